"""Follow ZeroMQ's wire protocol (ZMTP 3) on a connection as its bytes pass, without keeping them."""

from __future__ import annotations

from typing import Protocol

MORE, LONG, COMMAND = 1, 2, 4
GREETING_SIZE = 64
HANDSHAKE = 2
"""Maximum number of commands in a side's handshake; on an encrypted connection all later ones are messages."""
FRAME_COST = 1 << 10
"""Bytes that count for each frame besides its own, because a receiver keeps an object for each."""
UNLIMITED = 1 << 65
"""A number of bytes that no frame can exceed."""
MAJOR = 10
"""Offset of the major version in a greeting that begins with FIRST and has the lowest bit set at MAJOR - 1."""
FIRST = 0xFF
ZMTP_3 = 3
MAX_READY = 512
"""Bytes of the first command that are kept."""
IDENTITY = b"\x08Identity"


class MessageTooLargeError(ValueError):
    """A message has more bytes or frames than the connection allows, or its size cannot be known."""


class Sink(Protocol):
    """A receiver of the frames of messages, in pieces."""

    def piece(self, data: bytes) -> None:
        """Process the next bytes of the current frame."""

    def end_frame(self, more: bool) -> None:
        """End the current frame; ``more`` is False for a message's last one."""


class Position:
    """The protocol state of one direction of a connection, from the bytes that have passed.

    ``limit`` is the largest message in bytes; each frame counts ``FRAME_COST`` bytes more than it has. With a limit,
    the peer must speak ZMTP 3: libzmq also accepts the earlier versions, whose frames begin elsewhere.
    """

    def __init__(self, limit: int = UNLIMITED, sink: Sink | None = None) -> None:
        self.ready = b""
        """The body of the first command, which contains the peer's identity; at most ``MAX_READY`` bytes."""
        self.handshake_size = 0
        """Size in bytes of greeting and first command together; 0 until it is known."""
        self._rest = GREETING_SIZE
        self._head = b""
        self._greeting = b""
        self._more = False
        self._in_message = False
        self._commands = 0
        self._limit = limit
        self._size = 0
        self._sink = sink

    @property
    def between_messages(self) -> bool:
        """True if a message can begin now: after the handshake, and outside of any message."""
        return self._commands > 0 and not self._rest and not self._head and not self._more

    def follow(self, data: bytes) -> int:
        """Process bytes that passed; return how many messages begin in them.

        Raises MessageTooLargeError as soon as a frame's header shows that the limit is exceeded, or a greeting that the
        version of the protocol is too old.
        """
        messages = 0
        if self._head:
            data, self._head = self._head + data, b""
        place, end = 0, len(data)
        while place < end:
            if self._rest:
                place += self._skip(data, place, end)
                continue
            flags = data[place]
            start = place + (9 if flags & LONG else 2)
            if start > end:
                self._head = data[place:]
                break
            size = int.from_bytes(data[place + 1 : start], "big") if flags & LONG else data[place + 1]
            if flags & COMMAND:
                self._commands += 1
                self.handshake_size = self.handshake_size or GREETING_SIZE + (start - place) + size
                self._in_message = False
                messages += self._commands > HANDSHAKE
                if not self._more:  # libzmq allows a command between the frames of a message
                    self._size = 0
            else:
                messages += not self._more
                if not self._more:
                    self._size = 0
                self._more = bool(flags & MORE)
                self._in_message = True
                if not size and self._sink:
                    self._sink.end_frame(self._more)
            self._size += size + FRAME_COST
            if self._size > self._limit:
                raise MessageTooLargeError(f"a message of more than {self._limit} bytes")
            place, self._rest = start, size
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
        elif self._commands == 0 and self._limit < UNLIMITED:
            self._greet(data[place : place + step])
        return step

    def _greet(self, data: bytes) -> None:
        """Check the next bytes of the greeting."""
        before = len(self._greeting)
        self._greeting += data
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
