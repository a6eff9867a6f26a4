"""A Jupyter user's persistent sandboxes: the stores and the registry that go together, where Jupyter keeps its data."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from jupyter_core.paths import jupyter_data_dir

from . import estates
from .config import GCSConfig
from .lock.base import Owner
from .metadata import Checkpoint, GCSSandboxMetadata
from .names import SANDBOX_ID, prefix, snapshot_prefix
from .records import SandboxRecord
from .registry import PersistentSandboxRegistry, require_here
from .snapshots import MANIFEST
from .stores import Stores, open_stores


def settings(storage_dir: str = "") -> GCSConfig:
    """What the environment says of storage; ``storage_dir``, from Jupyter's configuration, goes before its variable."""
    environ = {**os.environ, **({"SANDBOX_STORAGE_DIR": storage_dir} if storage_dir else {})}
    return GCSConfig.from_environment(Path(jupyter_data_dir(), "sandbox", "storage"), environ)


def server() -> str:
    """What the owner of a lease is known by: this process, as others see it."""
    return f"Jupyter server {os.getpid()}"


def registry() -> PersistentSandboxRegistry:
    """This user's registry."""
    return PersistentSandboxRegistry(Path(jupyter_data_dir(), "sandbox", "registry"))


class Snapshot(NamedTuple):
    """A snapshot as storage shows it; ``created`` is ISO 8601."""

    created: str
    size: int


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

    def snapshots(self, record: SandboxRecord) -> dict[str, Snapshot]:
        """The finished snapshots of a sandbox by name, a damaged one too; StorageNotHereError as above. Blocks."""
        require_here(record, self.stores)
        if self.stores.snapshots is None:
            return {}
        objects = self.stores.snapshots.list(prefix(record.sandbox_id))
        found = {}
        for manifest in objects:
            below, _, file = manifest.name.rpartition("/")
            name = below.rpartition("/")[2]
            if file != MANIFEST or not SANDBOX_ID.fullmatch(name):
                continue
            if f"{below}/" == snapshot_prefix(record.sandbox_id, name):
                size = sum(info.size for info in objects if info.name.startswith(f"{below}/"))
                found[name] = Snapshot(datetime.fromtimestamp(manifest.updated, UTC).isoformat(), size)
        return found

    def revert(self, record: SandboxRecord) -> Checkpoint:
        """Give up a sandbox's last checkpoint for the one before. LeaseHeldError if it is in use. Blocks."""
        require_here(record, self.stores)
        return asyncio.run(estates.revert_persistent(self.stores, record.sandbox_id, Owner.here("jupyter sandbox")))

    def destroy(self, record: SandboxRecord) -> int:
        """Delete a sandbox, all but its record; returns the bytes that went. LeaseHeldError if it is in use. Blocks."""
        require_here(record, self.stores)
        return asyncio.run(estates.destroy_persistent(self.stores, record.sandbox_id, Owner.here("jupyter sandbox")))
