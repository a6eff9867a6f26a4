"""Pass bytes between one client and one channel of its kernel, and track the messages in them.

Bytes pass unchanged. On a plain connection, the headers and signatures of messages on shell, stdin and control are
read on the way, so that only messages of a client with the kernel's key wake the kernel or count as activity. An
encrypted connection cannot be read: everything on it counts, because only a client with the key gets that far.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, cast

from ..mux.stream import GuestStream
from .activity import OBSERVING
from .handshake import Handshake, KernelHandshake
from .heartbeat import Heart
from .message_reader import Header
from .peers import trusted_peer
from .zmtp import GREETING_SIZE, MessageTooLargeError, Position, identity

if TYPE_CHECKING:
    from ..mux.connection import GuestConnection
    from .relay import ChannelRelay

CALLS = ("shell", "stdin", "control")
"""The channels on which clients send requests."""
PING = b"\x01\x00"
"""The beginning of a heartbeat on an established connection; the reply has the same bytes."""
MAX_EARLY = 1 << 16
"""Bytes from a client that may wait for the kernel before reading from the client pauses."""
ENCRYPTED = slice(12, 32)
"""The position of the security mechanism's name in a greeting."""
PLAIN = b"NULL"


class ClientConnection(asyncio.Protocol):
    """A connection from a client to one channel. Owned by the relay; I/O loop only.

    ``trusted`` is False if another user of the machine opened it.
    """

    def __init__(self, relay: ChannelRelay, channel: str) -> None:
        self._relay = relay
        self.channel = channel
        self.trusted = True
        self.identity = b""
        self._stream: GuestStream | None = None
        self._heart: Heart | None = None
        self._handshake: Handshake | None = None
        self._kernel_handshake: KernelHandshake | None = None
        self._greeting = b""
        self._greeted = 0
        self._early = b""
        self._after_greeting = bytearray()
        """Bytes from a client whose handshake was answered here, held until the kernel has sent its greeting."""
        self._waiting = bytearray()
        self._unsent = 0
        self._congested = False
        self._spoke = self._served = self._calling = False
        self._questions = Position()
        self._position = Position()
        self._signed = 0
        self.unanswered: set[str] = set()
        """Ids of the requests on this connection that have no reply yet."""

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and join it to the kernel, or abort it if there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)
        self.trusted = trusted_peer(cast(socket.socket, transport.get_extra_info("socket")))
        if not self._relay.admit(self):
            self._transport.abort()
            return
        self.join()

    def data_received(self, data: bytes) -> None:
        """Pass the client's bytes on, or hold them while the kernel is hibernated; answer heartbeats meanwhile."""
        if self._heart or (self._relay.resting and self.channel == "hb" and data.startswith(PING)):
            self._beat(data)
            return
        self._spoke = True
        if self._stream is None:
            self._early += data
            if len(self._early) > MAX_EARLY:
                self._transport.pause_reading()
            return
        if self._handshake and not self._answer_handshake(data):
            return
        asked = self._follow(data) if self.channel in CALLS else 0
        self._relay.asked += asked
        self._pass_on(data)
        held = self._stream.backlog + len(self._after_greeting)
        if asked and held:
            self._calling = True
        if held > self._room:
            self._transport.pause_reading()
            self._calling = self._calling or self.trusted
        if self._relay.asleep and self.calling:
            self._relay.on_call()

    def pause_writing(self) -> None:
        """Stop sending: the client does not read fast enough."""
        self._congested = True

    def resume_writing(self) -> None:
        """Send the bytes that waited for the client to read."""
        self._congested = False
        if self._waiting:
            waiting, self._waiting = bytes(self._waiting), bytearray()
            self._transport.write(waiting)
        if not self._congested:
            self._settle()
            if self.channel == "hb":
                self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Detach from the kernel, but keep the stream while requests have no reply."""
        self._relay.leave(self)
        stream = self._stream
        if stream is None:
            return
        stream.on_ready = lambda: None
        if self.unanswered and self._relay.linger(self):
            stream.on_data = self._listen_on
            stream.on_end = self._relay_forgets
            return
        self._stream = None
        stream.on_end = lambda: None
        stream.on_data = lambda data: stream.consumed(len(data))
        if exc and not self.unanswered:
            stream.reset()
        else:
            stream.end()  # bytes that the client sent before it disconnected still arrive

    # -- called by the relay

    def join(self) -> None:
        """Join the connection to the kernel, if one runs. Answer heartbeats here while it is hibernated."""
        if self._stream or self._transport.is_closing():
            return
        if self._relay.resting and self.channel == "hb":
            self._heart = Heart()
            return
        try:
            self._stream = self._relay.open(self.channel)
        except ConnectionError:
            self._transport.abort()
            return
        if not self._stream:
            return
        if self._relay.knows_key:
            self._questions = Position(sink=self._relay.reader(self._requested) if self.channel in CALLS else None)
            replies = self._relay.reader(self._replied) if self.channel == "shell" else None
            self._position = Position(self._relay.max_message_size, replies)
        if self._relay.knows_key and self._relay.resting:
            self._handshake = Handshake(self.channel)
            self._kernel_handshake = KernelHandshake()
        self._stream.on_data = self._deliver
        self._stream.on_end = self._transport.close
        self._stream.on_ready = self._transport.resume_reading
        self._transport.resume_reading()
        if self._early:
            early, self._early = self._early, b""
            self.data_received(early)

    @property
    def joined(self) -> bool:
        """True while the connection is joined to the kernel."""
        return self._stream is not None and not self._transport.is_closing()

    def leads_to(self, link: GuestConnection) -> bool:
        """Return True if the connection's stream belongs to ``link``."""
        return self._stream is not None and self._stream.connection is link

    @property
    def ready(self) -> bool:
        """True if the connection is joined to the kernel and a message to the client can begin now."""
        return self.joined and self.interruptible

    @property
    def interruptible(self) -> bool:
        """True if a message to the client can begin now."""
        return self._position.between_messages and not self._waiting and not self._congested

    @property
    def calling(self) -> bool:
        """True if a trusted client has a request for the kernel, or needs the kernel to continue the handshake."""
        if self._stream is None or self.channel not in CALLS or not self.trusted:
            return False
        in_handshake = self._spoke and not self._served and (self._handshake is None or self._handshake.opaque)
        return in_handshake or (self._calling and (self._stream.backlog > 0 or bool(self._after_greeting)))

    def held(self) -> bytes:
        """Return the messages that are held for the kernel, without the client's handshake."""
        if self._kernel_handshake:
            return bytes(self._after_greeting[self._ready_size :])
        return self._stream.held() if self._stream else b""

    def settle(self, answer: bytes) -> None:
        """Send an answer on the kernel's behalf, and drop the held messages."""
        if self._kernel_handshake:
            del self._after_greeting[self._ready_size :]
        elif self._stream:
            self._stream.forget_held()
        self._calling = False
        self._transport.resume_reading()
        self._send(answer)

    def inject(self, channel: str, news: bytes) -> None:
        """Send a message on the kernel's behalf, if the connection is to ``channel`` and a message can begin now."""
        if self.channel == channel and self.interruptible:
            self._send(news)

    def awake(self) -> None:
        """Close a connection whose heartbeats were answered here, so that the client connects to the woken kernel."""
        if self._heart:
            self._transport.close()

    def drop(self) -> None:
        """Close the connection if it was joined to the kernel, which has ended."""
        if self._stream:
            self._transport.close()

    def abandon(self) -> None:
        """Close the connection without waiting for a client that does not read."""
        if self._congested:
            self._transport.abort()
        else:
            self._transport.close()

    def end_lingering(self) -> None:
        """End the stream of a client that left."""
        stream, self._stream = self._stream, None
        self._relay.lingering.discard(self)
        if stream:
            stream.on_end = lambda: None
            stream.on_data = lambda data: stream.consumed(len(data))
            stream.end()

    # -- from the client to the kernel

    def _answer_handshake(self, data: bytes) -> bool:
        """Answer a client that connects to a hibernated kernel. Abort and return False if it does not use ZMTP."""
        assert self._handshake is not None
        if self._handshake.done:
            return True
        try:
            reply = self._handshake.answer(data)
        except ValueError:
            self._transport.abort()
            return False
        if reply:
            self._send(reply)
        return True

    def _send(self, data: bytes) -> None:
        """Send bytes on the kernel's behalf, and track them: a reply ends its request as the kernel's own would."""
        self._position.follow(data)
        self._transport.write(data)

    @property
    def _ready_size(self) -> int:
        """Bytes after its greeting that belong to the client's handshake."""
        return max(0, self._questions.handshake_size - GREETING_SIZE)

    def _pass_on(self, data: bytes) -> None:
        """Write bytes to the kernel; hold all but the greeting for its own, if the handshake was answered here."""
        assert self._stream is not None
        if self._kernel_handshake and not self._kernel_handshake.greeted:
            rest = GREETING_SIZE - self._greeted
            self._greeted += len(data[:rest])
            self._after_greeting += data[rest:]
            data = data[:rest]
        if data:
            self._stream.write(data)

    def _follow(self, data: bytes) -> int:
        """Track the client's bytes; return how many messages in them count: signed ones, or all if unreadable."""
        self._greeting += data[: GREETING_SIZE - len(self._greeting)]
        self._signed = 0
        begun = self._questions.follow(data)
        if self._questions.ready and not self.identity:
            self.identity = identity(self._questions.ready)
            self._relay.replace_lingering(self)
        return self._signed if self._readable else begun

    @property
    def _readable(self) -> bool:
        """True if messages can be checked: the kernel's key is known and the connection is not encrypted."""
        return self._relay.knows_key and self._greeting[ENCRYPTED].startswith(PLAIN)

    @property
    def _room(self) -> int:
        """Bytes to hold before reading pauses: a whole message if it may wake the kernel, else MAX_EARLY."""
        waits = self._relay.asleep and self.trusted and not self._calling
        return self._relay.max_message_size if waits and self._readable else MAX_EARLY

    def _requested(self, header: Header, parent: Header) -> None:
        kind, msg_id = header.get("msg_type"), header.get("msg_id")
        if kind in OBSERVING and self._relay.resting:
            return
        self._signed += 1
        if self.channel == "shell":
            self._relay.activity.requested(header)
            if isinstance(msg_id, str) and isinstance(kind, str) and kind.endswith("_request"):
                self.unanswered.add(msg_id)

    # -- from the kernel to the client

    def _deliver(self, data: bytes) -> None:
        self._served = True
        data = self._without_handshake(data)
        if not data:
            return
        try:
            begun = self._position.follow(data)
        except MessageTooLargeError:
            self._refuse_large()
            return
        if begun and self.channel != "hb":
            self._relay.heeded = self._relay.asked
        self._unsent += len(data)
        if self._congested:
            self._waiting += data
        else:
            self._transport.write(data)
        if not self._congested:
            self._settle()

    def _without_handshake(self, data: bytes) -> bytes:
        """Return ``data`` without a woken kernel's handshake; after its greeting, send it the held bytes."""
        if self._kernel_handshake is None or self._stream is None:
            return data
        passed = self._kernel_handshake.strip(data)
        self._stream.consumed(len(data) - len(passed))
        if self._kernel_handshake.greeted and self._after_greeting:
            waiting, self._after_greeting = bytes(self._after_greeting), bytearray()
            self._stream.write(waiting)
            if self._stream.ready and not self._transport.is_closing():
                self._transport.resume_reading()
        if self._kernel_handshake.done:
            self._handshake = self._kernel_handshake = None
        return passed

    def _refuse_large(self) -> None:
        stream, self._stream = self._stream, None
        if stream:
            stream.on_end = stream.on_ready = lambda: None
            stream.reset()
        self._transport.abort()
        self._relay.on_oversized(self.channel)

    def _settle(self) -> None:
        """Give the guest credit for the bytes that were sent to the client."""
        if self._stream and self._unsent:
            self._stream.consumed(self._unsent)
        self._unsent = 0

    def _replied(self, header: Header, parent: Header) -> None:
        self._relay.activity.replied(parent)
        self.unanswered.discard(str(parent.get("msg_id", "")))

    def _listen_on(self, data: bytes) -> None:
        """Follow the replies to a client that left; end the stream after the last. Called by the stream."""
        assert self._stream is not None
        data = self._without_handshake(data)
        self._stream.consumed(len(data))
        try:
            if self._position.follow(data):
                self._relay.heeded = self._relay.asked
        except MessageTooLargeError:
            self.unanswered.clear()
        if not self.unanswered:
            self.end_lingering()

    def _relay_forgets(self) -> None:
        """Remove a lingering stream that the kernel closed. Called by the stream."""
        self._stream = None
        self._relay.lingering.discard(self)

    def _beat(self, data: bytes) -> None:
        try:
            self._transport.write(self._heart.answer(data) if self._heart else data)
        except ValueError:
            self._transport.abort()
            return
        if self._congested:
            self._transport.pause_reading()
