"""A Jupyter user's persistent sandboxes: the stores and the registry that go together, where Jupyter keeps its data."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from . import estates, snapshots
from .config import GCSConfig, own_folder, user_name
from .errors import SandboxError
from .handle import Identity
from .lock.base import Owner
from .metadata import Checkpoint, GCSSandboxMetadata, Stored, Summary
from .names import SANDBOX_ID, prefix, snapshot_prefix
from .records import SandboxRecord
from .registry import PersistentSandboxRegistry, require_here
from .signing import REGISTRY
from .snapshots import MANIFEST
from .stores import Stores, open_stores, required_shelf


def settings(storage_dir: str = "") -> GCSConfig:
    """What the environment says of storage; ``storage_dir``, from Jupyter's configuration, goes before its variable."""
    environ = {**os.environ, **({"SANDBOX_STORAGE_DIR": storage_dir} if storage_dir else {})}
    return GCSConfig.from_environment(own_folder() / "storage", environ)


def server() -> str:
    """What the owner of a lease is known by: this process, as others see it."""
    return f"Jupyter server {os.getpid()}"


def registry() -> PersistentSandboxRegistry:
    """This user's registry."""
    return PersistentSandboxRegistry(own_folder() / REGISTRY)


def touch(sandbox_ids: Iterable[str]) -> None:
    """These were used until now, though the servers that had them could not say so. Blocks."""
    used = set(sandbox_ids)
    for record in registry().list().records if used else []:
        if record.sandbox_id in used:
            with suppress(SandboxError):
                registry().touch(record.id)


@dataclass(frozen=True)
class Persistence:
    """Sandboxes that are recorded in ``registry``, and the ``stores`` that this server has for them."""

    stores: Stores
    registry: PersistentSandboxRegistry

    @classmethod
    def open(cls, storage_dir: str = "") -> Persistence:
        """This user's; ConfigurationError if there is nothing to keep sandboxes in."""
        return cls(open_stores(settings(storage_dir)), registry())

    def describe(self, record: SandboxRecord) -> GCSSandboxMetadata:
        """What its storage has of a sandbox; StorageNotHereError if that is not one of ours. Blocks."""
        require_here(record, self.stores)
        return estates.describe_persistent(self.stores, record.sandbox_id)

    def summarise(self, record: SandboxRecord) -> Summary:
        """The same as far as a list shows it, which is found out in a fraction of the time. Blocks."""
        require_here(record, self.stores)
        return estates.summarise_persistent(self.stores, record.sandbox_id)

    def snapshots(self, record: SandboxRecord) -> dict[str, Stored]:
        """The finished snapshots of a sandbox by name, a damaged one too; StorageNotHereError as above. Blocks."""
        require_here(record, self.stores)
        if self.stores.snapshots is None:
            return {}
        objects = self.stores.snapshots.list(f"{prefix(record.sandbox_id)}snapshots/")
        found = {}
        for manifest in objects:
            below, _, file = manifest.name.rpartition("/")
            name = below.rpartition("/")[2]
            if file != MANIFEST or not SANDBOX_ID.fullmatch(name):
                continue
            if f"{below}/" == snapshot_prefix(record.sandbox_id, name):
                size = sum(info.size for info in objects if info.name.startswith(f"{below}/"))
                found[name] = Stored(datetime.fromtimestamp(manifest.updated, UTC).isoformat(), size)
        return found

    def revert(self, record: SandboxRecord) -> Checkpoint:
        """Give up a sandbox's last checkpoint for the one before. LeaseHeldError if it is in use. Blocks."""
        require_here(record, self.stores)
        return asyncio.run(estates.revert_persistent(self.stores, record.sandbox_id, _owner()))

    def destroy(self, record: SandboxRecord) -> int:
        """Delete a sandbox, all but its record; returns the bytes that went. LeaseHeldError if it is in use. Blocks."""
        require_here(record, self.stores)
        return asyncio.run(estates.destroy_persistent(self.stores, record.sandbox_id, _owner()))

    def discard(self, record: SandboxRecord) -> int:
        """As ``destroy``, but SandboxExistsError if something was saved of it. Blocks."""
        require_here(record, self.stores)
        return asyncio.run(estates.destroy_persistent(self.stores, record.sandbox_id, _owner(), only_empty=True))

    def fork(self, record: SandboxRecord, new: SandboxRecord, savepoint: str = "") -> None:
        """Make ``new`` a sandbox with the memory of another, at a savepoint or as it was saved last. Blocks.

        LeaseHeldError if that is in use; SavepointNotFoundError.
        """
        require_here(record, self.stores)
        first = Identity(new.kernel_name, new.notebook_path, user_name()).document(new.sandbox_id)
        asyncio.run(estates.fork_persistent(self.stores, record.sandbox_id, first, _owner(), savepoint))

    def drop_savepoint(self, record: SandboxRecord, name: str) -> None:
        """Delete a savepoint. LeaseHeldError if the sandbox is in use; SavepointNotFoundError. Blocks."""
        require_here(record, self.stores)
        asyncio.run(estates.drop_savepoint(self.stores, record.sandbox_id, name, _owner()))

    def drop_snapshot(self, record: SandboxRecord, name: str) -> None:
        """Delete a snapshot. SnapshotNotFoundError. Blocks."""
        self.summarise(record)  # refuses what is not ours
        snapshots.delete(required_shelf(self.stores.shelf).store, snapshot_prefix(record.sandbox_id, name))


def _owner() -> Owner:
    return Owner.here("jupyter sandbox")
