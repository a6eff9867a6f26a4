"""Store and load file snapshots: an archive of a sandbox's files, and a manifest that makes it complete."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ..errors import (
    ConflictError,
    CorruptObjectError,
    MetadataError,
    ObjectNotFoundError,
    SignatureError,
    SnapshotError,
    SnapshotNotFoundError,
)
from ..gvisor.sandbox import GVisorSandbox
from ..storage.base import NEW, Advance, ObjectStore
from ..workers import bulk
from . import archive, metadata
from .backends import SnapshotStorage
from .checkpoints import now
from .metadata import GCSArtifact
from .names import prefix
from .staging import staging

FILE = "files.tar"
MANIFEST = "manifest.json"
LARGEST = 64 << 30


async def save(storage: SnapshotStorage, below: str, sandbox: GVisorSandbox, advance: Advance) -> GCSArtifact:
    """Store a running sandbox's files below the prefix ``below``. Raises SnapshotError if a snapshot exists there."""
    store = storage.store
    if await asyncio.to_thread(_exists, store, below + MANIFEST):
        raise SnapshotError(f"There is a snapshot {below} in {store.where} already.", "Choose another name.")
    await bulk(store.delete_all, below)
    async with staging(storage.staging) as folder:
        await archive.save(sandbox, folder / FILE, LARGEST)
        record = await bulk(store.upload, folder / FILE, below + FILE, advance)
    artifact = GCSArtifact(below, now(), {FILE: record})
    data = await asyncio.to_thread(storage.signer.sign, below + MANIFEST, metadata.encode_artifact(artifact))
    await asyncio.to_thread(store.write, below + MANIFEST, data, NEW)
    return artifact


async def load(storage: SnapshotStorage, below: str, sandbox: GVisorSandbox) -> None:
    """Unpack the snapshot below ``below`` in a running sandbox. Raises SnapshotNotFoundError, CorruptObjectError."""
    store = storage.store
    artifact = await asyncio.to_thread(manifest, storage, below)
    if artifact is None:
        raise SnapshotNotFoundError(f"There is no snapshot {below} in {store.where}.")
    if FILE not in artifact.files:
        raise CorruptObjectError(store.where, below + MANIFEST, f"it does not list {FILE}")
    async with staging(storage.staging) as folder:
        await bulk(store.download, below + FILE, artifact.files[FILE], folder / FILE)
        await archive.load(sandbox, folder / FILE)


def delete(store: ObjectStore, below: str) -> None:
    """Delete the snapshot below ``below``, its manifest first. Blocks. Raises SnapshotNotFoundError."""
    if not store.delete(below + MANIFEST):
        raise SnapshotNotFoundError(f"There is no snapshot {below} in {store.where}.")
    store.delete_all(below)


def manifest(storage: SnapshotStorage, below: str) -> GCSArtifact | None:
    """Return the artifact of the snapshot below ``below``; None if no complete snapshot exists. Blocks.

    Raises SignatureError if it is not signed with this user's key.
    """
    store = storage.store
    try:
        data, _ = store.read(below + MANIFEST)
    except ObjectNotFoundError:
        return None
    storage.signer.verify(below + MANIFEST, store.where, below.split("/")[1], data)
    return metadata.decode_artifact(data, f"{below}{MANIFEST} in {store.where}")


def sign_earlier(storage: SnapshotStorage, sandbox_id: str) -> None:
    """Sign the manifests of a sandbox's snapshots, if it is from before manifests were signed. Blocks."""
    store = storage.store
    for info in store.list(f"{prefix(sandbox_id)}snapshots/"):
        if info.name.endswith(f"/{MANIFEST}"):
            with suppress(ObjectNotFoundError, ConflictError, MetadataError, SignatureError):
                data, found = store.read(info.name)
                storage.signer.verify(info.name, store.where, sandbox_id, data)
                artifact = metadata.decode_artifact(data, info.name)
                signed = storage.signer.sign(info.name, metadata.encode_artifact(artifact))
                store.write(info.name, signed, found.generation)


def _exists(store: ObjectStore, name: str) -> bool:
    try:
        return bool(store.info(name))
    except ObjectNotFoundError:
        return False
