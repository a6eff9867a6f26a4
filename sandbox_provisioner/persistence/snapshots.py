"""Store and load file snapshots: a tar of the files that a sandbox wrote, and a manifest.

The manifest is written last: without it, the snapshot does not exist.

The tar contains the home folder, /tmp and the root of the sandbox, but neither memory nor mounted folders of the host.
Its contents are untrusted: the host only counts its bytes and checks its structure. The guest packs and unpacks it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import BinaryIO

from ..errors import (
    ConflictError,
    CorruptObjectError,
    DiskFullError,
    MetadataError,
    ObjectNotFoundError,
    SnapshotError,
    SnapshotNotFoundError,
    SnapshotTooLargeError,
)
from ..errors.signature import SignatureError
from ..gvisor.bundle import BundleSpec
from ..gvisor.carried import visible_mounts
from ..gvisor.guest_tool import GuestTool
from ..gvisor.sandbox import GVisorSandbox
from ..storage.base import NEW, Advance, ObjectStore
from ..workers import bulk
from . import metadata
from .backends import SnapshotStorage
from .checkpoints import now
from .metadata import GCSArtifact
from .names import prefix
from .staging import staging
from .tar_check import TarCheck

FILE = "files.tar"
MANIFEST = "manifest.json"
LARGEST = 64 << 30
"""Maximum bytes of a snapshot."""
PIECE = 1 << 18
PLACES = ("root", "tmp", "home")
"""The folders in a snapshot, by their names in the tar."""

logger = logging.getLogger(__name__)


async def save(storage: SnapshotStorage, below: str, sandbox: GVisorSandbox, advance: Advance) -> GCSArtifact:
    """Store a running sandbox's files below the prefix ``below``. Raises SnapshotError if a snapshot exists there."""
    store = storage.store
    if await asyncio.to_thread(store.exists, below + MANIFEST):
        raise SnapshotError(f"There is a snapshot {below} in {store.where} already.", "Choose another name.")
    await bulk(store.delete_all, below)
    async with staging(storage.staging) as folder:
        await pack(sandbox, folder / FILE, LARGEST)
        record = await bulk(store.upload, folder / FILE, below + FILE, advance)
    artifact = GCSArtifact(below, now(), {FILE: record})
    data = await asyncio.to_thread(storage.signer.sign, below + MANIFEST, metadata.encode_artifact(artifact))
    await asyncio.to_thread(store.write, below + MANIFEST, data, NEW)
    return artifact


async def load(storage: SnapshotStorage, below: str, sandbox: GVisorSandbox) -> None:
    """Unpack the snapshot with the prefix ``below``. Raises SnapshotNotFoundError, CorruptObjectError."""
    store = storage.store
    artifact = await asyncio.to_thread(manifest, storage, below)
    if artifact is None:
        raise SnapshotNotFoundError(f"There is no complete snapshot {below.rstrip('/')} in {store.where}.")
    if FILE not in artifact.files:
        raise CorruptObjectError(store.where, below + MANIFEST, f"it does not list {FILE}")
    async with staging(storage.staging) as folder:
        await bulk(store.download, below + FILE, artifact.files[FILE], folder / FILE)
        await unpack(sandbox, folder / FILE)


def delete(store: ObjectStore, below: str) -> None:
    """Delete the snapshot with the prefix ``below``, its manifest first. Blocks. Raises SnapshotNotFoundError."""
    if not store.delete(below + MANIFEST):
        raise SnapshotNotFoundError(f"There is no complete snapshot {below.rstrip('/')} in {store.where}.")
    store.delete_all(below)


def manifest(storage: SnapshotStorage, below: str) -> GCSArtifact | None:
    """Return the artifact of the snapshot with the prefix ``below``; None if it is not complete. Blocks.

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
    """Sign the manifests of the snapshots of a sandbox that an earlier version created unsigned. Blocks."""
    store = storage.store
    for info in store.list(f"{prefix(sandbox_id)}snapshots/"):
        if info.name.endswith(f"/{MANIFEST}"):
            with suppress(ObjectNotFoundError, ConflictError, MetadataError, SignatureError):
                data, found = store.read(info.name)
                storage.signer.verify(info.name, store.where, sandbox_id, data)
                artifact = metadata.decode_artifact(data, info.name)
                signed = storage.signer.sign(info.name, metadata.encode_artifact(artifact))
                store.write(info.name, signed, found.generation)


# -- the tar ---------------------------------------------------------------------------------------------------------


async def pack(sandbox: GVisorSandbox, target: Path, limit: int, places: Collection[str] = PLACES) -> int:
    """Write the files in ``places`` of a running sandbox to the tar ``target``, and return its size in bytes.

    Raises SnapshotTooLargeError if it would have more than ``limit`` bytes. After that, or another SnapshotError,
    GuestError or DiskFullError, ``target`` does not exist. A file that shrinks while it is read is filled up with
    zeros; a warning is logged.
    """
    with _disk_errors(target), _created(target) as file:
        return await _receive(sandbox, file, limit, places)


async def unpack(
    sandbox: GVisorSandbox, source: Path, places: Collection[str] = PLACES, command: str = "extract"
) -> None:
    """Unpack the tar ``source`` in ``places`` of a running sandbox; the ``command`` "add" replaces no existing files.

    Raises SnapshotError if it is malformed, and GuestError. Files below a mounted folder of the host are left out; a
    warning is logged.
    """
    check = TarCheck()
    async with GuestTool.run(
        sandbox, "Putting the snapshot in place", "archive.py", command, *_folders(sandbox.spec, places), stdin=True
    ) as tool:
        try:
            with _disk_errors(source), source.open("rb") as file:
                while data := await asyncio.to_thread(file.read, PIECE):
                    check.feed(data)
                    if not await tool.write(data):
                        break
                else:
                    check.end()
        except ValueError as error:
            raise SnapshotError(f"{source} is not a valid snapshot: {error}.") from error
        _log(sandbox, await tool.finish())


async def _receive(sandbox: GVisorSandbox, file: BinaryIO, limit: int, places: Collection[str]) -> int:
    check, size, folders = TarCheck(), 0, _folders(sandbox.spec, places)
    async with GuestTool.run(sandbox, "Packing the snapshot", "archive.py", "create", *folders) as tool:
        try:
            async for data in tool.output():
                size += len(data)
                if size > limit:
                    raise SnapshotTooLargeError(
                        f"The snapshot of sandbox {sandbox.sandbox_id} is larger than {limit:,} bytes.",
                        "Delete files that are not needed in the sandbox's home and /tmp.",
                    )
                check.feed(data)
                await asyncio.to_thread(_write, file, data)
            _log(sandbox, await tool.finish())
            check.end()
        except ValueError as error:
            raise SnapshotError(f"Sandbox {sandbox.sandbox_id} sent an invalid tar archive: {error}.") from error
    return size


def _folders(spec: BundleSpec, places: Collection[str]) -> list[str]:
    """Return NAME=FOLDER for each of the ``places`` to pack or unpack, unless read-only or mounted from the host."""
    mounted = {mount.destination for mount in visible_mounts(spec) if mount.source}
    found = {**({} if spec.read_only else {"/": "root"}), "/tmp": "tmp", spec.home: "home"}
    return [f"{name}={folder}" for folder, name in found.items() if name in places and folder not in mounted]


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """Yield an empty file, which is removed if the block raises."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb", buffering=0) as file:
        try:
            yield file
        except BaseException:
            path.unlink()
            raise


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Translate OSError into DiskFullError or SnapshotError."""
    try:
        yield
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            raise DiskFullError(str(error)) from error
        raise SnapshotError(f"The snapshot {path} cannot be read or written: {error.strerror}.") from error


def _log(sandbox: GVisorSandbox, problems: str) -> None:
    if problems:
        logger.warning("Some files of a snapshot were left out in sandbox %s: %s", sandbox.sandbox_id, problems)
