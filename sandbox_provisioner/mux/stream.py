"""One flow of bytes between the host and a target in the sandbox, with credit in both directions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ProtocolError
from ..guest.frames import AMOUNT, CREDIT, DATA, EOF, MAX_PAYLOAD, RESET, SMALLEST_CREDIT, WINDOW, encode, encode_credit

if TYPE_CHECKING:
    from .connection import GuestLink


class Stream:
    """One flow of bytes to and from a target in the sandbox. I/O loop only.

    The owner sets the callbacks. It calls ``consumed`` for bytes that it has processed, which lets the guest send more,
    and should stop producing while ``ready`` is False; ``on_ready`` is called when it may continue.
    """

    def __init__(self, link: GuestLink, number: int) -> None:
        self.number = number
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.on_end: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self.link = link
        self._credit = WINDOW
        self._allowance = WINDOW
        self._owed = 0
        self._backlog: deque[bytes] = deque()
        self._closing: int | None = None
        self._closed = False
        self._ended = False

    @property
    def ready(self) -> bool:
        """True while written bytes are sent at once."""
        return not self._backlog and self._credit > 0 and not self.link.quiet

    @property
    def backlog(self) -> int:
        """Number of bytes that wait for credit, or for the link to resume."""
        return sum(map(len, self._backlog))

    def held(self) -> bytes:
        """Return the bytes that wait for credit, or for the link to resume."""
        return b"".join(self._backlog)

    def forget_held(self) -> None:
        """Discard the bytes that wait."""
        self._backlog.clear()

    def write(self, data: bytes) -> None:
        """Send ``data`` now, or as soon as there is credit for it. Ignored after ``end`` or ``reset``."""
        if not self._closed and self._closing is None:
            self._backlog.append(data)
            self._flush()

    def consumed(self, amount: int) -> None:
        """Give the guest credit for ``amount`` bytes that it had sent."""
        self._owed += amount
        self._grant()

    def end(self) -> None:
        """Send EOF after the bytes that wait, but continue to receive."""
        self._close(EOF)

    def reset(self) -> None:
        """Close both directions at once, and discard the bytes that wait."""
        self._backlog.clear()
        self._close(RESET)

    def _grant(self) -> None:
        abandoned = self._closed and self._closing == RESET
        if self._owed < SMALLEST_CREDIT or self._ended or abandoned or self.link.quiet:
            return
        self._allowance += self._owed
        self.link._send(encode_credit(self.number, self._owed))
        self._owed = 0

    def _close(self, how: int) -> None:
        if self._closed:
            return
        self._closing = max(how, self._closing or how)
        self._flush()

    def _flush(self) -> None:
        if self.link.quiet:
            return
        while self._backlog and self._credit > 0:
            data = self._backlog.popleft()
            room = min(self._credit, MAX_PAYLOAD)
            if len(data) > room:
                self._backlog.appendleft(data[room:])
                data = data[:room]
            self._credit -= len(data)
            self.link._send(encode(DATA, self.number, data))
        if self._closing is not None and not self._backlog:
            self._closed = True
            self.link._send(encode(self._closing, self.number))
            self.link._retire(self)

    def _resume(self) -> None:
        self._grant()
        self._flush()
        if self.ready and not self._closed:
            self.on_ready()

    def _received(self, kind: int, payload: bytes) -> None:
        if kind == DATA:
            self._allowance -= len(payload)
            if self._ended or not payload or self._allowance < 0:
                raise ProtocolError("The guest sent bytes that it had no credit for.")
            if self._closed and self._closing == RESET:
                return
            self.on_data(payload)
        elif kind == CREDIT:
            if len(payload) != AMOUNT.size:
                raise ProtocolError("The guest sent a malformed credit.")
            (amount,) = AMOUNT.unpack(payload)
            self._credit += amount
            if amount < SMALLEST_CREDIT or self._credit > WINDOW:
                raise ProtocolError("The guest gave credit in crumbs, or for bytes that were never sent.")
            self._flush()
            if self.ready:
                self.on_ready()
        else:
            self._end_received(kind)

    def _end_received(self, kind: int) -> None:
        if self._ended and kind == EOF:
            raise ProtocolError("The guest ended a stream twice.")
        if not self._ended:
            self._ended = True
            self.on_end()
        if kind == RESET and not self._closed:
            self.reset()
        self.link._retire(self)
