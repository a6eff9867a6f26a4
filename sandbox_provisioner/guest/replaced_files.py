"""Keep the content of data files that were replaced or deleted on the host while this process has them open or mapped.

Runs in the kernel's process in the sandbox, before a checkpoint, with any version of Python. ``hooks`` calls
``keep_content``.

gVisor cannot save such a file once a lookup of its path has shown that it changed ("invalidated dentries can't be
saved"); without a lookup, the restored process would see the new file, or fail without one. Therefore each such file
is copied to memory. The copy takes the file's place in descriptors, which keep their number, access mode and position,
and in mappings, which keep their address. This is how Linux treats a deleted file that is still open.

Libraries are left alone: other processes map them too, and a restore compares their bytes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from errno import EFAULT
from typing import Any, NamedTuple

DELETED = " (deleted)"
REGION = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) ([r-])([w-])([x-])([ps]) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([0-9]+) +(/.*)$",
    re.MULTILINE,
)
HOST_FILES = "9p"
"""The type, in ``mountinfo``, of a mounted folder of the host."""
LARGEST = 4 << 30
"""Most bytes that are copied; less if a quarter of the free memory is less. A larger file is left as it is."""
PIECE = 1 << 20
MAP_SHARED, MAP_PRIVATE, MAP_FIXED = 1, 2, 16


class Region(NamedTuple):
    """A mapping: its address range, mmap's protection flags, and the offset, device and inode of its file."""

    start: int
    end: int
    protection: int
    shared: bool
    offset: int
    identity: tuple[int, int]
    path: str


class Descriptor(NamedTuple):
    """An open regular file, with its device and inode."""

    number: int
    identity: tuple[int, int]
    path: str
    size: int


def keep_content() -> None:
    """Replace each data file of the host that was replaced or deleted by a copy. Files that cannot be copied stay."""
    devices = _host_devices()
    regions = [region for region in _regions() if region.identity[0] in devices]
    descriptors = [descriptor for descriptor in _descriptors() if descriptor.identity[0] in devices]
    libraries = {region.identity for region in regions if region.protection & 4}
    room = _room()
    files: list[Descriptor | Region] = [*descriptors, *regions]
    found = [file for file in files if file.identity not in libraries]
    _notice({file.path for file in found if not file.path.endswith(DELETED) and _size(file) <= room})
    stale = {descriptor.identity for descriptor in descriptors if _is_stale(f"/proc/self/fd/{descriptor.number}")}
    stale |= {region.identity for region in _regions() if region.path.endswith(DELETED)}
    for identity in stale & {file.identity for file in found}:
        opened = [descriptor for descriptor in descriptors if descriptor.identity == identity]
        mapped = [region for region in regions if region.identity == identity]
        size = sum(_size(region) for region in mapped if not (opened and region.shared))
        size += max((descriptor.size for descriptor in opened), default=0)
        if size <= room:
            with suppress(OSError, AttributeError, ImportError):  # the error of the checkpoint then names the file
                _Replacement(opened, mapped).run()
                room -= size


# -- find the files --------------------------------------------------------------------------------------------------


def _host_devices() -> set[int]:
    """Return the device numbers of the mounted folders of the host."""
    found = set()
    for line in _read("/proc/self/mountinfo").splitlines():
        fields, _, about = line.partition(" - ")
        if about.split(" ")[0] == HOST_FILES:
            major, minor = fields.split(" ")[2].split(":")
            found.add(os.makedev(int(major), int(minor)))
    return found


def _regions() -> Iterator[Region]:
    """Yield the mappings of files in this process. A path that contains a line end is cut there."""
    for match in REGION.finditer(_read("/proc/self/maps")):
        start, end, read, write, execute, kind, offset, major, minor, inode, path = match.groups()
        protection = 1 * (read == "r") + 2 * (write == "w") + 4 * (execute == "x")
        identity = os.makedev(int(major, 16), int(minor, 16)), int(inode)
        yield Region(int(start, 16), int(end, 16), protection, kind == "s", int(offset, 16), identity, path)


def _descriptors(folder: str = "/proc/self/fd") -> Iterator[Descriptor]:
    """Yield the open regular files of the process with this folder of descriptors."""
    for name in os.listdir(folder):
        with suppress(OSError):
            path, found = os.readlink(f"{folder}/{name}"), os.stat(f"{folder}/{name}")
            if stat.S_ISREG(found.st_mode):
                yield Descriptor(int(name), (found.st_dev, found.st_ino), path, found.st_size)


def _notice(paths: set[str]) -> None:
    """Look the paths up, so that gVisor marks those that changed.

    Leaves out those that other processes have open: their descriptors are not replaced, and would prevent the save.
    """
    for entry in os.listdir("/proc") if paths else ():
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):
                paths -= {descriptor.path for descriptor in _descriptors(f"/proc/{entry}/fd")}
    for path in paths:
        os.path.lexists(path)


def _is_stale(link: str) -> bool:
    """Return True if the file behind a link in ``/proc`` is marked, and this is not a part of its name."""
    with suppress(OSError):
        path = os.readlink(link)
        return path.endswith(DELETED) and not os.path.lexists(path)
    return False


def _size(file: Descriptor | Region) -> int:
    return file.size if isinstance(file, Descriptor) else file.end - file.start


def _room() -> int:
    """Return the number of bytes that may be copied."""
    match = re.search(r"^MemAvailable: +([0-9]+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    return min(LARGEST, int(match[1]) * 1024 // 4) if match else LARGEST


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return file.read()


# -- replace one file ------------------------------------------------------------------------------------------------


class _Replacement:
    """The replacement of one file by a copy in memory, in ``descriptors`` and ``regions``."""

    def __init__(self, descriptors: list[Descriptor], regions: list[Region]) -> None:
        import ctypes
        import fcntl

        self._numbers = [descriptor.number for descriptor in descriptors]
        self._regions = regions
        self._fcntl: Any = fcntl
        self._errno = ctypes.get_errno
        self._libc: Any = ctypes.PyDLL(None, use_errno=True)  # keeps Python's other threads waiting during a call
        self._libc.mmap.restype = self._libc.write.restype = ctypes.c_ssize_t
        word, number = ctypes.c_size_t, ctypes.c_int
        self._libc.mmap.argtypes = [word, word, number, number, number, ctypes.c_int64]
        self._libc.write.argtypes = [number, word, word]

    def run(self) -> None:
        """Copy the content, then replace descriptors and mappings. Raises OSError."""
        if any(not region.protection & 1 for region in self._regions):
            raise PermissionError("A mapping cannot be read.")
        copy = os.memfd_create("replaced file")
        try:
            if self._numbers:
                self._copy_file(copy)
            private = [(region, self._copy_region(region)) for region in self._regions if not region.shared]
            shared = [region for region in self._regions if region.shared]
            if not self._numbers:
                for region in shared:
                    os.lseek(copy, region.offset, os.SEEK_SET)
                    self._write(copy, region)
            for group in self._groups():
                self._replace_descriptors(copy, group)
            for region in shared:
                self._map(region, copy, region.offset)
            for region, own in private:
                self._map(region, own, 0)
                os.close(own)
        finally:
            os.close(copy)

    def _copy_file(self, copy: int) -> None:
        """Copy the content. A file that is open only for writing cannot be read again: its copy has only its size."""
        offset = 0
        try:
            source = os.open(f"/proc/self/fd/{self._numbers[0]}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            if self._regions or any(self._mode(number) & os.O_ACCMODE != os.O_WRONLY for number in self._numbers):
                raise
            os.ftruncate(copy, os.fstat(self._numbers[0]).st_size)
            return
        try:
            while piece := os.pread(source, PIECE, offset):
                offset += len(piece)
                while piece:
                    piece = piece[os.write(copy, piece) :]
        finally:
            os.close(source)

    def _copy_region(self, region: Region) -> int:
        """Return a copy of the memory of a private mapping, which may differ from its file."""
        copy = os.memfd_create("replaced mapping")
        self._write(copy, region)
        return copy

    def _write(self, copy: int, region: Region) -> None:
        """Write the memory of a region to ``copy``, up to the end of the file: the rest cannot be read.

        A system call reports that end as an error, where an access would end the process.
        """
        place = region.start
        while place < region.end:
            written = self._libc.write(copy, place, min(PIECE, region.end - place))
            if written < 0:
                if self._errno() == EFAULT:
                    return
                raise OSError(self._errno(), "The memory of a mapping was not copied.")
            place += written

    def _groups(self) -> list[list[int]]:
        """Return the descriptors in groups that share a position, as copies by ``dup`` do."""
        groups: list[list[int]] = []
        for number in self._numbers:
            group = next((group for group in groups if _share_position(group[0], number)), None)
            if group is None:
                groups.append([number])
            else:
                group.append(number)
        return groups

    def _replace_descriptors(self, copy: int, group: Iterable[int]) -> None:
        numbers = list(group)
        opened = os.open(f"/proc/self/fd/{copy}", self._mode(numbers[0]) | os.O_CLOEXEC)
        flags = [os.O_CLOEXEC * (not os.get_inheritable(number)) for number in numbers]
        os.lseek(opened, os.lseek(numbers[0], 0, os.SEEK_CUR), os.SEEK_SET)
        for number, flag in zip(numbers, flags):  # noqa: B905, because older versions of Python do not know strict
            self._libc.dup3(opened, number, flag)
        os.close(opened)

    def _mode(self, number: int) -> int:
        flags: int = self._fcntl.fcntl(number, self._fcntl.F_GETFL)
        return flags & (os.O_ACCMODE | os.O_APPEND)

    def _map(self, region: Region, copy: int, offset: int) -> None:
        sharing = MAP_SHARED if region.shared else MAP_PRIVATE
        length = region.end - region.start
        if self._libc.mmap(region.start, length, region.protection, sharing | MAP_FIXED, copy, offset) == -1:
            raise OSError("A mapping cannot be replaced.")


def _share_position(one: int, other: int) -> bool:
    """Return True if a change of the position of one descriptor changes that of the other."""
    position = os.lseek(one, 0, os.SEEK_CUR)
    if os.lseek(other, 0, os.SEEK_CUR) != position:
        return False
    os.lseek(one, position + 1, os.SEEK_SET)
    shared = os.lseek(other, 0, os.SEEK_CUR) == position + 1
    os.lseek(one, position, os.SEEK_SET)
    return shared
