"""Leases among the servers of one machine: one locked file each. Linux unlocks the file when its process ends.

The locks belong to the open file description (F_OFD_SETLK). Unlike with flock, another process can test for a lock
without taking it briefly.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote
from weakref import WeakSet

from ..errors import LeaseLostError, StorageError
from ..storage.disk import OPEN, closing
from .base import CLOCK, Clock, Leases, Owner, Pace

PACE = Pace(lease_time=math.inf, renewal=0.5, poll=0.1)
LONGEST_RECORD = 4096


class LocalLeases(Leases):
    """Leases in ``folder``, which only this user's processes on this machine use. These leases do not expire.

    A process that is stopped (SIGSTOP) keeps its leases.
    """

    def __init__(self, folder: Path, pace: Pace = PACE, clock: Clock = CLOCK) -> None:
        super().__init__(pace, clock)
        self._folder = folder

    def _attempt(self, name: str, owner: Owner) -> LocalAttempt:
        return LocalAttempt(self._folder, name, owner, self.clock)

    def _holder(self, name: str) -> Owner | None:
        return _lock_owner(_path(self._folder, name, "lock"))


class LocalAttempt:
    """Attempt to acquire a lease by locking its file."""

    def __init__(self, folder: Path, name: str, owner: Owner, clock: Clock) -> None:
        self._clock = clock
        self.holder = Owner.from_json("")
        self._name = name
        self._owner = owner
        self._path = _path(folder, name, "lock")
        self._waiter_path = _path(folder, name, "waiter")
        self._file: LockedFile | None = None
        self._waiter_file: LockedFile | None = None

    def take(self) -> LocalClaim | None:
        """Lock the file and return the claim; None if another process has locked it. Raises StorageError."""
        with _storage_errors(self._path):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            while True:
                self._file = LockedFile.lock(self._path, self._owner)
                if self._file is not None:
                    token = _next_token(self._path.with_name("last-token"))
                    return LocalClaim(self._name, token, self._file, self._waiter_path, self._clock)
                if holder := _lock_owner(self._path):
                    self.holder = holder
                    return None

    def ask(self) -> None:
        """Become the waiter: lock the waiter's file, unless another attempt has locked it. Raises StorageError."""
        with _storage_errors(self._waiter_path):
            if self._waiter_file is None or not self._waiter_file.in_place():
                self.withdraw()
                self._waiter_file = LockedFile.lock(self._waiter_path, self._owner)

    def withdraw(self) -> None:
        """Remove the waiter's file if this attempt has locked it."""
        if self._waiter_file is not None:
            self._waiter_file.remove()

    def abandon(self) -> None:
        """Remove all files that this attempt has locked."""
        self.withdraw()
        if self._file is not None:
            self._file.remove()


class LocalClaim:
    """A lease whose file this process has locked."""

    def __init__(self, name: str, token: int, file: LockedFile, waiter: Path, clock: Clock) -> None:
        self.token = token
        self.renewed = clock.now()
        self._clock = clock
        self._name = name
        self._file = file
        self._waiter_path = waiter

    def renew(self) -> bool:
        """Check the file. Return True if another process waits. Raises LeaseLostError if the file is not ours."""
        if not self._file.in_place():
            raise LeaseLostError(self._name, f"its file {self._file.path} was removed or replaced")
        self.renewed = self._clock.now()
        return _lock_owner(self._waiter_path) is not None

    def end(self) -> None:
        """Remove the file and unlock it."""
        self._file.remove()


_open: WeakSet[LockedFile] = WeakSet()


class LockedFile:
    """A file that this process has locked. The lock ends with ``remove``, or when the file is closed."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        self._identity = (found.st_dev, found.st_ino)
        _open.add(self)

    @classmethod
    def lock(cls, path: Path, owner: Owner) -> LockedFile | None:
        """Create the file if needed, lock it and write ``owner`` to it. None if another process has locked it."""
        while True:
            file = cls(path, os.open(path, OPEN, 0o600))
            try:
                if not _lock(file._descriptor):
                    file.close()
                    return None
                if file.in_place():
                    os.ftruncate(file._descriptor, 0)
                    os.pwrite(file._descriptor, owner.to_json().encode()[:LONGEST_RECORD], 0)
                    return file
            except OSError:
                file.close()
                raise
            file.close()

    def in_place(self) -> bool:
        """Return True if the path still leads to this file. If it was removed, its lock keeps no other process out."""
        try:
            found = os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def remove(self) -> None:
        """Remove the file and unlock it, also for forked children that share the descriptor. May be called again."""
        if self._descriptor < 0:
            return
        with suppress(OSError):  # The file stays, but without a lock: the next owner locks it as it is.
            if self.in_place():
                self.path.unlink()
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK))
        self.close()

    def close(self) -> None:
        """Close the descriptor in this process."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _close_all() -> None:
    for file in list(_open):
        file.close()


os.register_at_fork(after_in_child=_close_all)


def _flock(kind: int) -> bytes:
    """Return a struct flock for a whole file."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
    except BlockingIOError:
        return False
    return True


def _lock_owner(path: Path) -> Owner | None:
    """Return the owner that has locked the file, or None if it is not locked or missing. Raises StorageError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with _storage_errors(path), suppress(FileNotFoundError), closing(os.open(path, flags)) as descriptor:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
        if struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK:
            return Owner.from_json(_read_owner(descriptor))
    return None


def _read_owner(descriptor: int) -> bytes:
    """Return the content of a locked file. Waits up to 50 ms, because the owner writes it just after locking."""
    for _ in range(50):
        content = os.pread(descriptor, LONGEST_RECORD, 0)
        if content:
            break
        time.sleep(0.001)
    return content


def _next_token(counter: Path) -> int:
    """Return a number greater than all earlier ones; at least the clock's microseconds, in case the file was lost."""
    with closing(os.open(counter, OPEN, 0o600)) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        written = os.pread(descriptor, 20, 0)
        last = int(written) if written.isdigit() else 0
        token = max(last + 1, time.time_ns() // 1000)
        os.pwrite(descriptor, b"%020d" % token, 0)
        return token


def _path(folder: Path, name: str, suffix: str) -> Path:
    """Return the path of a lease's file. It is directly in ``folder``, even if ``name`` contains slashes."""
    return folder / f"{quote(name, safe='')}.{suffix}"


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"The lease file {path} cannot be used: {error.strerror}."
        raise StorageError(str(path.parent), problem, f"Check {path.parent} and its permissions.") from error
