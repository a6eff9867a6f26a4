"""Move a file to the user's trash, as freedesktop.org specifies it, through the descriptor of the file's folder.

The package send2trash works on paths, which an attacker can redirect, and prefers a trash folder at the top of the
file's volume, which a sandbox may be able to write to. This module always uses the trash in the user's home.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from ..storage.disk import closing
from .entries import Place, copy_entry, remove_entry

NOTE_SUFFIX = ".trashinfo"
MAX_NAME = 255 - len(NOTE_SUFFIX)
"""Maximum bytes of a name in the trash: its note has the same name with an ending."""
MAX_SUFFIX = 32


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
