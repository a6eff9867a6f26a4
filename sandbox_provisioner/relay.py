"""ChannelRelay: the host's side of the data path, where clients connect to a kernel's five channels.

It moves bytes and knows nothing of ZeroMQ, so signing, CurveZMQ and every kernel's dialect pass through unchanged.
Its listeners outlive the kernel: clients that come while none is up are held, and served when one is. While a kernel
sleeps its clients' connections stay open, what they send is held, and the first of it on a channel that asks for
something is a call to wake it. Heartbeats are answered meanwhile, and call nobody.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

from .errors import GuestError, SandboxError
from .heart import Heart
from .link import GuestLink
from .stream import Stream
from .zmtp import Position

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
CALLS = ("shell", "stdin", "control")
"""The channels on which a client asks for something."""
PING = b"\x01\x00"
"""How a heartbeat begins on a connection that is up; its answer is itself, byte for byte."""
MAX_CLIENTS = 250
"""Connections at once to one kernel; a kernel has five for each client."""


MAX_EARLY = 1 << 16
"""What is kept of a client that talks before there is a kernel; reading on is how we notice that it hangs up."""
RECONNECT = 3.0
"""Seconds for which clients of a kernel in whose place there is another are waited for."""


class ChannelRelay:
    """Listens for clients on the host and joins each connection to a stream into the sandbox.

    ``asked`` counts the messages that clients have sent the present kernel, on channels that ask for something;
    ``heeded`` is what that was when the kernel last said anything.
    """

    def __init__(self) -> None:
        self.on_call: Callable[[], None] = lambda: None
        self.asked = self.heeded = 0
        self._reserved: dict[str, socket.socket] = {}
        self._servers: dict[str, asyncio.Server] = {}
        self._addresses: dict[str, str | int] = {}
        self._clients: set[_Client] = set()
        self._link: GuestLink | None = None
        self._targets: Mapping[str, str] = {}

    async def reserve_tcp(self, ip: str, ports: Mapping[str, int]) -> dict[str, int]:
        """Bind these ports of a loopback address, 0 for any; returns the ports. Those held already are kept."""
        if dict(ports) != self._addresses:
            await self.close()
            for channel in CHANNELS:
                listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                await self._bind(channel, listener, (ip, ports[channel]))
                self._addresses[channel] = listener.getsockname()[1]
        return cast(dict[str, int], dict(self._addresses))

    async def reserve_ipc(self, paths: Mapping[str, str]) -> None:
        """Bind unix sockets at these paths, for this user only. Those held already are kept if they are still there."""
        if dict(paths) != self._addresses or not all(Path(path).exists() for path in paths.values()):
            await self.close()
            for channel in CHANNELS:
                Path(paths[channel]).unlink(missing_ok=True)
                await self._bind(channel, socket.socket(socket.AF_UNIX), paths[channel])
                self._addresses[channel] = paths[channel]

    async def listen(self) -> None:
        """Let clients connect to what was reserved."""
        loop = asyncio.get_running_loop()
        while self._reserved:
            channel, listener = self._reserved.popitem()
            create = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
            server = await create(partial(_Client, self, channel), sock=listener, start_serving=False)
            self._servers[channel] = server  # before the next await: a cancelled launch closes it
            await server.start_serving()

    async def _bind(self, channel: str, listener: socket.socket, address: str | tuple[str, int]) -> None:
        try:
            listener.bind(address)
            if isinstance(address, str):
                Path(address).chmod(0o600)
        except OSError as error:
            listener.close()
            await self.close()
            where = address if isinstance(address, str) else "{}:{}".format(*address)
            raise SandboxError(f"The {channel} channel cannot listen on {where}: {error.strerror or error}.") from error
        self._reserved[channel] = listener

    def connect(self, link: GuestLink, targets: Mapping[str, str]) -> None:
        """A kernel is (coming) up behind ``link``: join every client, waiting or new, to its channel's target."""
        self._link, self._targets = link, targets
        self.asked = self.heeded = 0
        for client in list(self._clients):
            client.join()

    def disconnect(self) -> None:
        """The kernel is gone: close its clients' connections, as its own sockets would; the listeners stay."""
        self._link = None
        for client in list(self._clients):
            client.drop()

    @property
    def asleep(self) -> bool:
        """Whether the kernel is checkpointed, and its clients wait for its return."""
        return self._link is not None and self._link.asleep

    @property
    def resting(self) -> bool:
        """Whether it is asleep, or about to be, or to wake up: its heart cannot be heard."""
        return self._link is not None and self._link.resting

    def awake(self) -> None:
        """The kernel is back."""
        for client in list(self._clients):
            client.awake()

    def answer(self, reply: Callable[[bytes], tuple[bytes, bytes]]) -> None:
        """Answer what clients ask of a kernel that sleeps on, in its name: to the one that asked, and on iopub.

        ``reply`` makes both of what was held for the kernel, or raises ValueError, in which case that is held on.
        """
        for client in [client for client in self._clients if client.calling and client.interruptible]:
            try:
                private, public = reply(client.held())
            except ValueError:
                continue
            client.settle(private)
            for listener in self._clients:
                listener.overhear("iopub", public)

    async def reconnect(self, link: GuestLink, targets: Mapping[str, str], private: bytes, public: bytes) -> None:
        """Join the clients to another kernel in place of this one: they connect anew, and then hear what is said in its
        name, on shell and on iopub. One that does not connect in time is not waited for.
        """
        expected = Counter(client.channel for client in self._clients if client.joined)
        self.disconnect()
        self.connect(link, targets)
        with suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT):
                while expected - Counter(client.channel for client in self._clients if client.ready):
                    await asyncio.sleep(0.01)
        for listener in self._clients:
            if listener.ready:
                listener.overhear("shell", private)
                listener.overhear("iopub", public)

    @property
    def called(self) -> bool:
        """Whether a client has something for a kernel that sleeps, or was about to fall asleep, or is not up yet."""
        return any(client.calling for client in self._clients)

    @property
    def waited_for(self) -> bool:
        """Whether a client has asked for something, and the kernel has said nothing since."""
        return self.asked > self.heeded or self.called

    async def drained(self) -> None:
        """Wait until the kernel has closed all its connections, so that nothing of it is still on the way."""
        self._link = None  # who comes from now on waits for the next kernel
        while any(client.joined for client in self._clients):
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Close everything; nothing listens any more when this returns."""
        loop = asyncio.get_running_loop()
        for server in self._servers.values():
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        await asyncio.sleep(0)  # whoever was just accepted arrives in these two turns,
        await asyncio.sleep(0)  # and is closed with the others
        self.disconnect()
        for client in list(self._clients):
            client.abandon()
        for reserved in self._reserved.values():
            reserved.close()
        for server in self._servers.values():
            server.close()
        for path in self._addresses.values():
            if isinstance(path, str):
                Path(path).unlink(missing_ok=True)
        self._reserved.clear()
        self._servers.clear()
        self._addresses.clear()
        await asyncio.sleep(0)  # the closed transports' last callbacks

    def _admit(self, client: _Client) -> bool:
        if len(self._clients) >= MAX_CLIENTS:
            return False
        self._clients.add(client)
        return True

    def _open(self, channel: str) -> Stream | None:
        if self._link is None or self._link.error:
            return None
        try:
            return self._link.open(self._targets[channel])
        except GuestError as error:
            raise ConnectionError(errno.EMFILE, str(error)) from error


class _Client(asyncio.Protocol):
    """One client's connection to one channel."""

    def __init__(self, relay: ChannelRelay, channel: str) -> None:
        self._relay = relay
        self.channel = channel
        self._stream: Stream | None = None
        self._heart: Heart | None = None
        self._position = Position()
        self._questions = Position()
        self._spoke = self._served = False
        self._early = b""
        self._waiting = bytearray()
        self._unsent = 0
        self._congested = False

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)
        if not self._relay._admit(self):
            self._transport.abort()
            return
        self.join()

    def data_received(self, data: bytes) -> None:
        if self._heart or (self._relay.resting and self.channel == "hb" and data.startswith(PING)):
            self._beat(data)
            return
        self._spoke = True
        if self._stream:
            if self.channel in CALLS:
                self._relay.asked += self._questions.follow(data)
            self._stream.write(data)
        else:
            self._early += data
        if len(self._early) > MAX_EARLY or (self._stream and self._stream.backlog > MAX_EARLY):
            self._transport.pause_reading()
        if self._relay.asleep and self.channel in CALLS:
            self._relay.on_call()

    def pause_writing(self) -> None:
        self._congested = True

    def resume_writing(self) -> None:
        self._congested = False
        if self._waiting:
            waiting, self._waiting = bytes(self._waiting), bytearray()
            self._transport.write(waiting)
        if not self._congested:
            self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay._clients.discard(self)
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.on_end = stream.on_ready = lambda: None
        stream.on_data = lambda data: stream.consumed(len(data))
        if exc:
            stream.reset()
        else:
            stream.end()  # what it sent before it hung up still arrives

    # -- called by the relay and by the stream

    def join(self) -> None:
        if self._stream or self._transport.is_closing():
            return
        if self._relay.resting and self.channel == "hb":
            self._heart = Heart()
            return
        try:
            self._stream = self._relay._open(self.channel)
        except ConnectionError:
            self._transport.abort()
            return
        if self._stream:
            self._stream.on_data = self._deliver
            self._stream.on_end = self._transport.close
            self._stream.on_ready = self._transport.resume_reading
            self._transport.resume_reading()
            if self._early:
                early, self._early = self._early, b""
                self.data_received(early)

    @property
    def joined(self) -> bool:
        return self._stream is not None and not self._transport.is_closing()

    def _beat(self, data: bytes) -> None:
        try:
            self._transport.write(self._heart.answer(data) if self._heart else data)
        except ValueError:
            self._transport.abort()

    def awake(self) -> None:
        """The kernel's own heart beats again: a client of ours connects anew, to that."""
        if self._heart:
            self._transport.close()

    def held(self) -> bytes:
        """What waits for the kernel."""
        return self._stream.held() if self._stream else b""

    def settle(self, answer: bytes) -> None:
        """Send an answer in the kernel's place, to whom nothing goes of what was held."""
        if self._stream:
            self._stream.forget_held()
        self._transport.resume_reading()
        self._transport.write(answer)

    def overhear(self, channel: str, news: bytes) -> None:
        """Send what the kernel would say on a channel, unless this connection is not up yet, or not for that."""
        if self.channel == channel and self.interruptible:
            self._transport.write(news)

    @property
    def calling(self) -> bool:
        """One that has heard nothing yet waits in the middle of the handshake, and says no more until it does."""
        waits = self._stream is not None and (self._stream.backlog > 0 or (self._spoke and not self._served))
        return waits and self.channel in CALLS

    @property
    def interruptible(self) -> bool:
        """Whether a message to this client can begin now."""
        return self._position.between_messages and not self._waiting and not self._congested

    @property
    def ready(self) -> bool:
        """Whether it is joined to the kernel, and a message to it can begin now."""
        return self.joined and self.interruptible

    def drop(self) -> None:
        if self._stream:
            self._transport.close()

    def abandon(self) -> None:
        """Close, without waiting for a client that does not read."""
        if self._congested:
            self._transport.abort()
        else:
            self._transport.close()

    def _deliver(self, data: bytes) -> None:
        self._served = True
        if self._position.follow(data) and self.channel != "hb":
            self._relay.heeded = self._relay.asked
        self._unsent += len(data)
        if self._congested:
            self._waiting += data
        else:
            self._transport.write(data)
        if not self._congested:
            self._settle()

    def _settle(self) -> None:
        """Everything was sent: give the guest credit for it."""
        if self._stream and self._unsent:
            self._stream.consumed(self._unsent)
        self._unsent = 0
