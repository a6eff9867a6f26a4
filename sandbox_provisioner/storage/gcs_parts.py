"""A part of a file as Google's client reads and writes it: a stream of its own, with little of it in memory."""

from __future__ import annotations

import io
import os

from .base import Advance, nothing
from .parts import PIECE, Span, Sums, write_to

CHUNK = 4 * 1024 * 1024
"""How much of a part is sent, and held in memory, at a time."""


class Meter:
    """Tells of progress, and of nothing twice, however often a part has to be begun again."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._reached = 0

    def reach(self, position: int) -> None:
        """So many bytes of the part are done."""
        if position > self._reached:
            self._advance(position - self._reached)
            self._reached = position


class PartReader(io.RawIOBase):
    """A part of an open file, to be sent."""

    def __init__(self, file: int, span: Span, meter: Meter) -> None:
        self._file = file
        self._span = span
        self._meter = meter
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes, fewer only at the end."""
        left = self._span.length - self._position
        wanted = left if size < 0 else min(size, left)
        self._meter.reach(self._position)
        data = os.pread(self._file, wanted, self._span.offset + self._position)
        if len(data) < wanted:
            raise OSError("the file became shorter while it was being read")
        self._position += len(data)
        return data

    def tell(self) -> int:
        """Where in the part."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to another place in the part."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._span.length}[whence]
        self._position = start + offset
        return self._position


class PartWriter(io.RawIOBase):
    """A part of an open file, as it comes in, in many small pieces."""

    def __init__(self, file: int, span: Span, meter: Meter) -> None:
        self._span = span
        self._meter = meter
        self._write = write_to(file, nothing)
        self._waiting = bytearray()
        self._position = 0
        self.sums = Sums()

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Put bytes behind those that came before."""
        self._waiting += data
        if len(self._waiting) >= PIECE:
            self._put()
        return len(data)

    def finish(self) -> tuple[int, int]:
        """How many bytes came, and their CRC32C; those that fit are in the file."""
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
