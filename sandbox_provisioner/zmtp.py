"""As much of ZeroMQ's wire protocol (ZMTP 3) as it takes to speak for a kernel that sleeps, and not into its words."""

from __future__ import annotations

MORE, LONG, COMMAND = 1, 2, 4
GREETING_SIZE = 64


class Position:
    """Where in its protocol a connection is, by the bytes that went over it."""

    def __init__(self) -> None:
        self._rest = GREETING_SIZE
        self._head = b""
        self._more = False

    @property
    def between_messages(self) -> bool:
        """Whether a message could begin here."""
        return not self._rest and not self._head and not self._more

    def follow(self, data: bytes) -> None:
        """These bytes went over it."""
        place, end = 0, len(data)
        while place < end:
            if self._rest:
                step = min(self._rest, end - place)
                self._rest -= step
                place += step
                continue
            self._head += data[place : place + 1]
            place += 1
            flags = self._head[0]
            if len(self._head) == (9 if flags & LONG else 2):
                self._rest = int.from_bytes(self._head[1:], "big")
                self._more = bool(flags & MORE) if not flags & COMMAND else self._more
                self._head = b""
