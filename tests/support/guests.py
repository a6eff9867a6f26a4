"""Two kinds of guests for tests of the host's end of the byte stream.

The real guest is the sandbox's PID 1, run as a child process on the host. For the scripted guest, the test writes every
byte itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from sandbox_provisioner.errors import LinkClosedError
from sandbox_provisioner.guest.frames import CONTROL, VERSION, Decoder, encode
from sandbox_provisioner.gvisor.bundle import GUEST
from sandbox_provisioner.mux.connection import GuestConnection
from sandbox_provisioner.mux.process import GuestProcess
from sandbox_provisioner.mux.stream import GuestStream
from sandbox_provisioner.process import LocalProcess

LIMIT = 20
"""Seconds after which an expected event counts as missing."""


Frame = tuple[int, int, bytes]


INIT = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='init')['Init'](False, sys.argv[2]).run()"


@asynccontextmanager
async def real_guest(host_api: Path | None = None) -> AsyncIterator[tuple[GuestConnection, LocalProcess]]:
    """Run the sandbox's PID 1 as a child on the host, and yield the connection to it and the process.

    ``host_api`` is the path of the socket for requests from the sandbox. Fails if PID 1 printed anything.
    """
    guest_in, to_guest = os.pipe()
    from_guest, guest_out = os.pipe()
    connection = GuestConnection()
    await connection.attach(to_guest, from_guest)
    program = ["-c", INIT, str(GUEST), str(host_api)] if host_api else [str(GUEST)]
    argv = [sys.executable, "-I", "-S", "-B", *program]
    init = LocalProcess.start(argv, stdin=guest_in, stdout=guest_out)
    os.close(guest_in)
    os.close(guest_out)
    try:
        await asyncio.wait_for(connection.greeted(), LIMIT)
        yield connection, init
    finally:
        connection.close(LinkClosedError("the test is over."))
        printed = await asyncio.wait_for(init.read(), LIMIT)
        await init.stop()
        init.close()
        assert printed == (b"", b"")


class ScriptedGuest:
    """The guest's end of a byte stream. A test writes and reads its frames."""

    def __init__(self, connection: GuestConnection) -> None:
        self.connection = connection
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.connection.on_closed = self._on_lost
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    def _on_lost(self, error: Exception) -> None:
        if not self.lost.done():
            self.lost.set_result(error)

    async def attach(self) -> None:
        self._reader, to_guest = os.pipe()
        from_guest, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        await self.connection.attach(to_guest, from_guest)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    async def send(self, *frames: bytes) -> None:
        """Write all frames, unless the connection has failed."""
        view = memoryview(b"".join(frames))
        while view and not self.connection.error:
            try:
                view = view[os.write(self._writer, view) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                return
            await asyncio.sleep(0)

    async def say(self, **message: Any) -> None:
        """Send a control message."""
        await self.send(control(message))

    async def hello(self, *processes: int) -> None:
        """Send the hello message with the numbers of running processes, and wait until the host has received it."""
        await self.say(op="hello", version=VERSION, processes=list(processes))
        await asyncio.wait_for(self.connection.greeted(), LIMIT)

    def arrived(self) -> list[Frame]:
        """Return the frames that are in the pipe, without waiting."""
        while True:
            try:
                data = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                data = b""
            self._frames += self._decoder.feed(data)
            if not data:
                frames, self._frames = self._frames, []
                return frames

    async def frame(self) -> Frame:
        """Wait for the next frame from the host."""
        while not self._frames:
            self._frames = self.arrived()
            await asyncio.sleep(0)
        return self._frames.pop(0)

    async def expect(self, kind: int, stream: int | None = None) -> bytes:
        """Wait for the next frame, which must be of this kind and stream. Return its payload."""
        found, number, payload = await asyncio.wait_for(self.frame(), LIMIT)
        assert (found, number) == (kind, number if stream is None else stream)
        return payload

    async def quiesce(self) -> None:
        """Quiesce the connection, and confirm that. Frames before the request are discarded."""
        quiescing = asyncio.create_task(self.connection.quiesce())
        while (await self.frame())[0] != CONTROL:
            pass
        await self.say(op="quiesced")
        await asyncio.wait_for(quiescing, LIMIT)

    async def expect_control(self, op: str) -> dict[str, Any]:
        """Wait for the next frame, which must be a control message with this operation. Return the message."""
        message: dict[str, Any] = json.loads(await self.expect(CONTROL, 0))
        assert message["op"] == op
        return message


@asynccontextmanager
async def scripted_guest() -> AsyncIterator[ScriptedGuest]:
    """Yield a scripted guest. Fails if an exception was not caught in a task or callback."""
    escaped: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
    guest = ScriptedGuest(GuestConnection())
    await guest.attach()
    try:
        yield guest
        guest.connection.close(LinkClosedError("the test is over."))
        await asyncio.sleep(0)
        assert escaped == []
    finally:
        guest.connection.close(LinkClosedError("the test is over."))
        guest.close()


class Tap:
    """Collects the bytes of a stream. With ``consume``, it renews the guest's credit for them."""

    def __init__(self, stream: GuestStream, consume: bool = True) -> None:
        self.stream = stream
        self.data = bytearray()
        self.ended = 0
        self._consume = consume
        self._news = asyncio.Event()
        stream.on_data, stream.on_end = self._on_data, self._on_end

    def _on_data(self, data: bytes) -> None:
        self.data += data
        if self._consume:
            self.stream.consumed(len(data))
        self._news.set()

    def _on_end(self) -> None:
        self.ended += 1
        self._news.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not happened():
                self._news.clear()
                await self._news.wait()

    async def size(self, amount: int) -> bytes:
        """Wait until at least ``amount`` bytes have arrived, and return all bytes."""
        await self.until(lambda: len(self.data) >= amount)
        return bytes(self.data)

    async def end(self) -> bytes:
        """Wait for the end of the stream, and return all bytes."""
        await self.until(lambda: self.ended > 0)
        return bytes(self.data)


async def pour(stream: GuestStream, data: bytes, piece: int = 50_000) -> None:
    """Write ``data`` to a stream in pieces, each one when the stream is ready."""
    room = asyncio.Event()
    stream.on_ready = room.set
    for position in range(0, len(data), piece):
        while not stream.ready:
            room.clear()
            await asyncio.wait_for(room.wait(), LIMIT)
        stream.write(data[position : position + piece])


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(address: Path | int, serve: Serve) -> AsyncIterator[str]:
    """Listen on a path or port like a kernel in the sandbox, and yield the target. At the end, wait for connections."""
    handling: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await serve(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handling.add(asyncio.create_task(handle(reader, writer)))

    if isinstance(address, Path):
        listener, target = await asyncio.start_unix_server(accept, str(address)), f"unix:{address}"
    else:
        listener = await asyncio.start_server(accept, "127.0.0.1", address)
        target = f"tcp:127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield target
    finally:
        listener.close()
        await asyncio.wait_for(asyncio.gather(*handling), LIMIT)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


def control(message: object) -> bytes:
    return encode(CONTROL, 0, json.dumps(message).encode())


ENV = {"PATH": os.environ["PATH"]}


async def python(connection: GuestConnection, code: str, stdin: bool = True) -> GuestProcess:
    return await asyncio.wait_for(connection.spawn([sys.executable, "-u", "-c", code], ENV, "/", stdin=stdin), LIMIT)


async def shell(connection: GuestConnection, command: str, stdin: bool = True) -> GuestProcess:
    return await asyncio.wait_for(connection.spawn(["sh", "-c", command], ENV, "/", stdin=stdin), LIMIT)


async def finished(process: GuestProcess) -> tuple[int, bytes, bytes]:
    """Wait for the end of a process. Return its status, stdout and stderr."""
    out, err = await asyncio.wait_for(process.read(), LIMIT)
    return await asyncio.wait_for(process.wait(), LIMIT), out, err


async def first_line(process: GuestProcess) -> bytes:
    """Return the first line of the output of a process."""
    found = b""
    async with asyncio.timeout(LIMIT):
        async for piece in process.stream():
            found += piece.data
            if found.endswith(b"\n"):
                break
    return found


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
