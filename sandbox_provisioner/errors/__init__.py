"""All exceptions of the package, with SandboxError as their base class.

The message is for people: the ``problem`` (what happened, and why), then the ``remedy`` (what to do next). Attributes
have the same facts for programs. The ``kind`` of a class determines its HTTP status, problem type and exit status.
docs/generate_rest.py copies the first line of each docstring, up to a semicolon, into the REST documentation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .._text import indented
from .kinds import ExitStatus, Kind

AGAIN = "Correct this and try again. Nothing was deleted."
RESET = (
    "Restart Kernel, or `jupyter sandbox reset ID`, starts a new kernel; reset keeps the saved state as a savepoint."
)
OLDER = "`jupyter sandbox revert ID` returns to the previous checkpoint and keeps the latest as a savepoint."
HOSTS_FAULT = re.compile(
    "no space left|quota exceeded|input/output error|read-only file system|permission denied|operation not permitted|"
    "stale file handle|cannot allocate memory|too many open files|connection refused|signal: killed|unshare",
    re.IGNORECASE,
)
"""Matches the messages of runsc about a problem of the host or its disk."""
FILES_REPLACED = re.compile(r"dentries can't be|prepareSaveDead|gofer\.\w*dentry\)", re.IGNORECASE)
"""Matches the messages of runsc about a file in use that was removed or replaced."""

STORAGE_SETTINGS = {
    "local": "SANDBOX_STORAGE_DIR",
    "mounted": "SANDBOX_METADATA_MOUNT_PATH",
    "gcs": "SANDBOX_METADATA_BUCKET",
}
"""The variable that configures each kind of storage."""


class SandboxError(Exception):
    """Base class. ``str()`` is one or two printable sentences for a notebook, a log or a terminal."""

    kind: Kind = Kind.SANDBOX
    """The kind of problem. Subclasses inherit it, or set their own in the ``class`` statement."""

    def __init_subclass__(cls, kind: Kind | None = None) -> None:
        """Set the kind of the subclass."""
        super().__init_subclass__()
        cls.kind = kind or cls.kind

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = indented(problem)
        self.remedy = indented(remedy)
        super().__init__(f"{self.problem} {self.remedy}".strip())

    @property
    def exit_status(self) -> ExitStatus:
        """The exit status of a command that fails with this error."""
        return self.kind.exit_status


def subclasses(root: type[SandboxError] = SandboxError) -> list[type[SandboxError]]:
    """Return ``root`` and all imported classes that inherit from it, each once."""
    below = (found for child in root.__subclasses__() for found in subclasses(child))
    return list(dict.fromkeys([root, *below]))


class BadRequestError(SandboxError, kind=Kind.BAD_REQUEST):
    """The request is invalid; ``field`` names the invalid part, if known."""

    def __init__(self, problem: str, remedy: str = "", field: str = "") -> None:
        self.field = field
        super().__init__(problem, remedy)


class ConfigurationError(SandboxError, kind=Kind.NOT_SET_UP):
    """A setting is missing or has an invalid value; ``setting`` names it."""

    def __init__(self, setting: str, problem: str, remedy: str = "") -> None:
        self.setting = setting
        super().__init__(problem, remedy)


class UnsettledError(SandboxError):
    """A file that a template depends on changed while the template was built, or just before."""


class RunscNotFoundError(SandboxError):
    """No usable runsc was found or could be installed."""


class RunscTooOldError(SandboxError):
    """The runsc that was found is too old."""

    def __init__(self, path: str, version: str, problem: str, remedy: str) -> None:
        self.path, self.version = path, version
        super().__init__(problem, remedy)


class UnusableKernelError(SandboxError):
    """A kernel failed the trial in a sandbox."""


class UserNamespacesForbiddenError(SandboxError):
    """The system does not let an ordinary user create the user namespace that runsc needs."""


class DiskFullError(SandboxError, kind=Kind.DISK_FULL):
    """The disk is full."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The disk is full: {reason.strip()}.",
            "Free some space; `df -h` shows the full disk. Or set SANDBOX_STORAGE_DIR, for saved sandboxes, and "
            "SANDBOX_RUNTIME_DIR, for running ones, to folders on another disk.",
        )


class RunscError(SandboxError):
    """A runsc command failed and printed ``output``; ``returncode`` is None if it was killed at its timeout."""

    def __init__(self, argv: Sequence[str], returncode: int | None, output: str, problem: str = "") -> None:
        self.argv, self.returncode, self.output = tuple(argv), returncode, output
        ended = "did not answer in time" if returncode is None else f"ended with status {returncode}"
        super().__init__(f"{problem or 'runsc'} {ended}: {output.strip() or 'no reason given'}")

    @property
    def hosts_fault(self) -> bool:
        """True if runsc was killed, took too long or reported a problem of the host: the sandbox itself may be fine."""
        return self.returncode is None or self.returncode < 0 or bool(HOSTS_FAULT.search(self.output))

    @property
    def files_replaced(self) -> bool:
        """True if runsc could not save a file in use that was removed or replaced on the host."""
        return bool(FILES_REPLACED.search(self.output))


class StateError(SandboxError, kind=Kind.WRONG_STATE):
    """The action is not allowed in the sandbox's current state. ``reason`` is a clause such as "it is running"."""

    def __init__(self, sandbox_id: str, action: str, reason: str) -> None:
        self.sandbox_id, self.action, self.reason = sandbox_id, action, reason
        super().__init__(f"Cannot {action} sandbox {sandbox_id}: {reason}.")


class KernelBusyError(SandboxError, kind=Kind.WRONG_STATE):
    """A kernel was not hibernated, because it works or is kept awake; ``reasons`` are sentences without a full stop."""

    def __init__(self, sandbox_id: str, reasons: Sequence[str]) -> None:
        self.sandbox_id, self.reasons = sandbox_id, tuple(reasons)
        super().__init__(
            f"Sandbox {sandbox_id} was not hibernated: its kernel is busy. {'. '.join(reasons)}.",
            "Wait until it is idle, or use force (`jupyter sandbox hibernate --force`): a running cell then pauses, "
            "and continues only after the kernel's next message.",
        )


class CommandNotFoundError(SandboxError, FileNotFoundError, kind=Kind.COMMAND):
    """The kernelspec's program is not on this machine."""

    def __init__(self, command: str) -> None:
        self.command = command
        super().__init__(
            f"The kernel's program {command!r} was not found on this machine.",
            "Install it, or correct argv in the kernelspec; `jupyter kernelspec list` shows where that is.",
        )


class ProgramNotFoundError(SandboxError):
    """No trusted program of this name is on PATH; ``refused`` has a clause for each untrusted one, with the reason."""

    def __init__(self, name: str, refused: Sequence[str]) -> None:
        self.name = name
        self.refused = tuple(refused)
        super().__init__(
            f"The program {name} was not found on this machine{''.join(f'; {clause}' for clause in refused)}.",
            "Install it in a system folder that is on PATH.",
        )


class GuestError(SandboxError, kind=Kind.COMMAND):
    """A request failed in the guest, for example because a command does not exist; ``errno`` is the cause, or None."""

    def __init__(self, problem: str, errno: int | None = None) -> None:
        self.errno = errno
        super().__init__(problem)


class UnresponsiveError(SandboxError):
    """The sandbox was not saved because it did not answer; ``problem`` is a predicate, such as "did not answer"."""

    def __init__(self, sandbox_id: str, problem: str) -> None:
        self.sandbox_id = sandbox_id
        super().__init__(f"Sandbox {sandbox_id} {problem}.")


class ProtocolError(SandboxError):
    """The guest violated the protocol of the byte stream; its connection was closed."""


class LinkClosedError(SandboxError, kind=Kind.WRONG_STATE):
    """The connection to the guest is closed: the sandbox ended or was stopped."""


class MetadataError(SandboxError, kind=Kind.DAMAGED):
    """A stored document is invalid."""


class ForeignSandboxError(SandboxError, kind=Kind.NOT_YOURS):
    """The sandbox belongs to another user, who does not share it."""

    def __init__(self, sandbox_id: str, user: str, ours: str) -> None:
        self.sandbox_id, self.user = sandbox_id, user
        super().__init__(
            f"Sandbox {sandbox_id} belongs to user {user!r:.100}, who does not share it with {ours!r:.100}.",
            f"Choose another id, or ask the owner to set SANDBOX_SHARED_WITH={ours} and open the sandbox once.",
        )


class SnapshotError(SandboxError, kind=Kind.SNAPSHOT):
    """A file snapshot could not be made, or is invalid."""


class SnapshotTooLargeError(SnapshotError):
    """The files of a sandbox are larger than a snapshot may be."""


class SnapshotNotFoundError(SnapshotError, kind=Kind.NOT_FOUND):
    """No file snapshot has this name."""


class StorageError(SandboxError, kind=Kind.STORAGE):
    """An operation on storage failed; ``where`` names the storage."""

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        self.where = where
        super().__init__(problem, remedy)


class ObjectNotFoundError(StorageError):
    """No object has this ``name``."""

    def __init__(self, where: str, name: str) -> None:
        self.name = name
        super().__init__(where, f"There is no {name} in {where}.")


class ConflictError(StorageError):
    """The object is not at the expected generation: another process wrote or deleted it."""

    def __init__(self, where: str, name: str, expected: int) -> None:
        self.name, self.expected = name, expected
        reason = f"is no longer at generation {expected}: it was changed" if expected else "already exists"
        super().__init__(where, f"{name} in {where} {reason}.")


class StorageUnavailableError(StorageError):
    """Storage is unreachable or failed temporarily; the requested change may have been made."""


class RateLimitedError(StorageUnavailableError):
    """Storage refused a request because of too many requests; nothing was changed."""


class CorruptObjectError(StorageError, kind=Kind.DAMAGED):
    """A stored object is damaged; ``name`` is its name, ``previous`` is True if an older checkpoint can be restored."""

    def __init__(self, where: str, name: str, problem: str) -> None:
        self.name = name
        self.previous = False
        super().__init__(where, f"{name} in {where} is damaged: {problem}.")

    def offer_older(self, previous: bool) -> None:
        """Add the remedy to revert to the older checkpoint, or remove it if there is no ``previous`` one."""
        self.previous = previous
        self.remedy = f"{OLDER} {RESET}" if previous else RESET
        self.args = (f"{self.problem} {self.remedy}".strip(),)


class LeaseHeldError(SandboxError, kind=Kind.IN_USE):
    """The sandbox is in use by another server; ``owner`` names it."""

    def __init__(self, name: str, owner: object) -> None:
        self.name, self.owner = name, owner
        super().__init__(
            f"{_sandbox(name)} is in use by {owner}.",
            "Stop that server, or set enable_handoff on both servers. Do not shut the kernel down there: that can "
            "delete the saved state.",
        )


class LeaseLostError(SandboxError, kind=Kind.IN_USE):
    """This server lost the lease; ``reason`` is why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"{_sandbox(name)} is no longer leased to this server: {reason}.")


class SandboxNotFoundError(SandboxError, kind=Kind.NOT_FOUND):
    """No persistent sandbox has this id."""

    def __init__(self, sandbox_id: str, where: str) -> None:
        self.sandbox_id = sandbox_id
        super().__init__(f"There is no sandbox {sandbox_id} in {where}.", "`jupyter sandbox list` shows yours.")


class SandboxExistsError(SandboxError, kind=Kind.EXISTS):
    """A persistent sandbox with this id exists already."""

    def __init__(self, sandbox_id: str, where: str) -> None:
        self.sandbox_id = sandbox_id
        super().__init__(f"Sandbox {sandbox_id} already exists in {where}.", "Attach to it, or choose another id.")


class FencedError(SandboxError, kind=Kind.IN_USE):
    """Another server owns the sandbox now; changes on this server can no longer be saved."""

    def __init__(self, sandbox_id: str, owner: str) -> None:
        self.sandbox_id, self.owner = sandbox_id, owner
        super().__init__(f"Sandbox {sandbox_id} is now owned by {owner}. Changes on this server were not saved.")


class IncompatibleError(SandboxError, kind=Kind.INCOMPATIBLE):
    """This server cannot restore the checkpoint; ``previous`` is True if it can restore the one before."""

    def __init__(self, sandbox_id: str, reasons: Sequence[str], previous: bool) -> None:
        self.sandbox_id, self.reasons, self.previous = sandbox_id, tuple(reasons), previous
        remedy = " ".join(filter(None, [AGAIN, OLDER if previous else "", RESET]))
        super().__init__(f"Sandbox {sandbox_id} cannot be restored here: {_first(reasons)}.", remedy)


class UnknownSandboxError(SandboxError, kind=Kind.NOT_FOUND):
    """No record has this id or notebook; ``known`` has the existing ids."""

    def __init__(self, wanted: str, known: Sequence[str]) -> None:
        self.wanted, self.known = wanted, tuple(known)
        remedy = f"Recorded sandboxes: {', '.join(self.known) or 'none'}."
        super().__init__(f"No sandbox {wanted!r:.200} is recorded here.", remedy)


class NotebookInUseError(SandboxError, kind=Kind.IN_USE):
    """The notebook already has a kernel, running or saved; ``path`` is the notebook's."""

    def __init__(self, path: str, kernel: str = "a kernel on this server") -> None:
        self.path = path
        super().__init__(f"Notebook {path} already has {kernel}.", "Shut down or delete that, or use another notebook.")


class PlainKernelError(SandboxError, kind=Kind.PLAIN_KERNEL):
    """A kernel without a sandbox was requested, without confirmation, for a notebook that ran in a sandbox."""


class AmbiguousSandboxError(SandboxError, kind=Kind.AMBIGUOUS):
    """Several records match the request; ``matching`` has their ids."""

    def __init__(self, wanted: str, matching: Sequence[str], titles: Sequence[str] = ()) -> None:
        self.wanted, self.matching = wanted, tuple(matching)
        problem = f"{wanted!r:.200} matches {len(self.matching)} sandboxes: {', '.join(titles or self.matching)}."
        super().__init__(problem, "Use the full id of one of them.")


class UnreadableRecordError(SandboxError, kind=Kind.DAMAGED):
    """The record of a sandbox is invalid; ``path`` is its file."""

    def __init__(self, path: str, problem: str, remedy: str = "") -> None:
        self.path = path
        super().__init__(f"The record {path} cannot be used: {problem}.", remedy)


class StorageNotHereError(SandboxError, kind=Kind.ELSEWHERE):
    """The sandbox is in storage that this server does not use; ``storage`` and ``where`` identify that storage."""

    def __init__(self, sandbox_id: str, storage: str, where: str, here: str) -> None:
        self.sandbox_id, self.storage, self.where = sandbox_id, storage, where
        self.setting = STORAGE_SETTINGS.get(storage, "")
        super().__init__(
            f"Sandbox {sandbox_id} is in {storage} storage at {where}, but this server uses {here}.",
            f"Set {self.setting or 'the storage'} as on the server that saved it, or use the sandbox on that server.",
        )


class SavepointExistsError(SandboxError, kind=Kind.EXISTS):
    """A savepoint with this name exists already."""

    def __init__(self, sandbox_id: str, name: str) -> None:
        self.sandbox_id, self.name = sandbox_id, name
        super().__init__(f"Sandbox {sandbox_id} already has a savepoint {name}.", "Choose another name, or delete it.")


class TooManySavepointsError(SandboxError, kind=Kind.TOO_MANY):
    """The sandbox has the maximum number of savepoints."""

    def __init__(self, sandbox_id: str, most: int) -> None:
        self.sandbox_id = sandbox_id
        super().__init__(f"Sandbox {sandbox_id} has {most} savepoints, the maximum.", "Delete one first.")


class SavepointNotFoundError(SandboxError, kind=Kind.NOT_FOUND):
    """No savepoint has this name; ``known`` has the existing names."""

    def __init__(self, sandbox_id: str, name: str, known: Sequence[str]) -> None:
        self.sandbox_id, self.name, self.known = sandbox_id, name, tuple(known)
        remedy = f"Its savepoints: {', '.join(known) or 'none'}."
        super().__init__(f"Sandbox {sandbox_id} has no savepoint {name!r:.200}.", remedy)


class UnsaveableError(SandboxError, kind=Kind.UNSAVEABLE):
    """The sandbox cannot be checkpointed now and continues to run; ``reasons`` lists why."""

    def __init__(self, sandbox_id: str, reasons: Sequence[str]) -> None:
        self.sandbox_id, self.reasons = sandbox_id, tuple(reasons)
        super().__init__(f"Sandbox {sandbox_id} was not checkpointed and continues to run: {_first(reasons)}.")


def _sandbox(lease: str) -> str:
    """Return "Sandbox ID" for the name of its lease, "sandboxes/ID/lock"."""
    return lease.removesuffix("/lock").replace("sandboxes/", "Sandbox ")


def _first(reasons: Sequence[str], most: int = 5) -> str:
    """Return the first ``most`` reasons and the number of the others."""
    more = [f"and {len(reasons) - most} more"] if len(reasons) > most else []
    return "; ".join([*reasons[:most], *more])
