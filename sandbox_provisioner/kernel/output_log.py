"""Format a kernel's output as lines of the server's log that cannot be mistaken for the server's own.

Each line starts with the sandbox's id, has no control characters and a limited length. Lines that exceed a maximum
rate are dropped and counted. No I/O here: the caller passes the time and writes the lines.
"""

from __future__ import annotations

import re

from .._text import one_line

LINE_END = re.compile(rb"[\r\n]+")
MAX_LINE = 800
"""Maximum characters of a line. With the id it must fit into PIPE_BUF bytes, the limit of an atomic pipe write."""
MAX_LINE_BYTES = 4 * MAX_LINE
BURST = 200
"""Lines that may come at once, such as a traceback."""
LINES_PER_SECOND = 10
NOTICE_EVERY = 1.0
"""Minimum seconds between two lines that report how many were dropped."""
PARTIAL = 0.5
"""Seconds after which an unfinished line is logged."""


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
    """A formatter for one stream of a kernel's output. The streams of a kernel share a ``budget``."""

    def __init__(self, sandbox_id: str, budget: Budget) -> None:
        self._name = f"output of sandbox {one_line(sandbox_id)}"
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
