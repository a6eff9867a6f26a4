"""Find programs to run on the host, and refuse those that a sandbox or another user may have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..errors import ProgramNotFoundError
from .mounts import within

_writable: set[str] = set()


def note_writable(*folders: str) -> None:
    """Remember folders that kernels of this process can write to: no program in them is run on the host."""
    _writable.update(os.path.realpath(folder) for folder in folders if folder)


def writable_folders() -> set[str]:
    """Return the noted folders and this process's working directory, without /, where no kernel can work."""
    try:
        own = {os.path.realpath(os.getcwd())}
    except OSError:  # it was removed
        own = set()
    return (_writable | own) - {"/"}


def trusted_program(name: str, environ: Mapping[str, str] = os.environ, folders: Iterable[str] = ()) -> str:
    """Return the path of a trusted program on PATH or in one of ``folders``.

    Raises ProgramNotFoundError, which names each program that was refused and the reason.
    """
    refused = []
    for path in on_path(name, environ, folders):
        reason = reason_for_distrust(path)
        if not reason:
            return path
        refused.append(f"{path} is not used, because {reason}")
    raise ProgramNotFoundError(name, refused)


def on_path(name: str, environ: Mapping[str, str] = os.environ, folders: Iterable[str] = ()) -> Iterator[str]:
    """Yield each executable of that name on PATH and in ``folders``, trusted or not. Relative folders are skipped."""
    for folder in dict.fromkeys([*environ.get("PATH", os.defpath).split(os.pathsep), *folders]):
        path = os.path.join(folder, name)
        if os.path.isabs(folder) and os.path.isfile(path) and os.access(path, os.X_OK):
            yield path


def trusted_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return PATH without the folders to which a sandbox or another user can add programs."""
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if os.path.isabs(folder) and not reason_for_distrust(folder))


def reason_for_distrust(path: str, writable: Iterable[str] | None = None) -> str:
    """Return a clause that explains why a program or folder is not trusted; empty if it is trusted.

    It is not trusted if a sandbox or another user can change it or a folder above it, with and without links followed.
    """
    places = dict.fromkeys(
        str(place)
        for end in (os.path.abspath(path), os.path.realpath(path))
        for place in (Path(end), *Path(end).parents)
    )
    for place in places:
        if reason := _changeable(place):
            return reason
    for folder in writable_folders() if writable is None else writable:
        inside = [place for place in places if within(os.path.realpath(place), folder)]
        if inside and any(os.access(place, os.W_OK) for place in inside):
            return f"it lies in {folder}, which sandboxes can write to"
    return ""


def _changeable(place: str) -> str:
    """Return the reason why another user can change the file or folder ``place``, as a clause; empty if nobody can."""
    try:
        found = os.lstat(place)
    except OSError as error:
        return f"{place} cannot be examined: {error.strerror}"
    if found.st_uid not in (0, os.geteuid()) and not _unmapped(place, found.st_uid):
        return f"{place} belongs to another user (uid {found.st_uid})"
    if stat.S_ISLNK(found.st_mode):
        return ""
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & stat.S_IWOTH and not sticky:
        return f"everybody can write to {place}"
    own_group = found.st_gid in (0, os.getegid()) or found.st_uid == 0  # Debian's /usr/local: owner root, group staff
    if found.st_mode & stat.S_IWGRP and not sticky and not own_group:
        return f"a group (gid {found.st_gid}) can write to {place}"
    return ""


def _unmapped(place: str, uid: int) -> bool:
    """Return True if ``uid``, such as root outside a container, is not in this user namespace, and we cannot write."""
    try:
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
        partial = Path("/proc/self/uid_map").read_text().split() != ["0", "0", str((1 << 32) - 1)]
    except (OSError, ValueError):
        return False
    return uid == nobody and partial and not os.access(place, os.W_OK)
