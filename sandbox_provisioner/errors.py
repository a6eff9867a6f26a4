"""Every exception of the package, under one root.

Each carries what a program needs as attributes and what a person needs in its text: what happened, then, in
``remedy``, what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence


class SandboxError(Exception):
    """The root of them all. ``str()`` is one or two sentences fit for a notebook's error."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem} {remedy}".strip())


class ConfigurationError(SandboxError):
    """A setting has a value that cannot be used; ``setting`` names it."""

    def __init__(self, setting: str, problem: str, remedy: str = "") -> None:
        self.setting = setting
        super().__init__(problem, remedy)


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


class GuestError(SandboxError):
    """The guest refused a request, such as a command that does not exist; ``errno`` if there was one."""

    def __init__(self, problem: str, errno: int | None = None) -> None:
        self.errno = errno
        super().__init__(problem)


class ProtocolError(SandboxError):
    """The guest broke the rules of the data path and has lost its connection."""


class LinkClosedError(SandboxError):
    """The connection to the guest is gone: the sandbox ended, or was stopped."""
