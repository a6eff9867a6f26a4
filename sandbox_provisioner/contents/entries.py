"""Copy, move and remove single entries of open folders, without following links."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import dataclass

from ..storage.disk import closing

SAFE = os.O_NOFOLLOW | os.O_CLOEXEC


class AccessRefused(Exception):
    """The path leads through a link that must not be followed, or is neither a file nor a folder."""


@dataclass(frozen=True)
class Place:
    """An entry of a folder: the folder's descriptor, the entry's name, and its real path."""

    folder: int
    name: str
    real: str

    def stat(self) -> os.stat_result:
        """Return the status of the entry itself, not of a link's target."""
        return os.stat(self.name, dir_fd=self.folder, follow_symlinks=False)


def copy_entry(folder: int, name: str, target_folder: int, target: str) -> None:
    """Copy a file, a link as a link, or a folder and its contents, from one folder to another.

    Raises AccessRefused for any other entry.
    """
    kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISLNK(kind):
        os.symlink(os.readlink(name, dir_fd=folder), target, dir_fd=target_folder)
        return
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise AccessRefused(not_a_file(name))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with closing(os.open(name, os.O_RDONLY | SAFE | os.O_NONBLOCK, dir_fd=folder)) as old:
        if stat.S_ISDIR(kind):
            os.mkdir(target, 0o700, dir_fd=target_folder)
            flags = os.O_RDONLY | os.O_DIRECTORY
        with closing(os.open(target, flags | SAFE, 0o600, dir_fd=target_folder)) as new:
            if stat.S_ISDIR(kind):
                for entry in os.listdir(old):
                    copy_entry(old, entry, new, entry)
            elif not stat.S_ISREG(os.fstat(old).st_mode):
                raise AccessRefused(not_a_file(name))
            else:
                with os.fdopen(os.dup(old), "rb") as reader, os.fdopen(os.dup(new), "wb") as writer:
                    shutil.copyfileobj(reader, writer)
            shutil.copystat(f"/proc/self/fd/{old}", f"/proc/self/fd/{new}")


def remove_entry(folder: int, name: str) -> None:
    """Remove a file, a link, or a folder and its contents."""
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def type_and_target(place: Place) -> tuple[int, str]:
    """Return the type of an entry, and the target if it is a link."""
    try:
        return stat.S_IFLNK, os.readlink(place.name, dir_fd=place.folder)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return stat.S_IFMT(place.stat().st_mode), ""


def not_a_file(path: str) -> str:
    """Return the reason for refusing an entry that is neither a file, a folder nor a link."""
    return f"{path} is neither a file nor a folder (a FIFO, a socket or a device)."
