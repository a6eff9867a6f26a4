"""Answer the ZMTP handshake of a client that connects while its kernel is hibernated.

A client sends its first request only after the handshake, and only some requests wake the kernel. The client's own
handshake is held with its messages and reaches the kernel when it wakes. The kernel's handshake is then dropped,
because the client has already received one.
"""

from __future__ import annotations

from .zmtp import COMMAND, GREETING_SIZE, Position

MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + MECHANISM + bytes(32)
OPENING = 11
"""Bytes of a greeting that a peer sends before it receives the other's: signature and major version."""
MECHANISM_END = 32
"""Offset in a greeting at which the name of the security mechanism ends."""
SOCKET_TYPES = {"shell": b"ROUTER", "stdin": b"ROUTER", "control": b"ROUTER", "iopub": b"PUB", "hb": b"REP"}


def command(body: bytes) -> bytes:
    """Encode a short command frame."""
    return bytes([COMMAND, len(body)]) + body


def ready(channel: str) -> bytes:
    """Return the body of the READY command that ends the handshake of a kernel's socket for ``channel``."""
    kind = SOCKET_TYPES[channel]
    return b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind


class Handshake:
    """The kernel's side of one client's handshake, answered on the kernel's behalf.

    ``opaque`` becomes True if the client requests encryption, which only the kernel can answer.
    """

    def __init__(self, channel: str) -> None:
        self.opaque = False
        self._channel = channel
        self._heard = b""
        self._sent = 0

    def answer(self, data: bytes) -> bytes:
        """Process bytes from the client and return the reply. Raises ValueError if they are not ZMTP 3."""
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
        """True when no further reply is sent from here."""
        return self.opaque or self._sent == GREETING_SIZE


class KernelHandshake:
    """A filter that drops the part of a woken kernel's handshake that its client has already received.

    On a plain connection that is all of it. On an encrypted one it is the opening, and the client needs the rest.
    """

    def __init__(self) -> None:
        self.done = False
        self.greeted = False
        """True when the kernel has sent its greeting: libzmq disconnects a peer that sends a message before that."""
        self._seen = 0
        self._heard = b""
        self._position: Position | None = None

    def strip(self, data: bytes) -> bytes:
        """Return the part of ``data`` that the client still needs."""
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
        for place in range(len(data)):  # byte by byte: a handshake has only some hundred
            self._position.follow(data[place : place + 1])
            if self._position.between_messages:
                self.done = True
                return data[place + 1 :]
        return b""
