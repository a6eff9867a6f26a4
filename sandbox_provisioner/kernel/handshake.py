"""Answer the ZMTP handshake of a client that connects while its kernel is hibernated.

So a client can say what it wants before the kernel is woken for it. The client's own handshake is held with the rest,
and reaches the kernel when it wakes; the kernel's is then dropped, because the client has had one.
"""

from __future__ import annotations

from .zmtp import COMMAND, GREETING_SIZE, Position

MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + MECHANISM + bytes(32)
OPENING = 11
"""Bytes of a greeting that a peer sends before it has seen the other's: signature and major version."""
MECHANISM_END = 32
"""Where in a greeting the name of the security mechanism ends."""
SOCKET_TYPES = {"shell": b"ROUTER", "stdin": b"ROUTER", "control": b"ROUTER", "iopub": b"PUB", "hb": b"REP"}


def command(body: bytes) -> bytes:
    """Encode a short command frame."""
    return bytes([COMMAND, len(body)]) + body


def ready(channel: str) -> bytes:
    """Return the body of the READY command with which a kernel's socket for ``channel`` ends its handshake."""
    kind = SOCKET_TYPES[channel]
    return b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind


class Handshake:
    """Answer one client's handshake on a kernel's behalf.

    ``opaque`` becomes True if the client wants encryption, which only the kernel can answer.
    """

    def __init__(self, channel: str) -> None:
        self.opaque = False
        self._channel = channel
        self._heard = b""
        self._sent = 0

    def answer(self, data: bytes) -> bytes:
        """Take what the client sent and return what to send back; raises ValueError if that is not ZMTP 3."""
        if self.done:
            return b""
        self._heard += data[: GREETING_SIZE - len(self._heard)]
        if self._heard[0] != GREETING[0] or (len(self._heard) > 9 and not self._heard[9] & 1):
            raise ValueError("not a ZMTP connection")
        reply = b""
        if not self._sent:
            self._sent = OPENING
            reply = GREETING[:OPENING]
        if len(self._heard) == GREETING_SIZE:
            if self._heard[MECHANISM_END - len(MECHANISM) : MECHANISM_END] == MECHANISM:
                reply += GREETING[OPENING:] + command(ready(self._channel))
                self._sent = GREETING_SIZE
            else:
                self.opaque = True
        return reply

    @property
    def done(self) -> bool:
        """True when there is no more to answer here."""
        return self.opaque or self._sent == GREETING_SIZE


class KernelHandshake:
    """Drop that part of a woken kernel's handshake which its client has had already.

    On a plain connection that is all of it. On an encrypted one it is the opening, and the client needs the rest.
    """

    def __init__(self) -> None:
        self.done = False
        self.greeted = False
        """True when the kernel has sent its greeting: libzmq drops a peer that sends a message before that."""
        self._seen = 0
        self._heard = b""
        self._position: Position | None = None

    def strip(self, data: bytes) -> bytes:
        """Return what of ``data`` is to be passed on."""
        self._seen += len(data)
        self.greeted = self._seen >= GREETING_SIZE
        if self._position is None:
            self._heard += data
            if len(self._heard) < MECHANISM_END:
                return b""
            data, self._heard = self._heard, b""
            if data[MECHANISM_END - len(MECHANISM) : MECHANISM_END] != MECHANISM:
                self.done = True
                return data[OPENING:]
            self._position = Position()
        for place in range(len(data)):  # a handshake has some hundred bytes
            self._position.follow(data[place : place + 1])
            if self._position.between_messages:
                self.done = True
                return data[place + 1 :]
        return b""
