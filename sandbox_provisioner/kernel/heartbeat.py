"""Answer heartbeats on behalf of a hibernated kernel, on connections that clients open meanwhile.

Implements a ZMTP 3 REP socket that echoes, without encryption. An encrypted heartbeat cannot be answered without the
kernel.
"""

from __future__ import annotations

from .zmtp import COMMAND, GREETING, command, head, is_plain, ready

PING, PONG = b"\x04PING", b"\x04PONG"
TTL = 2
LARGEST = 1 << 16


class Heartbeat:
    """The heartbeats of one connection. Owned by its ``ClientConnection``."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._greeting_sent = False
        self._greeted = False

    def answer(self, data: bytes) -> bytes:
        """Return the reply to ``data``. Raises ValueError if it is not a heartbeat on a plain connection."""
        self._received += data
        reply = b""
        if data and not self._greeting_sent:  # a client sends the rest of its greeting only after it has ours
            self._greeting_sent = True
            reply = GREETING
        if not self._greeted:
            if len(self._received) < len(GREETING):
                return reply
            if self._received[0] != GREETING[0] or not is_plain(self._received):
                raise ValueError("not a plain ZMTP connection")
            del self._received[: len(GREETING)]
            self._greeted = True
            reply += command(ready("hb"))
        while found := head(self._received):
            flags, start, end = found
            if end > LARGEST:
                raise ValueError("too large for a heartbeat")
            if end > len(self._received):
                break
            whole = bytes(self._received[:end])
            reply += _pong(whole[start:]) if flags & COMMAND else whole
            del self._received[:end]
        return reply


def _pong(body: bytes) -> bytes:
    """Return the answer to a command; empty if it is not a PING."""
    return command(PONG + body[len(PING) + TTL :]) if body.startswith(PING) and len(body) < 1 << 8 else b""
