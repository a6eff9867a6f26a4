"""An object store in this process's memory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from sandbox_provisioner.errors import ConflictError, CorruptObjectError, ObjectNotFoundError
from sandbox_provisioner.storage.base import NEW, Advance, FileRecord, ObjectInfo, ObjectStore, nothing
from sandbox_provisioner.storage.disk import READ, closing, disk_errors, replacing
from sandbox_provisioner.storage.names import valid_name, valid_prefix
from sandbox_provisioner.storage.parts import Sums, record_of, spans_of, write_to, wrong_checksum


class _Object(NamedTuple):
    data: bytes
    info: ObjectInfo


class MemoryStore(ObjectStore):
    """A store in memory, lost when the process exits. Only for small files: each is held as a whole."""

    kind = "memory"
    where = "memory"

    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._generation = NEW
        self._lock = threading.Lock()

    def read(self, name: str) -> tuple[bytes, ObjectInfo]:
        """Return an object's bytes and its properties."""
        valid_name(self.where, name)
        with self._lock:
            if name not in self._objects:
                raise ObjectNotFoundError(self.where, name)
            return self._objects[name]

    def info(self, name: str) -> ObjectInfo:
        """Return an object's properties."""
        return self.read(name)[1]

    def write(self, name: str, data: bytes, generation: int | None = None) -> ObjectInfo:
        """Write an object, if it has this generation. Return its new properties."""
        valid_name(self.where, name)
        with self._lock:
            self._check(name, generation)
            self._generation += 1
            info = ObjectInfo(name, self._generation, len(data), time.time())
            self._objects[name] = _Object(bytes(data), info)
            return info

    def delete(self, name: str, generation: int | None = None) -> bool:
        """Delete an object, if it has this generation. Return False if it does not exist."""
        valid_name(self.where, name)
        with self._lock:
            if name not in self._objects:
                return False
            self._check(name, generation)
            del self._objects[name]
            return True

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return the objects below ``prefix``, sorted by name."""
        if prefix:
            valid_prefix(self.where, prefix)
        with self._lock:
            return sorted(found.info for name, found in self._objects.items() if name.startswith(prefix))

    def upload(self, source: Path, name: str, advance: Advance = nothing) -> FileRecord:
        """Store a file, and return its checksums."""
        valid_name(self.where, name)
        with disk_errors(self.where, f"store {source}"), closing(os.open(source, READ)) as file:
            data = bytearray(os.fstat(file).st_size)

            def keep(offset: int, piece: bytes) -> None:
                data[offset : offset + len(piece)] = piece
                advance(len(piece))

            record = record_of(file, keep)
        try:
            self.write(name, bytes(data), NEW)
        except ConflictError:
            if self.read(name)[0] != data:
                raise
        return record

    def download(self, name: str, record: FileRecord, target: Path, advance: Advance = nothing) -> None:
        """Verify a stored file, and write it to ``target``."""
        data = self._verified(name, record)
        with disk_errors(self.where, f"copy {name} to {target}"), replacing(target, len(data)) as file:
            write_to(file, advance)(0, data)

    def delete_all(self, prefix: str) -> int:
        """Delete all objects below ``prefix``. Return their total size."""
        valid_prefix(self.where, prefix)
        return sum(found.size for found in self.list(prefix) if self.delete(found.name))

    def _check(self, name: str, generation: int | None) -> None:
        current = self._objects[name].info.generation if name in self._objects else NEW
        if generation not in (None, current):
            raise ConflictError(self.where, name, generation or NEW)

    def _verified(self, name: str, record: FileRecord) -> bytes:
        data, _ = self.read(name)
        parts = spans_of(self.where, name, record)
        if len(data) != record.size:
            raise CorruptObjectError(self.where, name, f"it has {len(data)} bytes instead of {record.size}")
        for span in parts:
            sums = Sums()
            sums.add(data[span.offset : span.offset + span.length])
            if not sums.match(record, span.number):
                raise wrong_checksum(self.where, name, span, record)
        return data
