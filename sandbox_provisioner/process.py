"""Run a child process asynchronously, on the host or in a sandbox, with one interface.

``Process`` is the interface; ``LocalProcess`` is a child on the host, ``mux.process.GuestProcess`` a command in a
sandbox. Output is buffered until it is read. A child that writes more than about ``BUFFER`` unread bytes is blocked
until the output is read; no output is lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import IO, NamedTuple

BUFFER = 1 << 20
"""Bytes of unread output at which reading from a child stops."""
JOIN_LIMIT = 1 << 12
"""Unread pieces are joined up to this size in bytes: a piece of one byte would use a hundred bytes of memory."""


class Output(NamedTuple):
    """A piece of output and its stream: "stdout" or "stderr"."""

    stream: str
    data: bytes


class Process(ABC):
    """A child process on the host or in a sandbox. Belongs to the loop that it was created on."""

    def __init__(self) -> None:
        self._pieces: deque[Output] = deque()
        self._size = 0
        self._open_outputs = 0
        self._news = asyncio.Event()
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._exit.result() if self._exit.done() and not self._exit.exception() else None

    async def wait(self) -> int:
        """Wait for the exit status and return it. Output may still be unread."""
        return await asyncio.shield(self._exit)

    async def stream(self) -> AsyncIterator[Output]:
        """Yield output as it arrives, until both outputs are closed and read. No piece is yielded twice."""
        while self._pieces or self._open_outputs:
            if self._pieces:
                piece = self._pieces.popleft()
                self._size -= len(piece.data)
                self._taken(piece)
                yield piece
            else:
                self._news.clear()
                await self._news.wait()

    async def read(self) -> tuple[bytes, bytes]:
        """Return the remaining output: stdout, stderr."""
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        async for piece in self.stream():
            parts[piece.stream].append(piece.data)
        return b"".join(parts["stdout"]), b"".join(parts["stderr"])

    async def stop(self, grace: float = 5.0) -> int:
        """Send SIGTERM, and SIGKILL after ``grace`` seconds. Return the exit status."""
        if not self._exit.done():
            self.send_signal(signal.SIGTERM)
            try:
                return await asyncio.wait_for(self.wait(), grace)
            except TimeoutError:
                self.send_signal(signal.SIGKILL)
        return await self.wait()

    @abstractmethod
    def send_signal(self, signum: int) -> None:
        """Send a signal to the process and its children. Does nothing if the process has ended."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to stdin and wait until all is accepted. Raises BrokenPipeError if stdin is closed."""

    @abstractmethod
    def close_stdin(self) -> None:
        """Signal the end of the input."""

    @abstractmethod
    def _taken(self, piece: Output) -> None:
        """Let the child write again if there is room. Called after ``piece`` was read."""

    def _feed(self, piece: Output) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last and last.stream == piece.stream and len(last.data) + len(piece.data) <= JOIN_LIMIT:
            self._pieces[-1] = Output(piece.stream, last.data + piece.data)
        else:
            self._pieces.append(piece)
        self._size += len(piece.data)
        self._news.set()

    def _output_ended(self) -> None:
        self._open_outputs -= 1
        self._news.set()

    def _exited(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)


class LocalProcess(Process):
    """A child of this process, in its own session, so that it does not get a Ctrl-C in the terminal."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[str, IO[bytes]] = {}
        self._paused_outputs: set[str] = set()
        self._writable = asyncio.Event()
        self.pid = child.pid
        if child.stdin:
            os.set_blocking(child.stdin.fileno(), False)
        for name, pipe in (("stdout", child.stdout), ("stderr", child.stderr)):
            if pipe:
                os.set_blocking(pipe.fileno(), False)
                self._outputs[name] = pipe
                self._loop.add_reader(pipe.fileno(), self._readable, name)
        self._open_outputs = len(self._outputs)
        self._pidfd = os.pidfd_open(child.pid)
        self._loop.add_reader(self._pidfd, self._ended)

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> LocalProcess:
        """Start ``argv``, with descriptors as for subprocess.Popen. Raises OSError if the program cannot be started."""
        child = subprocess.Popen(
            argv, env=env, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0, start_new_session=True
        )
        return cls(child)

    @classmethod
    async def run(
        cls, argv: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
    ) -> tuple[int | None, bytes, bytes]:
        """Run a command and return its status, stdout and stderr; after a timeout (None, b"", b"")."""
        process = cls.start(argv, env=env)
        try:
            out, err = await asyncio.wait_for(process.read(), timeout)
            return await asyncio.wait_for(process.wait(), timeout), out, err
        except TimeoutError:
            return None, b"", b""
        finally:
            await process.stop(grace=0)
            process.close()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the child's process group. Does nothing if the child has ended."""
        if not self._exit.done():
            os.killpg(self.pid, signum)

    async def write(self, data: bytes) -> None:
        """Write all of ``data`` to stdin. Raises BrokenPipeError if stdin is closed."""
        view = memoryview(data)
        while view:
            if self._child.stdin is None or self._child.stdin.closed:
                raise BrokenPipeError("stdin is closed")
            fd = self._child.stdin.fileno()
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                self._writable.clear()
                self._loop.add_writer(fd, self._wake_writer)
                await self._writable.wait()

    def close_stdin(self) -> None:
        """Close stdin. A waiting write raises BrokenPipeError."""
        if self._child.stdin and not self._child.stdin.closed:
            self._wake_writer()
            self._child.stdin.close()

    def _wake_writer(self) -> None:
        assert self._child.stdin is not None
        self._loop.remove_writer(self._child.stdin.fileno())
        self._writable.set()

    def close(self) -> None:
        """Close this end of the pipes. Output that has not arrived yet is lost."""
        self.close_stdin()
        for name in list(self._outputs):
            self._close_output(name)

    def _readable(self, name: str) -> None:
        try:
            data = os.read(self._outputs[name].fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._close_output(name)
            return
        self._feed(Output(name, data))
        if self._size >= BUFFER:
            self._paused_outputs |= set(self._outputs)
            for pipe in self._outputs.values():
                self._loop.remove_reader(pipe.fileno())

    def _taken(self, piece: Output) -> None:
        if self._paused_outputs and self._size < BUFFER // 2:
            for name in self._paused_outputs & set(self._outputs):
                self._loop.add_reader(self._outputs[name].fileno(), self._readable, name)
            self._paused_outputs.clear()

    def _close_output(self, name: str) -> None:
        pipe = self._outputs.pop(name)
        self._loop.remove_reader(pipe.fileno())
        pipe.close()
        self._output_ended()

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exited(self._child.wait())
