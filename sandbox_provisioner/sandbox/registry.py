"""PersistentSandboxRegistry: which persistent sandboxes there are, for a process that has none of them open.

It remembers identities and holds no sandbox. Several processes can use one folder: each change of a record is a
compare-and-swap of its file. All methods block for some file accesses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack
from uuid import UUID, uuid4, uuid5

from . import records
from .errors import (
    AmbiguousSandboxError,
    ConflictError,
    ObjectNotFoundError,
    SandboxError,
    SandboxNotFoundError,
    StorageError,
    StorageNotHereError,
    UnknownSandboxError,
    UnreadableRecordError,
)
from .records import SandboxRecord
from .storage.base import NEW
from .storage.local import LocalStore
from .stores import Stores

SUFFIX = ".json"
NAMESPACE = UUID("0b7c5f0e-3f0b-4a0e-9a55-6a4d3f7f3c11")
"""For the identities of sandboxes that somebody else named."""

Destroy = Callable[[SandboxRecord], int]
"""Removes a sandbox with its checkpoints and snapshots and returns how many bytes went; SandboxNotFoundError if it is
gone already, any other SandboxError if it must stay."""


class Facts(TypedDict, total=False):
    """What is remembered of a sandbox besides where it is."""

    kernel_name: str
    settings: Mapping[str, Any]
    notebook_path: str


class Listing(NamedTuple):
    """All records, oldest first, and what is wrong with each that cannot be read."""

    records: list[SandboxRecord]
    unreadable: list[UnreadableRecordError]


@dataclass(frozen=True)
class Removal:
    """What became of a sandbox that was to go: ``freed`` bytes, or the ``error`` for which it is still there."""

    record: SandboxRecord
    freed: int = 0
    error: SandboxError | None = None


class PersistentSandboxRegistry:
    """The records in ``folder``, which only its owner can read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = LocalStore(folder)

    def allocate(self, stores: Stores, **facts: Unpack[Facts]) -> SandboxRecord:
        """A new identity for a sandbox that is about to be made in ``stores``, where its id will be the same.

        It is on disk when this returns, so whatever happens next, the sandbox will be found and can be deleted.
        """
        identity = uuid4()
        record = _new(identity, stores, str(identity), facts)
        self._store.write(_name(identity), records.encode(record), NEW)
        return record

    def ensure(self, identity: UUID, stores: Stores, **facts: Unpack[Facts]) -> SandboxRecord:
        """The record of ``identity`` as it is; if there is none, a new one as ``allocate`` makes it."""
        return self._ensure(_new(identity, stores, str(identity), facts))

    def record(self, sandbox_id: str, stores: Stores, **facts: Unpack[Facts]) -> SandboxRecord:
        """Remember a sandbox that was not named by us; the same sandbox has the same identity each time.

        ``facts`` replace those that were known, and it counts as used now.
        """
        here = [record for record in self.list().records if record.sandbox_id == sandbox_id and _is_in(record, stores)]
        unnamed = uuid5(NAMESPACE, f"{stores.kind} {stores.metadata.where} {sandbox_id}")
        record = here[0] if here else self._ensure(_new(unnamed, stores, sandbox_id, facts))
        return self._change(record.id, lambda known: replace(known, **facts, last_used=_now()))

    def load(self, identity: UUID) -> SandboxRecord:
        """The record of ``identity``; UnknownSandboxError, UnreadableRecordError."""
        return self._read(identity)[0]

    def find(self, wanted: str) -> SandboxRecord:
        """The record with this id, or with this id in its storage, or the only one whose id begins so.

        UnknownSandboxError lists the ids there are, AmbiguousSandboxError those that fit.
        """
        known, unreadable = self.list()
        found = [record for record in known if wanted in (str(record.id), record.sandbox_id)]
        beginning = wanted.lower().replace("-", "")
        if not found and beginning:
            found = [record for record in known if record.id.hex.startswith(beginning)]
        if len(found) > 1:
            raise AmbiguousSandboxError(wanted, [str(record.id) for record in found])
        if found:
            return found[0]
        for report in unreadable:
            if beginning and Path(report.path).stem.replace("-", "").startswith(beginning):
                raise report
        raise UnknownSandboxError(wanted, [str(record.id) for record in known])

    def find_notebook(self, notebook_path: str, kernel_name: str) -> Sequence[SandboxRecord]:
        """The records of a notebook and a kernel, the one that was used last first."""
        asked = (notebook_path, kernel_name)
        found = [record for record in self.list().records if (record.notebook_path, record.kernel_name) == asked]
        return sorted(found, key=lambda record: record.last_used, reverse=True)

    def list(self) -> Listing:
        """Everything there is; a record that cannot be read is reported and stops nothing."""
        listing = Listing([], [])
        for name in self._names():
            try:
                listing.records.append(self._read(self._identity(name))[0])
            except UnknownSandboxError:
                continue  # deleted since
            except UnreadableRecordError as error:
                listing.unreadable.append(error)
        listing.records.sort(key=lambda record: record.created)
        return listing

    def touch(self, identity: UUID) -> SandboxRecord:
        """Note that the sandbox is used now."""
        return self._change(identity, lambda known: replace(known, last_used=_now()))

    def rename(self, old: str, new: str) -> Sequence[SandboxRecord]:
        """A notebook, or a folder of notebooks, was moved; returns the records that followed it."""

        below = old.rstrip("/") + "/"

        def moved(known: SandboxRecord) -> SandboxRecord:
            path = known.notebook_path
            if path == old:
                return replace(known, notebook_path=new)
            if path.startswith(below):
                return replace(known, notebook_path=f"{new.rstrip('/')}/{path.removeprefix(below)}")
            return known

        found = [record for record in self.list().records if old and moved(record) != record]
        return [self._change(record.id, moved) for record in found]

    def reattach(self, wanted: str, stores: Stores) -> SandboxRecord:
        """The record, as by ``find``, of a sandbox that is to be attached from ``stores``; it counts as used now.

        StorageNotHereError names the storage it is in if that is another one. Nothing new is ever made.
        """
        record = self.find(wanted)
        require_here(record, stores)
        return self.touch(record.id)

    def delete(self, identity: UUID, destroy: Destroy) -> int:
        """Remove a sandbox, then its record; returns the bytes that went. It stays recorded if ``destroy`` fails."""
        record, generation = self._read(identity)
        try:
            freed = destroy(record)
        except SandboxNotFoundError:
            freed = 0
        try:
            self._store.delete(_name(identity), generation)
        except ConflictError:
            pass  # somebody used the name at the last moment: it stays, for what they may have made
        return freed

    def forget(self, identity: UUID) -> bool:
        """Remove the record of a sandbox that is gone; False if there was none."""
        return self._store.delete(_name(identity))

    def unused(self, older_than: timedelta) -> Sequence[SandboxRecord]:
        """The records of sandboxes that nobody has used for that long."""
        now = _now()
        return [record for record in self.list().records if now - record.last_used > older_than]

    def prune(self, older_than: timedelta, destroy: Destroy) -> Sequence[Removal]:
        """Delete every sandbox that nobody has used for that long; one that must stay does not stop the others."""
        removals = []
        for record in self.unused(older_than):
            try:
                if self.load(record.id).last_used == record.last_used:
                    removals.append(Removal(record, self.delete(record.id, destroy)))
            except UnknownSandboxError:
                continue
            except SandboxError as error:
                removals.append(Removal(record, error=error))
        return removals

    def _identity(self, name: str) -> UUID:
        try:
            identity = UUID(name.removesuffix(SUFFIX))
        except ValueError:
            identity = None
        if identity is None or _name(identity) != name:
            raise UnreadableRecordError(str(self._folder / name), "its name is no record's", "Move it away.")
        return identity

    def _read(self, identity: UUID) -> tuple[SandboxRecord, int]:
        path = str(self._folder / _name(identity))
        try:
            data, info = self._store.read(_name(identity))
        except ObjectNotFoundError as error:
            if os.path.lexists(path) and not _is_plain(path):
                raise UnreadableRecordError(path, "it is no plain file", "Move it away.") from error
            known = [name.removesuffix(SUFFIX) for name in self._names()]
            raise UnknownSandboxError(str(identity), known) from error
        except StorageError as error:
            raise UnreadableRecordError(path, error.problem.rstrip("."), error.remedy) from error
        return records.decode(data, identity, path), info.generation

    def _names(self) -> Sequence[str]:
        """Everything in the folder, whether or not the store takes it for one of its objects."""
        objects = {info.name for info in self._store.list("")}
        others = os.listdir(self._folder) if self._folder.exists() else []
        return sorted(objects.union(name for name in others if not name.startswith(".")))

    def _ensure(self, record: SandboxRecord) -> SandboxRecord:
        try:
            self._store.write(_name(record.id), records.encode(record), NEW)
        except ConflictError:
            return self.load(record.id)
        return record

    def _change(self, identity: UUID, change: Callable[[SandboxRecord], SandboxRecord]) -> SandboxRecord:
        while True:
            known, generation = self._read(identity)
            changed = change(known)
            try:
                self._store.write(_name(identity), records.encode(changed), generation)
            except ConflictError:
                continue
            return changed


def require_here(record: SandboxRecord, stores: Stores) -> None:
    """StorageNotHereError unless the sandbox is kept in ``stores``."""
    if not _is_in(record, stores):
        here = stores.metadata.where
        raise StorageNotHereError(str(record.id), record.storage, record.where, here)


def _is_in(record: SandboxRecord, stores: Stores) -> bool:
    return (record.storage, record.where) == (stores.kind, stores.metadata.where)


def _new(identity: UUID, stores: Stores, sandbox_id: str, facts: Facts) -> SandboxRecord:
    now = _now()
    return SandboxRecord(
        id=identity,
        storage=stores.kind,
        where=stores.metadata.where,
        sandbox_id=sandbox_id,
        kernel_name=facts.get("kernel_name", ""),
        settings=facts.get("settings", {}),
        notebook_path=facts.get("notebook_path", ""),
        created=now,
        last_used=now,
    )


def _is_plain(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


def _name(identity: UUID) -> str:
    return f"{identity}{SUFFIX}"


def _now() -> datetime:
    return datetime.now(UTC)
