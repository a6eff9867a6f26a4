"""As much of ZeroMQ's wire protocol (ZMTP 3) as it takes to speak for a kernel that sleeps, and not into its words."""

from __future__ import annotations

MORE, LONG, COMMAND = 1, 2, 4
GREETING_SIZE = 64
HANDSHAKE = 2
"""Commands at most with which each side begins; on an encrypted connection all that follow are messages."""


class Position:
    """Where in its protocol one direction of a connection is, by the bytes that went over it."""

    def __init__(self) -> None:
        self._rest = GREETING_SIZE
        self._head = b""
        self._more = False
        self._commands = 0

    @property
    def between_messages(self) -> bool:
        """Whether a message could begin here, after the handshake."""
        return self._commands > 0 and not self._rest and not self._head and not self._more

    def follow(self, data: bytes) -> int:
        """These bytes went over it; how many messages begin in them. A flood of empty frames must not take long."""
        messages = 0
        if self._head:
            data, self._head = self._head + data, b""
        place, end = min(self._rest, len(data)), len(data)
        self._rest -= place
        while place < end:
            flags = data[place]
            start = place + (9 if flags & LONG else 2)
            if start > end:
                self._head = data[place:]
                return messages
            size = int.from_bytes(data[place + 1 : start], "big") if flags & LONG else data[place + 1]
            if flags & COMMAND:
                self._commands += 1
                messages += self._commands > HANDSHAKE
            else:
                messages += not self._more
                self._more = bool(flags & MORE)
            place = start + size
        self._rest = self._rest or place - end
        return messages
