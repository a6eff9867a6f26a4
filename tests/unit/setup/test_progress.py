"""Progress of long steps is shown on a terminal and in a log."""

from __future__ import annotations

import io
import os
import re
import threading

import pytest

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.setup.progress import Progress


class Utf8(io.StringIO):
    encoding = "utf-8"


class Watched(Utf8):
    """A log that sets an event when something is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.written.set()
        return written


def test_short_step_is_one_line() -> None:
    log = Utf8()
    with Progress(log).step("Working") as step:
        step.result = "well"
    assert log.getvalue() == "✓ Working: well\n"


def test_failed_step_is_one_line_with_the_reason() -> None:
    log = Utf8()
    with pytest.raises(SandboxError), Progress(log).step("Working"):
        raise SandboxError("it broke.", "mend it.")
    assert log.getvalue() == "✗ Working: it broke.\n"


def test_interrupted_step_is_reported() -> None:
    log = Utf8()
    with pytest.raises(KeyboardInterrupt), Progress(log).step("Working"):
        raise KeyboardInterrupt
    assert log.getvalue() == "✗ Working: interrupted\n"


def test_long_step_prints_regular_lines_in_a_log() -> None:
    log = Watched()
    with Progress(log, log_interval=0.01).step("Working") as step:
        step.note("on\nthis")
        assert log.written.wait(30)
    assert re.match(r"  Working, \d+ s - on this\n", log.getvalue())


def test_terminal_shows_a_moving_line_and_then_the_outcome() -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal, open(ours, "rb", buffering=0) as screen:
        with Progress(terminal).step("Working"):
            assert re.search(rb"Working, \d+ s", screen.read(200))
        shown = b""
        while not shown.endswith("\r\x1b[K✓ Working\r\n".encode()):  # without output, the test runs into its time limit
            shown += screen.read(200)
