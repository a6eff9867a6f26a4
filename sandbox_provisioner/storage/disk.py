"""Files on a disk, for all stores: opened without following links, put in place whole and durable, errors in words."""

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
    errno.EBUSY,
    errno.EHOSTDOWN,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOTCONN,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
"""What a disk, or the network behind a mounted one, may recover from."""


@contextmanager
def disk_errors(where: str, doing: str) -> Iterator[None]:
    """What the system refuses becomes an error of ours; ``doing`` completes "Could not ..."."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"could not {doing} in {where}") from error
        problem = f"Could not {doing} in {where}: {error.strerror or error}."
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorageError(where, problem, "Check that the folder belongs to you and can be written to.") from error
        if error.errno in MAY_PASS:
            raise StorageUnavailableError(where, problem) from error
        raise StorageError(where, problem) from error


@contextmanager
def closing(file: int) -> Iterator[int]:
    """An open file or folder, closed at the end."""
    try:
        yield file
    finally:
        os.close(file)


def sync(folder: int) -> None:
    """Make the names in an open folder last; a file system that cannot do that is taken as it is."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


@contextmanager
def landing(target: Path, size: int) -> Iterator[int]:
    """Where a file is put together: beside ``target``, whose name it gets when it is whole and on the disk.

    What there is of it stays only if storage could not be reached, or if we are killed; it is taken up again then.
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
