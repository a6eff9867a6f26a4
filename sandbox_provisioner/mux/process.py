"""The processes of one connection: commands that run inside the sandbox, with the same interface as a LocalProcess."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._text import printable
from ..errors import GuestError, ProtocolError
from ..process import Output, Process
from .stream import GuestStream

if TYPE_CHECKING:
    from .connection import GuestConnection

MAX_PROCESSES = 1024


class GuestProcess(Process):
    """A command in the sandbox, started by ``GuestConnection.spawn``. Runs on the host's I/O loop."""

    def __init__(self, connection: GuestConnection, number: int) -> None:
        super().__init__()
        self.number = number
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._streams: dict[str, GuestStream] = {}
        self._stdio: GuestStream | None = None
        """The stream that carries stdin and stdout."""
        self._stdin_ready = asyncio.Event()

    def send_signal(self, signum: int) -> None:
        """Ask PID 1 to signal the process group in the sandbox, which may outlive the process."""
        if self._open_outputs or not self._exit.done():
            self._connection.tell(op="signal", process=self.number, signal=int(signum))

    async def write(self, data: bytes) -> None:
        """Write to its stdin, waiting while there is no credit. Raises BrokenPipeError if stdin is closed."""
        while self._stdio and not self._stdio.closed and not self._stdio.ready and not self._exit.done():
            self._stdin_ready.clear()
            await self._stdin_ready.wait()
        if self._stdio is None or self._stdio.closed or self._exit.done():
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
            stream = self._connection.open(f"process:{self.number}:{target}")
            stream.on_data = lambda data, name=name: self._feed(Output(name, data))  # type: ignore[misc]
            stream.on_end = self._output_ended
            stream.on_ready = self._stdin_ready.set
            self._streams[name] = stream
        self._open_outputs = 2
        self._stdio = self._streams["stdout"]
        self._streams["stderr"].end()
        if not stdin or self._exit.done():
            self._stdio.end()

    def abandon(self) -> None:
        """Discard its output, received and future. The guest gets no more credit, so the process soon blocks."""
        self._pieces.clear()
        self._size = self._open_outputs = 0
        self._news.set()
        for stream in self._streams.values():
            stream.on_data, stream.on_end = lambda data: None, lambda: None

    def connection_closed(self, error: Exception) -> None:
        """Set the exit status to -9. Called by the table when the connection was closed with ``error``."""
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # Mark as retrieved, so that asyncio logs no warning if it is not awaited.
        self._open_outputs = 0
        self._news.set()
        self._exited(-9)

    def _exited(self, status: int) -> None:
        super()._exited(status)
        self._stdin_ready.set()
        self.close_stdin()

    def _taken(self, piece: Output) -> None:
        self._streams[piece.stream].consumed(len(piece.data))


class ProcessTable(dict[int, GuestProcess]):
    """The running processes of one connection by number."""

    def __init__(self, connection: GuestConnection) -> None:
        super().__init__()
        self._connection = connection
        self._next = 1

    async def spawn(self, request: Mapping[str, Any]) -> GuestProcess:
        """Start a process. Raises GuestError if it cannot be executed."""
        process = GuestProcess(self._connection, self._next)
        self._connection.tell(op="spawn", process=process.number, **request)
        self._next += 1
        self[process.number] = process
        await process.started
        process.begin(request["stdin"])
        return process

    def adopt(self, numbers: Sequence[int], restored: bool) -> None:
        """Add the processes in the guest's hello message, which is untrusted.

        Raises ProtocolError if the list is invalid, or if a guest that was not ``restored`` has any.
        """
        if len(set(numbers)) != len(numbers) or len(numbers) > (MAX_PROCESSES if restored else 0):
            raise ProtocolError("Invalid list of processes from guest.")
        for number in map(int, numbers):
            if not 0 < number < 1 << 31:
                raise ProtocolError(f"Invalid process number from guest: {number}.")
            process = self[number] = GuestProcess(self._connection, number)
            process.started.set_result(None)
            self._next = max(self._next, number + 1)

    def received(self, op: str, message: Mapping[str, Any]) -> None:
        """Handle a message about a process. Raises ProtocolError if it does not fit the process's state."""
        process = self.get(message["process"])
        if process is None or process.started.done() != (op == "exited"):
            raise ProtocolError(f"Unexpected message from guest: {op!r} for process {str(message['process'])[:50]}.")
        if op == "started":
            process.started.set_result(None)
        elif op == "failed":
            process.started.set_exception(refusal("The command could not be started in the sandbox", message))
            del self[process.number]
        else:
            status = int(message["status"])
            if not -128 < status < 256:
                raise ValueError(f"exit status {status}")
            del self[process.number]
            process._exited(status)

    def close(self, error: Exception) -> None:
        """End all processes, because the connection was closed with ``error``."""
        for process in list(self.values()):
            process.connection_closed(error)
        self.clear()


def refusal(problem: str, message: Mapping[str, Any]) -> GuestError:
    """Return the error for a message from PID 1 that reports a failed system call."""
    number = int(message["errno"])
    return GuestError(f"{problem}: {os.strerror(number)}: {printable(str(message['filename'])[:500])}.", number)
