"""Run the actions that a notebook requests for its own kernel with ``%sandbox``. I/O thread only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jupyter_client.session import Session

from ..errors import SandboxError
from ..errors.redaction import public
from ..persistence.metadata import Checkpoint
from ..sandbox.handle import SandboxHandle
from .kernel import SandboxedKernel
from .synthetic_replies import Cell, end_cell

EPHEMERAL = (
    "Nothing of this kernel is kept: it was started for no notebook and without a sandbox_id, or persistent is not set."
)


class NotebookActions:
    """The actions on one kernel, as ``host_api.Askable`` declares them. ``session`` signs messages as the kernel."""

    def __init__(self, kernel: SandboxedKernel, session: Callable[[], Session]) -> None:
        self._kernel = kernel
        self._session = session

    async def status(self) -> Mapping[str, Any]:
        """Return the fields that ``host_api.Askable.status`` lists."""
        assert self._kernel.handle is not None
        handle = self._kernel.handle
        kept = handle.persistent
        return {
            "sandbox_id": handle.sandbox_id,
            "state": str(handle.instance.state),
            "notebook": handle.metadata.notebook_path if kept else "",
            "idle_timeout": handle.idle_timeout or 0.0,
            "awake": self._kernel.activity.awake_for(),
            "ephemeral": "" if kept else EPHEMERAL,
        }

    async def savepoints(self) -> Mapping[str, Checkpoint]:
        """Return the savepoints by name. Raises SandboxError if the kernel is ephemeral."""
        return self._kept().metadata.savepoints

    async def savepoint(self, name: str) -> Checkpoint:
        """Make a savepoint and return it. Raises SandboxError if the kernel is ephemeral."""
        self._kept()
        return await self._kernel.savepoint(name)

    async def rewind(self, name: str, cell: Cell | None) -> str:
        """Restore a savepoint and return the name of the one that has the state from before.

        ``cell`` is ended on the kernel's behalf, because its kernel is replaced. Raises SandboxError if the kernel is
        ephemeral or its connections are encrypted.
        """
        if "curve_publickey" in self._kept().contents.get("connection", {}):
            raise SandboxError(
                "This kernel's connections are encrypted, and the cell that rewinds it could not be ended.",
                "Rewind it from outside: `jupyter sandbox rewind`.",
            )

        def last_messages(kept: str, problem: SandboxError | None) -> tuple[bytes, bytes]:
            said = f"Rewound to {name}; the state before is kept as savepoint {kept}."
            return end_cell(cell, self._session(), said, public(problem) if problem else "") if cell else (b"", b"")

        return await self._kernel.rewind(name, last_messages)

    async def keep_awake(self, name: str, seconds: float | None) -> str:
        """Prevent hibernation for idleness; return a sentence that states for how long."""
        return self._kernel.keep_awake(name, seconds)

    def _kept(self) -> SandboxHandle:
        handle = self._kernel.handle
        if handle is None or not handle.persistent:
            raise SandboxError(EPHEMERAL)
        return handle
