"""Run a command inside a sandbox, with the same interface as a local Process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..process import Output, Process
from .stream import Stream

if TYPE_CHECKING:
    from .connection import GuestLink


class GuestProcess(Process):
    """A command in the sandbox, created by GuestLink. Its signals go to its process group there. I/O loop only."""

    def __init__(self, link: GuestLink, number: int) -> None:
        super().__init__()
        self.number = number
        self._link = link
        self._room = asyncio.Event()
        self._stdio: Stream | None = None
        self._streams: dict[str, Stream] = {}
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send_signal(self, signum: int) -> None:
        """Ask PID 1 to signal the process group, which may outlive the process."""
        if self._open_outputs or not self._exit.done():
            self._link.tell(op="signal", process=self.number, signal=int(signum))

    async def write(self, data: bytes) -> None:
        """Write to its stdin, waiting while there is no credit. Raises BrokenPipeError if stdin is closed."""
        while self._stdio and not self._stdio._closed and not self._stdio.ready and not self._exit.done():
            self._room.clear()
            await self._room.wait()
        if self._stdio is None or self._stdio._closed or self._exit.done():
            raise BrokenPipeError("stdin is closed")
        self._stdio.write(data)

    def close_stdin(self) -> None:
        """Close its stdin."""
        if self._stdio:
            self._stdio.end()

    def begin(self, stdin: bool = True) -> None:
        """Start receiving its output. Calling it again has no effect."""
        if self._streams:
            return
        for name, target in (("stdout", "output"), ("stderr", "errors")):
            stream = self._link.open(f"process:{self.number}:{target}")
            stream.on_data = lambda data, name=name: self._feed(Output(name, data))  # type: ignore[misc]
            stream.on_end = self._output_ended
            stream.on_ready = self._room.set
            self._streams[name] = stream
        self._open_outputs = 2
        self._stdio = self._streams["stdout"]
        self._streams["stderr"].end()
        if not stdin or self._exit.done():
            self._stdio.end()

    def abandon(self) -> None:
        """Discard its output, received and future. No more credit is given, so its writers soon block."""
        self._pieces.clear()
        self._size = self._open_outputs = 0
        self._news.set()
        for stream in self._streams.values():
            stream.on_data, stream.on_end = lambda data: None, lambda: None

    def _taken(self, piece: Output) -> None:
        self._streams[piece.stream].consumed(len(piece.data))

    def _exited(self, status: int) -> None:
        super()._exited(status)
        self._room.set()
        self.close_stdin()

    def _lost(self, error: Exception) -> None:
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()
        self._open_outputs = 0
        self._news.set()
        self._exited(-9)
