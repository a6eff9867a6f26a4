"""GuestTool: one of our own scripts at work inside a sandbox, of which nothing is taken on trust, not even its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from .bundle import GUEST_INSIDE
from .errors import GuestError, SandboxError
from .guestprocess import GuestProcess
from .gvisor import GVisorSandbox
from .words import printable

GRACE = 10.0
"""Seconds that a script which was killed may take to be gone."""
STALL = 60.0
"""Seconds in which nothing comes or goes, after which a script is given up."""
WORDS_KEPT = 1 << 12


class GuestTool:
    """A script that runs. ``task`` is what it is for: the beginning of any GuestError that it comes to."""

    def __init__(self, process: GuestProcess, task: str) -> None:
        self._process = process
        self._output = process.stream()
        self._task = task
        self._words = bytearray()

    @classmethod
    @asynccontextmanager
    async def run(
        cls, sandbox: GVisorSandbox, task: str, script: str, *arguments: str, stdin: bool = False
    ) -> AsyncIterator[GuestTool]:
        """Run ``script`` from the guest's folder with the sandbox's Python; it does not outlive the block."""
        argv = [sandbox.spec.python, "-I", "-S", "-B", f"{GUEST_INSIDE}/{script}", *arguments]
        process = await sandbox.execute(argv, cwd="/", stdin=stdin)
        try:
            yield cls(process, task)
        finally:
            with suppress(TimeoutError, SandboxError):
                async with asyncio.timeout(GRACE):
                    await process.stop(grace=0)
                    await process.read()
            process.abandon()

    async def output(self) -> AsyncIterator[bytes]:
        """Its stdout, piece by piece, to the end; the end of its stderr is kept for ``finish``."""
        while True:
            async with self._patience():
                piece = await anext(self._output, None)
            if piece is None:
                return
            if piece.stream == "stdout":
                yield piece.data
            else:
                self._words += piece.data
                del self._words[:-WORDS_KEPT]

    async def write(self, data: bytes) -> bool:
        """Write to its stdin, waiting until there is room; False if it reads no more, and ``finish`` will say why."""
        try:
            async with self._patience():
                await self._process.write(data)
        except BrokenPipeError:
            return False
        return True

    async def finish(self) -> str:
        """Wait for its end: its last words if it has succeeded, GuestError with them if not."""
        self._process.close_stdin()
        async for _ in self.output():
            pass
        async with self._patience():
            status = await self._process.wait()
        words = printable(bytes(self._words))
        if status:
            raise GuestError(f"{self._task} failed in the sandbox: {words or f'it ended with status {status}'}.")
        return words

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(STALL):
                yield
        except TimeoutError:
            raise GuestError(f"{self._task} failed in the sandbox: it stood still for {STALL:.0f} seconds.") from None
