"""Run a command in a sandbox from the server's loop, and stream its output."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from ..errors import LinkClosedError
from ..io_thread import IO
from ..mux.process import GuestProcess
from ..process import Output
from ..provisioner import SandboxProvisioner


class Execution:
    """A command in a sandbox. Server loop; the work runs on the I/O loop.

    Output that is not read yet is held back in the sandbox. The kernel counts as busy until ``kill`` is called.
    """

    def __init__(self, provisioner: SandboxProvisioner, process: GuestProcess) -> None:
        self._process = process
        self._pieces = process.stream()
        self._open = provisioner.executions
        self._open.add(self)

    @classmethod
    async def start(cls, provisioner: SandboxProvisioner, command: Sequence[str], cwd: str | None) -> Execution:
        """Wake the kernel if hibernated, and start a command without stdin; ``cwd`` defaults to the kernel's folder."""
        if provisioner.asleep:
            await provisioner.wake()
        sandbox = provisioner.sandbox
        assert sandbox is not None
        return cls(provisioner, await IO.run(sandbox.execute(command, cwd=cwd or provisioner.cwd, stdin=False)))

    async def output(self) -> AsyncIterator[Output]:
        """Yield the command's output as it arrives."""
        while (piece := await IO.run(self._next())) is not None:
            yield piece

    async def status(self) -> int:
        """Wait until the command ends and return its exit status, negative for a signal."""
        return await IO.run(self._process.wait())

    async def kill(self) -> None:
        """Kill the command if it still runs, and discard its output. The caller must call this in any case."""
        self._open.discard(self)
        await IO.run(self._kill())

    async def _next(self) -> Output | None:
        return await anext(self._pieces, None)

    async def _kill(self) -> None:
        with suppress(LinkClosedError):
            self._process.send_signal(signal.SIGKILL)
        self._process.abandon()
