"""Pack the files that the sandbox wrote into a tar on stdout, or unpack such a tar from stdin into a new sandbox.

    archive.py create NAME=FOLDER...     archive.py extract NAME=FOLDER...     archive.py add NAME=FOLDER...

``extract`` replaces existing files, ``add`` does not: a running program may have them open. Runs in the sandbox as a
process of its own. Each place, such as home=/home/ada, is a folder that is not mounted from the host. Its members in
the tar are named NAME/..., so that it can be unpacked where the folder has another path. Mounts inside a place are
neither packed nor written to. Of an overlay, only the upper layer is packed: unchanged files of the lower layer and
deletions are not recorded. A folder follows its contents in the tar, so that its mode and time are set when it is
complete.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

GUEST_FOLDER = os.path.dirname(os.path.abspath(__file__))
BUFFER = 1 << 18
NOTES_SHOWN = 20
FATAL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO)
"""Errors that end the unpacking; others concern only one file."""
RECURSION_LIMIT = 10_000
"""Two frames for each folder in the longest possible path, and some more."""


class Refused(Exception):
    """A member of a tar that may not be unpacked."""


class Place:
    """A folder that is not mounted from the host. Its files are recognized by their devices."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.device = os.stat(folder).st_dev
        self.other_mounts = mounted_devices() - {self.device}
        self.lower_layer = os.stat(__file__).st_dev

    def has(self, found: os.stat_result) -> bool:
        """Return True if a file or folder with this status is in this place.

        An overlay's files have other device numbers than its folders, so a file is in it if it is on no other mount.
        """
        if stat.S_ISDIR(found.st_mode):
            return found.st_dev == self.device
        return found.st_dev not in self.other_mounts

    def written(self, found: os.stat_result) -> bool:
        """Return True if the sandbox wrote the file with the status ``found``. Folders always count as written."""
        return stat.S_ISDIR(found.st_mode) or found.st_dev != self.lower_layer


def mounted_devices() -> set[int]:
    """Return the devices of all mounts."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        numbers = [line.split(" ", 3)[2].partition(":") for line in file]
    return {os.makedev(int(major), int(minor)) for major, _, minor in numbers}


class Notes:
    """Messages on stderr about problems with single files, limited to NOTES_SHOWN."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, name: str, problem: str) -> None:
        """Count one problem, and print it if the limit is not reached."""
        self.count += 1
        if self.count <= NOTES_SHOWN:
            print(ascii(name), problem, file=sys.stderr)

    def end(self) -> None:
        """Print how many problems were not shown."""
        if self.count > NOTES_SHOWN:
            print("and", self.count - NOTES_SHOWN, "more", file=sys.stderr)


# -- packing ---------------------------------------------------------------------------------------------------------


class FixedSizeReader:
    """A file that always returns as many bytes as requested, even if it shrank or cannot be read to the end."""

    def __init__(self, file: BinaryIO, name: str, notes: Notes) -> None:
        self._file = file
        self._name = name
        self._notes = notes
        self._ended = False

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes, padded with zeros."""
        data, problem = b"", "shrank while it was read"
        if not self._ended:
            try:
                data = self._file.read(size)
            except OSError as error:
                problem = f"could not be read to the end: {error.strerror}"
            if len(data) < size:
                self._ended = True
                self._notes.add(self._name, problem)
        return data.ljust(size, b"\0")


class Packer:
    """Writes the files of places to a tar."""

    def __init__(self, tar: tarfile.TarFile, notes: Notes) -> None:
        self._tar = tar
        self._notes = notes
        self._linked: dict[tuple[int, int], str] = {}

    def pack(self, name: str, path: str, place: Place) -> bool:
        """Pack everything in the folder ``path`` of a place that the sandbox has written.

        Return False if a mount lies inside; the folder then exists in every new sandbox and gets no member.
        """
        try:
            entries = sorted(os.listdir(path))
        except OSError as error:
            self._notes.add(name, f"cannot be read: {error.strerror}")
            return True
        complete = True
        for entry in entries:
            complete &= self._entry(f"{name}/{entry}", os.path.join(path, entry), place)
        return complete

    def _entry(self, name: str, path: str, place: Place) -> bool:
        """Pack a file, a link, or a folder and its contents. Return False if it is or contains a mount."""
        try:
            found = os.lstat(path)
            if not place.has(found):
                return False
            if path == GUEST_FOLDER or not place.written(found):
                return True
            if not stat.S_ISDIR(found.st_mode):
                self._file_or_link(name, path, found)
                return True
            if not self.pack(name, path, place):
                return False
            self._tar.addfile(self._header(name, found, tarfile.DIRTYPE))
            return True
        except BrokenPipeError:
            raise
        except FileNotFoundError:
            return True
        except OSError as error:
            self._notes.add(name, f"cannot be packed: {error.strerror}")
            return True

    def _file_or_link(self, name: str, path: str, found: os.stat_result) -> None:
        identity = found.st_dev, found.st_ino
        if identity in self._linked:
            self._tar.addfile(self._header(name, found, tarfile.LNKTYPE, self._linked[identity]))
            return
        if stat.S_ISLNK(found.st_mode):
            self._tar.addfile(self._header(name, found, tarfile.SYMTYPE, os.readlink(path)))
        elif stat.S_ISREG(found.st_mode):
            self._file(name, path)
        else:
            return
        if found.st_nlink > 1:
            self._linked[identity] = name

    def _file(self, name: str, path: str) -> None:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            header = self._header(name, found, tarfile.REGTYPE)
            header.size = found.st_size
            self._tar.addfile(header, FixedSizeReader(file, name, self._notes))  # type: ignore[arg-type]

    def _header(self, name: str, found: os.stat_result, kind: bytes, target: str = "") -> tarfile.TarInfo:
        header = tarfile.TarInfo(name)
        header.type = kind
        header.mode = stat.S_IMODE(found.st_mode)
        header.mtime = int(found.st_mtime)
        header.linkname = target
        return header


# -- unpacking ---------------------------------------------------------------------------------------------------------


class Unpacker:
    """Unpacks the members of a tar, opening one folder at a time without following links or entering mounts."""

    def __init__(self, places: dict[str, str], replace: bool) -> None:
        self._replace = replace
        self._places = {name: Place(folder) for name, folder in places.items()}

    def unpack(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Unpack one member. Raises Refused or OSError if its type or path is not allowed."""
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            raise Refused("is neither a file, a folder nor a link")
        with self._parent(member.name) as (place, parent, name):
            if member.isdir():
                with self._step(place, parent, name) as folder:
                    os.chmod(folder, member.mode & 0o7777)
                    os.utime(folder, (member.mtime, member.mtime))
                return
            if not self._remove_existing(place, parent, name):
                return
            if member.issym():
                os.symlink(member.linkname, name, dir_fd=parent)
                os.utime(name, (member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)
            elif member.islnk():
                with self._parent(member.linkname) as (_, target_parent, target):
                    os.link(target, name, src_dir_fd=target_parent, dst_dir_fd=parent, follow_symlinks=False)
            else:
                self._file(tar, member, parent, name)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[Place, int, str]]:
        """Yield a member's place, a descriptor of its parent folder, and its name there. Raises Refused."""
        name, *steps = path.split("/")
        place = self._places.get(name)
        if place is None or not steps or not set(steps).isdisjoint({"", ".", ".."}):
            raise Refused("is not in a folder that is restored")
        folder = os.open(place.folder, os.O_PATH | os.O_DIRECTORY)
        try:
            for step in steps[:-1]:
                with self._step(place, folder, step) as inner:
                    os.dup2(inner, folder)
            yield place, folder, steps[-1]
        finally:
            os.close(folder)

    @contextmanager
    def _step(self, place: Place, parent: int, name: str) -> Iterator[int]:
        """Yield a descriptor of the folder ``name``, created if missing. Raises Refused if it is a mount."""
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            pass
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            if not place.has(os.fstat(folder)):
                raise Refused("is in a folder of the host")
            yield folder
        finally:
            os.close(folder)

    def _remove_existing(self, place: Place, parent: int, name: str) -> bool:
        """Remove an existing file if it may be replaced. Return False if it stays. Raises Refused if it is a mount."""
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return True
        if not place.has(found):
            raise Refused("is a file or folder of the host")
        if self._replace:
            os.unlink(name, dir_fd=parent)
        return self._replace

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str) -> None:
        content = tar.extractfile(member)
        assert content is not None
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
        with open(target, "wb") as file:
            while data := content.read(BUFFER):
                file.write(data)
            file.flush()
            os.fchmod(target, member.mode & 0o7777)
            os.utime(target, (member.mtime, member.mtime))


# -- the command -----------------------------------------------------------------------------------------------------


def create(places: dict[str, str], notes: Notes) -> None:
    """Pack ``places`` to stdout."""
    options = {"format": tarfile.PAX_FORMAT, "encoding": "utf-8", "errors": "surrogateescape", "copybufsize": BUFFER}
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", bufsize=BUFFER, **options) as tar:  # type: ignore[call-overload]
        packer = Packer(tar, notes)
        for name, folder in places.items():
            packer.pack(name, folder, Place(folder))


def extract(places: dict[str, str], notes: Notes, replace: bool) -> None:
    """Unpack stdin into ``places``; with ``replace``, replace existing files."""
    unpacker = Unpacker(places, replace)
    options = {"encoding": "utf-8", "errors": "surrogateescape"}
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|", bufsize=BUFFER, **options) as tar:  # type: ignore[call-overload]
        while member := tar.next():
            try:
                unpacker.unpack(tar, member)
            except (OSError, Refused, ValueError, OverflowError) as error:
                if getattr(error, "errno", None) in FATAL:
                    raise
                notes.add(member.name, getattr(error, "strerror", None) or str(error))
            tar.members.clear()  # TarFile keeps all members otherwise.
    while sys.stdin.buffer.read(BUFFER):
        pass


def main(command: str, *places: str) -> None:
    """Run ``command``, "create", "extract" or "add", on places of the form NAME=FOLDER."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    notes = Notes()
    folders = dict(place.split("=", 1) for place in places)
    if command == "create":
        create(folders, notes)
    else:
        extract(folders, notes, replace={"extract": True, "add": False}[command])
    notes.end()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
