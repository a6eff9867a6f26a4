"""Files on a disk: open without following links, write atomically and durably, translate errors.

A store opens the files of its folder one folder at a time from its root, so that no link can lead out of it. New files
are written in ``.tmp``, and folders are moved there to be deleted. ``delete_abandoned`` deletes those that dead
processes left there.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ..errors import DiskFullError, StorageError, StorageUnavailableError

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
CREATE = OPEN | os.O_EXCL

MAY_PASS = {
    errno.EBUSY, errno.EHOSTDOWN, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOTCONN, errno.ESTALE,
    errno.ETIMEDOUT,
}  # fmt: skip
"""Errors from which a disk, or the network behind a mounted one, may recover."""

TEMPORARY = ".tmp"
ABANDONED = 3600.0
"""Seconds since its last change after which a temporary file belongs to a dead writer."""


@contextmanager
def disk_errors(where: str, doing: str) -> Iterator[None]:
    """Turn OSError in the block into DiskFullError or StorageError; ``doing`` completes "Could not ..."."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"could not {doing} in {where}") from error
        problem = f"Could not {doing} in {where}: {error.strerror or error}."
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = (
                "Check that the folder belongs to you and can be written to. It is set by SANDBOX_STORAGE_DIR or, if "
                "it is mounted, by a variable whose name ends in _MOUNT_PATH."
            )
            raise StorageError(where, problem, remedy) from error
        if error.errno in MAY_PASS:
            raise StorageUnavailableError(where, problem) from error
        raise StorageError(where, problem) from error


@contextmanager
def closing(file: int) -> Iterator[int]:
    """Yield an open file or folder, and close it after the block."""
    try:
        yield file
    finally:
        os.close(file)


def sync(folder: int) -> None:
    """Make the names in an open folder durable, if the file system supports that."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


@contextmanager
def replacing(target: Path, size: int) -> Iterator[int]:
    """Yield a temporary file beside ``target``, and rename it to ``target`` when it is complete and on the disk.

    The temporary file is kept only if the block raises StorageUnavailableError or the process is killed; the next call
    continues with it.
    """
    partial = target.with_name(f".{target.name}.partial")
    with closing(os.open(partial, OPEN, 0o600)) as file:
        try:
            os.ftruncate(file, size)
            yield file
            os.fsync(file)
            os.rename(partial, target)
        except StorageUnavailableError:
            raise
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    with closing(os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
        sync(folder)


class Draft(NamedTuple):
    """An open file that will be renamed: its present name, its folder (None if ``name`` is a path), its descriptor."""

    name: str
    folder: int | None
    file: int


@contextmanager
def root_of(path: Path, create: bool = False) -> Iterator[int]:
    """Yield a store's open folder. Raises FileNotFoundError if it does not exist and ``create`` is false."""
    if create:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        yield root


@contextmanager
def parent_of(root: int, name: str, create: bool = False) -> Iterator[int]:
    """Yield the open folder that contains ``name``. Raises FileNotFoundError or NotADirectoryError."""
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


def last_segment(name: str) -> str:
    """Return the last segment of a name."""
    return name.rpartition("/")[2]


def _make(folder: int, name: str) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=folder)
    except FileExistsError:
        return
    sync(folder)


@contextmanager
def temporary(root: int) -> Iterator[Draft]:
    """Yield a new file in ``.tmp``, which is deleted after the block unless it was renamed."""
    with parent_of(root, f"{TEMPORARY}/", create=True) as folder:
        name = uuid.uuid4().hex
        with closing(os.open(name, CREATE, 0o600, dir_fd=folder)) as file:
            try:
                yield Draft(name, folder, file)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)


def remove_empty_folders(root: int, name: str) -> None:
    """Remove the empty folders above ``name``."""
    with suppress(OSError):
        for folder in PurePosixPath(name).parents:
            with parent_of(root, str(folder)) as parent:
                os.rmdir(folder.name, dir_fd=parent)


def files(top: int, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name, with ``prefix``, and the stat result of each regular, not hidden file below an open folder."""
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


def move_aside(root: int, name: str) -> str:
    """Move the folder ``name`` to ``.tmp`` in one step, and return its new name; its old one if it cannot be moved.

    Raises FileNotFoundError or NotADirectoryError if it is not a folder.
    """
    with parent_of(root, name) as parent, parent_of(root, f"{TEMPORARY}/", create=True) as trash:
        if not stat.S_ISDIR(os.stat(last_segment(name), dir_fd=parent, follow_symlinks=False).st_mode):
            raise NotADirectoryError(name)
        place = uuid.uuid4().hex
        try:
            os.rename(last_segment(name), place, src_dir_fd=parent, dst_dir_fd=trash)
        except OSError:  # some mounted file systems do not rename folders
            return name
        sync(parent)
    remove_empty_folders(root, name)
    return f"{TEMPORARY}/{place}"


def delete_folder(root: int, name: str) -> int:
    """Delete a folder with its content. Return the size of its files in bytes, without hidden ones."""
    with parent_of(root, f"{name}/") as top:
        size = sum(found.st_size for _, found in files(top, ""))
    with parent_of(root, name) as parent:
        shutil.rmtree(last_segment(name), dir_fd=parent)
        sync(parent)
    return size


def delete_abandoned(root: int) -> None:
    """Delete the temporary files and folders of dead writers."""
    with suppress(FileNotFoundError), parent_of(root, f"{TEMPORARY}/") as folder:
        for name in os.listdir(folder):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if found.st_mtime > time.time() - ABANDONED:
                continue
            if stat.S_ISDIR(found.st_mode):
                shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)
