"""Show the progress of a long step: a moving line on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from .._text import indented, one_line
from ..errors import SandboxError

LOG_INTERVAL = 10.0
"""Seconds between two lines about a running step where the output is no terminal."""
TERMINAL_INTERVAL = 0.2
SPINNER = "|/-\\"

Note = Callable[[str], None]
"""Called with a text about the current work of a step; the newest text is shown."""


def marks(stream: TextIO) -> tuple[str, str]:
    """Return the marks for success and failure that ``stream`` can encode."""
    try:
        "✓✗".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "ok", "NO"
    return "✓", "✗"


class Progress:
    """A report of steps on ``stream``: one line per completed step, and regular lines about a long one.

    A step that raises is reported as failed, in one line, and the exception is passed on to the caller.
    """

    def __init__(self, stream: TextIO, log_interval: float = LOG_INTERVAL) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._interval = TERMINAL_INTERVAL if self._terminal else log_interval
        self._good, self._bad = marks(stream)

    def say(self, text: str) -> None:
        """Print a permanent line."""
        clear = "\r\x1b[K" if self._terminal else ""
        print(f"{clear}{indented(text)}", file=self._stream, flush=True)

    def done(self, text: str) -> None:
        """Print a permanent line with the mark for success."""
        self.say(f"{self._good} {text}")

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Run the body as a step: ``with progress.step("Fetching") as step: ... step.result = "12 MB"``."""
        step = Step(title)
        ended = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(step, ended), daemon=True)
        ticker.start()
        try:
            yield step
        except SandboxError as error:
            outcome = f"{self._bad} {title}: {error.problem}"
            raise
        except Exception as error:
            outcome = f"{self._bad} {title}: {error}"
            raise
        except BaseException:
            outcome = f"{self._bad} {title}: interrupted"
            raise
        else:
            outcome = f"{self._good} {title}{': ' if step.result else ''}{step.result}"
        finally:
            ended.set()
            ticker.join()
            self.say(outcome)

    def _tick(self, step: Step, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(self._interval):
            status = f"{step.title}, {step.seconds():.0f} s{' - ' if step.newest else ''}{step.newest}"
            if self._terminal:
                width = max(shutil.get_terminal_size().columns - 4, 20)
                self._stream.write(f"\r\x1b[K{SPINNER[count % len(SPINNER)]} {status[:width]}")
                self._stream.flush()
            else:
                self.say(f"  {status}")
            count += 1


class Step:
    """A running step. ``result`` is shown at its end; the ticker thread reads ``newest``."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.result = ""
        self.newest = ""
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        """Set the text about the step's current work, at most 160 characters."""
        self.newest = one_line(" ".join(text.split())[:160])

    def seconds(self) -> float:
        """Return the seconds since the step began."""
        return time.monotonic() - self._started
