"""Explain the exit status of ``jupyter sandbox`` and derive it from errors, for scripts."""

from __future__ import annotations

from ..errors import SandboxError
from ..errors.kinds import ExitStatus

HELP = "\n".join(
    [
        "exit status:",
        *(f"  {status.value}  {status.meaning}" for status in ExitStatus),
        "`exec` ends with the exit status of the command that it ran.\n",
    ]
)


def exit_status(error: Exception) -> ExitStatus:
    """Return the exit status for an error, whether it was raised in this process or reported by a server."""
    return error.exit_status if isinstance(error, SandboxError) else ExitStatus.FAILED
