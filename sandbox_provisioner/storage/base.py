"""ObjectStore: named objects with generations, the one interface that all persistence goes through.

A generation is a number that changes with every write of an object; giving it back with a write or a delete makes that
conditional, which is the only way in which two servers agree on anything. All methods block: call them in threads.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

DIGEST = re.compile(r"[0-9a-f]{64}")
"""A SHA-256 as records have it."""

NEW = 0
"""The generation of an object that is not there: a write with it creates, or fails."""

Advance = Callable[[int], None]
"""Told, from any thread, how many further bytes have been moved."""


class ObjectInfo(NamedTuple):
    """What a store knows of an object. ``updated`` is in seconds, by the store's own clock."""

    name: str
    generation: int
    size: int
    updated: float


@dataclass(frozen=True)
class FileRecord:
    """A file as it was uploaded: what proves, on download, that it is the same.

    ``parts`` has the CRC32C of each part, against damage, and ``digests`` its SHA-256, against a deliberate change.
    Records that were made by version 0.1.0 before documents were signed have no digests.
    """

    size: int
    part_size: int
    parts: tuple[int, ...]
    digests: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        """Return how the record contradicts itself; empty if it does not. An empty file has one, empty, part."""
        if self.size < 0 or self.part_size < 1 or len(self.parts) != -(-max(self.size, 1) // self.part_size):
            return f"its record has {len(self.parts)} parts for {self.size} bytes"
        if not all(0 <= part < 1 << 32 for part in self.parts):
            return "its record has a checksum that cannot be one"
        if self.digests and len(self.digests) != len(self.parts):
            return f"its record has {len(self.digests)} digests for {len(self.parts)} parts"
        if not all(DIGEST.fullmatch(digest) for digest in self.digests):
            return "its record has a digest that is not a SHA-256"
        return ""


def nothing(amount: int) -> None:
    """An ``Advance`` for those who do not show progress."""


class ObjectStore(ABC):
    """Objects in one place: a folder, a bucket with a prefix, or memory.

    Names are 1 to 512 characters: segments of up to 255 letters, digits, ``-``, ``_`` and ``.`` that are joined by
    ``/`` and do not begin with a dot; anything else raises StorageError before it can do harm. No name may be the
    beginning of another one's folders (``a`` beside ``a/b``): a folder cannot hold both. An uploaded file is seen by
    ``download``, ``in_place``, ``delete_all`` and ``list`` alone, and by the last of them perhaps in parts.
    """

    kind: str
    """What it is: ``local``, ``mounted``, ``gcs`` or ``memory``."""
    where: str
    """Which one it is, for messages: a path or ``gs://bucket/prefix``."""

    @abstractmethod
    def read(self, name: str) -> tuple[bytes, ObjectInfo]:
        """An object's bytes, and which generation they are; ObjectNotFoundError if there is none."""

    @abstractmethod
    def info(self, name: str) -> ObjectInfo:
        """What is known of an object; ObjectNotFoundError if there is none."""

    @abstractmethod
    def write(self, name: str, data: bytes, generation: int | None = None) -> ObjectInfo:
        """Write a small object whole: over anything, or only if ``generation`` (NEW: none) is what is there.

        ConflictError if it is not. A write whose answer was lost is not reported as a conflict with itself.
        """

    @abstractmethod
    def delete(self, name: str, generation: int | None = None) -> bool:
        """Delete an object, only if it has ``generation`` where that is given; False if there was none."""

    @abstractmethod
    def list(self, prefix: str) -> list[ObjectInfo]:
        """The objects whose names begin with ``prefix``, which is empty or ends in a slash, by name."""

    @abstractmethod
    def upload(self, source: Path, name: str, advance: Advance = nothing) -> FileRecord:
        """Store a large file under a new name, in parallel and with bounded memory; an interrupted one goes on.

        A store of files on the same disk takes the file itself instead of copying it, so ``source`` may be gone.
        """

    @abstractmethod
    def download(self, name: str, record: FileRecord, target: Path, advance: Advance = nothing) -> None:
        """Fetch a file and verify it; CorruptObjectError, and no ``target``, if it is not what was uploaded."""

    @abstractmethod
    def delete_all(self, prefix: str) -> int:
        """Delete all objects and files below ``prefix``, which ends in a slash; returns how many bytes went."""

    def in_place(self, name: str, record: FileRecord) -> Path | None:
        """The verified file itself, where files can be used without a download; None where they cannot.

        CorruptObjectError as for ``download``. The caller must not change it.
        """
        return None
