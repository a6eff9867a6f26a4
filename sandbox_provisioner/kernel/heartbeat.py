"""Answer heartbeats on behalf of a hibernated kernel, on connections that clients open meanwhile.

Implements a ZMTP 3 REP socket that echoes, without encryption. An encrypted heartbeat cannot be answered without the
kernel.
"""

from __future__ import annotations

from .handshake import GREETING, MECHANISM, command, ready
from .zmtp import COMMAND, LONG

PING, PONG = b"\x04PING", b"\x04PONG"
TTL = 2
LARGEST = 1 << 16


class Heart:
    """The heartbeats of one connection. Owned by its ``ClientConnection``."""

    def __init__(self) -> None:
        self._heard = bytearray()
        self._spoke = False
        self._greeted = False

    def answer(self, data: bytes) -> bytes:
        """Return the reply to ``data``. Raises ValueError if it is not a heartbeat on a plain connection."""
        self._heard += data
        said = b""
        if data and not self._spoke:  # a client sends the rest of its greeting only after it has ours
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
        """Remove and return the next whole frame; empty if it is incomplete. Raises ValueError if it is too large."""
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
