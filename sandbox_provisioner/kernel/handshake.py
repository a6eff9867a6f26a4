"""Answer the ZMTP handshakes and the heartbeats of clients that connect while their kernel is hibernated.

A client sends its first request only after the handshake, and only some requests wake the kernel. The client's part of
the handshake is held with its messages and is sent to the kernel when it wakes. The kernel's part is then dropped,
because the client has already received one.
"""

from __future__ import annotations

from ..mux.stream import GuestStream
from .zmtp import COMMAND, GREETING, GREETING_SIZE, MECHANISM_END, Position, command, head, is_plain, ready

OPENING = 11
"""Bytes of a greeting that a peer sends before it receives the other's: signature and major version."""
PING, PONG = b"\x04PING", b"\x04PONG"
TTL = 2
"""Bytes of a PING's time to live, which a PONG does not repeat."""
LARGEST_HEARTBEAT = 1 << 16
"""Bytes of the largest frame on a heartbeat's connection."""


class Handshake:
    """The kernel's part of the handshake with one client, sent on the kernel's behalf.

    ``opaque`` becomes True if the client requests encryption; only the kernel can answer that.
    """

    def __init__(self, channel: str) -> None:
        self.opaque = False
        self._channel = channel
        self._greeting = b""
        self._sent = 0

    def answer(self, data: bytes) -> bytes:
        """Process bytes from the client and return the reply. Raises ValueError if they are not ZMTP 3."""
        if self.done:
            return b""
        self._greeting += data[: GREETING_SIZE - len(self._greeting)]
        if self._greeting[0] != GREETING[0] or (len(self._greeting) > 9 and not self._greeting[9] & 1):
            raise ValueError("not a ZMTP connection")
        reply = b""
        if not self._sent:
            self._sent = OPENING
            reply = GREETING[:OPENING]
        if len(self._greeting) == GREETING_SIZE:
            if is_plain(self._greeting):
                reply += GREETING[OPENING:] + command(ready(self._channel))
                self._sent = GREETING_SIZE
            else:
                self.opaque = True
        return reply

    @property
    def done(self) -> bool:
        """True when there is nothing left to send on the kernel's behalf."""
        return self.opaque or self._sent == GREETING_SIZE


class KernelHandshake:
    """A filter that drops the part of a woken kernel's handshake that its client has already received.

    On a plain connection the client has received the whole handshake, on an encrypted one only the opening.
    """

    def __init__(self) -> None:
        self.done = False
        self.greeted = False
        """True when the kernel has sent its greeting: libzmq disconnects a peer that sends a message before that."""
        self._seen = 0
        self._greeting = b""
        self._position: Position | None = None

    def strip(self, data: bytes) -> bytes:
        """Return the part of ``data`` that the client still needs."""
        self._seen += len(data)
        self.greeted = self._seen >= GREETING_SIZE
        if self._position is None:
            self._greeting += data
            if len(self._greeting) < MECHANISM_END:
                return b""
            data, self._greeting = self._greeting, b""
            if not is_plain(data):
                self.done = True
                return data[OPENING:]
            self._position = Position()
        for place in range(len(data)):  # byte by byte: a handshake has only some hundred
            self._position.follow(data[place : place + 1])
            if self._position.between_messages:
                self.done = True
                return data[place + 1 :]
        return b""


class HeldClient:
    """A client that connected while its kernel was hibernated. Owned by its connection, until the kernel has woken.

    ``answered`` sends the kernel's part of the handshake; ``kernel`` drops that part when the woken kernel sends it
    again. ``waiting`` has the client's bytes after the greeting; they are sent once the kernel has sent its greeting.
    """

    def __init__(self, channel: str) -> None:
        self.answered = Handshake(channel)
        self.kernel = KernelHandshake()
        self.waiting = bytearray()
        self._greeting_left = GREETING_SIZE

    def to_kernel(self, data: bytes) -> bytes:
        """Process bytes from the client. Return those that can be sent to the kernel now."""
        if self.kernel.greeted:
            return data
        greeting, rest = data[: self._greeting_left], data[self._greeting_left :]
        self._greeting_left -= len(greeting)
        self.waiting += rest
        return greeting

    def from_kernel(self, stream: GuestStream, data: bytes) -> bytes:
        """Return the part of the kernel's bytes that the client needs. Give the kernel credit for the rest.

        If the kernel has sent its greeting, send it ``waiting``.
        """
        passed = self.kernel.strip(data)
        stream.consumed(len(data) - len(passed))
        if self.kernel.greeted and self.waiting:
            waiting, self.waiting = bytes(self.waiting), bytearray()
            stream.write(waiting)
        return passed


class Heartbeat:
    """Answers the heartbeats of one connection for a hibernated kernel. Owned by its ``ClientConnection``.

    An encrypted heartbeat cannot be answered without the kernel.
    """

    def __init__(self) -> None:
        self._handshake = Handshake("hb")
        self._received = bytearray()
        self._greeting_left = GREETING_SIZE

    def answer(self, data: bytes) -> bytes:
        """Return the reply to ``data``. Raises ValueError if it is not a heartbeat on a plain connection."""
        reply = self._handshake.answer(data) if data else b""
        if self._handshake.opaque:
            raise ValueError("not a plain ZMTP connection")
        self._received += data[self._greeting_left :]
        self._greeting_left -= min(self._greeting_left, len(data))
        while found := head(self._received):
            flags, start, end = found
            if end > LARGEST_HEARTBEAT:
                raise ValueError("too large for a heartbeat")
            if end > len(self._received):
                break
            frame = bytes(self._received[:end])
            reply += _pong(frame[start:]) if flags & COMMAND else frame
            del self._received[:end]
        return reply


def _pong(body: bytes) -> bytes:
    """Return the answer to a command; empty if it is not a PING."""
    return command(PONG + body[len(PING) + TTL :]) if body.startswith(PING) and len(body) < 1 << 8 else b""
