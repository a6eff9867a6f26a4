"""Errors of sandboxes that cannot be saved because of files that were removed or replaced on the host."""

from __future__ import annotations

from collections.abc import Sequence

from . import SandboxError, UnsaveableError
from .kinds import Kind


class ReplacedFilesError(UnsaveableError):
    """Files that the sandbox uses were removed or replaced on the host, so that it cannot be checkpointed now."""

    def __init__(self, sandbox_id: str, reasons: Sequence[str]) -> None:
        super().__init__(sandbox_id, reasons)
        self.remedy = (
            "Close these files and delete the objects that use them, or end the processes that have them open. If they "
            "are libraries, restart the kernel. Then it can be saved."
        )
        self.args = (f"{self.problem} {self.remedy}",)


class LeftRunningError(SandboxError, kind=Kind.UNSAVEABLE):
    """The sandbox of a server that ended still runs, because it cannot be saved; ``reason`` is why."""

    def __init__(self, sandbox_id: str, reason: str, saved: str) -> None:
        self.sandbox_id, self.reason, self.saved = sandbox_id, reason, saved
        give_up = f"`jupyter sandbox revert ID` returns to the checkpoint of {saved}, " if saved else ""
        super().__init__(
            f"Sandbox {sandbox_id} still runs, although its server has ended. Saving it failed: {reason}",
            "It continues to run, and opening the notebook tries again to save it. To end it and lose its unsaved "
            f"state: {give_up}{'and ' if saved else ''}`jupyter sandbox reset ID` makes the notebook start with a new "
            "kernel.",
        )
