"""Remember which files this process has verified, so that a large image is not read again when its sandbox wakes.

A file counts as unchanged while its device, inode, size, mtime and ctime are the same. Users cannot set the ctime:
Linux renews it with every write, under any name of the file, and with every rename. A change could go unnoticed in
three ways, which are excluded:

- Two writes within one step of Linux's clock get the same ctime. ``identify`` therefore waits for the next step,
  so that the file is read after the step in which it was last changed.
- Other file systems may have coarser times, or those of another machine. Only those in FILE_SYSTEMS are trusted.
- Damage on the disk does not change any time. Therefore a file is read again after TRUSTED seconds.

A program that maps the file into memory before it is read could still change it unnoticed, but only a program of this
user can open the file, and it could as well read the signing key. Nothing is stored: a new process verifies each file.
"""

from __future__ import annotations

import ctypes
import os
import time
from threading import Lock

from .base import FileRecord

FILE_SYSTEMS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0xCA451A4E, 0x01021994, 0x794C7630})
"""Types in statfs(2) of the trusted file systems: ext4, XFS, Btrfs, F2FS, ZFS, bcachefs, tmpfs and overlayfs."""
TRUSTED = 3600.0
SMALL = 4 << 20
"""Bytes below which a file is not remembered: to read it takes little more time than to wait for the clock."""
COARSE_CLOCK = 5
"""CLOCK_REALTIME_COARSE, Linux's clock for the times of files. Python has no name for it."""
LONGEST_STEP = 0.05
"""Seconds to wait for the clock at most. Its step is 1 to 10 ms; a ctime further ahead is not trusted."""

LIBC = ctypes.CDLL(None)

Identity = tuple[int, int, int, int, int]


class VerifiedFiles:
    """The ``most`` files that were verified last, each with the record that it matched. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[Identity, tuple[FileRecord, float]] = {}
        self._lock = Lock()

    def identify(self, file: int) -> Identity | None:
        """Return the identity of an open file, for ``add``; None if it cannot be trusted. Call it before reading."""
        found = os.fstat(file)
        whole_seconds = found.st_ctime_ns % 10**9 == 0  # an ext4 with small inodes has no finer times
        if not self._most or found.st_size < SMALL or whole_seconds or _file_system(file) not in FILE_SYSTEMS:
            return None
        deadline = time.monotonic() + LONGEST_STEP
        while time.clock_gettime_ns(COARSE_CLOCK) <= found.st_ctime_ns:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.0005)
        return _identity(found)

    def add(self, file: int, identity: Identity | None, record: FileRecord) -> None:
        """Remember that an open file matches ``record``, unless it has changed since ``identity`` was taken."""
        if identity is None or identity != _identity(os.fstat(file)):
            return
        with self._lock:
            self._known.pop(identity, None)
            self._known[identity] = record, _now()
            while len(self._known) > self._most:
                del self._known[next(iter(self._known))]

    def match(self, file: int, record: FileRecord) -> bool:
        """Return True if an open file is known to match ``record``, and has not changed since that was verified."""
        with self._lock:
            known, since = self._known.get(_identity(os.fstat(file)), (None, 0.0))
        return known == record and _now() - since < TRUSTED


def _now() -> float:
    """Return the time in seconds by a clock that continues while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _file_system(file: int) -> int:
    """Return the type of the file system of an open file; 0 if it is unknown."""
    answer = ctypes.create_string_buffer(256)  # struct statfs, which begins with the type, a long
    if LIBC.fstatfs(file, answer):
        return 0
    return ctypes.c_ulong.from_buffer(answer).value & 0xFFFFFFFF
