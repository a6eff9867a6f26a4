"""The files of a store's folder, reached from its root one folder at a time, so that no link leads out of it.

New files grow up in ``.tmp``, and folders are taken there to be deleted; what is left there by the dead is collected.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .disk import CREATE, FOLDER, closing, sync

TEMPORARY = ".tmp"
ABANDONED = 3600.0
"""So many seconds after its last change a temporary file is taken for a dead writer's."""


class Draft(NamedTuple):
    """An open file that is to get another name: the one it has now, in which folder if that is not in the name."""

    name: str
    folder: int | None
    file: int


@contextmanager
def root_of(path: Path, create: bool = False) -> Iterator[int]:
    """A store's folder, open; FileNotFoundError if there is none and it is not to be made."""
    if create:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        yield root


@contextmanager
def parent_of(root: int, name: str, create: bool = False) -> Iterator[int]:
    """The folder in which ``name`` is, open; FileNotFoundError or NotADirectoryError if there is none."""
    here = os.dup(root)
    try:
        for segment in name.split("/")[:-1]:
            if create:
                _make(here, segment)
            below = os.open(segment, FOLDER, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def leaf(name: str) -> str:
    """The last segment of a name."""
    return name.rpartition("/")[2]


def _make(folder: int, name: str) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=folder)
    except FileExistsError:
        return
    sync(folder)


@contextmanager
def temporary(root: int) -> Iterator[Draft]:
    """A new file without a proper name, which goes away unless it gets one."""
    with parent_of(root, f"{TEMPORARY}/", create=True) as folder:
        name = uuid.uuid4().hex
        with closing(os.open(name, CREATE, 0o600, dir_fd=folder)) as file:
            try:
                yield Draft(name, folder, file)
            finally:
                try:
                    os.unlink(name, dir_fd=folder)
                except FileNotFoundError:
                    pass


def prune(root: int, name: str) -> None:
    """Remove the folders above ``name`` that are empty."""
    for folder in PurePosixPath(name).parents:
        try:
            with parent_of(root, str(folder)) as parent:
                os.rmdir(folder.name, dir_fd=parent)
        except OSError:
            return


def files(top: int, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """The regular files below an open folder, hidden ones aside, and their names, which begin with ``prefix``."""
    for path, folders, names, folder in os.fwalk(".", onerror=_unless_gone, dir_fd=top):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            try:
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode) and not name.startswith("."):
                yield prefix + str(PurePosixPath(path, name)), found


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def withdraw(root: int, name: str) -> str:
    """Take the folder ``name`` out of sight in one step; where it is now: where it was, if it cannot be moved."""
    with parent_of(root, name) as parent, parent_of(root, f"{TEMPORARY}/", create=True) as trash:
        if not stat.S_ISDIR(os.stat(leaf(name), dir_fd=parent, follow_symlinks=False).st_mode):
            raise NotADirectoryError(name)
        place = uuid.uuid4().hex
        try:
            os.rename(leaf(name), place, src_dir_fd=parent, dst_dir_fd=trash)
        except OSError:  # some mounted file systems do not rename folders
            return name
        sync(parent)
    prune(root, name)
    return f"{TEMPORARY}/{place}"


def destroy(root: int, name: str) -> int:
    """Delete a folder and all that is in it; how many bytes that was."""
    with parent_of(root, f"{name}/") as top:
        size = sum(found.st_size for _, found in files(top, ""))
    with parent_of(root, name) as parent:
        shutil.rmtree(leaf(name), dir_fd=parent)
        sync(parent)
    return size


def collect(root: int) -> None:
    """Delete what dead writers left behind."""
    try:
        with parent_of(root, f"{TEMPORARY}/") as folder:
            for name in os.listdir(folder):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if found.st_mtime > time.time() - ABANDONED:
                    continue
                if stat.S_ISDIR(found.st_mode):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
                else:
                    os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
