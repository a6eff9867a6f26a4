"""The two pipes to a sandbox's PID 1: its stdin and stdout."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class Pipe(asyncio.Protocol):
    """The pipes to and from one guest process. ``on_end`` is called if the guest closes them before ``close``."""

    def __init__(self, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_data = on_data
        self._on_end = on_end
        self._reader: asyncio.ReadTransport | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._closed = False

    async def open(self, to_guest: int, from_guest: int) -> None:
        """Take over two descriptors, the pipes to and from a sandbox that is about to start."""
        loop = asyncio.get_running_loop()
        self._reader, _ = await loop.connect_read_pipe(lambda: self, os.fdopen(from_guest, "rb", 0))
        self._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_guest, "wb", 0))

    def write(self, data: bytes) -> None:
        """Send ``data`` to the guest, or buffer it."""
        if self._writer:
            self._writer.write(data)

    def close(self) -> None:
        """Close both pipes. Buffered data is discarded."""
        self._closed = True
        if self._reader:
            self._reader.close()
        if self._writer and not self._writer.is_closing():
            self._writer.abort()

    def data_received(self, data: bytes) -> None:
        """Pass on data from the guest. Called by the loop."""
        self._on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the guest's pipe. Called by the loop."""
        if not self._closed:
            self._on_end()
