"""Track the messages of a client's connection as its bytes pass: read their headers and check their signatures.

On a plain connection, the messages on shell, stdin and control are read, so that only a client with the kernel's key
can wake the kernel or count as activity. An encrypted connection cannot be read: everything on it counts, because only
a client with the key completes the handshake. Bodies are hashed piece by piece and not kept, so a message of any size
needs little memory.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .known_answers import COMM_INFO, OBSERVING
from .zmtp import GREETING_SIZE, Position, identity, is_plain

if TYPE_CHECKING:
    from .relay import ChannelRelay

COMM_INFO_REPLY = "comm_info_reply"
EXECUTE = "execute_request"
CALLS = ("shell", "stdin", "control")
"""The channels on which clients send requests."""
DELIMITER = b"<IDS|MSG>"
MAX_SIGNATURE = 256
MAX_HEADER = 1 << 16
MAX_CONTENT = 1 << 16
"""Maximum bytes of a content that is kept."""
MAX_IDENTITIES = 8
SIGNED_FRAMES = 4
"""Header, parent header, metadata and content. Buffers follow and are not signed."""

Header = Mapping[str, Any]
OnContent = Callable[[Header, Header, bytes | None], None]
"""Called with the header, the parent header and the content of a message; with None if the content is too long."""


class MessageTracker:
    """The messages of one connection. ``unanswered`` has the ids of the requests on shell that have no reply yet."""

    def __init__(self, relay: ChannelRelay, channel: str) -> None:
        self.identity = b""
        """The identity of the client's socket, once it is known."""
        self.unanswered: set[str] = set()
        self.observed = False
        """True after a request that only observes the kernel arrived while the kernel could not answer."""
        self._relay = relay
        self._channel = channel
        self._checked = relay.knows_key
        self._signed = 0
        requests = relay.reader(self._requested, (COMM_INFO, EXECUTE), self._received_content)
        self._requests = Position(sink=requests if channel in CALLS else None)
        comms = relay.reader(self._replied, (COMM_INFO_REPLY,), self._replied_content)
        replies = comms if channel == "shell" else None
        self._replies = Position(relay.max_message_size, replies) if self._checked else Position()

    def from_client(self, data: bytes) -> int:
        """Process the client's bytes. Return how many messages in them count as requests.

        These are the signed ones on a plain connection, and all that follow the handshake on an encrypted one. Until
        the kernel has completed the handshake, nothing counts: the client may not have the key.
        """
        self._signed = 0
        begun = self._requests.follow(data)
        if self._requests.ready and not self.identity:
            self.identity = identity(self._requests.ready)
        if self.readable:
            return self._signed
        return begun if self._replies.handshake_done or not self._checked else 0

    def to_client(self, data: bytes) -> int:
        """Process bytes to the client; return how many messages begin in them. Raises MessageTooLargeError."""
        return self._replies.follow(data)

    @property
    def between_replies(self) -> bool:
        """True if a message to the client can begin now."""
        return self._replies.between_messages

    @property
    def between_requests(self) -> bool:
        """True if the client has sent whole messages so far."""
        return self._requests.between_messages

    @property
    def readable(self) -> bool:
        """True if signatures can be checked: the kernel's key is known and the connection is not encrypted."""
        return self._checked and is_plain(self._requests.greeting)

    @property
    def handshake_size(self) -> int:
        """Number of bytes of the client's handshake after its greeting; 0 until it is known."""
        return max(0, self._requests.handshake_size - GREETING_SIZE)

    def _requested(self, header: Header, parent: Header) -> None:
        kind, msg_id = header.get("msg_type"), header.get("msg_id")
        if kind in OBSERVING and self._relay.resting:
            self.observed = True
            return
        self._signed += 1
        if self._channel == "shell":
            self._relay.known.requested(kind)
            self._relay.activity.requested(header)
            if isinstance(msg_id, str) and isinstance(kind, str) and kind.endswith("_request"):
                self.unanswered.add(msg_id)
        elif self._channel == "control":
            self._relay.activity.requested_on_control(header)

    def _received_content(self, header: Header, parent: Header, content: bytes | None) -> None:
        if header["msg_type"] == EXECUTE:
            if self._channel == "shell":
                self._relay.note_cell(header, content or b"")
        elif content is not None:
            self._relay.known.asked(header, content)

    def _replied_content(self, header: Header, parent: Header, content: bytes | None) -> None:
        if content is not None:
            self._relay.known.replied(parent, content)

    def _replied(self, header: Header, parent: Header) -> None:
        self._relay.activity.replied(parent)
        self.unanswered.discard(str(parent.get("msg_id", "")))


class MessageReader:
    """A ``zmtp.Sink`` that calls ``on_message(header, parent_header)`` for each message with a valid signature.

    Reads one direction of a connection. ``key`` and ``scheme`` come from the connection file; with an empty key,
    messages are not signed and all are reported. For messages of the types ``kinds``, ``on_content`` is then called
    with the content, too.
    """

    def __init__(
        self,
        key: bytes,
        scheme: str,
        on_message: Callable[[Header, Header], None],
        kinds: Sequence[str] = (),
        on_content: OnContent | None = None,
    ) -> None:
        self._base = hmac.new(key, digestmod=scheme.partition("-")[2]) if key else None
        self._on_message = on_message
        self._kinds = kinds
        self._on_content = on_content
        self._begin()

    def _begin(self) -> None:
        self._kept = b""
        self._identities = 0
        self._frame = -2
        """-2 before the delimiter, -1 in the signature, then the index of a signed frame."""
        self._signature = b""
        self._parts: list[bytes] = []
        self._content: bytes | None = None
        self._sum = self._base.copy() if self._base else None
        self._valid = True

    def piece(self, data: bytes) -> None:
        """Process the next bytes of the current frame."""
        if self._frame >= SIGNED_FRAMES or not self._valid:
            return
        if self._sum and self._frame >= 0:
            self._sum.update(data)
        if self._content is not None and self._frame == SIGNED_FRAMES - 1:
            self._content += data[: MAX_CONTENT + 1 - len(self._content)]
        if self._frame < 2:
            largest = (len(DELIMITER) + 1, MAX_SIGNATURE, MAX_HEADER, MAX_HEADER)[self._frame + 2]
            self._kept += data[: largest + 1 - len(self._kept)]
            if len(self._kept) > largest and self._frame > -2:
                self._valid = False

    def end_frame(self, more: bool) -> None:
        """End the current frame, and the message if ``more`` is False."""
        kept, self._kept = self._kept, b""
        if self._frame == -2:
            self._identities += 1
            if kept == DELIMITER:
                self._frame = -1
            elif self._identities > MAX_IDENTITIES:
                self._valid = False
        elif self._frame == -1:
            self._signature, self._frame = kept, 0
        else:
            if self._frame < 2:
                self._parts.append(kept)
            if self._frame == 0 and self._on_content and any(kind.encode() in kept for kind in self._kinds):
                self._content = b""
            self._frame += 1
        if not more:
            self._end_message()

    def _end_message(self) -> None:
        try:
            if self._valid and self._frame >= SIGNED_FRAMES and self._signed():
                header, parent = map(json.loads, self._parts)
                if isinstance(header, dict) and isinstance(parent, dict):
                    self._on_message(header, parent)
                    self._report_content(header, parent)
        except (ValueError, RecursionError):
            pass
        finally:
            self._begin()

    def _report_content(self, header: Header, parent: Header) -> None:
        if self._on_content and self._content is not None and header.get("msg_type") in self._kinds:
            self._on_content(header, parent, self._content if len(self._content) <= MAX_CONTENT else None)

    def _signed(self) -> bool:
        return self._sum is None or hmac.compare_digest(self._sum.hexdigest().encode(), self._signature)
