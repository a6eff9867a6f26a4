"""Operate on a kernel and its sandbox from any event loop: save, wake, rewind, fork, and report its state."""

from __future__ import annotations

from typing import Any

from .._text import titled
from ..config import user_name
from ..errors import KernelBusyError, SandboxError
from ..io_thread import IO
from ..persistence.metadata import Checkpoint, GCSArtifact
from ..sandbox.handle import Identity, SandboxHandle
from ..sandbox.manager import SandboxManager
from .activity import USER_HOLD, KernelActivity
from .kernel import KernelState, SandboxedKernel
from .settings import SandboxSettings, own_config, unknown_settings


class KernelOperations(SandboxSettings):
    """The operations on one kernel that a Jupyter Server and Python programs call; SandboxProvisioner inherits them.

    Holds the kernel and, if it is persistent, the open sandbox. The work runs in the I/O thread.
    """

    parent: Any

    def __init__(self, **kwargs: Any) -> None:
        spec = kwargs.get("kernel_spec")
        kwargs = own_config(spec.metadata if spec else {}, kwargs)
        known = self.trait_names()
        super().__init__(**{name: value for name, value in kwargs.items() if name in known})
        self.unknown = [name for name in kwargs if name not in known]
        """Names in the kernelspec's ``config`` that are not settings."""
        place = f"The kernelspec {spec.display_name!r}" if spec else "The kernelspec"
        for warning in unknown_settings(self.unknown, place):
            self.log.warning(warning)
        self._kernel = SandboxedKernel()
        self._manager: SandboxManager | None = None
        self._handle: SandboxHandle | None = None
        self._launched = False
        self._keeps_state = False
        self._releasing = False
        self._final = False  # True after a request to shut down without a restart
        self._moved = ""
        self._kernel.home.limit = self.home_limit
        self._kernel.home.wanted = self._may_restart

    @property
    def handle(self) -> SandboxHandle | None:
        """The persistent sandbox that the kernel runs in; None if it is ephemeral."""
        return self._handle

    @property
    def title(self) -> str:
        """The kernel's id and its notebook, for the log."""
        return titled(str(self.kernel_id), self._handle.metadata.notebook_path if self._handle else "")

    @property
    def can_save(self) -> bool:
        """True if the kernel is persistent and this server has a place for checkpoints."""
        return self._handle is not None and self._handle.can_save

    @property
    def state(self) -> KernelState:
        """The kernel's state."""
        return self._kernel.state

    @property
    def asleep(self) -> bool:
        """True while the kernel is hibernated or waking: until its restore is complete."""
        return self._kernel.asleep

    @property
    def activity(self) -> KernelActivity:
        """The kernel's unfinished requests and its reasons to be kept awake."""
        return self._kernel.activity

    @property
    def executions(self) -> set[object]:
        """Commands that currently run in the sandbox beside the kernel."""
        return self.activity.executions

    @property
    def busy(self) -> bool:
        """True while the kernel is not idle: ``waited_for``, with an unfinished request, or kept awake."""
        return self._kernel.busy()

    @property
    def waited_for(self) -> bool:
        """True while the kernel has not reacted to a client's last request, or a command runs beside the kernel."""
        return bool(self.activity.executions) or self._kernel.relay.waited_for

    def busy_reasons(self) -> list[str]:
        """Return the reasons why the kernel is busy, as sentences without a full stop; empty if it is idle."""
        reasons = self.activity.reasons()
        if not reasons and self.waited_for:
            reasons.append("A client waits for the kernel's reply")
        return reasons

    def require_idle(self) -> None:
        """Raise KernelBusyError if the kernel is awake, and a cell runs or it is kept awake."""
        if not self.asleep and (reasons := self.activity.reasons(brief=False)):
            raise KernelBusyError(self._handle.sandbox_id if self._handle else str(self.kernel_id), reasons)

    async def hibernate(self, insist: float | None = None) -> None:
        """Save the kernel, if it is persistent, and free its memory. A client's next request wakes it.

        Set ``insist`` when the server or the kernel ends: if PID 1 does not answer within that many seconds, the kernel
        is saved without PID 1. Raises UnresponsiveError if that fails too.
        """
        if self._handle and self._launched and self._kernel.status is None:
            await IO.run(self._kernel.hibernate(insist))

    async def wake(self) -> None:
        """Restore a hibernated kernel now."""
        await IO.run(self._kernel.wake())

    async def keep_home(self, restart: bool) -> None:
        """If a restart may follow, keep the files in the kernel's home folder for the next kernel, before a kill.

        A hibernated kernel is woken for that only if ``restart`` is True: the restart is certain.
        """
        if self._handle and self._launched and self._kernel.status is None and (restart or not self._kernel.asleep):
            await IO.run(self._kernel.home.take_before_kill(self._handle, self._kernel.wake))

    def _may_restart(self) -> bool:
        return self._handle is not None and not (self._final or self._keeps_state or self._releasing)

    async def keep_awake(self, seconds: float | None) -> None:
        """Prevent hibernation and culling for idleness for ``seconds``: None for no limit, 0 to stop."""
        await IO.run(self._kernel.keep_awake(USER_HOLD, seconds))

    async def follow(self, notebook_path: str) -> None:
        """Record the notebook's new path, unless the sandbox was opened by its own id."""
        record = self._handle.record if self._handle else None
        named = self.sandbox_id or self.gcs_sandbox_id
        if self._handle and record and not named and notebook_path != record.notebook_path:
            await IO.run(self._handle.follow(notebook_path))

    async def require_revertible(self) -> None:
        """Raise StateError or IncompatibleError unless this server can restore the previous checkpoint."""
        handle = self._require_persistent()

        async def check() -> None:
            async with handle.exclusive():
                await handle.memory.require_revertible()

        await IO.run(check())

    async def savepoint(self, name: str) -> Checkpoint:
        """Save the kernel's memory as a savepoint and return it. The kernel continues to run."""
        self._require_persistent()
        return await IO.run(self._kernel.savepoint(name))

    async def drop_savepoint(self, name: str) -> None:
        """Delete a savepoint."""
        await IO.run(self._require_persistent().drop_savepoint(name))

    async def rewind(self, name: str) -> str:
        """Restore the kernel to a savepoint. Return the name of the savepoint that has the state from before.

        Clients see a restart: their unanswered requests are lost.
        """
        self._require_persistent()
        return await IO.run(self._kernel.rewind(name))

    async def fork(self, new_id: str, savepoint: str = "", notebook_path: str = "") -> None:
        """Store a new sandbox ``new_id`` with this kernel's memory, current or at a savepoint; do not start it."""
        handle = self._require_persistent()
        assert self._manager is not None and handle.record is not None
        about = Identity(handle.record.kernel_name, notebook_path, user_name())
        await IO.run(self._manager.fork(handle, new_id, about, savepoint))

    async def save_snapshot(self, name: str) -> GCSArtifact:
        """Save the files that were written in the sandbox as a file snapshot. The kernel continues to run."""
        return await IO.run(self._require_persistent().save_snapshot(name))

    async def load_snapshot(self, name: str, source_id: str) -> None:
        """Write the files of a snapshot of the sandbox ``source_id`` to their places in this one."""
        await IO.run(self._require_persistent().load_snapshot(source_id, name))

    def _require_persistent(self) -> SandboxHandle:
        if self._handle is None:
            raise SandboxError(
                f"Sandbox {self.kernel_id} is ephemeral: its state is not saved.",
                "Start the kernel for a notebook or with a sandbox_id, and turn on the setting persistent.",
            )
        return self._handle

    @property
    def moved(self) -> str:
        """The reason why another server has the kernel; empty while this server has it."""
        return self._moved

    def keep_state(self) -> None:
        """Never delete the saved state when the kernel ends. Do not wake the kernel for clients, or restart it.

        Called by the server before it stops, culls the kernel, or ends it with its state kept.
        """
        self._keeps_state = True
        self.parent.stop_restarter()
