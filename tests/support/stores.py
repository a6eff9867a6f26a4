"""Open stores, and change one object from several processes."""

from __future__ import annotations

from pathlib import Path

from sandbox_provisioner.errors import ConflictError, ObjectNotFoundError
from sandbox_provisioner.storage.base import NEW, ObjectInfo, ObjectStore
from sandbox_provisioner.storage.gcs import GCSStore
from sandbox_provisioner.storage.local import LocalStore
from sandbox_provisioner.storage.mounted import MountedStore


def open_store(kind: str, place: str) -> ObjectStore:
    """Open a store. ``place`` is a folder, or the name of a bucket."""
    if kind == "gcs":
        return GCSStore(place, "some/prefix")
    return {"local": LocalStore, "mounted": MountedStore}[kind](Path(place))


def append(store: ObjectStore, token: str) -> None:
    """Add a line to the object ``lines``, which other processes change at the same time."""
    while True:
        try:
            data, info = store.read("lines")
        except ObjectNotFoundError:
            data, info = b"", ObjectInfo("lines", NEW, 0, 0.0)
        if token.encode() in data.splitlines():
            return
        try:
            store.write("lines", data + token.encode() + b"\n", info.generation)
        except ConflictError:
            continue
        return


def append_many(kind: str, place: str, worker: int, count: int) -> None:
    """Add ``count`` lines in this process."""
    store = open_store(kind, place)
    for number in range(count):
        append(store, f"{worker}-{number}")
