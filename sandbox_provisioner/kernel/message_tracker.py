"""Track the messages of one client's connection in both directions, as its bytes pass.

On a plain connection, the headers and signatures of messages on shell, stdin and control are read, so that only
messages of a client with the kernel's key wake the kernel or count as activity. An encrypted connection cannot be read:
everything on it counts, because only a client with the key gets that far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .activity import OBSERVING
from .message_reader import Header
from .zmtp import GREETING_SIZE, Position, identity, is_plain

if TYPE_CHECKING:
    from .relay import ChannelRelay

CALLS = ("shell", "stdin", "control")
"""The channels on which clients send requests."""


class MessageTracker:
    """The messages of one connection. ``unanswered`` has the ids of the requests that have no reply yet."""

    def __init__(self, relay: ChannelRelay, channel: str) -> None:
        self.identity = b""
        """The identity of the client's socket, once it is known."""
        self.unanswered: set[str] = set()
        self._relay = relay
        self._channel = channel
        self._checked = relay.knows_key
        self._greeting = b""
        self._signed = 0
        self._requests = Position(sink=relay.reader(self._requested) if channel in CALLS else None)
        replies = relay.reader(self._replied) if channel == "shell" else None
        self._replies = Position(relay.max_message_size, replies) if self._checked else Position()

    def from_client(self, data: bytes) -> int:
        """Process the client's bytes; return how many messages in them count: signed ones, or all if unreadable."""
        self._greeting += data[: GREETING_SIZE - len(self._greeting)]
        self._signed = 0
        begun = self._requests.follow(data)
        if self._requests.ready and not self.identity:
            self.identity = identity(self._requests.ready)
        return self._signed if self.readable else begun

    def to_client(self, data: bytes) -> int:
        """Process bytes to the client; return how many messages begin in them. Raises MessageTooLargeError."""
        return self._replies.follow(data)

    @property
    def between_replies(self) -> bool:
        """True if a message to the client can begin now."""
        return self._replies.between_messages

    @property
    def readable(self) -> bool:
        """True if messages can be checked: the kernel's key is known and the connection is not encrypted."""
        return self._checked and is_plain(self._greeting)

    @property
    def handshake_size(self) -> int:
        """Number of bytes of the client's handshake after its greeting; 0 until it is known."""
        return max(0, self._requests.handshake_size - GREETING_SIZE)

    def _requested(self, header: Header, parent: Header) -> None:
        kind, msg_id = header.get("msg_type"), header.get("msg_id")
        if kind in OBSERVING and self._relay.resting:
            return
        self._signed += 1
        if self._channel == "shell":
            self._relay.activity.requested(header)
            if isinstance(msg_id, str) and isinstance(kind, str) and kind.endswith("_request"):
                self.unanswered.add(msg_id)

    def _replied(self, header: Header, parent: Header) -> None:
        self._relay.activity.replied(parent)
        self.unanswered.discard(str(parent.get("msg_id", "")))
