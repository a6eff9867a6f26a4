"""Copy and remove single entries of open folders, or move them to the trash, without following links.

The trash is the one in the user's home, as freedesktop.org specifies it. The package send2trash works on paths, which
an attacker can redirect, and prefers a trash folder at the top of the file's volume, which a sandbox may be able to
write to.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from ..storage.disk import closing

SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
NOTE_SUFFIX = ".trashinfo"
MAX_NAME = 255 - len(NOTE_SUFFIX)
"""Maximum bytes of a name in the trash: its note has the same name with an ending."""
MAX_SUFFIX = 32


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


# -- the trash -----------------------------------------------------------------------------------------------------


def home_trash() -> Path:
    """Return the user's trash folder."""
    data = os.environ.get("XDG_DATA_HOME", "")
    return Path(data if os.path.isabs(data) else os.path.expanduser("~/.local/share"), "Trash")


def move_to_trash(place: Place, trash: Path) -> None:
    """Move an entry to the trash, with a note of its path. Raises OSError; the entry then stays where it was."""
    for part in ("files", "info"):
        (trash / part).mkdir(parents=True, exist_ok=True, mode=0o700)
    info = _reserve(trash, place)
    try:
        with closing(os.open(trash / "files", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as files:
            _move(place, files, info.stem)
    except BaseException:
        info.unlink()
        raise


def _reserve(trash: Path, place: Place) -> Path:
    """Write the note under an unused name in the trash, and return the note's path."""
    real = quote(os.fsencode(place.real))
    text = f"[Trash Info]\nPath={real}\nDeletionDate={datetime.now():%Y-%m-%dT%H:%M:%S}\n"
    number = 0
    while True:
        name = _numbered(place.name, number)
        info = trash / "info" / f"{name}{NOTE_SUFFIX}"
        if not os.path.lexists(trash / "files" / name):
            with suppress(FileExistsError), info.open("x") as file:
                file.write(text)
                return info
        number += 1


def _numbered(name: str, number: int) -> str:
    """Return the name in the trash for attempt ``number``, shortened if it is too long for its note."""
    stem, suffix = os.path.splitext(name)
    if len(os.fsencode(suffix)) > MAX_SUFFIX:
        stem, suffix = name, ""
    ending = f" {number}{suffix}" if number else suffix
    return os.fsdecode(os.fsencode(stem)[: MAX_NAME - len(os.fsencode(ending))]) + ending


def _move(place: Place, files: int, name: str) -> None:
    try:
        os.rename(place.name, name, src_dir_fd=place.folder, dst_dir_fd=files)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy_entry(place.folder, place.name, files, name)
        remove_entry(place.folder, place.name)
