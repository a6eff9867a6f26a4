"""Choose stores and leases from the settings: the only place that maps settings to classes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakValueDictionary

from ..config import GCSConfig, Place
from ..errors import ConfigurationError
from ..lock.base import Leases
from ..lock.local import LocalLeases
from ..lock.objects import ObjectLeases
from ..storage.base import ObjectStore
from ..storage.local import LocalStore
from ..storage.mounted import MountedStore
from .digest_cache import DigestCache
from .signing import Signer

LEASES, STAGING, CACHE = ".leases", ".staging", ".cache"
"""Subfolders of the storage folder. Names of objects never begin with a dot."""


@dataclass(frozen=True)
class SnapshotStorage:
    """The store for file snapshots, the temporary folder for uploads and downloads, and the signer of manifests."""

    store: ObjectStore
    staging: Path
    signer: Signer


@dataclass(frozen=True)
class Stores:
    """The stores, leases and signer for persistent sandboxes; None in place of each store that is not configured."""

    kind: str
    """Kind of the metadata store, which records refer to: ``local``, ``mounted`` or ``gcs``."""
    metadata: ObjectStore
    checkpoints: ObjectStore | None
    snapshots: ObjectStore | None
    leases: Leases
    staging: Path
    """Local folder for images during upload and download; on the same disk as the store if the store is local."""
    digests: DigestCache
    signer: Signer

    @property
    def snapshot_storage(self) -> SnapshotStorage | None:
        """The storage for file snapshots of these sandboxes; None without a store for snapshots."""
        return SnapshotStorage(self.snapshots, self.staging, self.signer) if self.snapshots else None

    def required_checkpoints(self) -> ObjectStore:
        """Return the store for checkpoints. Raises ConfigurationError if none is configured."""
        if self.checkpoints is None:
            raise _not_configured("checkpoints", "SANDBOX_CHECKPOINT")
        return self.checkpoints


def require_snapshots(storage: SnapshotStorage | None) -> SnapshotStorage:
    """Return ``storage``. Raises ConfigurationError if this server has no storage for file snapshots."""
    if storage is None:
        raise _not_configured("file snapshots", "FILESYSTEM_SNAPSHOT")
    return storage


def _not_configured(what: str, name: str) -> ConfigurationError:
    """Return the error for a missing store, whose variables begin with ``name``."""
    problem = f"This server has no storage for {what}: {name}_BUCKET is not set."
    return ConfigurationError(f"{name}_BUCKET", problem, f"Set it, or {name}_MOUNT_PATH.")


_shared: WeakValueDictionary[tuple[int, GCSConfig], Stores] = WeakValueDictionary()


def share_stores(config: GCSConfig) -> Stores:
    """Return the stores for ``config``: the same object, with its threads and caches, in the whole process. Blocks."""
    key = os.getpid(), config
    return _shared.get(key) or _shared.setdefault(key, open_stores(config))


def open_stores(config: GCSConfig) -> Stores:
    """Return new stores for ``config``. Raises ConfigurationError if settings for persistence are missing."""
    config.require(sandbox_id="")
    folder = _own(config.folder)
    staging, digests = folder / STAGING, DigestCache(folder / CACHE)
    if config.embedded:
        store = LocalStore(folder)
        leases = LocalLeases(folder / LEASES)
        return Stores(store.kind, store, store, store, leases, staging, digests, Signer(config))
    metadata = _conditional(config.metadata, config.prefix)
    return Stores(
        kind=metadata.kind,
        metadata=metadata,
        checkpoints=_bulk(config.checkpoints, config.prefix),
        snapshots=open_snapshots(config),
        leases=_leases(config.locks, config.prefix),
        staging=staging,
        digests=digests,
        signer=Signer(config),
    )


def open_snapshots(config: GCSConfig) -> ObjectStore | None:
    """Return the store for snapshots, also on a server without persistent sandboxes; None if none is configured."""
    return LocalStore(config.folder) if config.embedded else _bulk(config.snapshots, config.prefix)


def open_snapshot_storage(config: GCSConfig) -> SnapshotStorage | None:
    """Return the storage for file snapshots of ephemeral sandboxes; None if none is configured."""
    store = open_snapshots(config)
    return SnapshotStorage(store, _own(config.folder) / STAGING, Signer(config)) if store else None


def _own(folder: Path) -> Path:
    """Return ``folder``, made with mode 0700 if missing, before other code makes it with wider permissions."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        problem = f"The folder {folder} for persistent sandboxes cannot be created: {error.strerror}."
        remedy = "Set SANDBOX_STORAGE_DIR to a folder of your own."
        raise ConfigurationError("SANDBOX_STORAGE_DIR", problem, remedy) from error
    return folder


def _conditional(place: Place, prefix: str) -> ObjectStore:
    """Return the store for small objects that need compare-and-swap: the bucket if set, else the mounted folder."""
    if place.mount is not None and not place.bucket:
        return MountedStore(place.mount / prefix)
    return _bucket(place, prefix)


def _bulk(place: Place, prefix: str) -> ObjectStore | None:
    """Return the store for large files, which are written once: the mounted folder if set, else the bucket."""
    if place.mount is not None:
        return MountedStore(place.mount / prefix)
    return _bucket(place, prefix) if place.bucket else None


def _leases(place: Place, prefix: str) -> Leases:
    if not place.bucket:
        return ObjectLeases(_conditional(place, prefix))
    _require_client(place)
    from ..lock.gcs import GCSLeases

    return GCSLeases(place.bucket, prefix)


def _bucket(place: Place, prefix: str) -> ObjectStore:
    _require_client(place)
    from ..storage.gcs import GCSStore

    return GCSStore(place.bucket, prefix)


def _require_client(place: Place) -> None:
    try:
        installed = find_spec("google.cloud.storage") is not None
    except ModuleNotFoundError:
        installed = False
    if not installed:
        raise ConfigurationError(
            place.bucket_variable,
            f"{place.bucket_variable} is {place.bucket!r}, but Google's client library for storage is not installed.",
            "`pip install 'sandbox-provisioner[gcs]'` installs it.",
        )
