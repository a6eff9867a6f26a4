"""Encode and decode the frames on the pipe between host and guest. Runs in PID 1, and on the host's I/O loop.

A frame is a kind (1 byte), a stream id (4), a length (4) and that many bytes. Stream 0 is the connection itself
and carries CONTROL messages, which are JSON objects with an "op". Every other stream is a pair of byte flows:

    OPEN    the opener names a target ("unix:/run/kernel-1", "process:3:output"); the host's ids are odd
    DATA    bytes, for which the receiver must have given credit
    CREDIT  the sender of this frame has consumed this many bytes and accepts as many more
    EOF     the sender will send no more DATA
    RESET   the sender will neither send nor accept any more; answered with RESET unless already closed

A stream is over for a side that has sent EOF or RESET and received EOF or RESET.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

OPEN, DATA, CREDIT, EOF, RESET, CONTROL = range(1, 7)

VERSION = 1
HEADER = struct.Struct("!BII")
AMOUNT = struct.Struct("!I")
MAX_PAYLOAD = 1 << 18
WINDOW = 1 << 20
"""Bytes that one side may send on a stream before it receives more credit."""
SMALLEST_CREDIT = WINDOW // 4
"""Smallest amount of a CREDIT in bytes: a receiver that has consumed less waits before it sends one."""


class FrameError(ValueError):
    """The bytes are not valid frames."""


def encode(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return HEADER.pack(kind, stream, len(payload)) + payload


def encode_credit(stream: int, amount: int) -> bytes:
    """Return a CREDIT frame for ``amount`` bytes."""
    return encode(CREDIT, stream, AMOUNT.pack(amount))


class Decoder:
    """Splits a byte stream, received in arbitrary pieces, into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield (kind, stream, payload) for every frame that ``data`` completes. Raises FrameError if invalid."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        position = 0
        try:
            while len(data) - position >= HEADER.size:
                kind, stream, length = HEADER.unpack_from(data, position)
                if length > MAX_PAYLOAD or not OPEN <= kind <= CONTROL:
                    raise FrameError(f"frame of kind {kind} and length {length}")
                start, end = position + HEADER.size, position + HEADER.size + length
                if len(data) < end:
                    break
                position = end
                yield kind, stream, data[start:end]
        finally:
            self._rest = data[position:]
