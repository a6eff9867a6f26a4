"""The two pipes to a sandbox's PID 1: its stdin and stdout."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class Pipe(asyncio.Protocol):
    """The pipes to and from PID 1. Runs on the host's I/O loop. ``on_end`` is called if the guest closes them first."""

    def __init__(self, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_data = on_data
        self._on_end = on_end
        self._reader: asyncio.ReadTransport | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._closed = False

    async def open(self, to_guest: int, from_guest: int) -> None:
        """Take over the descriptors of the two pipes."""
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
        """Call ``on_data``. Called by the loop when data has arrived."""
        self._on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Call ``on_end`` unless the pipes were closed here. Called by the loop."""
        if not self._closed:
            self._on_end()
