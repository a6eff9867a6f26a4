"""Streams with which Google's client reads and writes one part of a file, with bounded memory."""

from __future__ import annotations

import io
import os

from .base import Advance, nothing
from .parts import PIECE, Span, Sums, write_to

CHUNK = 4 * 1024 * 1024
"""Bytes of a part that are sent at a time and held in memory."""


class Meter:
    """Reports the progress of a part. Bytes are reported once, even if the part is transferred again."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._reached = 0

    def reach(self, position: int) -> None:
        """Report that the part is done up to ``position``."""
        if position > self._reached:
            self._advance(position - self._reached)
            self._reached = position


class PartReader(io.RawIOBase):
    """A readable stream over one part of an open file, for an upload."""

    def __init__(self, file: int, span: Span, meter: Meter) -> None:
        self._file = file
        self._span = span
        self._meter = meter
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        """Return ``size`` bytes, or fewer at the end of the part. Raises OSError if the file became shorter."""
        left = self._span.length - self._position
        wanted = left if size < 0 else min(size, left)
        self._meter.reach(self._position)
        data = os.pread(self._file, wanted, self._span.offset + self._position)
        if len(data) < wanted:
            raise OSError("the file became shorter while it was being read")
        self._position += len(data)
        return data

    def tell(self) -> int:
        """Return the position in the part."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position in the part, and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._span.length}[whence]
        self._position = start + offset
        return self._position


class PartWriter(io.RawIOBase):
    """A writable stream into one part of an open file, for a download. Small writes are buffered."""

    def __init__(self, file: int, span: Span, meter: Meter) -> None:
        self._span = span
        self._meter = meter
        self._write = write_to(file, nothing)
        self._waiting = bytearray()
        self._position = 0
        self.sums = Sums()

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Append bytes to the part."""
        self._waiting += data
        if len(self._waiting) >= PIECE:
            self._put()
        return len(data)

    def finish(self) -> tuple[int, int]:
        """Write the buffer. Return how many bytes were received, also beyond the part's end, and their CRC32C."""
        self._put()
        return self._position, self.sums.crc

    def _put(self) -> None:
        piece = bytes(self._waiting)
        self._waiting.clear()
        self.sums.add(piece)
        if self._position + len(piece) <= self._span.length:
            self._write(self._span.offset + self._position, piece)
            self._meter.reach(self._position + len(piece))
        self._position += len(piece)
