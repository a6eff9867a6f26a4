"""Choose the folder that a kernel works in, and remember the folders that kernels could write to.

A notebook's code may have made any link in such a folder, even if its kernel ended long ago. All functions block.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..config import own_folder
from ..errors import ConfigurationError
from ..gvisor.bundle import BundleSpec, Mount, parse_mount
from ..gvisor.mounts import homes, require_below_root, require_no_planted_link, unlinked, within, working_folder
from ..gvisor.programs import note_writable
from ..gvisor.reserved_dirs import reserved_folders
from .scope import project_folder, require_not_executed
from .settings import SandboxSettings

_read: dict[Path, tuple[tuple[int, int], frozenset[str]]] = {}
"""Cache of ``recall``: for each list, its modification time and size when it was read, and the folders in it."""


def server_root(kernel_manager: Any) -> str:
    """Return the root folder of the kernel's Jupyter Server; empty if the kernel manager has no server."""
    return str(getattr(getattr(kernel_manager, "parent", None), "root_dir", "") or "")


class Workplace(NamedTuple):
    """The ``folder`` that a kernel can write to, and in it, as the kernel sees it, the folder in which it works."""

    folder: Mount
    cwd: str


def distrust_programs(settings: SandboxSettings, root: str, cwd: str, chosen: Workplace | None) -> None:
    """Exclude the folders that kernels can write to from all searches for programs."""
    shared = [mount.source for mount in map(parse_mount, settings.mounts) if mount.writable]
    note_writable(root, cwd, settings.working_folder, chosen.folder.source if chosen else "", *shared)


def choose_folder(settings: SandboxSettings, root: str, cwd: str | None) -> Workplace | None:
    """Return the folder that the kernel can write to, and its working folder; None if it gets only its private home.

    Raises ConfigurationError if the requested folder is not allowed.
    """
    wanted, allowed = settings.working_folder or cwd, settings.allow_home
    try:
        if not settings.working_folder and cwd:
            cwd = wanted = _outside_home(settings, cwd)
        folder = working_folder(wanted or os.getcwd(), allowed, reserved_folders(settings.storage_dir))
        if settings.working_folder and root:
            folder = unlinked(folder._replace(source=folder.destination), [root], "working_folder")
        elif cwd:
            mounts = [parse_mount(text) for text in settings.mounts]
            if root:
                require_below_root(folder, root, mounts)
            require_no_planted_link(folder, recall(list_file()), [mount.source for mount in mounts if mount.writable])
    except ConfigurationError as error:
        if wanted:
            raise
        settings.log.warning("The kernel gets an empty home of its own, not the server's folder. %s", error)
        return None
    if cwd and not settings.working_folder:
        require_not_executed(folder.source, root, settings.protected_paths)
    kind = "notebook" if settings.working_folder or not cwd else settings.folder_scope
    scope = project_folder(folder, kind, root, settings.project_markers)
    if scope.source in map(os.path.realpath, sys.path):
        settings.log.warning(
            "The server imports Python modules from %s, which this kernel can write to: it could change the "
            "server's code. Remove the folder from the server's PYTHONPATH, or start the server in another folder.",
            scope.source,
        )
    return Workplace(scope, folder.destination)


def _outside_home(settings: SandboxSettings, cwd: str) -> str:
    """Return ``cwd``, or the setting ``home_folder`` if it is a home: a kernel must not see, or write to, all of it.

    Raises ConfigurationError if that folder does not exist and cannot be created.
    """
    if settings.allow_home or not settings.home_folder or os.path.realpath(cwd) not in homes():
        return cwd
    folder = os.path.join(cwd, os.path.expanduser(settings.home_folder))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            "home_folder",
            f"The notebook lies directly in your home {cwd}, and the folder {folder}, in which its sandboxed kernel "
            f"would work, cannot be created: {error.strerror}.",
            "Move the notebook into a folder of its own, or set SandboxProvisioner.home_folder to another folder.",
        ) from error
    settings.log.warning(
        "The notebook lies directly in your home, so its sandboxed kernel works in %s: it does not see the files "
        "beside the notebook. Move the notebook into a folder of its own to use them.",
        folder,
    )
    return folder


def remember_shared(settings: SandboxSettings, folder: Mount | None) -> None:
    """Record the folders that the kernel can write to: from now on, the server does not trust links in them."""
    given = [*([folder] if folder else []), *map(parse_mount, settings.mounts)]
    try:
        remember({os.path.realpath(mount.source) for mount in given if mount.writable}, list_file())
    except OSError as error:
        settings.log.warning(
            "This kernel's writable folders were not recorded, so the server will trust links that the kernel makes "
            "there, also to files outside of these folders: %s",
            error,
        )


def remember_protected(spec: BundleSpec) -> None:
    """Record read-only mounts inside writable folders, so that the server does not write to them through links."""
    writable = [mount.source for mount in spec.mounts if mount.source and mount.writable]
    shown = [mount.source for mount in spec.mounts if mount.source and not mount.writable]
    inner = {os.path.realpath(path) for path in shown if any(within(path, place) for place in writable)}
    with suppress(OSError):  # remember_shared has logged the same problem
        remember(inner, protected_file())


def list_file() -> Path:
    """Return the path of the user's list of writable folders: one JSON string per line."""
    return own_folder() / "shared-folders"


def protected_file() -> Path:
    """Return the path of the list of read-only mounts inside folders that kernels could write to."""
    return list_file().with_name("protected-folders")


def remember(folders: Iterable[str], file: Path) -> None:
    """Add real paths to the list ``file``. Call it before the sandbox starts. Raises OSError if writing fails."""
    missing = sorted(set(folders) - recall(file))
    if missing:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One write in append mode: lines of two processes do not mix. The first "\n" ends a line that was cut short.
        lines = "".join(f"\n{json.dumps(folder)}" for folder in missing) + "\n"
        number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(number, lines.encode())
        finally:
            os.close(number)


def recall(file: Path) -> frozenset[str]:
    """Return the real paths in the list ``file``; invalid lines are skipped."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return frozenset()
    stamp = (found.st_mtime_ns, found.st_size)
    if file not in _read or _read[file][0] != stamp:
        _read[file] = stamp, frozenset(filter(None, map(_folder, file.read_text(errors="replace").splitlines())))
    return _read[file][1]


def _folder(line: str) -> str:
    try:
        folder = json.loads(line)
    except ValueError:
        return ""
    return folder if isinstance(folder, str) and os.path.isabs(folder) else ""
