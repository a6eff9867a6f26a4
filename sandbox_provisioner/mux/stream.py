"""The streams of one connection: flows of bytes to targets in the sandbox, with credit in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import GuestError, ProtocolError
from ..guest.frames import (
    AMOUNT,
    CREDIT,
    DATA,
    EOF,
    MAX_PAYLOAD,
    OPEN,
    RESET,
    SMALLEST_CREDIT,
    WINDOW,
    encode,
    encode_credit,
)

if TYPE_CHECKING:
    from .connection import GuestConnection

MAX_STREAMS = 4096
MAX_REFUSED = 64
"""Streams that a guest may try to open before its connection is closed; each is refused."""


class GuestStream:
    """One flow of bytes to and from a target in the sandbox. Runs on the host's I/O loop.

    The caller of ``open`` sets the callbacks. It calls ``consumed`` for bytes that it has processed, which lets the
    guest send more. It stops writing while ``ready`` is False; ``on_ready`` is called when it may continue.
    """

    def __init__(self, connection: GuestConnection, table: StreamTable, number: int) -> None:
        self.number = number
        self.connection = connection
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.on_end: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self.closed = False
        """True after EOF or RESET was sent."""
        self.ended = False
        """True after EOF or RESET was received."""
        self._table = table
        self._credit = WINDOW
        self._guest_credit = WINDOW
        self._consumed = 0
        self._unsent = bytearray()
        self._closing: int | None = None

    @property
    def ready(self) -> bool:
        """True while written bytes are sent at once."""
        return not self._unsent and self._credit > 0 and not self.connection.quiet

    @property
    def backlog(self) -> int:
        """Number of written bytes that were not sent: they wait for credit, or for the connection to resume."""
        return len(self._unsent)

    def held(self) -> bytes:
        """Return the bytes that ``backlog`` counts."""
        return bytes(self._unsent)

    def forget_held(self) -> None:
        """Discard the bytes that ``backlog`` counts."""
        self._unsent.clear()

    def write(self, data: bytes) -> None:
        """Send ``data`` now, or as soon as there is credit for it. Ignored after ``end`` or ``reset``."""
        if not self.closed and self._closing is None:
            self._unsent += data
            self._flush()

    def consumed(self, amount: int) -> None:
        """Give the guest credit for ``amount`` bytes that it had sent."""
        self._consumed += amount
        self._give_credit()

    def end(self) -> None:
        """Send EOF after the bytes that wait, but continue to receive."""
        self._close(EOF)

    def reset(self) -> None:
        """Close both directions at once, and discard the bytes that wait."""
        self._unsent.clear()
        self._close(RESET)

    def _close(self, how: int) -> None:
        if not self.closed:
            self._closing = max(how, self._closing or how)
            self._flush()

    def _give_credit(self) -> None:
        was_reset = self.closed and self._closing == RESET
        if self._consumed >= SMALLEST_CREDIT and not (self.ended or was_reset or self.connection.quiet):
            self._guest_credit += self._consumed
            self.connection.send(encode_credit(self.number, self._consumed))
            self._consumed = 0

    def _flush(self) -> None:
        """Send the waiting bytes, as far as there is credit; then EOF or RESET if ``end`` or ``reset`` was called."""
        if self.connection.quiet:
            return
        while self._unsent and self._credit > 0:
            data = bytes(self._unsent[: min(self._credit, MAX_PAYLOAD)])
            del self._unsent[: len(data)]
            self._credit -= len(data)
            self.connection.send(encode(DATA, self.number, data))
        if self._closing is not None and not self._unsent:
            self.closed = True
            self.connection.send(encode(self._closing, self.number))
            self._forget_if_over()

    def resume(self) -> None:
        """Send the waiting bytes, because the traffic continues. Called by the table."""
        self._give_credit()
        self._flush()
        if self.ready and not self.closed:
            self.on_ready()

    def received(self, kind: int, payload: bytes) -> None:
        """Handle a frame from the guest. Called by the table. Raises ProtocolError."""
        if kind == DATA:
            self._guest_credit -= len(payload)
            if self.ended or not payload or self._guest_credit < 0:
                raise ProtocolError("The guest sent bytes without credit.")
            if not (self.closed and self._closing == RESET):
                self.on_data(payload)
        elif kind == CREDIT:
            if len(payload) != AMOUNT.size:
                raise ProtocolError("Invalid credit from guest.")
            (amount,) = AMOUNT.unpack(payload)
            self._credit += amount
            if amount < SMALLEST_CREDIT or self._credit > WINDOW:
                raise ProtocolError("The guest gave too little credit, or credit for bytes that were not sent.")
            self._flush()
            if self.ready:
                self.on_ready()
        else:
            if self.ended and kind == EOF:
                raise ProtocolError("The guest ended a stream twice.")
            self._end()
            if kind == RESET and not self.closed:
                self.reset()
            self._forget_if_over()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self.on_end()

    def _forget_if_over(self) -> None:
        if self.closed and self.ended:
            self._table.pop(self.number, None)

    def connection_closed(self) -> None:
        """End the stream. Called by the table when the connection was closed."""
        self.closed = True
        self._end()


class StreamTable(dict[int, GuestStream]):
    """The streams of one connection by number. Streams that the host opens have odd numbers."""

    def __init__(self, connection: GuestConnection) -> None:
        super().__init__()
        self._connection = connection
        self._next = 1
        self._refused = 0
        self._late_frames = 0

    def open(self, target: str) -> GuestStream:
        """Open a stream. Raises GuestError if too many are open."""
        if len(self) >= MAX_STREAMS:
            raise GuestError(f"The sandbox has {MAX_STREAMS} open streams, which is the limit.")
        stream = self[self._next] = GuestStream(self._connection, self, self._next)
        self._next += 2
        self._connection.send(encode(OPEN, stream.number, target.encode()))
        return stream

    def received(self, kind: int, number: int, payload: bytes) -> None:
        """Handle a frame from the guest. Raises ProtocolError if it does not fit the stream's state."""
        if kind == OPEN:
            self._refused += 1
            if self._refused > MAX_REFUSED or number % 2:
                raise ProtocolError("The guest tried to open too many streams, or one with an invalid number.")
            self._connection.send(encode(RESET, number))
        elif stream := self.get(number):
            stream.received(kind, payload)
        elif kind == DATA or not 0 < number < self._next:
            raise ProtocolError(f"The guest sent a frame of kind {kind} for stream {number}, which is not open.")
        else:
            self._late_frames += 1  # CREDIT, EOF or RESET that was sent before our own close arrived
            if self._late_frames > 8 * self._next:
                raise ProtocolError("The guest sent too many frames for closed streams.")

    def resume(self) -> None:
        """Send the waiting bytes of all streams, because the traffic continues."""
        for stream in list(self.values()):
            stream.resume()

    def close(self) -> None:
        """End all streams, because the connection was closed."""
        for stream in list(self.values()):
            stream.connection_closed()
        self.clear()
