"""Pass bytes between one client and one channel of its kernel, unchanged.

The module ``messages`` tracks the Jupyter messages in these bytes. While the kernel is hibernated, the client's
handshake and heartbeats are answered here, and its messages are held for the kernel.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..mux.stream import GuestStream
from .handshake import Heartbeat, HeldClient
from .messages import CALLS, MessageTracker
from .zmtp import MessageTooLargeError

if TYPE_CHECKING:
    from .relay import ChannelRelay

PING = b"\x01\x00"
"""The beginning of a heartbeat on an established connection; the reply has the same bytes."""
MAX_EARLY = 1 << 16
"""Bytes from a client that may wait for the kernel before reading from the client pauses."""
TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
STATE_FIELD, UID_FIELD = 3, 7
"""Indices of fields in a line of these tables."""
ESTABLISHED = "01"


class LingeringStream:
    """The stream of a client that disconnected, kept until its requests are answered. Owned by the relay."""

    def __init__(
        self,
        relay: ChannelRelay,
        channel: str,
        stream: GuestStream,
        messages: MessageTracker,
        held: HeldClient | None,
    ) -> None:
        self._relay = relay
        self.channel = channel
        self.identity = messages.identity
        self.connection = stream.connection
        self._stream = stream
        self._messages = messages
        self._held = held
        stream.on_data = self._received
        stream.on_end = self._remove

    def end(self) -> None:
        """End the stream. The kernel still receives the bytes that the client sent before it disconnected."""
        _discard_received(self._stream)
        self._stream.end()
        self._remove()

    def _remove(self) -> None:
        self._relay.lingering.discard(self)

    def _received(self, data: bytes) -> None:
        """Track the replies; end the stream after the last one. Called by the stream."""
        if self._held:
            data = self._held.from_kernel(self._stream, data)
            if self._held.kernel.done:
                self._held = None
        self._stream.consumed(len(data))
        try:
            if self._messages.to_client(data):
                self._relay.note_reaction(self.channel)
        except MessageTooLargeError:
            self._messages.unanswered.clear()
        if not self._messages.unanswered:
            self.end()


class ClientConnection(asyncio.Protocol):
    """A client's connection to one channel. Owned by the relay; I/O loop only.

    ``trusted`` is False if another user of the machine opened it.
    """

    def __init__(self, relay: ChannelRelay, channel: str) -> None:
        self._relay = relay
        self.channel = channel
        self.trusted = True
        self._stream: GuestStream | None = None
        self._heart: Heartbeat | None = None
        self._held: HeldClient | None = None
        self._messages = MessageTracker(relay, channel)
        self._early = b""  # from the client, received before the kernel ran
        self._to_client = bytearray()  # waits until the client reads
        self._to_publish = b""  # from this server, waits until a message to the client can begin
        self._uncredited = 0  # bytes that were sent to the client, but the guest has no credit for them yet
        self._congested = False  # True while the client does not read fast enough
        self._client_sent = self._kernel_sent = self._has_request = False

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and join it to the kernel, or close it if there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)
        self.trusted = trusted_peer(cast(socket.socket, transport.get_extra_info("socket")))
        if not self._relay.admit(self):
            self._transport.abort()
            return
        self.join()

    def data_received(self, data: bytes) -> None:
        """Pass the client's bytes on. While the kernel is hibernated, hold them; answer heartbeats."""
        if self._heart or (self._relay.resting and self.channel == "hb" and data.startswith(PING)):
            self._answer_heartbeat(data)
            return
        self._client_sent = True
        if self._stream is None:
            self._early += data
            if len(self._early) > MAX_EARLY:
                self._transport.pause_reading()
            return
        if self._held and not self._answer_handshake(self._held, data):
            return
        requests = self._follow(data) if self.channel in CALLS else 0
        self._relay.sent += requests
        self._pass_on(data)
        waiting = self._waits_for_kernel
        if requests and waiting:
            self._has_request = True
        if waiting > self._room:
            self._transport.pause_reading()
            self._has_request = self._has_request or self.trusted
        if self._relay.asleep:
            self._relay.answer_observers([self])
            if self.calling:
                self._relay.on_call()

    def pause_writing(self) -> None:
        """Stop sending: the client does not read fast enough."""
        self._congested = True

    def resume_writing(self) -> None:
        """Send the bytes that waited for the client to read."""
        self._congested = False
        if self._to_client:
            data, self._to_client = bytes(self._to_client), bytearray()
            self._transport.write(data)
        self._continue()
        if not self._congested and self.channel == "hb":
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream to the kernel, or keep it for the replies to unanswered requests."""
        self._relay.remove(self)
        stream = self._stream
        if stream is None:
            return
        self._stream = None
        stream.on_ready = lambda: None
        if self._messages.unanswered:
            self._relay.linger(LingeringStream(self._relay, self.channel, stream, self._messages, self._held))
            return
        _discard_received(stream)
        if exc:
            stream.reset()
        else:
            stream.end()  # the kernel still receives the bytes that the client sent before it disconnected

    # -- called by the relay

    def join(self) -> None:
        """Join the connection to the kernel, if there is one. While it is hibernated, answer heartbeats instead."""
        if self._stream or self._transport.is_closing():
            return
        if self._relay.resting and self.channel == "hb":
            self._heart = Heartbeat()
            return
        try:
            self._stream = self._relay.open(self.channel)
        except ConnectionError:
            self._transport.abort()
            return
        if not self._stream:
            return
        self._messages = MessageTracker(self._relay, self.channel)
        if self._relay.knows_key and self._relay.resting:
            self._held = HeldClient(self.channel)
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

    @property
    def interruptible(self) -> bool:
        """True if a message to the client can begin now."""
        return self._messages.between_replies and not self._to_client and not self._congested

    @property
    def calling(self) -> bool:
        """True while a trusted client's request, or handshake that only the kernel can answer, waits for the kernel."""
        if self._stream is None or self.channel not in CALLS or not self.trusted:
            return False
        only_kernel_can_answer = self._held is None or self._held.answered.opaque
        in_handshake = self._client_sent and not self._kernel_sent and only_kernel_can_answer
        return in_handshake or (self._has_request and self._waits_for_kernel > 0)

    @property
    def observing(self) -> bool:
        """True while a trusted client waits for a hibernated kernel only with requests that observe it."""
        whole = self._messages.between_requests and 0 < self._waits_for_kernel <= MAX_EARLY
        can_answer = self.joined and self.interruptible
        return self._messages.observed and self.trusted and not self._has_request and whole and can_answer

    def call(self) -> None:
        """Make the held requests wake the kernel, because their answers are not known."""
        self._has_request = True

    @property
    def _waits_for_kernel(self) -> int:
        """Number of the client's bytes that the kernel has not received."""
        return (self._stream.backlog if self._stream else 0) + (len(self._held.waiting) if self._held else 0)

    def held(self) -> bytes:
        """Return the client's bytes after its handshake that the kernel has not received, with or without a request."""
        if self._held:
            return bytes(self._held.waiting[self._messages.handshake_size :])
        return self._stream.held() if self._stream else b""

    def answer_held(self, answer: bytes) -> None:
        """Send an answer on the kernel's behalf, and discard the held messages."""
        if self._held:
            del self._held.waiting[self._messages.handshake_size :]
        elif self._stream:
            self._stream.forget_held()
        self._has_request = self._messages.observed = False
        self._transport.resume_reading()
        self._send(answer)

    def inject(self, channel: str, message: bytes) -> None:
        """Send a message on the kernel's behalf, if the connection is to ``channel`` and a message can begin now."""
        if self.channel == channel and self.interruptible:
            self._send(message)

    def publish(self, message: bytes) -> None:
        """Send a message on the kernel's behalf, if the connection is to iopub, as soon as a message can begin."""
        if self.channel == "iopub":
            self._to_publish += message
            self._continue()

    def end_own_heartbeats(self) -> None:
        """Close a connection whose heartbeats were answered here, so that the client connects to the woken kernel."""
        if self._heart:
            self._transport.close()

    def drop(self) -> None:
        """Close the connection if it was joined to the kernel, which has now ended."""
        if self._stream:
            self._transport.close()

    def abandon(self) -> None:
        """Close the connection. Do not wait for a client that does not read what was sent to it."""
        if self._congested:
            self._transport.abort()
        else:
            self._transport.close()

    # -- from the client to the kernel

    def _answer_handshake(self, held: HeldClient, data: bytes) -> bool:
        """Answer a client that connects to a hibernated kernel. Abort and return False if it does not use ZMTP."""
        try:
            reply = held.answered.answer(data)
        except ValueError:
            self._transport.abort()
            return False
        if reply:
            self._send(reply)
        return True

    def _send(self, data: bytes) -> None:
        """Send bytes on the kernel's behalf. They are tracked like the kernel's own, so a reply ends its request."""
        self._messages.to_client(data)
        self._transport.write(data)

    def _pass_on(self, data: bytes) -> None:
        """Write bytes to the kernel; if the handshake was answered here, only after the kernel's greeting."""
        assert self._stream is not None
        if data := self._held.to_kernel(data) if self._held else data:
            self._stream.write(data)

    def _follow(self, data: bytes) -> int:
        """Track the client's bytes. Return how many messages in them count as requests to the kernel."""
        known = self._messages.identity
        requests = self._messages.from_client(data)
        if self._messages.identity != known:
            self._relay.replace_lingering(self.channel, self._messages.identity)
        return requests

    @property
    def _room(self) -> int:
        """Bytes to hold before reading pauses: enough for a whole message if it can wake the kernel, else MAX_EARLY."""
        can_wake = self._relay.asleep and self.trusted and not self._has_request
        return self._relay.max_message_size if can_wake and self._messages.readable else MAX_EARLY

    # -- from the kernel to the client

    def _deliver(self, data: bytes) -> None:
        """Pass the kernel's bytes on. Called by the stream."""
        self._kernel_sent = True
        data = self._without_handshake(data)
        if not data:
            return
        try:
            messages = self._messages.to_client(data)
        except MessageTooLargeError:
            self._refuse_large()
            return
        if messages and self.channel != "hb":
            self._relay.note_reaction(self.channel)
        self._uncredited += len(data)
        if self._congested:
            self._to_client += data
        else:
            self._transport.write(data)
        self._continue()

    def _without_handshake(self, data: bytes) -> bytes:
        """Return ``data`` without the handshake of a woken kernel; the client has already received one."""
        if self._held is None or self._stream is None:
            return data
        passed = self._held.from_kernel(self._stream, data)
        if self._stream.ready and not self._held.waiting and not self._transport.is_closing():
            self._transport.resume_reading()
        if self._held.kernel.done:
            self._held = None
        return passed

    def _refuse_large(self) -> None:
        """Close the connection, because the kernel has sent a message that is too large."""
        stream, self._stream = self._stream, None
        if stream:
            stream.on_end = stream.on_ready = lambda: None
            stream.reset()
        self._transport.abort()
        self._relay.on_oversized(self.channel)

    def _continue(self) -> None:
        """Send the published messages, if one can begin, and give the guest credit for the bytes that were sent."""
        if self._to_publish and self.interruptible:
            message, self._to_publish = self._to_publish, b""
            self._send(message)
        if self._congested:
            return
        if self._stream and self._uncredited:
            self._stream.consumed(self._uncredited)
        self._uncredited = 0

    def _answer_heartbeat(self, data: bytes) -> None:
        """Answer a heartbeat on the kernel's behalf while the client reads the answers; abort if it is invalid."""
        try:
            self._transport.write(self._heart.answer(data) if self._heart else data)
        except ValueError:
            self._transport.abort()
            return
        if self._congested:
            self._transport.pause_reading()


def _discard_received(stream: GuestStream) -> None:
    """Discard all bytes that the kernel still sends on a stream without a client."""
    stream.on_end = lambda: None
    stream.on_data = lambda data: stream.consumed(len(data))


def trusted_peer(connection: socket.socket) -> bool:
    """Return True if root or this process's own user opened the connection."""
    return peer_uid(connection) in (0, os.geteuid())


def peer_uid(connection: socket.socket) -> int | None:
    """Return the user id of the process that opened the connection; None if it cannot be determined."""
    if connection.family == socket.AF_UNIX:
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", packed)[1])
    try:
        theirs, ours = connection.getpeername(), connection.getsockname()
        wanted = [_entry(*theirs[:2]), _entry(*ours[:2])]
        for line in TABLES[connection.family].read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1:3] == wanted and fields[STATE_FIELD] == ESTABLISHED:  # closed ones show user 0
                return int(fields[UID_FIELD])
    except (OSError, LookupError, ValueError):
        pass
    return None


def _entry(address: str, port: int) -> str:
    """Return an address in the format of /proc/net/tcp: 32-bit words in the machine's byte order."""
    packed = ipaddress.ip_address(address).packed
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return f"{b''.join(words).hex().upper()}:{port:04X}"
