"""Add a note to a cell's error that the sandbox caused, and to a failed pip: the limit, and the setting that moves it.

Runs in the kernel's process in the sandbox, in the thread of the cell that failed, with any version of Python.
``magics`` calls ``attach`` when IPython's shell is created. The notes state facts about the sandbox, from its own mount
table and the variable SANDBOX_NETWORK. Nothing here knows which files exist on the host.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

NETWORK = "SANDBOX_NETWORK"
"""Variable with the setting ``network`` of this sandbox. A restore keeps it: it requires the same setting."""
MOUNT_TABLE = "/proc/self/mountinfo"
OWN_FOLDER = "/.sandbox"
"""Beginning of the paths of this package's own files and mounts."""
MAX_CHAIN = 50
"""Largest number of causes and contexts of an error that are examined."""
MAX_SHOWN = 5
"""Largest number of folders that a note lists."""
PIP_LOG = "/tmp/.sandbox-pip-{}.log"
MAX_LOG = 1 << 20
"""Bytes of pip's log that are searched, from its end."""
UNREACHED = re.compile(
    rb"Temporary failure in name resolution|Network is unreachable|NewConnectionError|NameResolutionError"
)
PIP_FAILED = re.compile(rb"^\S* *ERROR: ", re.MULTILINE)

NO_NETWORK = (
    "Sandbox: this kernel has no network. To give it one, set SandboxProvisioner.network = 'host' in Jupyter's "
    "configuration, or SANDBOX_NETWORK=host in the server's environment, then start the kernel again."
)


class Mounted(NamedTuple):
    """A line of the mount table. ``memory`` is True for a folder that exists only inside the sandbox."""

    path: str
    writable: bool
    memory: bool


def attach(shell: Any) -> None:
    """Add notes to the errors that ``shell`` shows, and to cells in which pip failed."""
    show = shell.showtraceback

    def showtraceback(exc_tuple: Any = None, *arguments: Any, **options: Any) -> Any:
        with suppress(Exception):
            add_note((exc_tuple or sys.exc_info())[1])
        return show(exc_tuple, *arguments, **options)

    shell.showtraceback = showtraceback
    shell.events.register("pre_run_cell", lambda *_: _begin_pip_log())
    shell.events.register("post_run_cell", lambda *_: _end_pip_log())


def add_note(error: BaseException | None) -> None:
    """Add the sandbox's note to ``error``, once, if the sandbox caused it."""
    note = explain(error)
    if error is not None and note and note not in getattr(error, "__notes__", ()):
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


def explain(error: BaseException | None) -> str:
    """Return the note for an error: the first that fits the error or one of its causes. Empty if none fits."""
    for cause in _chain(error):
        if isinstance(cause, OSError):
            for explanation in EXPLANATIONS:
                note = explanation(cause)
                if note:
                    return note
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its causes or contexts, and the members of groups, each once, at most MAX_CHAIN."""
    queue: list[Any] = [error]
    seen: set[int] = set()
    while queue and len(seen) < MAX_CHAIN:
        current = queue.pop(0)
        if isinstance(current, BaseException) and id(current) not in seen:
            seen.add(id(current))
            yield current
            context = None if current.__suppress_context__ else current.__context__
            queue += [current.__cause__, context, *getattr(current, "exceptions", ())]


# -- the explanations --------------------------------------------------------------------------------------------------


def _without_network(error: OSError) -> str:
    """Explain a failed name resolution or an unreachable address in a sandbox without network."""
    if os.environ.get(NETWORK) != "none":
        return ""
    unresolved = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
    unreachable = not isinstance(error, socket.gaierror) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)
    return NO_NETWORK if unresolved or unreachable else ""


def _not_shown(error: OSError) -> str:
    """Explain a missing path in a folder of which the sandbox shows nothing, or only the mounts in it."""
    path = _path(error.filename)
    if error.errno != errno.ENOENT or not path:
        return ""
    mounts = mount_table()
    inner, home = _innermost(path, mounts), os.path.realpath(os.path.expanduser("~"))
    if inner.path != "/" and not inner.memory:
        return ""
    parent = _existing_parent(path)
    above_mount = any(mount.path.startswith(parent.rstrip("/") + "/") for mount in mounts)
    if parent == home:
        return (
            f"Sandbox: this kernel's home {home} is a folder of its own, in memory, and does not show the files of "
            f"the home on the host. {_shown(mounts)}"
        )
    if not above_mount or parent in ("/tmp", "/dev", "/run"):
        return ""  # the folder was made inside the sandbox, or is one that is always empty at the start
    return f"Sandbox: {_text(path)} is outside of the folders that this kernel sees. {_shown(mounts)}"


def _read_only(error: OSError) -> str:
    """Explain a write to a path that the sandbox mounts read-only."""
    if error.errno != errno.EROFS:
        return ""
    mounts = mount_table()
    paths = [path for path in map(_path, (error.filename, error.filename2)) if path]
    refused = next((path for path in paths if not _innermost(path, mounts).writable), "")
    if not refused:
        return ""
    return f"Sandbox: {_text(refused)} is read-only in this sandbox. {_kept(mounts)}"


EXPLANATIONS: tuple[Callable[[OSError], str], ...] = (_without_network, _not_shown, _read_only)
"""Each returns the note for an error that one limit of the sandbox causes, or an empty string."""


def _writable(mounts: list[Mounted]) -> list[str]:
    """Return the writable folders of the host, without those that lie in another one."""
    folders = sorted(mount.path for mount in mounts if mount.writable and not mount.memory)
    return [one for one in folders if not any(one.startswith(f"{other}/") for other in folders)]


def _shown(mounts: list[Mounted]) -> str:
    folders = _writable(mounts)
    return (
        f"It sees {_listed(folders) or 'no folder of the host'} and the installed programs. To show it more, add "
        "the folder to SandboxProvisioner.mounts, then start the kernel again."
    )


def _kept(mounts: list[Mounted]) -> str:
    folders = _writable(mounts)
    kept = f"Files can be kept in {_listed(folders)}. " if folders else ""
    memory = [place for place in (os.path.expanduser("~"), "/tmp") if os.access(place, os.W_OK)]
    return (
        f"{kept}Files in {' and '.join(map(_text, memory))} exist only in the kernel's memory. To make another folder "
        "writable, add it with :rw to SandboxProvisioner.mounts, then start the kernel again."
    )


def _listed(folders: list[str]) -> str:
    named = [_text(folder) for folder in folders]
    more = len(named) - MAX_SHOWN
    return ", ".join(named[:MAX_SHOWN] + ([f"{more} more"] if more > 0 else []))


# -- paths and mounts --------------------------------------------------------------------------------------------------


def mount_table() -> list[Mounted]:
    """Return the sandbox's mounts in the order in which they were made; the pseudo file systems count as memory."""
    found = []
    with open(MOUNT_TABLE, errors="surrogateescape") as table:
        for line in table:
            fields = line.split()
            path, options, kind = _decoded(fields[4]), fields[5].split(","), fields[fields.index("-") + 1]
            if not path.startswith(OWN_FOLDER):
                found.append(Mounted(path, "rw" in options, path == "/" or kind not in ("9p", "gofer", "lisafs")))
    return found


def _decoded(field: str) -> str:
    r"""Return a path of the mount table with its octal escapes, such as \040 for a space, replaced."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def _innermost(path: str, mounts: list[Mounted]) -> Mounted:
    """Return the mount that ``path`` lies in: of those with the longest path, the one that was made last."""
    inside = [mount for mount in mounts if path == mount.path or path.startswith(mount.path.rstrip("/") + "/")]
    return max(reversed(inside), key=lambda mount: len(mount.path), default=Mounted("/", True, True))


def _path(name: Any) -> str:
    """Return the absolute path of an error's file name, with links followed; empty if it has none."""
    try:
        text = os.fsdecode(name)
    except TypeError:
        return ""
    if "/" not in text and not os.path.lexists(text):
        return ""  # a missing file in the working folder, or a command that is not on PATH
    return os.path.realpath(text)


def _existing_parent(path: str) -> str:
    """Return the innermost folder above ``path`` that exists."""
    while path != "/":
        path = os.path.dirname(path)
        if os.path.isdir(path):
            return path
    return path


def _text(path: str) -> str:
    """Return a path for a message: printable and not too long."""
    shown = path if path.isprintable() else ascii(path)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


# -- pip ---------------------------------------------------------------------------------------------------------------


def _begin_pip_log() -> None:
    """Before a cell, make the pip processes that it starts write a log, unless the user wants one elsewhere."""
    if os.environ.get(NETWORK) == "none":
        os.environ.setdefault("PIP_LOG", _log_path())


def _end_pip_log() -> None:
    """After a cell, remove the log. If it shows that pip failed without network, print the note."""
    path = _log_path()
    if os.environ.get("PIP_LOG") == path:
        del os.environ["PIP_LOG"]
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG))
            log = file.read(MAX_LOG)
        os.unlink(path)
    except OSError:
        return
    if PIP_FAILED.search(log) and UNREACHED.search(log):
        print(NO_NETWORK)


def _log_path() -> str:
    return PIP_LOG.format(os.getpid())
