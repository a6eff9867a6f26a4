"""Encode, decode and follow ZeroMQ's wire protocol, ZMTP 3. No other module depends on its byte format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

MORE, LONG, COMMAND = 1, 2, 4
MECHANISM = b"NULL".ljust(20, b"\0")
MECHANISM_END = 32
"""Offset in a greeting at which the name of the security mechanism ends."""
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + MECHANISM + bytes(32)
GREETING_SIZE = len(GREETING)
SOCKET_TYPES = {"shell": b"ROUTER", "stdin": b"ROUTER", "control": b"ROUTER", "iopub": b"PUB", "hb": b"REP"}
HANDSHAKE = 2
"""Maximum number of commands in a side's handshake; on an encrypted connection all later ones are messages."""
FRAME_COST = 1 << 10
"""Bytes that count for each frame in addition to its body, because a receiver keeps an object for each frame."""
UNLIMITED = 1 << 65
"""A number of bytes that no frame can exceed."""
MAJOR = 10
"""Offset of the major version in a greeting, if it begins with FIRST and the byte before MAJOR is odd."""
FIRST = 0xFF
ZMTP_3 = 3
MAX_READY = 512
"""Bytes of the first command that are kept."""
IDENTITY = b"\x08Identity"


class MessageTooLargeError(ValueError):
    """A message has more bytes or frames than the connection allows, or its size cannot be known."""


def head(data: bytes | bytearray, place: int = 0) -> tuple[int, int, int] | None:
    """Return the flags of the frame at ``place``, and where its body begins and ends; None if they are incomplete."""
    if place >= len(data):
        return None
    flags = data[place]
    start = place + (9 if flags & LONG else 2)
    if start > len(data):
        return None
    return flags, start, start + (int.from_bytes(data[place + 1 : start], "big") if flags & LONG else data[place + 1])


def frame(body: bytes, flags: int = 0) -> bytes:
    """Encode one frame."""
    if len(body) > 0xFF:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def encode(frames: Sequence[bytes]) -> bytes:
    """Encode a multipart message."""
    return b"".join(frame(body, MORE) for body in frames[:-1]) + frame(frames[-1])


def messages(data: bytes) -> Iterator[list[bytes]]:
    """Yield the multipart messages in a piece of a connection. Raises ValueError if one is incomplete."""
    bodies: list[bytes] = []
    place = 0
    while place < len(data):
        flags, start, end = head(data, place) or (0, 0, len(data) + 1)
        if flags & ~(MORE | LONG | COMMAND) or end > len(data):
            raise ValueError("not whole frames")
        if not flags & COMMAND:
            bodies.append(data[start:end])
            if not flags & MORE:
                yield bodies
                bodies = []
        place = end
    if bodies:
        raise ValueError("not a whole message")


def command(body: bytes) -> bytes:
    """Encode a command."""
    return frame(body, COMMAND)


def ready(channel: str) -> bytes:
    """Return the body of the READY command that ends the handshake of a kernel's socket for ``channel``."""
    kind = SOCKET_TYPES[channel]
    return b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind


def is_plain(greeting: bytes | bytearray) -> bool:
    """Return True if a greeting asks for a connection without encryption."""
    return greeting[MECHANISM_END - len(MECHANISM) : MECHANISM_END] == MECHANISM


class Sink(Protocol):
    """A receiver of the frames of messages, in pieces."""

    def piece(self, data: bytes) -> None:
        """Process the next bytes of the current frame."""

    def end_frame(self, more: bool) -> None:
        """End the current frame; ``more`` is False for a message's last one."""


class Position:
    """The protocol state of one direction of a connection, computed from the bytes that have passed.

    ``limit`` is the largest message in bytes; each frame counts ``FRAME_COST`` bytes extra. With a limit,
    the peer must speak ZMTP 3: libzmq also accepts the earlier versions, whose frames begin elsewhere.
    """

    def __init__(self, limit: int = UNLIMITED, sink: Sink | None = None) -> None:
        self.ready = b""
        """The body of the first command, which contains the peer's identity; at most ``MAX_READY`` bytes."""
        self.handshake_size = 0
        """Size in bytes of greeting and first command together; 0 until it is known."""
        self.greeting = b""
        """The bytes of the peer's greeting that have passed."""
        self._rest = GREETING_SIZE
        self._head = b""
        self._more = False
        self._in_message = False
        self._commands = 0
        self._limit = limit
        self._size = 0
        self._sink = sink

    @property
    def handshake_done(self) -> bool:
        """True if all commands of this side's encrypted handshake have passed."""
        return self._commands >= HANDSHAKE

    @property
    def between_messages(self) -> bool:
        """True if a message can begin now: after the handshake, and outside of any message."""
        return self._commands > 0 and not self._rest and not self._head and not self._more

    def follow(self, data: bytes) -> int:
        """Process bytes that passed; return how many messages begin in them.

        Raises MessageTooLargeError as soon as a frame's header shows that the limit is exceeded, or the greeting shows
        that the version of the protocol is too old.
        """
        messages = 0
        if self._head:
            data, self._head = self._head + data, b""
        place, end = 0, len(data)
        while place < end:
            if self._rest:
                place += self._skip(data, place, end)
                continue
            found = head(data, place)
            if found is None:
                self._head = data[place:]
                break
            flags, start, stop = found
            if flags & COMMAND:
                self._commands += 1
                self.handshake_size = self.handshake_size or GREETING_SIZE + stop - place
                self._in_message = False
                messages += self._commands > HANDSHAKE
                if not self._more:  # libzmq allows a command between the frames of a message
                    self._size = 0
            else:
                if not self._more:
                    messages += 1
                    self._size = 0
                self._more = bool(flags & MORE)
                self._in_message = True
                if start == stop and self._sink:
                    self._sink.end_frame(self._more)
            self._size += stop - start + FRAME_COST
            if self._size > self._limit:
                raise MessageTooLargeError(f"a message of more than {self._limit} bytes")
            place, self._rest = start, stop - start
        return messages

    def _skip(self, data: bytes, place: int, end: int) -> int:
        """Process the rest of a frame, as far as it is in ``data``; return how many bytes that was."""
        step = min(self._rest, end - place)
        self._rest -= step
        if self._in_message:
            if self._sink:
                self._sink.piece(data[place : place + step])
                if not self._rest:
                    self._sink.end_frame(self._more)
        elif self._commands == 1 and len(self.ready) < MAX_READY:
            self.ready = (self.ready + data[place : place + step])[:MAX_READY]
        elif self._commands == 0:
            self._greet(data[place : place + step])
        return step

    def _greet(self, data: bytes) -> None:
        """Keep the next bytes of the greeting. With a limit, check the version of the protocol."""
        before = len(self.greeting)
        self.greeting += data
        if self._limit == UNLIMITED:
            return
        for place, byte in enumerate(data, before):
            old = (place == 0 and byte != FIRST) or (place == MAJOR - 1 and not byte & 1)
            if old or (place == MAJOR and byte < ZMTP_3):
                raise MessageTooLargeError("messages in an old version of the protocol, of unknown size")


def identity(ready: bytes) -> bytes:
    """Return the socket identity in a READY command; empty if it has none."""
    place = ready.find(IDENTITY)
    if place < 0:
        return b""
    start = place + len(IDENTITY) + 4
    size = int.from_bytes(ready[start - 4 : start], "big")
    return ready[start : start + size] if len(ready) >= start + size else b""
