"""SandboxedKernel: a kernel process in a sandbox, joined to its clients. Lives in the I/O thread; knows no Jupyter."""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from signal import SIGKILL

from .bundle import Mount
from .errors import GuestError, LinkClosedError
from .folders import identity, replaced
from .guestprocess import GuestProcess
from .gvisor import GVisorSandbox
from .handle import SandboxHandle
from .process import Process
from .relay import ChannelRelay
from .runtime import sweep

LAST_OUTPUT = 1.0
"""Seconds that an ended kernel's last messages and output have to get through."""
LAST_WORDS = 2000
IDENTIFY_TRIES = 10

Sinks = Mapping[str, int | None]
"""The descriptors that a kernel's stdout and stderr are copied to, and which are closed in the end; None drops them."""


class SandboxedKernel:
    """One kernel after another behind the same listeners: ``launch`` ends the one that still runs."""

    def __init__(self) -> None:
        self.relay = ChannelRelay()
        self.handle: SandboxHandle | None = None
        self.status: int | None = 0
        self.last_words = b""
        self._process: GuestProcess | None = None
        self._life: asyncio.Task[None] | None = None

    async def launch(
        self,
        handle: SandboxHandle,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        folder: Mount | None,
        files: Mapping[str, str],
        targets: Mapping[str, str],
        sinks: Sinks,
        on_end: Callable[[int], None],
    ) -> None:
        """Start the sandbox and the kernel in it, and join the clients to its ``targets``. All or nothing.

        The kernel is not started unless the sandbox shows the very ``folder`` that was asked for.
        """
        _sweep_once()
        await self.kill()
        await self.ended()
        self.handle = handle
        try:
            await self.relay.listen()
            await handle.instance.start()
            self._process = await self._start(handle.instance, argv, env, cwd, files, folder)
        except BaseException:
            _close(sinks)
            await asyncio.shield(handle.instance.delete())
            raise
        self.status = None
        self.last_words = b""
        self.relay.connect(handle.instance.link, targets)
        self._life = asyncio.create_task(self._live(handle, self._process, sinks, on_end))

    @staticmethod
    async def _start(
        sandbox: GVisorSandbox,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        files: Mapping[str, str],
        folder: Mount | None,
    ) -> GuestProcess:
        for _ in range(IDENTIFY_TRIES):  # a neighbour that writes into the folder changes what it is known by
            try:
                expect = identity(folder)
                return await sandbox.execute(argv, env=env, cwd=cwd, stdin=False, files=files, expect=expect)
            except GuestError as error:
                if folder is None or error.errno != errno.ESTALE:
                    raise
        assert folder is not None
        raise replaced(folder)

    async def signal(self, signum: int) -> None:
        """Signal the kernel's process group; SIGKILL ends the whole sandbox, which no guest can resist."""
        if signum == SIGKILL:
            await self.kill()
        elif self._process and self.status is None:
            with suppress(LinkClosedError):  # it is dead, which is no mistake of the caller's
                self._process.send_signal(signum)

    async def kill(self) -> None:
        """End the kernel and its sandbox now."""
        if self.handle:
            await self.handle.instance.delete()

    async def ended(self) -> int:
        """Wait until the kernel has ended and nothing of its sandbox is left; its exit status."""
        if self._life:
            await asyncio.shield(self._life)
        return self.status or 0

    async def close(self) -> None:
        """End the kernel, if one runs, and its listeners."""
        await self.kill()
        await self.ended()
        await self.relay.close()

    async def _live(
        self, handle: SandboxHandle, process: GuestProcess, sinks: Sinks, on_end: Callable[[int], None]
    ) -> None:
        copying = asyncio.create_task(self._copy(process, sinks))
        status = await process.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.relay.drained(), LAST_OUTPUT)
        await asyncio.wait({copying}, timeout=LAST_OUTPUT)
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
        _close(sinks)
        on_end(status)
        self.status = status
        self.relay.disconnect()
        await handle.instance.delete()

    async def _copy(self, process: Process, sinks: Sinks) -> None:
        async for piece in process.stream():
            self.last_words = (self.last_words + piece.data)[-LAST_WORDS:]
            sink = sinks.get(piece.stream)
            if sink is not None:
                with suppress(OSError):
                    await _write(sink, piece.data)


async def _write(sink: int, data: bytes) -> None:
    """Write to a descriptor that others share, and so must not be made non-blocking, without ever blocking."""
    loop = asyncio.get_running_loop()
    view = memoryview(data)
    while view:
        writable = asyncio.Event()
        try:
            loop.add_writer(sink, writable.set)
        except PermissionError:  # a regular file: always writable, and not for epoll
            view = view[os.write(sink, view) :]
            continue
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sink)
        view = view[os.write(sink, view[: select.PIPE_BUF]) :]


def printable(words: bytes) -> str:
    """What a kernel said, fit for one line of a log: no escape sequences, no lines that look like the log's own."""
    lines = words.decode("utf-8", "replace").strip().splitlines()
    return " | ".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def _close(sinks: Sinks) -> None:
    for sink in sinks.values():
        if sink is not None:
            os.close(sink)


_sweeping: dict[int, asyncio.Task[list[str]]] = {}


def _sweep_once() -> None:
    """On this process's first launch, remove in the background what dead servers left."""
    if os.getpid() not in _sweeping:
        _sweeping[os.getpid()] = asyncio.create_task(asyncio.to_thread(sweep))
