"""A guest with five listening sockets like a kernel's, and clients, for tests of the relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from guests import LIMIT, Serve, echo, real_guest, server

from sandbox_provisioner.kernel.relay import CHANNELS
from sandbox_provisioner.mux.connection import GuestConnection

ANY = dict.fromkeys(CHANNELS, 0)


IP = "127.0.0.1"


@asynccontextmanager
async def kernel(folder: Path, serve: Serve = echo) -> AsyncIterator[tuple[GuestConnection, dict[str, str]]]:
    """Run a guest with a listener for each channel. Yield the connection to the guest, and the listeners' targets."""
    async with AsyncExitStack() as stack:
        targets = {channel: await stack.enter_async_context(server(folder / channel, serve)) for channel in CHANNELS}
        connection, _ = await stack.enter_async_context(real_guest())
        yield connection, targets


class Client:
    """A client's connection to one channel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self, amount: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(amount), LIMIT)

    async def rest(self) -> bytes:
        """Return all bytes until the end of the connection."""
        return await asyncio.wait_for(self._reader.read(), LIMIT)

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass


Dial = Callable[..., asyncio.Future[Client]]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` is true."""
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.005)
