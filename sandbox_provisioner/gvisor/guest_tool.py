"""Run one of our own scripts inside a sandbox. Its output is untrusted, and it may stall or never exit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from .._text import printable
from ..errors import GuestError, SandboxError
from ..mux.process import GuestProcess
from .bundle import GUEST_INSIDE
from .sandbox import GVisorSandbox

GRACE = 10.0
"""Seconds to wait until a killed script has exited."""
LAST_OUTPUT = 1.0
"""Seconds to wait for the last output of a killed script."""
STALL = 60.0
"""Seconds without any input or output after which a script is killed."""
STDERR_KEPT = 1 << 12
"""Bytes of stderr that are kept for the error message."""


class GuestTool:
    """A running script. ``task`` names the script's purpose; the text of each GuestError begins with it."""

    def __init__(self, process: GuestProcess, task: str) -> None:
        self._process = process
        self._output = process.stream()
        self._task = task
        self._stderr = bytearray()

    @classmethod
    @asynccontextmanager
    async def run(
        cls, sandbox: GVisorSandbox, task: str, script: str, *arguments: str, stdin: bool = False
    ) -> AsyncIterator[GuestTool]:
        """Run ``script`` from the guest's folder with the sandbox's Python; kill it when the block ends."""
        argv = [sandbox.spec.python, "-I", "-S", "-B", f"{GUEST_INSIDE}/{script}", *arguments]
        process = await sandbox.execute(argv, cwd="/", stdin=stdin)
        try:
            yield cls(process, task)
        finally:
            with suppress(TimeoutError, SandboxError):
                async with asyncio.timeout(GRACE):
                    await process.stop(grace=0)
                async with asyncio.timeout(LAST_OUTPUT):  # another process can keep the pipes open
                    await process.read()
            process.abandon()

    async def output(self) -> AsyncIterator[bytes]:
        """Yield its stdout and keep the end of its stderr for ``finish``. Raises GuestError if it stalls."""
        while True:
            async with self._stall_limit():
                piece = await anext(self._output, None)
            if piece is None:
                return
            if piece.stream == "stdout":
                yield piece.data
            else:
                self._stderr += piece.data
                del self._stderr[:-STDERR_KEPT]

    async def write(self, data: bytes) -> bool:
        """Write to its stdin, waiting until there is room.

        Return False if the script has closed its stdin; ``finish`` reports the reason.
        """
        try:
            async with self._stall_limit():
                await self._process.write(data)
        except BrokenPipeError:
            return False
        return True

    async def finish(self) -> str:
        """Wait until it exits, and return the end of its stderr. Raises GuestError, with that text, if it failed."""
        self._process.close_stdin()
        async for _ in self.output():
            pass
        async with self._stall_limit():
            status = await self._process.wait()
        message = printable(bytes(self._stderr))
        if status:
            raise GuestError(
                f"{self._task} failed in the sandbox: {message or f'the helper exited with status {status}'}."
            )
        return message

    @asynccontextmanager
    async def _stall_limit(self) -> AsyncIterator[None]:
        """Raise GuestError if the block takes longer than ``STALL`` seconds."""
        try:
            async with asyncio.timeout(STALL):
                yield
        except TimeoutError:
            raise GuestError(
                f"{self._task} failed in the sandbox: no input or output for {STALL:.0f} seconds."
            ) from None
