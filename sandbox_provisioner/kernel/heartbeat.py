"""Heart: beats for a kernel that sleeps, on connections that its heartbeat channel gets meanwhile.

The one place where ZeroMQ's wire protocol (ZMTP 3) is spoken: a REP socket that echoes, without encryption, which is
all that a heartbeat is. An encrypted one cannot be answered without the kernel.
"""

from __future__ import annotations

from .handshake import GREETING, MECHANISM, command, ready
from .zmtp import COMMAND, LONG

PING, PONG = b"\x04PING", b"\x04PONG"
TTL = 2
LARGEST = 1 << 16


class Heart:
    """One connection's heartbeats."""

    def __init__(self) -> None:
        self._heard = bytearray()
        self._spoke = False
        self._greeted = False

    def answer(self, data: bytes) -> bytes:
        """What to send back for ``data``; ValueError if that is not a heartbeat's protocol."""
        self._heard += data
        said = b""
        if data and not self._spoke:  # a client says the rest of its own greeting only after it has heard ours
            self._spoke = True
            said = GREETING
        if not self._greeted:
            if len(self._heard) < len(GREETING):
                return said
            if self._heard[0] != GREETING[0] or self._heard[12:32] != MECHANISM:
                raise ValueError("not a plain ZMTP connection")
            del self._heard[: len(GREETING)]
            self._greeted = True
            said += command(ready("hb"))
        while frame := self._frame():
            said += _answer(frame)
        return said

    def _frame(self) -> bytes:
        """The next whole frame, as it came; nothing if it is not all there yet."""
        head = _head(self._heard)
        if len(self._heard) < head:
            return b""
        size = head + int.from_bytes(self._heard[1:head], "big")
        if size > LARGEST:
            raise ValueError("a heartbeat that large is none")
        if len(self._heard) < size:
            return b""
        frame = bytes(self._heard[:size])
        del self._heard[:size]
        return frame


def _head(frame: bytes | bytearray) -> int:
    return 9 if frame and frame[0] & LONG else 2


def _answer(frame: bytes) -> bytes:
    if not frame[0] & COMMAND:
        return frame
    body = frame[_head(frame) :]
    if body.startswith(PING) and len(body) < 1 << 8:
        return command(PONG + body[len(PING) + TTL :])
    return b""
