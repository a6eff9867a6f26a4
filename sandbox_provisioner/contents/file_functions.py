"""Define replacements for the functions of os, shutil and others that Jupyter Server's contents managers call.

The replacements take the same path strings and act through the ``Beneath`` of the innermost folder that was registered
with ``guard``. Paths outside of these folders are refused, except in the private folder for checkpoints.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import stat
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tornado.web import HTTPError

from .._text import one_line
from ..config import own_folder
from ..gvisor.mounts import within
from .beneath import Beneath
from .entries import AccessRefused, home_trash, move_to_trash
from .links import LinkRules

ADVICE = (
    " A notebook's code may have made the link. Delete it, for example with os.unlink in a cell, or add the "
    "folder to which it leads to the setting GuardedContents.allowed_link_targets."
)


class Refused(HTTPError):
    """An HTTP 403 answer with the reason why the server does not access a file."""

    def __init__(self, problem: str) -> None:
        super().__init__(403, one_line(problem) + (ADVICE if "link" in problem and ":rw" not in problem else ""))


_guards: dict[str, Beneath] = {}
"""The guard of each folder, by the folder's path in Jupyter Server."""


def guard(beneath: Beneath) -> None:
    """Register a guard: the guarded contents managers access files beneath its folder through it from now on."""
    _guards[beneath.name] = beneath


def guard_of(*paths: str) -> Beneath:
    """Return the guard of the innermost folder that contains all ``paths``. Raises PermissionError if none does."""
    places = [os.path.abspath(path) for path in paths]
    names = [name for name in _guards if all(within(place, name) for place in places)]
    if names:
        return _guards[max(names, key=len)]
    if all(within(place, private := _private_folder()) for place in places):
        return Beneath(LinkRules(private))
    raise PermissionError(errno.EACCES, "Not in a guarded folder", paths[0])


def _private_folder() -> str:
    """Return the folder for checkpoints of files in folders that the user cannot write to.

    Jupyter Server keeps them in ``jupyter_checkpoints`` in /tmp, where another user can make that folder first, with
    links to the user's files in it.
    """
    private = own_folder() / "checkpoints"
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(private)


def call(operation: Callable[..., Any], path: str, *arguments: Any) -> Any:
    """Call ``operation`` on the guard of ``path``. Raises Refused, and OSError as the system does."""
    try:
        return operation(guard_of(path), path, *arguments)
    except AccessRefused as refusal:
        raise Refused(str(refusal)) from None


def _guarded(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda path, *arguments: call(operation, path, *arguments)


def open_file(path: str, mode: str = "r", **options: Any) -> Any:
    """Open a file like the builtin ``open``."""
    return builtins.open(path, mode, **options, opener=lambda name, flags: call(Beneath.open, name, flags))


def _mode(path: str) -> int:
    """Return the mode of a file or folder, with links followed; 0 if it cannot be found."""
    try:
        found: os.stat_result = call(Beneath.stat, path)
    except (OSError, ValueError):
        return 0
    return found.st_mode


def exists(path: str) -> bool:
    """Return True if the entry exists; a link counts even if its target does not exist."""
    try:
        call(Beneath.lstat, path)
    except OSError:
        return False
    return True


def _access(path: str, mode: int) -> bool:
    try:
        return bool(call(Beneath.access, path, mode))
    except OSError:
        return False


def is_file_hidden(path: str, stat_res: os.stat_result | None = None) -> bool:
    """Return True for a name that begins with a dot or a folder that cannot be listed, like jupyter_core's function."""
    if os.path.basename(os.path.abspath(path)).startswith("."):
        return True
    try:
        return stat.S_ISDIR(call(Beneath.stat, path).st_mode) and not _access(path, os.X_OK | os.R_OK)
    except (FileNotFoundError, Refused):
        return False


def is_hidden(path: str, root: str = "/") -> bool:
    """Return True if a path, or a folder between ``root`` and it, is hidden, like jupyter_core's function."""
    place, top = os.path.abspath(path), os.path.abspath(root)
    if not within(place, top):
        raise ValueError(f"{path} is not in {root}")
    relative = place[len(top) :].lstrip("/")
    if not relative:
        return False
    return any(part.startswith(".") for part in relative.split("/")) or is_file_hidden(path)


def samefile(first: str, second: str) -> bool:
    """Return True if two paths lead to the same file."""
    return os.path.samestat(call(Beneath.stat, first), call(Beneath.stat, second))


def ensure_dir_exists(path: str, mode: int = 0o777) -> None:
    """Make a folder and its missing parents."""
    call(Beneath.makedirs, path, mode)


def send_to_trash(path: str) -> None:
    """Move a file or folder to the trash in the user's home."""
    call(_trash, path)


def _trash(beneath: Beneath, path: str) -> None:
    with beneath.locate(path, follow=False, write=True) as place:
        move_to_trash(place, home_trash())


def _two_paths(operation: Callable[[Beneath, str, str], None]) -> Callable[[str, str], None]:
    def operate(source: str, target: str) -> None:
        try:
            guard_of(source, target)
        except PermissionError:
            _across(operation, source, target)
        else:
            call(lambda _, *paths: operation(guard_of(*paths), *paths), source, target)

    return operate


def copytree(source: str, target: str) -> None:
    """Copy a folder to a path that does not exist, and make its missing parents."""
    ensure_dir_exists(os.path.dirname(target))
    _two_paths(Beneath.copytree)(source, target)


def _across(operation: Callable[[Beneath, str, str], None], source: str, target: str) -> None:
    """Copy or move a file between two guarded folders, such as a checkpoint in the temporary folder."""
    if operation is Beneath.copystat:
        return
    with open_file(source, "rb") as old, open_file(target, "wb") as new:
        shutil.copyfileobj(old, new)
    if operation is Beneath.move:
        call(Beneath.unlink, source)


TEXT = (
    "abspath", "basename", "dirname", "isabs", "join", "normpath", "relpath", "sep", "split", "splitdrive", "splitext",
)  # fmt: skip
"""Names in os.path that only process the text of a path."""
CONSTANTS = ("O_RDONLY", "R_OK", "W_OK", "X_OK", "close", "fsync", "getcwd", "sep", "stat_result")

guarded_path = SimpleNamespace(
    **{name: getattr(os.path, name) for name in TEXT},
    exists=lambda path: bool(_mode(path)),
    isdir=lambda path: stat.S_ISDIR(_mode(path)),
    isfile=lambda path: stat.S_ISREG(_mode(path)),
    # Otherwise Jupyter Server would resolve the link itself; here, opening the path follows it, with all checks.
    islink=lambda path: False,
    samefile=samefile,
)
guarded_os = SimpleNamespace(
    **{name: getattr(os, name) for name in CONSTANTS},
    path=guarded_path,
    access=_access,
    listdir=_guarded(Beneath.listdir),
    lstat=_guarded(Beneath.lstat),
    mkdir=_guarded(Beneath.mkdir),
    open=lambda path, flags, mode=0o777: call(Beneath.open, path, flags, mode),
    remove=_guarded(Beneath.unlink),
    replace=_two_paths(Beneath.replace),
    stat=_guarded(Beneath.stat),
    unlink=_guarded(Beneath.unlink),
)
guarded_shutil = SimpleNamespace(
    copyfile=_two_paths(Beneath.copyfile),
    copystat=_two_paths(Beneath.copystat),
    copytree=copytree,
    move=_two_paths(Beneath.move),
    rmtree=_guarded(Beneath.rmtree),
)
REPLACEMENTS: dict[str, Any] = {
    "os": guarded_os,
    "shutil": guarded_shutil,
    "open": open_file,
    "exists": exists,
    "is_hidden": is_hidden,
    "is_file_hidden": is_file_hidden,
    "samefile": samefile,
    "ensure_dir_exists": ensure_dir_exists,
    "send2trash": send_to_trash,
    "tempfile": SimpleNamespace(gettempdir=_private_folder),
}
"""The replacements for globals of Jupyter Server's modules, by name."""
