"""Accept clients' connections to a kernel's five channels, and join them to streams into the sandbox.

Bytes pass unchanged, so signatures, CurveZMQ and the messages of any kernel work as they do without a relay. The
listeners stay open when the kernel ends: connections that are made while no kernel runs wait for the next one. While a
kernel is hibernated, its clients' connections stay open and their messages are held; the first signed message on shell,
stdin or control wakes the kernel. Heartbeats are answered on the host and do not wake it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from jupyter_client.session import Session

from ..errors import GuestError, SandboxError
from ..mux.connection import GuestConnection
from ..mux.stream import GuestStream
from ..workers import control, finished
from .activity import KernelActivity
from .known_answers import KnownAnswers
from .messages import CALLS, Header, MessageReader, OnContent
from .relay_client import ClientConnection, LingeringStream
from .synthetic_replies import observer_replies

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
MAX_CLIENTS = 250
"""Maximum number of connections to one kernel; each client opens five."""
MAX_FOREIGN = 10
"""Maximum number of these connections that other users of the machine may open."""
MAX_LINGERING = 64
"""Maximum number of streams that are kept for replies after their client has disconnected."""
MAX_MESSAGE = 256 << 20
RECONNECT = 3.0
"""Maximum seconds that a rewind waits until the clients have connected to the new kernel."""


class ChannelRelay:
    """The listeners and client connections of one SandboxedKernel, which owns it. I/O loop only.

    ``sent`` counts the messages that clients have sent to the current kernel on shell, stdin and control; ``answered``
    is the value of ``sent`` when the kernel last began a message; ``heard`` is True if it has sent any on one of these
    channels. ``activity`` gets all requests and replies.
    ``on_call`` is called when a client's request has to wake the kernel, ``on_oversized`` with the channel of a message
    that was refused because it exceeds ``max_message_size`` bytes. ``on_cell``, if set, is called once, with the header
    of the next request that executes a user's cell.
    """

    def __init__(self, activity: KernelActivity | None = None) -> None:
        self.activity = activity or KernelActivity()
        self.max_message_size = MAX_MESSAGE
        self.on_call: Callable[[], None] = lambda: None
        self.on_oversized: Callable[[str], None] = lambda channel: None
        self.on_cell: Callable[[Header], None] | None = None
        self.sent = self.answered = 0
        self.known = KnownAnswers()
        self.heard = False
        self.lingering: set[LingeringStream] = set()
        self._signing: tuple[bytes, str] | None = None
        self._servers: list[asyncio.Server] = []
        self._addresses: dict[str, str | int] = {}
        self._clients: set[ClientConnection] = set()
        self._connection: GuestConnection | None = None
        self._targets: Mapping[str, str] = {}

    async def reserve_tcp(self, ip: str, ports: Mapping[str, int]) -> dict[str, int]:
        """Bind ``ports`` of a loopback address, 0 for any free one, unless they are bound already. Return the ports.

        Raises SandboxError if a port cannot be bound.
        """
        if dict(ports) != self._addresses:
            await self.close()
            for channel in CHANNELS:
                listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                await self._bind(channel, listener, (ip, ports[channel]))
                self._addresses[channel] = listener.getsockname()[1]
        return cast(dict[str, int], dict(self._addresses))

    async def reserve_ipc(self, paths: Mapping[str, str]) -> None:
        """Bind unix sockets at ``paths``, for this user only, unless they are bound already and still exist.

        Raises SandboxError if a socket cannot be bound.
        """
        if dict(paths) != self._addresses or not await control(_exist, paths.values()):
            await self.close()
            await control(_remove, paths.values())
            for channel in CHANNELS:
                await self._bind(channel, socket.socket(socket.AF_UNIX), paths[channel])
                self._addresses[channel] = paths[channel]

    async def listen(self) -> None:
        """Start to accept connections on the reserved addresses."""
        for server in self._servers:
            await server.start_serving()

    async def _bind(self, channel: str, listener: socket.socket, address: str | tuple[str, int]) -> None:
        """Bind the listener of a channel. Raises SandboxError if that fails; nothing stays bound then."""
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        try:
            await finished(control(_bind, listener, address))
        except asyncio.CancelledError:
            listener.close()
            if isinstance(address, str):
                await control(_remove, [address])
            raise
        except OSError as error:
            listener.close()
            await self.close()
            where = address if isinstance(address, str) else "{}:{}".format(*address)
            raise SandboxError(f"The {channel} channel cannot listen on {where}: {error.strerror or error}.") from error
        server = await create(partial(ClientConnection, self, channel), sock=listener, start_serving=False)
        self._servers.append(server)

    def connect(
        self, connection: GuestConnection, targets: Mapping[str, str], signing: tuple[bytes, str] | None = None
    ) -> None:
        """Join every client, waiting or future, to the kernel behind ``connection``, at its channel's target.

        ``signing`` is the kernel's key and signature scheme; without it, all messages count as requests, unchecked.
        """
        self._connection, self._targets, self._signing = connection, targets, signing
        self.sent, self.answered, self.heard = 0, 0, False
        self.known.forget()
        for client in list(self._clients):
            client.join()

    def disconnect(self) -> None:
        """Close the connections to a kernel that has ended, as its own sockets would; the listeners stay open."""
        self._connection = None
        for stream in list(self.lingering):
            stream.end()
        for client in list(self._clients):
            client.drop()

    @property
    def asleep(self) -> bool:
        """True from the end of a save that ended the sandbox until the restore begins; ``resting`` lasts longer."""
        return self._connection is not None and self._connection.asleep

    @property
    def resting(self) -> bool:
        """True while the kernel cannot answer: it is being saved, ``asleep`` or being restored."""
        return self._connection is not None and self._connection.resting

    def reconnect_heartbeats(self) -> None:
        """Make clients reconnect their heartbeats to the kernel. Called after it was woken."""
        for client in list(self._clients):
            client.end_own_heartbeats()

    def answer(self, reply: Callable[[bytes], tuple[bytes, bytes]]) -> None:
        """Answer the held requests of all clients on the kernel's behalf, because it could not be woken.

        ``reply`` gets the bytes that a client sent, and returns the answers to that client and to all clients on iopub.
        If it raises ValueError, the client's bytes stay held.
        """
        for client in [client for client in self._clients if client.calling and client.interruptible]:
            try:
                private, public = reply(client.held())
            except ValueError:
                continue
            client.answer_held(private)
            for listener in self._clients:
                listener.inject("iopub", public)

    def answer_observers(self, observers: Iterable[ClientConnection] = ()) -> None:
        """Answer the held requests of these clients, or of all, if they only observe the hibernated kernel.

        A client whose request has no known answer is ``calling`` from now on. Bytes that are not whole, signed messages
        stay held.
        """
        for client in [each for each in observers or self._clients if each.observing]:
            assert self._signing is not None
            key, scheme = self._signing
            try:
                answers = observer_replies(client.held(), Session(key=key, signature_scheme=scheme), self.known)
            except ValueError:
                continue
            if answers is None:
                client.call()
                continue
            client.answer_held(answers.private)
            for listener in self._clients:
                listener.inject("iopub", answers.public)

    async def reconnect(
        self,
        connection: GuestConnection,
        targets: Mapping[str, str],
        signing: tuple[bytes, str] | None,
        private: bytes,
        public: bytes,
    ) -> None:
        """Replace the kernel: disconnect its clients, and send them messages as soon as they have reconnected.

        ``private`` is sent on shell, ``public`` on iopub. Waits for the clients at most RECONNECT seconds.
        """
        expected = Counter(client.channel for client in self._clients if client.joined)
        self.disconnect()
        self.connect(connection, targets, signing)
        with suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT):
                while expected - Counter(client.channel for client in self._clients if _is_ready(client)):
                    await asyncio.sleep(0.01)
        for listener in self._clients:
            if _is_ready(listener):
                listener.inject("shell", private)
                listener.inject("iopub", public)

    def publish(self, message: bytes) -> None:
        """Send a message to all clients on iopub on the kernel's behalf, between two messages of the kernel."""
        for client in self._clients:
            client.publish(message)

    @property
    def called(self) -> bool:
        """True while the kernel has not received a client's request: at least one client is ``calling``."""
        return any(client.calling for client in self._clients)

    @property
    def waited_for(self) -> bool:
        """True while a request has no reaction: ``called``, or the kernel has sent nothing since it received one."""
        return self.sent > self.answered or self.called

    async def drained(self) -> None:
        """Wait until the kernel has closed all its connections, so that its last messages have been passed on."""
        self._connection = None  # new connections wait for the next kernel
        while any(client.joined for client in self._clients):
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Close all connections and listeners; nothing listens when this returns."""
        loop = asyncio.get_running_loop()
        for server in self._servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        await asyncio.sleep(0)  # a connection that was just accepted arrives in these two turns of the loop,
        await asyncio.sleep(0)  # and is closed with the others
        self.disconnect()
        for client in list(self._clients):
            client.abandon()
        for server in self._servers:
            server.close()
        paths = [path for path in self._addresses.values() if isinstance(path, str)]
        self._servers.clear()
        self._addresses.clear()
        await finished(control(_remove, paths))
        await asyncio.sleep(0)  # run the last callbacks of the closed transports

    # -- called by the connections

    def admit(self, client: ClientConnection) -> bool:
        """Register a new connection. Return False if there are too many."""
        foreign = sum(not one.trusted for one in self._clients)
        if len(self._clients) >= MAX_CLIENTS or (not client.trusted and foreign >= MAX_FOREIGN):
            return False
        self._clients.add(client)
        return True

    def note_reaction(self, channel: str) -> None:
        """Record that the kernel began a message: it has reacted to the messages that were sent before."""
        self.answered, self.heard = self.sent, self.heard or channel in CALLS

    def note_cell(self, header: Header, content: bytes) -> None:
        """Call ``on_cell`` if it is set and the execute request, with this ``content``, is for a user's cell."""
        if self.on_cell and not _is_hidden(content):
            on_cell, self.on_cell = self.on_cell, None
            on_cell(header)

    def remove(self, client: ClientConnection) -> None:
        """Remove a closed connection."""
        self._clients.discard(client)

    def linger(self, stream: LingeringStream) -> None:
        """Keep the stream of a disconnected client until its requests are answered.

        The stream is ended at once if its kernel has ended or too many streams are kept.
        """
        if stream.connection is self._connection and len(self.lingering) < MAX_LINGERING:
            self.lingering.add(stream)
        else:
            stream.end()

    def replace_lingering(self, channel: str, identity: bytes) -> None:
        """End the lingering streams of a client that reconnects: a kernel accepts one connection per identity."""
        for stream in list(self.lingering):
            if identity and (stream.identity, stream.channel) == (identity, channel):
                stream.end()

    @property
    def knows_key(self) -> bool:
        """True if the key that signs the messages is known, so that they can be checked."""
        return self._signing is not None

    def reader(
        self, on_message: Callable[[Header, Header], None], kinds: Sequence[str], on_content: OnContent
    ) -> MessageReader | None:
        """Return a reader for the messages of one direction; None if they cannot be checked."""
        return MessageReader(*self._signing, on_message, kinds, on_content) if self._signing else None

    def open(self, channel: str) -> GuestStream | None:
        """Return a new stream to a channel; None without a kernel. Raises ConnectionError if too many are open."""
        if self._connection is None or self._connection.error:
            return None
        try:
            return self._connection.open(self._targets[channel])
        except GuestError as error:
            raise ConnectionError(errno.EMFILE, str(error)) from error


def _is_ready(client: ClientConnection) -> bool:
    """Return True if the client is joined to the kernel and a message to it can begin now."""
    return client.joined and client.interruptible


def _is_hidden(content: bytes) -> bool:
    """Return True for an execute request of a program, such as an extension of JupyterLab, which shows no output."""
    try:
        options: Any = json.loads(content)
        return bool(options.get("silent")) or options.get("store_history") is False
    except (ValueError, AttributeError, RecursionError):  # it is unknown: the cell is too long
        return False


def _bind(listener: socket.socket, address: str | tuple[str, int]) -> None:
    """Bind a socket; one with a path is accessible to this user only. Blocks."""
    listener.bind(address)
    if isinstance(address, str):
        Path(address).chmod(0o600)


def _exist(paths: Iterable[str]) -> bool:
    """Return True if all files exist. Blocks."""
    return all(Path(path).exists() for path in paths)


def _remove(paths: Iterable[str]) -> None:
    """Remove the files that exist. Blocks."""
    for path in paths:
        Path(path).unlink(missing_ok=True)
