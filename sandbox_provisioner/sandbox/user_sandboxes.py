"""Combine the stores and the registry of a Jupyter user's persistent sandboxes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from ..config import GCSConfig, own_folder, user_name
from ..errors import RunscNotFoundError, RunscTooOldError, SandboxError
from ..gvisor.runsc import find
from ..lock.base import Owner
from ..persistence import snapshots
from ..persistence.backends import Stores, open_stores, require_snapshots
from ..persistence.metadata import Checkpoint, GCSSandboxMetadata, Stored, Summary
from ..persistence.names import SANDBOX_ID, prefix, snapshot_prefix
from ..persistence.records import SandboxRecord
from ..persistence.signing import REGISTRY
from ..persistence.snapshots import MANIFEST
from . import detached
from .handle import Identity
from .recovery import Recovery
from .registry import PersistentSandboxRegistry, require_here


def settings(storage_dir: str = "") -> GCSConfig:
    """Return the storage settings from the environment; ``storage_dir`` overrides SANDBOX_STORAGE_DIR."""
    environ = {**os.environ, **({"SANDBOX_STORAGE_DIR": storage_dir} if storage_dir else {})}
    return GCSConfig.from_environment(own_folder() / "storage", environ)


def server() -> str:
    """Return the name of this process that other users see in its leases."""
    return f"Jupyter server {os.getpid()}"


def registry() -> PersistentSandboxRegistry:
    """Return this user's registry."""
    return PersistentSandboxRegistry(own_folder() / REGISTRY)


def touch(sandbox_ids: Iterable[str]) -> None:
    """Set the last use of rescued sandboxes to now, because their killed servers could not. Blocks."""
    used = set(sandbox_ids)
    for record in registry().list().records if used else []:
        if record.sandbox_id in used:
            with suppress(SandboxError):
                registry().touch(record.id)


@dataclass(frozen=True)
class Persistence:
    """A user's recorded sandboxes: the ``registry``, and the ``stores`` of this server.

    All methods block, and raise StorageNotHereError if the sandbox is in another storage.
    """

    stores: Stores
    registry: PersistentSandboxRegistry

    @classmethod
    def open(cls, storage_dir: str = "") -> Persistence:
        """Return this user's sandboxes. Raises ConfigurationError if this server cannot store sandboxes."""
        return cls(open_stores(settings(storage_dir)), registry())

    def describe(self, record: SandboxRecord) -> GCSSandboxMetadata:
        """Return the document of a sandbox."""
        return detached.describe_persistent(self.stores, self._id(record))

    def summarise(self, record: SandboxRecord) -> Summary:
        """Return the summary of a sandbox, much faster than ``describe`` and with the same errors."""
        return detached.summarise_persistent(self.stores, self._id(record))

    def snapshots(self, record: SandboxRecord) -> dict[str, Stored]:
        """Return the complete snapshots of a sandbox by name, without a check of their signatures."""
        sandbox_id, store = self._id(record), self.stores.snapshots
        objects = store.list(f"{prefix(sandbox_id)}snapshots/") if store else []
        found = {}
        for manifest in objects:
            below, _, file = manifest.name.rpartition("/")
            name = below.rpartition("/")[2]
            if file != MANIFEST or not SANDBOX_ID.fullmatch(name):
                continue
            if f"{below}/" == snapshot_prefix(sandbox_id, name):
                size = sum(info.size for info in objects if info.name.startswith(f"{below}/"))
                found[name] = Stored(datetime.fromtimestamp(manifest.updated, UTC).isoformat(), size)
        return found

    def revert(self, record: SandboxRecord, runsc: str = "") -> Checkpoint:
        """Revert a sandbox to its previous checkpoint and return that; keep the latest as a savepoint.

        A sandbox that a killed server left running is saved first; if that fails, it is ended, and its latest
        checkpoint stays the current one. Raises LeaseHeldError if the sandbox is in use, StateError if it has no such
        checkpoint.
        """

        async def work() -> Checkpoint:
            left_running = await self._left_running(record, runsc)
            checkpoint = await detached.revert_persistent(
                self.stores, record.sandbox_id, _owner(), left_running is not None
            )
            if left_running:
                await left_running.end(record.sandbox_id)
            return checkpoint

        return asyncio.run(work())

    def reset(self, record: SandboxRecord, runsc: str = "") -> str:
        """Make the next start of a sandbox begin with a new kernel. Return the savepoint with the latest state, or "".

        A sandbox that a killed server left running is saved first; if that fails, it is ended. Raises LeaseHeldError if
        the sandbox is in use.
        """

        async def work() -> str:
            left_running = await self._left_running(record, runsc)
            kept = await detached.reset_persistent(self.stores, record.sandbox_id, _owner())
            if left_running:
                await left_running.end(record.sandbox_id)
            return kept

        return asyncio.run(work())

    async def _left_running(self, record: SandboxRecord, runsc: str) -> Recovery | None:
        """Save a sandbox that a killed server left running. If that fails, return the recovery that can end it."""
        sandbox_id = self._id(record)
        try:
            recovery = Recovery(await asyncio.to_thread(find, runsc), self.stores, _owner)
        except (RunscNotFoundError, RunscTooOldError):  # then no sandbox runs here
            return None
        return recovery if any(one.runs_on for one in await recovery.save(sandbox_id)) else None

    def destroy(self, record: SandboxRecord, unverified: bool = False) -> int:
        """Delete a sandbox, but not its record, and return the freed bytes.

        With ``unverified``, the signature need not be valid, but the document must not name another user. Raises
        LeaseHeldError if it is in use.
        """
        destroy = detached.destroy_persistent(self.stores, self._id(record), _owner(), unverified=unverified)
        return asyncio.run(destroy)

    def require_deletable(self, record: SandboxRecord, unverified: bool = False) -> None:
        """Raise the error that ``destroy`` would raise for a sandbox now. Changes nothing."""
        asyncio.run(detached.require_deletable(self.stores, self._id(record), unverified))

    def discard(self, record: SandboxRecord) -> int:
        """Delete an empty sandbox like ``destroy``. Raises SandboxExistsError if it has any saved state."""
        return asyncio.run(detached.destroy_persistent(self.stores, self._id(record), _owner(), only_empty=True))

    def fork(self, record: SandboxRecord, new: SandboxRecord, savepoint: str = "") -> None:
        """Create the sandbox ``new`` with the memory of ``record``, at a savepoint or at its latest checkpoint.

        Raises LeaseHeldError if the sandbox of ``record`` is in use, SavepointNotFoundError.
        """
        first = Identity(new.kernel_name, new.notebook_path, user_name()).document(new.sandbox_id)
        asyncio.run(detached.fork_persistent(self.stores, self._id(record), first, _owner(), savepoint))

    def drop_savepoint(self, record: SandboxRecord, name: str) -> None:
        """Delete a savepoint. Raises LeaseHeldError if the sandbox is in use, SavepointNotFoundError."""
        asyncio.run(detached.drop_savepoint(self.stores, self._id(record), name, _owner()))

    def drop_snapshot(self, record: SandboxRecord, name: str) -> None:
        """Delete a snapshot. Raises SnapshotNotFoundError."""
        self.summarise(record)  # raises if the sandbox is another user's
        store = require_snapshots(self.stores.snapshot_storage).store
        snapshots.delete(store, snapshot_prefix(record.sandbox_id, name))

    def _id(self, record: SandboxRecord) -> str:
        """Return the id of a sandbox in this storage. Raises StorageNotHereError if it is in another one."""
        require_here(record, self.stores)
        return record.sandbox_id


def _owner() -> Owner:
    return Owner.here("jupyter sandbox")
