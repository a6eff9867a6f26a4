"""Record which persistent sandboxes a user has, so that every process of the user can find them.

Several processes can use one folder: each change of a record is a compare-and-swap of its file. All methods block for
file access, except those of Registration.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack
from uuid import UUID, uuid4, uuid5

from ..errors import (
    ConflictError,
    ObjectNotFoundError,
    SandboxError,
    SandboxNotFoundError,
    StorageError,
    StorageNotHereError,
    UnknownSandboxError,
    UnreadableRecordError,
)
from ..persistence import records
from ..persistence.backends import Stores
from ..persistence.records import SandboxRecord
from ..storage.base import NEW
from ..storage.local import LocalStore
from .lookup import look_up
from .start_request import StartRequest

SUFFIX = ".json"
NAMESPACE = UUID("0b7c5f0e-3f0b-4a0e-9a55-6a4d3f7f3c11")
"""UUID namespace for records of sandboxes whose id a user chose."""
NOTEBOOKS = UUID("5a0f7c0e-6a55-4f1c-9b7d-0d6f0c1a2b3c")
"""UUID namespace for sandboxes of notebooks."""

Destroy = Callable[[SandboxRecord], int]
"""Delete a sandbox with its checkpoints and snapshots and return the freed bytes. Raises SandboxNotFoundError if it is
already gone, another SandboxError if it cannot be deleted."""


class Facts(TypedDict, total=False):
    """Facts in a record besides the identity and location of the sandbox."""

    kernel_name: str
    settings: Mapping[str, Any]
    notebook_path: str
    folder: str


class Listing(NamedTuple):
    """All readable records, oldest first, and an error for each unreadable one."""

    records: list[SandboxRecord]
    unreadable: list[UnreadableRecordError]


@dataclass(frozen=True)
class Removal:
    """The result of deleting a sandbox: ``freed`` bytes, or the ``error`` that prevented it."""

    record: SandboxRecord
    freed: int = 0
    error: SandboxError | None = None


class PersistentSandboxRegistry:
    """The records in ``folder``, which only its owner can read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = LocalStore(folder)

    def allocate(self, stores: Stores, **facts: Unpack[Facts]) -> SandboxRecord:
        """Write and return a record with a new id, which is also the sandbox's id in ``stores``.

        Call it before the sandbox is created there: the sandbox can then be found and deleted even if its creation is
        interrupted.
        """
        return self.ensure(uuid4(), stores, **facts)

    def ensure(self, identity: UUID, stores: Stores, **facts: Unpack[Facts]) -> SandboxRecord:
        """Return the record of ``identity`` unchanged; if it does not exist, write one as ``allocate`` does."""
        return self._ensure(_new(identity, stores, str(identity), facts))

    def record(self, sandbox_id: str, stores: Stores, **facts: Unpack[Facts]) -> SandboxRecord:
        """Write and return the record of the sandbox ``sandbox_id`` in ``stores``. Later calls use the same record.

        ``facts`` replace the recorded ones, and the time of the last use is set to now.
        """
        here = [record for record in self.list().records if record.sandbox_id == sandbox_id and _is_in(record, stores)]
        derived_id = uuid5(NAMESPACE, f"{stores.kind} {stores.metadata.where} {sandbox_id}")
        record = here[0] if here else self._ensure(_new(derived_id, stores, sandbox_id, facts))
        return self._change(record.id, lambda known: replace(known, **facts, last_used=_now()))

    def load(self, identity: UUID) -> SandboxRecord:
        """Return the record of ``identity``. Raises UnknownSandboxError, UnreadableRecordError."""
        return self._read(identity)[0]

    def find(self, wanted: str) -> SandboxRecord:
        """Return the record that ``wanted`` names: by its id, id in storage, beginning of the id, or notebook.

        Raises UnknownSandboxError with all ids, AmbiguousSandboxError with the matching ids, and UnreadableRecordError
        if only an unreadable record matches.
        """
        return look_up(wanted, *self.list())

    def find_notebook(self, notebook_path: str, kernel_name: str) -> Sequence[SandboxRecord]:
        """Return the records of a notebook and a kernel, most recently used first."""
        wanted = (notebook_path, kernel_name)
        found = [record for record in self.list().records if (record.notebook_path, record.kernel_name) == wanted]
        return sorted(found, key=lambda record: record.last_used, reverse=True)

    def list(self) -> Listing:
        """Return all records, and the errors of those that cannot be read."""
        listing = Listing([], [])
        for name in self._names():
            try:
                listing.records.append(self._read(self._identity(name))[0])
            except UnknownSandboxError:
                continue  # deleted meanwhile
            except UnreadableRecordError as error:
                listing.unreadable.append(error)
        listing.records.sort(key=lambda record: record.created)
        return listing

    def touch(self, identity: UUID) -> SandboxRecord:
        """Set the last use of a sandbox to now, and return its record. Raises the errors of ``load``."""
        return self._change(identity, lambda known: replace(known, last_used=_now()))

    def rename(self, old: str, new: str) -> Sequence[SandboxRecord]:
        """Update the records of a notebook, or of a folder of notebooks, that was moved; return the changed ones."""

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
        """Find the record of a sandbox that is to be used again, as ``find`` does, and set its last use to now.

        Raises StorageNotHereError if the sandbox is not in ``stores``, and the errors of ``find``.
        """
        record = self.find(wanted)
        require_here(record, stores)
        return self.touch(record.id)

    def delete(self, identity: UUID, destroy: Destroy) -> int:
        """Delete a sandbox and then its record, and return the freed bytes. The record is kept if ``destroy`` fails."""
        record, generation = self._read(identity)
        try:
            freed = destroy(record)
        except SandboxNotFoundError:
            freed = 0
        with suppress(ConflictError):  # the record was changed meanwhile: the sandbox may have been created again
            self._store.delete(_name(identity), generation)
        return freed

    def forget(self, identity: UUID) -> bool:
        """Delete the record of a sandbox that is gone. Return False if it did not exist."""
        return self._store.delete(_name(identity))

    def prune(self, older_than: timedelta, destroy: Destroy, among: Container[UUID] | None = None) -> Sequence[Removal]:
        """Delete the sandboxes that have been unused for longer than ``older_than``, and return each result or error.

        With ``among``, delete only sandboxes with these ids. A sandbox that is used or deleted meanwhile is skipped.
        """
        now, removals = _now(), []
        for record in self.list().records:
            if now - record.last_used <= older_than or (among is not None and record.id not in among):
                continue
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
            problem = "the file's name is not the id of a sandbox"
            raise UnreadableRecordError(str(self._folder / name), problem, "Move the file out of the registry.")
        return identity

    def _read(self, identity: UUID) -> tuple[SandboxRecord, int]:
        path = str(self._folder / _name(identity))
        try:
            data, info = self._store.read(_name(identity))
        except ObjectNotFoundError as error:
            if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
                problem = "it is not a regular file"
                raise UnreadableRecordError(path, problem, "Move it out of the registry.") from error
            known = [name.removesuffix(SUFFIX) for name in self._names()]
            raise UnknownSandboxError(str(identity), known) from error
        except StorageError as error:
            raise UnreadableRecordError(path, error.problem.rstrip("."), error.remedy) from error
        return records.decode(data, identity, path), info.generation

    def _names(self) -> Sequence[str]:
        """Return the names of all files in the folder that are not hidden, including damaged and foreign ones."""
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
            with suppress(ConflictError):
                self._store.write(_name(identity), records.encode(changed), generation)
                return changed


def require_here(record: SandboxRecord, stores: Stores) -> None:
    """Raise StorageNotHereError unless the sandbox is stored in ``stores``."""
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
        folder=facts.get("folder", ""),
    )


def _name(identity: UUID) -> str:
    return f"{identity}{SUFFIX}"


def _now() -> datetime:
    return datetime.now(UTC)


# -- open sandboxes ------------------------------------------------------------------------------------------------


class Registration:
    """The record of an open sandbox in the user's registry."""

    def __init__(self, registry: PersistentSandboxRegistry, record: SandboxRecord) -> None:
        self.record = record
        self._registry = registry

    async def touch(self) -> None:
        """Set the time of the last use, which ``jupyter sandbox prune`` compares, to now. Errors are ignored."""
        with suppress(SandboxError):
            self.record = await asyncio.to_thread(self._registry.touch, self.record.id)

    async def rename(self, notebook_path: str) -> None:
        """Record the new path of the notebook, so that the sandbox is found under that path."""
        moved = await asyncio.to_thread(self._registry.rename, self.record.notebook_path, notebook_path)
        self.record = next((record for record in moved if record.id == self.record.id), self.record)

    async def forget(self) -> None:
        """Delete the record."""
        await asyncio.to_thread(self._registry.forget, self.record.id)


@dataclass(frozen=True)
class Requested:
    """The record of the sandbox that a start requests.

    ``is_new`` is True if the record was written for this start. If ``is_derived``, the sandbox's id was derived from
    the notebook: if another server created it, its notebook may have been renamed since.
    """

    record: SandboxRecord
    is_new: bool = False
    is_derived: bool = False


def facts(request: StartRequest) -> Facts:
    """Return the facts of a request to record. Without a notebook in it, the recorded notebook does not change."""
    found = Facts(kernel_name=request.kernel_name)
    if request.notebook_path:
        found["notebook_path"] = request.notebook_path
    return found


def find_or_write(
    registry: PersistentSandboxRegistry, stores: Stores, request: StartRequest, open_ids: Container[str]
) -> Requested:
    """Find or write the record of the requested sandbox. Blocks.

    A notebook gets a new record if it has none, or if another kernel has its sandbox open (``open_ids``). The new id is
    derived from user, notebook path and kernel, so that a server that shares only the storage finds the same sandbox.
    If a record has that id already, the notebook of that record was renamed, and the new id is random.
    """
    recorded = {record.id for record in registry.list().records}
    if request.sandbox_id:
        record = registry.record(request.sandbox_id, stores)
        return Requested(record, is_new=record.id not in recorded)
    for record in registry.find_notebook(request.notebook_path, request.kernel_name):
        if record.where == stores.metadata.where:
            if record.sandbox_id in open_ids:
                return Requested(registry.allocate(stores, **facts(request)), is_new=True)
            return Requested(record)
    identity = uuid5(NOTEBOOKS, "\n".join((request.user, request.notebook_path, request.kernel_name)))
    if identity in recorded or str(identity) in open_ids:
        return Requested(registry.allocate(stores, **facts(request)), is_new=True)
    return Requested(registry.ensure(identity, stores, **facts(request)), is_new=True, is_derived=True)
