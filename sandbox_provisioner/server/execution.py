"""Execution: a command in a sandbox for one who is in another thread than the sandbox's, taken piece by piece."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from .errors import LinkClosedError
from .guestprocess import GuestProcess
from .iothread import IO
from .process import Output
from .provisioner import SandboxProvisioner


class Execution:
    """A command that runs; its output waits in the sandbox until it is taken. Until it is killed, nobody is idle."""

    def __init__(self, provisioner: SandboxProvisioner, process: GuestProcess) -> None:
        self._process = process
        self._pieces = process.stream()
        self._open = provisioner.executions
        self._open.add(self)

    @classmethod
    async def start(cls, provisioner: SandboxProvisioner, command: Sequence[str], cwd: str | None) -> Execution:
        """Start a command in a kernel's sandbox, in the kernel's folder unless another is named; it reads nothing."""
        if provisioner.asleep:
            await provisioner.wake()
        sandbox = provisioner.sandbox
        assert sandbox is not None
        return cls(provisioner, await IO.run(sandbox.execute(command, cwd=cwd or provisioner.cwd, stdin=False)))

    async def output(self) -> AsyncIterator[Output]:
        """Everything that it writes, as it comes."""
        while (piece := await IO.run(self._next())) is not None:
            yield piece

    async def status(self) -> int:
        """Wait for its end; its exit status, negative for a signal."""
        return await IO.run(self._process.wait())

    async def kill(self) -> None:
        """End it at once, if it still runs."""
        self._open.discard(self)
        await IO.run(self._kill())

    async def _next(self) -> Output | None:
        return await anext(self._pieces, None)

    async def _kill(self) -> None:
        with suppress(LinkClosedError):
            self._process.send_signal(signal.SIGKILL)
        self._process.abandon()
