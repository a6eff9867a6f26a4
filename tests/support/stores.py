"""Stores as any process opens them, and changes of one object by several of them."""

from __future__ import annotations

from pathlib import Path

from sandbox_provisioner.errors import ConflictError, ObjectNotFoundError
from sandbox_provisioner.storage.base import NEW, ObjectInfo, ObjectStore
from sandbox_provisioner.storage.gcs import GCSStore
from sandbox_provisioner.storage.local import LocalStore
from sandbox_provisioner.storage.mounted import MountedStore


def open_store(kind: str, place: str) -> ObjectStore:
    """A store as any process would open it: ``place`` is a folder, or a bucket."""
    if kind == "gcs":
        return GCSStore(place, "some/prefix")
    return {"local": LocalStore, "mounted": MountedStore}[kind](Path(place))


def append(store: ObjectStore, token: str) -> None:
    """Add a line to an object that others add to as well."""
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
    store = open_store(kind, place)
    for number in range(count):
        append(store, f"{worker}-{number}")
