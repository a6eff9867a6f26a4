"""Every exception of the package, under one root.

Each carries what a program needs as attributes and what a person needs in its text: what happened, then, in
``remedy``, what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .words import indented

AGAIN = "Put it back and try again: nothing is lost."
OLDER = (
    "There is an older checkpoint: `jupyter sandbox revert` with the sandbox's id goes to it, and keeps this one as a "
    "savepoint."
)
HOSTS_FAULT = re.compile(
    "no space left|quota exceeded|input/output error|read-only file system|permission denied|operation not permitted|"
    "stale file handle|cannot allocate memory|too many open files|connection refused|signal: killed|unshare",
    re.IGNORECASE,
)
"""What runsc says when something is wrong with the host or its disk."""


class SandboxError(Exception):
    """The root of them all. ``str()`` is one or two sentences fit for a notebook's error, a log and a terminal."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = indented(problem)
        self.remedy = indented(remedy)
        super().__init__(f"{self.problem} {self.remedy}".strip())


class ConfigurationError(SandboxError):
    """A setting has a value that cannot be used; ``setting`` names it."""

    def __init__(self, setting: str, problem: str, remedy: str = "") -> None:
        self.setting = setting
        super().__init__(problem, remedy)


class UnsettledError(SandboxError):
    """A file that a template depends on was changed while it was made, or just before."""


class RunscNotFoundError(SandboxError):
    """No usable runsc anywhere we look."""


class RunscTooOldError(SandboxError):
    """A runsc was found that cannot do what a kernel needs."""

    def __init__(self, path: str, version: str, problem: str, remedy: str) -> None:
        self.path = path
        self.version = version
        super().__init__(problem, remedy)


class UserNamespacesForbiddenError(SandboxError):
    """This system does not let an ordinary user make the user namespace that runsc needs."""


class DiskFullError(SandboxError):
    """There was no room for a sandbox's few files."""

    def __init__(self, words: str) -> None:
        super().__init__(f"The disk is full: {words.strip()}.", "Free some space; `df -h` shows where there is none.")


class RunscError(SandboxError):
    """A runsc command failed; ``words`` is what it said."""

    def __init__(self, argv: Sequence[str], returncode: int | None, words: str, problem: str = "") -> None:
        self.argv = tuple(argv)
        self.returncode = returncode
        self.words = words
        ended = "did not answer in time" if returncode is None else f"ended with status {returncode}"
        super().__init__(f"{problem or 'runsc'} {ended}: {words.strip() or 'it gave no reason'}")

    @property
    def hosts_fault(self) -> bool:
        """True if runsc was stopped, took too long, or could not write: that says nothing of the sandbox."""
        return self.returncode is None or self.returncode < 0 or bool(HOSTS_FAULT.search(self.words))


class StateError(SandboxError):
    """An action that is not legal in the sandbox's present state."""

    def __init__(self, sandbox_id: str, action: str, state: str) -> None:
        self.sandbox_id = sandbox_id
        self.action = action
        self.state = state
        super().__init__(f"Cannot {action} sandbox {sandbox_id}: it is {state}.")


class CommandNotFoundError(SandboxError, FileNotFoundError):
    """A kernelspec names a program that is not on this machine."""

    def __init__(self, command: str) -> None:
        self.command = command
        super().__init__(
            f"The kernel's program {command!r} was not found on this machine.",
            "`jupyter kernelspec list` shows where its kernelspec is; correct argv there, or install the program.",
        )


class ProgramNotFoundError(SandboxError):
    """No trusted program of that name is on PATH; ``refused`` says which were found and why they are not used."""

    def __init__(self, name: str, refused: Sequence[str]) -> None:
        self.name = name
        self.refused = tuple(refused)
        super().__init__(
            f"The program {name} was not found on this machine{''.join(f'; {one}' for one in refused)}.",
            "Install it in a system folder that is on PATH.",
        )


class GuestError(SandboxError):
    """The guest refused a request, such as a command that does not exist; ``errno`` if there was one."""

    def __init__(self, problem: str, errno: int | None = None) -> None:
        self.errno = errno
        super().__init__(problem)


class UnresponsiveError(SandboxError):
    """A sandbox's PID 1 or kernel did not answer when it was to be saved."""

    def __init__(self, sandbox_id: str, problem: str) -> None:
        self.sandbox_id = sandbox_id
        super().__init__(f"Sandbox {sandbox_id} {problem}.")


class ProtocolError(SandboxError):
    """The guest broke the rules of the data path and has lost its connection."""


class LinkClosedError(SandboxError):
    """The connection to the guest is gone: the sandbox ended, or was stopped."""


class MetadataError(SandboxError):
    """A stored document cannot be understood."""


class SignatureError(SandboxError):
    """A stored document was not written with this user's key; ``foreign`` if it claims to be another user's."""

    def __init__(self, problem: str, remedy: str, foreign: bool) -> None:
        self.foreign = foreign
        super().__init__(problem, remedy)

    @classmethod
    def unsigned(cls, name: str, where: str, foreign: bool) -> SignatureError:
        """Return the error for a document without a signature."""
        return cls(
            f"{name} in {where} is not signed and was refused: another user, or a program that may write there, may "
            "have made or changed it.",
            "If it is yours, from before documents were signed, set SANDBOX_TRUST_STORAGE=1, open it once, and unset "
            "the variable.",
            foreign,
        )

    @classmethod
    def other_key(cls, name: str, where: str, theirs: str, ours: str, key_file: str) -> SignatureError:
        """Return the error for a document that names another key."""
        return cls(
            f"{name} in {where} is signed with the key {theirs} and was refused: the key of this server is {ours}.",
            "It belongs to another user, or to a server of yours that has a key of its own. Servers that share storage "
            f"need one key: set SANDBOX_SIGNING_KEY on all of them, for example to the content of {key_file} on the "
            "server that saved it. If that key is lost, set SANDBOX_TRUST_STORAGE=1, open the sandbox once, and unset "
            "the variable.",
            foreign=True,
        )

    @classmethod
    def changed(cls, name: str, where: str) -> SignatureError:
        """Return the error for a document that our key did not sign as it is."""
        return cls(
            f"{name} in {where} does not match its signature and was refused: it was changed, or moved from another "
            "place, after this user's key signed it.",
            "Find out who can write there. Put back the original, or delete the sandbox.",
            foreign=False,
        )


class ForeignSandboxError(SandboxError):
    """A sandbox belongs to another ``user``, who does not share it with us."""

    def __init__(self, sandbox_id: str, user: str, ours: str) -> None:
        self.sandbox_id = sandbox_id
        self.user = user
        super().__init__(
            f"Sandbox {sandbox_id} belongs to user {user!r:.100}, who does not share it with {ours!r:.100}.",
            f"Choose another id; or ask the owner to set SANDBOX_SHARED_WITH={ours} and to open it once.",
        )


class SnapshotError(SandboxError):
    """A snapshot of a sandbox's files could not be made, or is none."""


class SnapshotNotFoundError(SnapshotError):
    """There is no snapshot of that name."""


class StorageError(SandboxError):
    """Storage did not do what it should; ``where`` says which."""

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        self.where = where
        super().__init__(problem, remedy)


class ObjectNotFoundError(StorageError):
    """There is no object of that name; ``name`` has it."""

    def __init__(self, where: str, name: str) -> None:
        self.name = name
        super().__init__(where, f"There is no {name} in {where}.")


class ConflictError(StorageError):
    """The object is not the one that was meant: somebody else wrote, or deleted, it."""

    def __init__(self, where: str, name: str, expected: int) -> None:
        self.name = name
        self.expected = expected
        meant = f"is not at generation {expected} any more" if expected else "exists already"
        super().__init__(where, f"{name} in {where} {meant}.")


class StorageUnavailableError(StorageError):
    """Storage could not be reached, or failed in a way that may pass; what was asked for may have happened."""


class RateLimitedError(StorageUnavailableError):
    """Storage refused a request because too many came; it was not carried out."""


class CorruptObjectError(StorageError):
    """What is stored is not what was written; ``name`` says where."""

    def __init__(self, where: str, name: str, problem: str) -> None:
        self.name = name
        self.previous = False
        super().__init__(where, f"{name} in {where} is damaged: {problem}.")

    def offer_older(self, previous: bool) -> None:
        """Say that there is an older checkpoint, if there is."""
        self.previous = previous
        self.remedy = OLDER if previous else ""
        self.args = (f"{self.problem} {self.remedy}".strip(),)


class LeaseHeldError(SandboxError):
    """Another server has it; ``owner`` says which."""

    def __init__(self, name: str, owner: object) -> None:
        self.name = name
        self.owner = owner
        remedy = (
            "Stop that server, or set enable_handoff on both; to shut the kernel down there may delete what was saved."
        )
        super().__init__(
            f"{name.removesuffix('/lock').replace('sandboxes/', 'Sandbox ')} is in use by {owner}.", remedy
        )


class LeaseLostError(SandboxError):
    """A lease is not ours any more; ``reason`` says why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"The lease of {name} was lost: {reason}.")


class SandboxNotFoundError(SandboxError):
    """There is no persistent sandbox of that id."""

    def __init__(self, sandbox_id: str, where: str) -> None:
        self.sandbox_id = sandbox_id
        super().__init__(
            f"There is no sandbox {sandbox_id} in {where}.", "`jupyter sandbox list` shows those there are."
        )


class SandboxExistsError(SandboxError):
    """There is a persistent sandbox of that id already."""

    def __init__(self, sandbox_id: str, where: str) -> None:
        self.sandbox_id = sandbox_id
        super().__init__(f"There is a sandbox {sandbox_id} in {where} already.", "Attach to it, or choose another id.")


class FencedError(SandboxError):
    """Another server has taken the sandbox over; what this one had of it can no longer be saved."""

    def __init__(self, sandbox_id: str, owner: str) -> None:
        self.sandbox_id = sandbox_id
        self.owner = owner
        super().__init__(f"Sandbox {sandbox_id} was taken over by {owner}: nothing of this server's copy was saved.")


class IncompatibleError(SandboxError):
    """A checkpoint does not fit this server; ``reasons`` say why, ``previous`` whether an older one may be tried."""

    def __init__(self, sandbox_id: str, reasons: Sequence[str], previous: bool) -> None:
        self.sandbox_id = sandbox_id
        self.reasons = tuple(reasons)
        self.previous = previous
        super().__init__(
            f"Sandbox {sandbox_id} cannot be restored here: {_some(reasons)}.",
            f"{AGAIN} {OLDER}" if previous else AGAIN,
        )


class UnknownSandboxError(SandboxError):
    """No record here has that id or notebook; ``known`` has the ids there are."""

    def __init__(self, wanted: str, known: Sequence[str]) -> None:
        self.wanted = wanted
        self.known = tuple(known)
        super().__init__(
            f"No sandbox {wanted!r:.200} is recorded here.", f"These are: {', '.join(self.known) or 'none at all'}."
        )


class AmbiguousSandboxError(SandboxError):
    """Several records fit what was asked for; ``matching`` has their ids."""

    def __init__(self, wanted: str, matching: Sequence[str]) -> None:
        self.wanted = wanted
        self.matching = tuple(matching)
        super().__init__(f"{wanted!r:.200} can be {len(self.matching)} sandboxes: {', '.join(self.matching)}.")


class UnreadableRecordError(SandboxError):
    """A record of a sandbox cannot be understood; ``path`` says which file it is."""

    def __init__(self, path: str, problem: str, remedy: str = "") -> None:
        self.path = path
        super().__init__(f"The record {path} cannot be used: {problem}.", remedy)


class StorageNotHereError(SandboxError):
    """A sandbox is kept in a storage, ``kind`` and ``where``, that this server does not have."""

    def __init__(self, sandbox_id: str, kind: str, where: str, here: str) -> None:
        self.sandbox_id = sandbox_id
        self.kind = kind
        self.where = where
        super().__init__(
            f"Sandbox {sandbox_id} is kept in {kind} storage at {where}, which this server does not have.",
            f"Its own is at {here}; set it up for the other one, or use the sandbox from a server that is.",
        )


class SavepointExistsError(SandboxError):
    """A savepoint's name is taken."""

    def __init__(self, sandbox_id: str, name: str) -> None:
        self.sandbox_id, self.name = sandbox_id, name
        super().__init__(f"Sandbox {sandbox_id} has a savepoint {name} already.", "Choose another name, or delete it.")


class TooManySavepointsError(SandboxError):
    """A sandbox has as many savepoints as one may have."""

    def __init__(self, sandbox_id: str, most: int) -> None:
        self.sandbox_id = sandbox_id
        super().__init__(f"Sandbox {sandbox_id} has {most} savepoints, and may have no more.", "Delete some.")


class SavepointNotFoundError(SandboxError):
    """There is no savepoint of that name; ``known`` are those there are."""

    def __init__(self, sandbox_id: str, name: str, known: Sequence[str]) -> None:
        self.sandbox_id, self.name, self.known = sandbox_id, name, tuple(known)
        super().__init__(
            f"Sandbox {sandbox_id} has no savepoint {name!r:.200}.", f"It has {', '.join(known) or 'none'}."
        )


class UnsaveableError(SandboxError):
    """A sandbox runs on in a way that would not survive a restore; ``reasons`` say what is in the way."""

    def __init__(self, sandbox_id: str, reasons: Sequence[str]) -> None:
        self.sandbox_id = sandbox_id
        self.reasons = tuple(reasons)
        super().__init__(f"Sandbox {sandbox_id} was not checkpointed, and runs on: {_some(reasons)}.")


def _some(reasons: Sequence[str], most: int = 5) -> str:
    """As many of ``reasons`` as a person reads."""
    more = [f"and {len(reasons) - most} more"] if len(reasons) > most else []
    return "; ".join([*reasons[:most], *more])
