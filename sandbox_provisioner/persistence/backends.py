"""From settings to stores and leases: the one place that knows which class goes with which setting."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakValueDictionary

from .config import GCSConfig, Place
from .errors import ConfigurationError
from .fingerprints import Fingerprints
from .lock.base import Leases
from .lock.local import LocalLeases
from .lock.objects import ObjectLeases
from .signing import Signer
from .storage.base import ObjectStore
from .storage.local import LocalStore
from .storage.mounted import MountedStore

LEASES, STAGING, CACHE = ".leases", ".staging", ".cache"
"""What a folder has beside its objects, whose names do not begin with a dot."""


@dataclass(frozen=True)
class Shelf:
    """Where snapshots go, and the folder through which they go there."""

    store: ObjectStore
    staging: Path
    signer: Signer


@dataclass(frozen=True)
class Stores:
    """Everything a persistent sandbox is kept in. None where this server has nothing for it."""

    kind: str
    """``local``, ``mounted`` or ``gcs``: where the metadata is, by which a sandbox is known."""
    metadata: ObjectStore
    checkpoints: ObjectStore | None
    snapshots: ObjectStore | None
    leases: Leases
    staging: Path
    """For images on their way: on this machine, and on the disk of the local store if there is one."""
    fingerprints: Fingerprints
    signer: Signer

    @property
    def shelf(self) -> Shelf | None:
        """For snapshots of these sandboxes."""
        return Shelf(self.snapshots, self.staging, self.signer) if self.snapshots else None

    def required_checkpoints(self) -> ObjectStore:
        """The place for checkpoints; ConfigurationError if there is none."""
        if self.checkpoints is None:
            raise ConfigurationError(
                "SANDBOX_CHECKPOINT_BUCKET",
                "A sandbox's memory is saved in a place for checkpoints, and SANDBOX_CHECKPOINT_BUCKET is not set.",
                "Set it, or SANDBOX_CHECKPOINT_MOUNT_PATH.",
            )
        return self.checkpoints


def required_shelf(shelf: Shelf | None) -> Shelf:
    """The shelf itself; ConfigurationError if there is none."""
    if shelf is None:
        raise ConfigurationError(
            "FILESYSTEM_SNAPSHOT_BUCKET",
            "This server has no place for snapshots: FILESYSTEM_SNAPSHOT_BUCKET is not set.",
            "Set it, or FILESYSTEM_SNAPSHOT_MOUNT_PATH.",
        )
    return shelf


_shared: WeakValueDictionary[tuple[int, GCSConfig], Stores] = WeakValueDictionary()


def share_stores(config: GCSConfig) -> Stores:
    """As ``open_stores``, but the same for all in this process who have them now: their threads, and what is cached."""
    stores = _shared.get((os.getpid(), config))
    if stores is None:
        stores = _shared[os.getpid(), config] = open_stores(config)
    return stores


def open_stores(config: GCSConfig) -> Stores:
    """The stores of a server that can persist; ConfigurationError names what is missing on one that cannot."""
    config.require(sandbox_id="")
    folder = _own(config.folder)
    staging, fingerprints = folder / STAGING, Fingerprints(folder / CACHE)
    if config.embedded:
        store = LocalStore(folder)
        leases = LocalLeases(folder / LEASES)
        return Stores(store.kind, store, store, store, leases, staging, fingerprints, Signer(config))
    metadata = _conditional(config.metadata, config.prefix)
    return Stores(
        kind=metadata.kind,
        metadata=metadata,
        checkpoints=_bulk(config.checkpoints, config.prefix),
        snapshots=open_snapshots(config),
        leases=_leases(config.locks, config.prefix),
        staging=staging,
        fingerprints=fingerprints,
        signer=Signer(config),
    )


def open_snapshots(config: GCSConfig) -> ObjectStore | None:
    """Where snapshots go, also on a server that can keep nothing else; None if nowhere."""
    return LocalStore(config.folder) if config.embedded else _bulk(config.snapshots, config.prefix)


def open_shelf(config: GCSConfig) -> Shelf | None:
    """For snapshots of sandboxes of which nothing else is kept."""
    store = open_snapshots(config)
    return Shelf(store, _own(config.folder) / STAGING, Signer(config)) if store else None


def _own(folder: Path) -> Path:
    """The folder itself, made if it is not there: whoever made it first would not know who may see into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        problem = f"The folder {folder} for persistent sandboxes cannot be made: {error.strerror}."
        remedy = "Set SANDBOX_STORAGE_DIR to a folder of your own."
        raise ConfigurationError("SANDBOX_STORAGE_DIR", problem, remedy) from error
    return folder


def _conditional(place: Place, prefix: str) -> ObjectStore:
    """For small objects that servers agree by: the bucket itself, if there is one."""
    if place.mount is not None and not place.bucket:
        return MountedStore(place.mount / prefix)
    return _bucket(place, prefix)


def _bulk(place: Place, prefix: str) -> ObjectStore | None:
    """For large files, which are written once: the mounted folder, if there is one."""
    if place.mount is not None:
        return MountedStore(place.mount / prefix)
    return _bucket(place, prefix) if place.bucket else None


def _leases(place: Place, prefix: str) -> Leases:
    if not place.bucket:
        return ObjectLeases(_conditional(place, prefix))
    _require_client(place)
    from .lock.gcs import GCSLeases

    return GCSLeases(place.bucket, prefix)


def _bucket(place: Place, prefix: str) -> ObjectStore:
    _require_client(place)
    from .storage.gcs import GCSStore

    return GCSStore(place.bucket, prefix)


def _require_client(place: Place) -> None:
    try:
        installed = find_spec("google.cloud.storage") is not None
    except ModuleNotFoundError:
        installed = False
    if not installed:
        raise ConfigurationError(
            place.bucket_variable,
            f"{place.bucket_variable} is {place.bucket!r}, but Google's client library for it is not installed.",
            "`pip install 'sandbox-provisioner[gcs]'` installs it.",
        )
