"""Copy a kernel's output to the descriptors that Jupyter gave for it, and report its exit status.

Output that goes to the server's own log is formatted as lines that cannot be mistaken for the server's: each starts
with the sandbox's id and notebook, has no control characters and a limited length. Lines that exceed a maximum rate are
dropped and counted.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .._text import one_line
from ..process import Process

LAST_WORDS = 2000
"""Bytes of a kernel's last output that are kept for the log."""
DROPPED_PER_SECOND = 1 << 20
"""Read rate, in bytes per second, of output that is dropped instead of logged."""
LINE_END = re.compile(rb"[\r\n]+")
MAX_LINE = 800
"""Maximum characters of a line. With id and notebook it must fit into PIPE_BUF bytes, to be written at once."""
MAX_LINE_BYTES = 4 * MAX_LINE
BURST = 200
"""Lines that may come at once, such as a traceback."""
LINES_PER_SECOND = 10
NOTICE_EVERY = 1.0
"""Minimum seconds between two reports of the number of dropped lines."""
PARTIAL = 0.5
"""Seconds after which an unfinished line is logged."""


@dataclass
class Ending:
    """The destinations of a kernel's stdout and stderr, and the callback for its exit status.

    ``sinks`` has one descriptor for each; None drops the bytes.

    Streams in ``logged`` go to the server's own log or terminal, as lines from LogLines; all others get the bytes
    unchanged.
    """

    sinks: Mapping[str, int | None] = field(default_factory=dict)
    tell: Callable[[int], None] = lambda status: None
    logged: frozenset[str] = frozenset()
    last_words: bytes = b""
    """The last output of the kernel, at most LAST_WORDS bytes."""

    def close(self) -> None:
        """Close the descriptors, only once: their numbers are soon reused."""
        sinks, self.sinks = self.sinks, {}
        for sink in sinks.values():
            if sink is not None:
                os.close(sink)


def ending(kwargs: Mapping[str, Any], tell: Callable[[int], None]) -> Ending:
    """Return the ending for a kernel whose ``stdout`` and ``stderr`` are given in ``kwargs``, as Popen takes them.

    PIPE, which has no reader here, DEVNULL and STDOUT drop the output. None stands for this process's own descriptor.
    """
    sinks: dict[str, int | None] = {}
    logged = set()
    for name, own in (("stdout", 1), ("stderr", 2)):
        given = kwargs.get(name)
        number = own if given is None else given if isinstance(given, int) else given.fileno()
        dropped = number in (subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT)
        sinks[name] = None if dropped else os.dup(number)
        if not dropped and _is_log(number):
            logged.add(name)
    return Ending(sinks, tell, frozenset(logged))


def _is_log(number: int) -> bool:
    """Return True if a descriptor is a terminal or this process's own log."""
    for own in (1, 2):
        try:
            if os.path.sameopenfile(number, own):
                return True
        except OSError:  # this process has no such descriptor
            continue
    return os.isatty(number)


class Budget:
    """The number of lines that may be logged now: up to BURST, refilled at LINES_PER_SECOND."""

    def __init__(self, now: float) -> None:
        self._lines = float(BURST)
        self._since = now

    def spend(self, now: float) -> bool:
        """Take one line from the budget. Return False if it is used up."""
        self._lines = min(BURST, self._lines + (now - self._since) * LINES_PER_SECOND)
        self._since = now
        if self._lines < 1:
            return False
        self._lines -= 1
        return True


class LogLines:
    """A formatter for one stream of a kernel's output, without I/O: the caller passes the time and writes the lines.

    The streams of a kernel share a ``budget``.
    """

    def __init__(self, title: str, budget: Budget) -> None:
        self._name = f"output of sandbox {one_line(title)}"
        self._budget = budget
        self._partial = bytearray()
        self._cut = 0
        self._since = 0.0
        self._dropping_since = 0.0
        self._dropped_lines = 0
        self._dropped_bytes = 0

    @property
    def pending(self) -> bool:
        """True while ``flush`` has lines to return."""
        return bool(self._partial or self._dropped_lines)

    @property
    def dropping(self) -> bool:
        """True while dropped lines have not been reported in the log."""
        return bool(self._dropped_lines)

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Process output; return the lines to log, each with its line end."""
        first, *others = LINE_END.split(data)
        self._add(first, now)
        lines: list[bytes] = []
        for piece in others:
            lines += self._end_line(now)
            self._add(piece, now)
        if self._partial and now - self._since > PARTIAL:
            lines += self._end_line(now)
        return lines

    def flush(self, now: float) -> list[bytes]:
        """Return the unfinished line and the report of dropped lines, if any, as lines to log."""
        return [*self._end_line(now), *self._notice()]

    def _add(self, piece: bytes, now: float) -> None:
        if piece and not self._partial:
            self._since = now
        room = MAX_LINE_BYTES - len(self._partial)
        self._partial += piece[:room]
        self._cut += max(0, len(piece) - room)

    def _end_line(self, now: float) -> list[bytes]:
        line, cut = bytes(self._partial), self._cut
        self._partial.clear()
        self._cut = 0
        if not line:
            return []
        lines = self._notice() if now - self._dropping_since > NOTICE_EVERY else []
        if self._dropped_lines or not self._budget.spend(now):
            if not self._dropped_lines:
                self._dropping_since = now
            self._dropped_lines += 1
            self._dropped_bytes += len(line) + cut
            return lines
        text = one_line(line)
        more = cut + len(text[MAX_LINE:].encode())
        text = f"{text[:MAX_LINE]} ... ({more} bytes more)" if more else text
        return [*lines, f"{self._name} | {text}\n".encode()]

    def _notice(self) -> list[bytes]:
        if not self._dropped_lines:
            return []
        dropped = f"{self._dropped_lines} lines ({self._dropped_bytes} bytes)"
        self._dropped_lines = self._dropped_bytes = 0
        return [f"{self._name} * dropped {dropped}: more than {LINES_PER_SECOND} lines per second\n".encode()]


async def copy_output(process: Process, ending: Ending, title: str) -> None:
    """Copy the output of ``process`` to the sinks until it ends. Store the last bytes in ``ending``."""
    loop = asyncio.get_running_loop()
    budget = Budget(loop.time())
    logs = {name: LogLines(title, budget) for name in ending.logged}
    output = process.stream()
    following = asyncio.ensure_future(anext(output, None))
    try:
        while True:
            waits = any(stream.pending for stream in logs.values())
            done, _ = await asyncio.wait({following}, timeout=PARTIAL if waits else None)
            piece = following.result() if done else None
            if piece is None:
                for name, stream in logs.items():
                    await _write_all(ending.sinks.get(name), stream.flush(loop.time()))
                if done:
                    return
                continue
            following = asyncio.ensure_future(anext(output, None))
            ending.last_words = (ending.last_words + piece.data)[-LAST_WORDS:]
            log = logs.get(piece.stream)
            lines = log.feed(piece.data, loop.time()) if log else [piece.data]
            await _write_all(ending.sinks.get(piece.stream), lines)
            if log and log.dropping:  # read slowly: other kernels share this loop
                await asyncio.sleep(len(piece.data) / DROPPED_PER_SECOND)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _write_all(sink: int | None, pieces: Sequence[bytes]) -> None:
    """Write each piece with one call, so that lines of different writers do not mix."""
    if sink is not None:
        for piece in pieces:
            with suppress(OSError):
                await _write(sink, piece)


async def _write(sink: int, data: bytes) -> None:
    """Write without blocking to a descriptor that others share, so it cannot be switched to non-blocking mode."""
    loop = asyncio.get_running_loop()
    view = memoryview(data)
    while view:
        writable = asyncio.Event()
        try:
            loop.add_writer(sink, writable.set)
        except PermissionError:  # a regular file: always writable, and rejected by epoll
            view = view[os.write(sink, view) :]
            continue
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sink)
        view = view[os.write(sink, view[: select.PIPE_BUF]) :]
