"""ChannelRelay: the host's side of the data path, where clients connect to a kernel's five channels.

Bytes pass unchanged, so signing, CurveZMQ and every kernel's dialect work as they do without it; ``relay_client`` reads
along. The listeners outlive the kernel: clients that connect while no kernel is up are held, and served when one is.
While a kernel is hibernated its clients' connections stay open, their messages are held, and the first signed one on
shell, stdin or control wakes the kernel. Heartbeats are answered meanwhile and wake nothing.
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

from .activity import KernelActivity
from .errors import GuestError, SandboxError
from .link import GuestLink
from .message_reader import Header, MessageReader
from .relay_client import ClientConnection
from .stream import Stream

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
MAX_CLIENTS = 250
"""Connections at once to one kernel; a kernel has five for each client."""
MAX_FOREIGN = 10
"""Of these, connections of other users of the machine."""
MAX_LINGERING = 64
"""Connections whose client has left and whose replies are still expected."""
MAX_MESSAGE = 256 << 20
RECONNECT = 3.0
"""Seconds to wait for clients to connect to the kernel that replaces theirs."""


class ChannelRelay:
    """Listens for clients on the host and joins each connection to a stream into the sandbox.

    ``asked`` counts the messages that clients have sent the present kernel on shell, stdin and control; ``heeded`` is
    that count when the kernel last sent anything. ``activity`` learns of requests and replies. ``on_call`` is called
    when a hibernated kernel is wanted, ``on_oversized`` with the channel of a message that was not passed on because
    it exceeds ``max_message_size`` bytes.
    """

    def __init__(self, activity: KernelActivity | None = None) -> None:
        self.activity = activity or KernelActivity()
        self.max_message_size = MAX_MESSAGE
        self.on_call: Callable[[], None] = lambda: None
        self.on_oversized: Callable[[str], None] = lambda channel: None
        self.asked = self.heeded = 0
        self.lingering: set[ClientConnection] = set()
        self._signing: tuple[bytes, str] | None = None
        self._reserved: dict[str, socket.socket] = {}
        self._servers: dict[str, asyncio.Server] = {}
        self._addresses: dict[str, str | int] = {}
        self._clients: set[ClientConnection] = set()
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
            server = await create(partial(ClientConnection, self, channel), sock=listener, start_serving=False)
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

    def connect(self, link: GuestLink, targets: Mapping[str, str], signing: tuple[bytes, str] | None = None) -> None:
        """Join every client, waiting or new, to the kernel behind ``link``, at its channel's target.

        ``signing`` is the kernel's key and signature scheme; without it messages cannot be checked, and all count.
        """
        self._link, self._targets, self._signing = link, targets, signing
        self.asked = self.heeded = 0
        for client in list(self._clients):
            client.join()

    def disconnect(self) -> None:
        """The kernel is gone: close its clients' connections, as its own sockets would; the listeners stay."""
        self._link = None
        for client in list(self.lingering):
            client.end_lingering()
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
                listener.inject("iopub", public)

    async def reconnect(
        self,
        link: GuestLink,
        targets: Mapping[str, str],
        signing: tuple[bytes, str] | None,
        private: bytes,
        public: bytes,
    ) -> None:
        """Join the clients to another kernel in place of this one: they connect anew, and then hear what is said in its
        name, on shell and on iopub. One that does not connect in time is not waited for.
        """
        expected = Counter(client.channel for client in self._clients if client.joined)
        self.disconnect()
        self.connect(link, targets, signing)
        with suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT):
                while expected - Counter(client.channel for client in self._clients if client.ready):
                    await asyncio.sleep(0.01)
        for listener in self._clients:
            if listener.ready:
                listener.inject("shell", private)
                listener.inject("iopub", public)

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

    # -- called by the connections

    def admit(self, client: ClientConnection) -> bool:
        """Take a new connection; return False if there are too many."""
        foreign = sum(not one.trusted for one in self._clients)
        if len(self._clients) >= MAX_CLIENTS or (not client.trusted and foreign >= MAX_FOREIGN):
            return False
        self._clients.add(client)
        return True

    def leave(self, client: ClientConnection) -> None:
        """Forget a connection that was closed."""
        self._clients.discard(client)

    def linger(self, client: ClientConnection) -> bool:
        """Keep the stream of a client that left until its replies have come; return False if there are too many."""
        if self._link is None or not client.leads_to(self._link) or len(self.lingering) >= MAX_LINGERING:
            return False
        self.lingering.add(client)
        return True

    def replace_lingering(self, client: ClientConnection) -> None:
        """End the lingering streams of a client that connects again: a kernel knows one connection by an identity."""
        for one in list(self.lingering):
            if client.identity and one.identity == client.identity and one.channel == client.channel:
                one.end_lingering()

    @property
    def knows_key(self) -> bool:
        """True if messages can be checked."""
        return self._signing is not None

    def reader(self, on_message: Callable[[Header, Header], None]) -> MessageReader | None:
        """Return a reader of one direction's messages; None if they cannot be checked."""
        return MessageReader(*self._signing, on_message) if self._signing else None

    def open(self, channel: str) -> Stream | None:
        """Open a stream to a channel of the kernel; None if there is no kernel. Raises ConnectionError."""
        if self._link is None or self._link.error:
            return None
        try:
            return self._link.open(self._targets[channel])
        except GuestError as error:
            raise ConnectionError(errno.EMFILE, str(error)) from error
