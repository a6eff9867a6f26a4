"""Helpers for files on a disk: open without following links, write atomically and durably, translate errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
