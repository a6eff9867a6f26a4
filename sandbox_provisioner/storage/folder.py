"""FolderStore: objects as plain files in a folder; subclasses differ only in how they exclude other writers.

An object's generation is its file's modification time in nanoseconds, set before the file gets its name, so that both
change in one step. Each generation is greater than all earlier ones in the folder: the modification time of
``.generation`` is the last one. Readers therefore need no lock, and always see a complete object.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from ..errors import ConflictError, CorruptObjectError, ObjectNotFoundError, SandboxError, StorageError
from . import disk
from .base import MOST_READ, NEW, Advance, FileRecord, ObjectInfo, ObjectStore, nothing, require_readable
from .names import is_name, valid_name, valid_prefix
from .parts import PIECE, no_copy, record_of, spans_of, verify, write_to
from .verified_files import VerifiedFiles

Check = Callable[[], None]
"""Raises StorageUnavailableError if the write lock was lost, as in a paused process; called before each change."""

GENERATION = ".generation"
MISSING = (FileNotFoundError, NotADirectoryError)
"""The errors for a path that does not exist, or that leads through a file."""
COARSEST = 10**10
"""Nanoseconds: coarsest step of modification times that a file system may have."""


class FolderStore(ObjectStore):
    """A store in a folder. The first write creates the folder with mode 0700."""

    def __init__(self, folder: Path, most_verified: int = 0) -> None:
        """Remember the last ``most_verified`` files that were verified: unchanged ones are not read again."""
        self.root = Path(os.path.abspath(folder))
        self.where = str(self.root)
        self._verified = VerifiedFiles(most_verified)

    @abstractmethod
    def _exclusive(self, root: int) -> AbstractContextManager[Check]:
        """Exclude all other writers from the folder that is open as ``root`` during the block; yields the check."""

    def read(self, name: str) -> tuple[bytes, ObjectInfo]:
        """Return an object's bytes and its properties."""
        with disk.disk_errors(self.where, f"read {name}"), self._object(name) as (file, info):
            require_readable(self.where, name, info.size)
            data, left = bytearray(), MOST_READ + 1
            while left > 0 and (piece := os.read(file, min(PIECE, left))):
                data += piece
                left -= len(piece)
            require_readable(self.where, name, len(data))  # it may have grown
            return bytes(data), info

    def info(self, name: str) -> ObjectInfo:
        """Return an object's properties."""
        with disk.disk_errors(self.where, f"read {name}"), self._object(name) as (_, info):
            return info

    def write(self, name: str, data: bytes, generation: int | None = None) -> ObjectInfo:
        """Write an object. Its data is on the disk before it gets its name."""
        valid_name(self.where, name)
        with (
            disk.disk_errors(self.where, f"write {name}"),
            disk.root_of(self.root, create=True) as root,
            disk.temporary(root) as draft,
        ):
            write_to(draft.file, nothing)(0, data)
            return self._place(root, draft, name, generation)

    def delete(self, name: str, generation: int | None = None) -> bool:
        """Delete an object, and the folders that become empty."""
        valid_name(self.where, name)
        with disk.disk_errors(self.where, f"delete {name}"), suppress(*MISSING), disk.root_of(self.root) as root:
            return self._delete(root, name, generation)
        return False

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return the objects below ``prefix``, sorted by name. Also deletes temporary files of dead writers."""
        if prefix:
            valid_prefix(self.where, prefix)
        errors = disk.disk_errors(self.where, "list the objects")
        with errors, suppress(*MISSING), disk.root_of(self.root) as root, disk.parent_of(root, prefix) as top:
            disk.delete_abandoned(root)
            return sorted(_info(name, found) for name, found in disk.files(top, prefix) if is_name(name))
        return []

    def upload(self, source: Path, name: str, advance: Advance = nothing) -> FileRecord:
        """Store a file: move it if this user owns it and it is on the same file system, else copy it."""
        valid_name(self.where, name)
        with (
            disk.disk_errors(self.where, f"store {source}"),
            disk.closing(os.open(source, disk.READ)) as file,
            disk.root_of(self.root, create=True) as root,
        ):
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise StorageError(self.where, f"{source} cannot be stored in {self.where}: it is not a file.")
            try:
                if not self._move(root, source, file, name):
                    return self._copy(root, file, name, advance)
            except ConflictError as conflict:
                record = record_of(file, no_copy)
                try:
                    with self._object(name) as (there, _):
                        verify(self.where, name, there, record, no_copy)
                except CorruptObjectError:
                    raise conflict from None
                return record
            try:
                return self._record_of_moved(file, advance)
            except BaseException:
                with suppress(SandboxError):
                    self.delete(name)
                raise

    def download(self, name: str, record: FileRecord, target: Path, advance: Advance = nothing) -> None:
        """Copy a file to ``target``, and verify it while copying."""
        spans_of(self.where, name, record)
        with (
            disk.disk_errors(self.where, f"copy {name} to {target}"),
            self._object(name) as (file, _),
            disk.replacing(target, record.size) as copy,
        ):
            verify(self.where, name, file, record, write_to(copy, advance))

    def in_place(self, name: str, record: FileRecord) -> Path | None:
        """Verify a file, unless it is known to be unchanged, and return its path.

        Return None if another user could change it afterwards.
        """
        with disk.disk_errors(self.where, f"read {name}"), self._object(name) as (file, _):
            if not self._private(name, file):
                return None
            if not self._verified.match(file, record):
                identity = self._verified.identify(file)
                verify(self.where, name, file, record, no_copy)
                self._verified.add(file, identity, record)
        return self.root / name

    def _private(self, name: str, file: int) -> bool:
        """Return True if only this user and root can change a file and the folders that contain it."""
        folders = [self.root.joinpath(*name.split("/")[:depth]) for depth in range(name.count("/") + 1)]
        found = [os.fstat(file), *map(os.lstat, folders)]
        above = map(os.stat, Path(os.path.realpath(self.root)).parents)
        found += (each for each in above if not each.st_mode & stat.S_ISVTX)  # nobody can rename others' files there
        return all(each.st_uid in (0, os.geteuid()) and not each.st_mode & 0o022 for each in found)

    def delete_all(self, prefix: str) -> int:
        """Delete everything below ``prefix``: it is moved away in one step, and then its files are deleted."""
        valid_prefix(self.where, prefix)
        with disk.disk_errors(self.where, f"delete {prefix}"), suppress(*MISSING), disk.root_of(self.root) as root:
            with self._exclusive(root) as check:
                check()
                withdrawn = disk.move_aside(root, prefix[:-1])
            return disk.delete_folder(root, withdrawn)
        return 0

    @contextmanager
    def _object(self, name: str) -> Iterator[tuple[int, ObjectInfo]]:
        """Yield an object's open file and its properties. Raises ObjectNotFoundError."""
        valid_name(self.where, name)
        try:
            with disk.root_of(self.root) as root, disk.parent_of(root, name) as folder:
                opened = os.open(disk.last_segment(name), disk.READ, dir_fd=folder)
        except MISSING:
            raise ObjectNotFoundError(self.where, name) from None
        with disk.closing(opened) as file:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise ObjectNotFoundError(self.where, name)
            yield file, _info(name, found)

    def _place(
        self, root: int, draft: disk.Draft, name: str, generation: int | None, durable: bool = True
    ) -> ObjectInfo:
        """Rename a complete file to ``name``. Raises ConflictError if ``name`` has another ``generation``."""
        now = time.time_ns()
        os.utime(draft.file, ns=(now, now))
        if durable:
            os.fsync(draft.file)
        with self._exclusive(root) as check:
            current = self._current(root, name)
            if generation not in (None, current):
                raise ConflictError(self.where, name, generation or NEW)
            self._stamp(root, draft.file, current)
            with disk.parent_of(root, name, create=True) as folder:
                check()
                os.rename(draft.name, disk.last_segment(name), src_dir_fd=draft.folder, dst_dir_fd=folder)
                disk.sync(folder)
        return _info(name, os.fstat(draft.file))

    def _delete(self, root: int, name: str, generation: int | None) -> bool:
        with self._exclusive(root) as check, disk.parent_of(root, name) as folder:
            current = _generation(folder, disk.last_segment(name))
            if current == NEW:
                return False
            if generation not in (None, current):
                raise ConflictError(self.where, name, generation or NEW)
            check()
            os.unlink(disk.last_segment(name), dir_fd=folder)
            disk.sync(folder)
            disk.remove_empty_folders(root, name)
            return True

    def _current(self, root: int, name: str) -> int:
        try:
            with disk.parent_of(root, name) as folder:
                return _generation(folder, disk.last_segment(name))
        except FileNotFoundError:
            return NEW

    def _stamp(self, root: int, file: int, current: int) -> None:
        """Set a file's modification time above the last generation, however coarse the file system's times are."""
        with disk.closing(os.open(GENERATION, disk.OPEN, 0o600, dir_fd=root)) as mark:
            last = max(os.fstat(mark).st_mtime_ns, current)
            step = 1
            while os.fstat(file).st_mtime_ns <= last:
                if step > COARSEST:
                    problem = f"The file system of {self.where} does not keep modification times."
                    raise StorageError(self.where, problem, "Choose a folder on another file system.")
                os.utime(file, ns=(last + step, last + step))
                os.fsync(file)
                step *= 10
            given = os.fstat(file).st_mtime_ns
            os.utime(mark, ns=(given, given))

    def _move(self, root: int, source: Path, file: int, name: str) -> bool:
        """Move ``source`` into the store, without writing its data to the disk. Return False if it cannot be moved."""
        found, here = os.fstat(file), os.fstat(root)
        if found.st_dev != here.st_dev or found.st_uid != os.geteuid() or found.st_nlink != 1:
            return False
        os.fchmod(file, 0o600)
        try:
            self._place(root, disk.Draft(str(source), None, file), name, NEW, durable=False)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            return False
        return True

    def _record_of_moved(self, file: int, advance: Advance) -> FileRecord:
        """Return the record of a file that has its final name, and write its data to the disk at the same time.

        Nothing refers to the file before its record is returned, so it need not be on the disk when it gets its name.
        """
        identity = self._verified.identify(file)
        record = record_of(file, lambda _, piece: advance(len(piece)), flush=True)
        self._verified.add(file, identity, record)
        return record

    def _copy(self, root: int, file: int, name: str, advance: Advance) -> FileRecord:
        with disk.temporary(root) as draft:
            record = record_of(file, write_to(draft.file, advance))
            self._place(root, draft, name, NEW)
        return record


def _generation(folder: int, name: str) -> int:
    """Return the generation of a file in an open folder; NEW if it does not exist."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return NEW
    return NEW if stat.S_ISDIR(found.st_mode) else found.st_mtime_ns


def _info(name: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, found.st_mtime_ns, found.st_size, found.st_mtime)
