"""Map errors to the exit status of ``jupyter sandbox``, for scripts."""

from __future__ import annotations

from enum import IntEnum
from http import HTTPStatus

from .. import errors
from ..client import NoServerError, ProblemError, ServerUnreachableError
from ..errors import SandboxError
from .forks import NotebookTakenError
from .targets import NoKernelError, UnreadSandboxError


class ExitStatus(IntEnum):
    """The exit statuses; ``HELP`` explains them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    MISSING = 3
    CONFLICT = 4
    UNABLE = 5


HELP = """\
exit status:
  0  it is done
  1  it failed
  2  the command was not understood, or could mean several sandboxes
  3  there is no such sandbox, savepoint or snapshot
  4  the sandbox is in use, or in a state in which that cannot be done, or the name is taken
  5  this machine or server is not able to: it is not set up for it, not running, or does not let you in
`exec` ends with the status of the command that it ran, if it ran it.
"""

MEANINGS: tuple[tuple[type[SandboxError], ExitStatus], ...] = (
    (errors.AmbiguousSandboxError, ExitStatus.USAGE),
    (errors.UnknownSandboxError, ExitStatus.MISSING),
    (errors.SandboxNotFoundError, ExitStatus.MISSING),
    (errors.SavepointNotFoundError, ExitStatus.MISSING),
    (errors.SnapshotNotFoundError, ExitStatus.MISSING),
    (errors.SnapshotError, ExitStatus.CONFLICT),
    (errors.SandboxExistsError, ExitStatus.CONFLICT),
    (errors.SavepointExistsError, ExitStatus.CONFLICT),
    (errors.LeaseHeldError, ExitStatus.CONFLICT),
    (errors.LeaseLostError, ExitStatus.CONFLICT),
    (errors.FencedError, ExitStatus.CONFLICT),
    (errors.StateError, ExitStatus.CONFLICT),
    (NoKernelError, ExitStatus.CONFLICT),
    (NotebookTakenError, ExitStatus.CONFLICT),
    (errors.ConfigurationError, ExitStatus.UNABLE),
    (errors.StorageNotHereError, ExitStatus.UNABLE),
    (errors.ForeignSandboxError, ExitStatus.UNABLE),
    (errors.SignatureError, ExitStatus.UNABLE),
    (errors.DiskFullError, ExitStatus.UNABLE),
    (NoServerError, ExitStatus.UNABLE),
    (UnreadSandboxError, ExitStatus.UNABLE),
    (ServerUnreachableError, ExitStatus.UNABLE),
)
"""Exit status of errors in this process; the first match counts, and others are FAILED."""

BY_KIND = {
    "ambiguous": ExitStatus.USAGE,
    "not-found": ExitStatus.MISSING,
    "not-set-up": ExitStatus.UNABLE,
    "elsewhere": ExitStatus.UNABLE,
    "not-signed": ExitStatus.UNABLE,
    "disk-full": ExitStatus.UNABLE,
}
BY_STATUS: dict[int, ExitStatus] = {
    HTTPStatus.UNAUTHORIZED: ExitStatus.UNABLE,
    HTTPStatus.FORBIDDEN: ExitStatus.UNABLE,
    HTTPStatus.NOT_FOUND: ExitStatus.UNABLE,
    HTTPStatus.CONFLICT: ExitStatus.CONFLICT,
}
"""Exit status of a server's HTTP status, if BY_KIND does not have the kind of problem."""


def exit_status(error: Exception) -> ExitStatus:
    """Return the exit status for an error, which is the same in this process and on a server."""
    if isinstance(error, ProblemError):
        return BY_KIND.get(error.kind) or BY_STATUS.get(error.status, ExitStatus.FAILED)
    return next((status for known, status in MEANINGS if isinstance(error, known)), ExitStatus.FAILED)
