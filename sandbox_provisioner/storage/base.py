"""ObjectStore: named objects with generations, the interface that all persistence uses.

A generation is a number that changes with every write of an object. A write or delete with a generation is conditional,
which is the only way in which servers coordinate. All methods block: call them in threads.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError, ObjectNotFoundError

DIGEST = re.compile(r"[0-9a-f]{64}")
"""A SHA-256 in a record."""

NEW = 0
"""The generation of an object that does not exist: a write with it creates the object, or fails."""

MOST_READ = 64 << 20
"""Bytes of the largest object that ``read`` returns. Documents are smaller; other writers can make larger ones."""

Advance = Callable[[int], None]
"""Callback, from any thread, with the number of bytes transferred since the last call."""


class ObjectInfo(NamedTuple):
    """Properties of an object. ``updated`` is in seconds since 1970, by the store's own clock."""

    name: str
    generation: int
    size: int
    updated: float


def require_readable(where: str, name: str, size: int) -> None:
    """Raise CorruptObjectError for an object of more than MOST_READ bytes, which would fill the memory."""
    if size > MOST_READ:
        raise CorruptObjectError(where, name, f"it has {size:,} bytes, and no document has more than {MOST_READ:,}")


@dataclass(frozen=True)
class FileRecord:
    """Size and checksums of an uploaded file, with which a download is verified.

    ``parts`` has the CRC32C of each part, to detect damage, and ``digests`` its SHA-256, to detect manipulation.
    Records from version 0.1.0, before documents were signed, have no digests.
    """

    size: int
    part_size: int
    parts: tuple[int, ...]
    digests: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        """Inconsistency of the record, as a clause; empty if it is consistent. An empty file has one empty part."""
        if self.size < 0 or self.part_size < 1 or len(self.parts) != -(-max(self.size, 1) // self.part_size):
            return f"its record has {len(self.parts)} parts for {self.size} bytes"
        if not all(0 <= part < 1 << 32 for part in self.parts):
            return "its record has an invalid checksum"
        if self.digests and len(self.digests) != len(self.parts):
            return f"its record has {len(self.digests)} digests for {len(self.parts)} parts"
        if not all(DIGEST.fullmatch(digest) for digest in self.digests):
            return "its record has a digest that is not a SHA-256"
        return ""


def nothing(amount: int) -> None:
    """Do nothing: the default ``Advance``."""


class ObjectStore(ABC):
    """A set of named objects in a folder or in a bucket below a prefix.

    Names have 1 to 512 characters: segments of up to 255 letters, digits, ``-``, ``_`` and ``.``, joined by ``/``, that
    do not begin with a dot. Any other name raises StorageError before it is used. A name must not be a folder of
    another name (``a`` beside ``a/b``): a file system cannot store both. Use an uploaded file only with ``download``,
    ``in_place``, ``delete_all`` and ``list``, which may list its parts.
    """

    kind: str
    """Kind of the store: ``local``, ``mounted`` or ``gcs``."""
    where: str
    """Location of the store, for messages: a path or ``gs://bucket/prefix``."""

    @abstractmethod
    def read(self, name: str) -> tuple[bytes, ObjectInfo]:
        """Return an object's bytes and its properties. Raises ObjectNotFoundError."""

    @abstractmethod
    def info(self, name: str) -> ObjectInfo:
        """Return an object's properties. Raises ObjectNotFoundError."""

    def exists(self, name: str) -> bool:
        """Return True if an object has this name."""
        try:
            return bool(self.info(name))
        except ObjectNotFoundError:
            return False

    @abstractmethod
    def write(self, name: str, data: bytes, generation: int | None = None) -> ObjectInfo:
        """Write a small object atomically, with ``generation`` only if that is its present generation.

        ``NEW`` means that it must not exist. Raises ConflictError. A write that is retried because its response was
        lost does not conflict with itself.
        """

    @abstractmethod
    def delete(self, name: str, generation: int | None = None) -> bool:
        """Delete an object; return False if it did not exist. Raises ConflictError if it has another ``generation``."""

    @abstractmethod
    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return the objects whose names begin with ``prefix``, which is empty or ends in a slash, sorted by name."""

    @abstractmethod
    def upload(self, source: Path, name: str, advance: Advance = nothing) -> FileRecord:
        """Store a large file under a new name, in parallel and with bounded memory, and return its record.

        Calling it again after an interruption continues the upload. A store on the same disk moves the file instead of
        copying it, so ``source`` may be gone. Raises ConflictError if the name has other content.
        """

    @abstractmethod
    def download(self, name: str, record: FileRecord, target: Path, advance: Advance = nothing) -> None:
        """Copy a file to ``target`` and verify it. If it differs, raises CorruptObjectError; ``target`` is not made."""

    @abstractmethod
    def delete_all(self, prefix: str) -> int:
        """Delete all objects and files below ``prefix``, which ends in a slash. Return the number of bytes deleted."""

    def in_place(self, name: str, record: FileRecord) -> Path | None:
        """Verify a file and return its path, for use without a download; None if the store does not allow that.

        Raises CorruptObjectError, as ``download`` does. The caller must not change the file.
        """
        return None
