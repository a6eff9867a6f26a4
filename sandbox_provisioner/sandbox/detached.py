"""Read, fork, revert and delete sandboxes that no server has open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from ..errors import (
    LeaseHeldError,
    MetadataError,
    ObjectNotFoundError,
    SandboxExistsError,
    SandboxNotFoundError,
    StateError,
)
from ..errors.signature import SignatureError
from ..events import EVENT_BUS, EventKind
from ..lock.base import Lease, Owner
from ..persistence import checkpoints, snapshots
from ..persistence import document as documents
from ..persistence.backends import Stores
from ..persistence.document import Document
from ..persistence.metadata import Checkpoint, GCSSandboxMetadata, Summary
from ..persistence.names import artifacts, checkpoints_prefix, lock_name, metadata_name, prefix, tombstone_name
from ..persistence.signing import named_user
from ..persistence.staging import staging
from ..storage.base import Advance, ObjectStore, nothing
from ..workers import bulk

RESEED = "reseed"
"""Key in the contents of a fork's checkpoint: the fork must get other random numbers than the original sandbox."""


@asynccontextmanager
async def leased(sandbox_id: str, stores: Stores, owner: Owner, patience: float = 0.0) -> AsyncIterator[Lease]:
    """Acquire the lease of a sandbox and yield it. The lease stays after the block, unless the block fails.

    Raises LeaseHeldError if another server still holds the lease after ``patience`` seconds. If the sandbox is another
    user's, raises ForeignSandboxError or SignatureError, without a request for a hand-off to that user's server.
    """
    try:
        lease = await stores.leases.acquire(lock_name(sandbox_id), owner)
    except LeaseHeldError:
        with suppress(SandboxNotFoundError, MetadataError):
            await asyncio.to_thread(describe_persistent, stores, sandbox_id)
        if not patience:
            raise
        lease = await stores.leases.acquire(lock_name(sandbox_id), owner, patience)
    try:
        yield lease
    except BaseException:
        await asyncio.shield(lease.release())
        raise


@asynccontextmanager
async def borrowed(sandbox_id: str, stores: Stores, owner: Owner) -> AsyncIterator[Document]:
    """Acquire the lease of a sandbox, provide its document, and release the lease after the block.

    Raises LeaseHeldError, SandboxNotFoundError.
    """
    async with leased(sandbox_id, stores, owner) as lease:
        yield await open_document(stores, sandbox_id, lease)
    await lease.release()


async def open_document(stores: Stores, sandbox_id: str, lease: Lease) -> Document:
    """Read the document of a sandbox whose lease this server holds. Raises the errors of ``document.load``."""
    return await Document.open(stores.metadata, stores.signer, metadata_name(sandbox_id), lease, sandbox_id)


async def sign(document: Document, stores: Stores, runs_on: bool = False) -> None:
    """Write this server's signature and lease token into a document; ``runs_on`` is passed to ``Document.sign``.

    If an older version of this package created the sandbox without signatures, also sign its snapshots. From then on,
    an unsigned document of this sandbox is refused.
    """
    await document.sign(runs_on)
    await asyncio.to_thread(_sign_earlier_snapshots, stores, document.metadata.sandbox_id)


def _sign_earlier_snapshots(stores: Stores, sandbox_id: str) -> None:
    if sandbox_id in stores.signer.earlier:
        if stores.snapshot_storage:
            snapshots.sign_earlier(stores.snapshot_storage, sandbox_id)
        stores.signer.earlier.discard(sandbox_id)


def describe_persistent(stores: Stores, sandbox_id: str) -> GCSSandboxMetadata:
    """Return the document of a sandbox; no lease is needed. Blocks. Raises the errors of ``document.load``."""
    return documents.load(stores.metadata, stores.signer, metadata_name(sandbox_id), sandbox_id)[0]


def summarise_persistent(stores: Stores, sandbox_id: str) -> Summary:
    """Return the summary of a sandbox; no lease is needed. Blocks. Raises the errors of ``document.load``."""
    return documents.read_summary(stores.metadata, stores.signer, metadata_name(sandbox_id), sandbox_id)


async def create_fork(
    stores: Stores, first: GCSSandboxMetadata, owner: Owner, make: Callable[[str], Awaitable[Checkpoint]]
) -> Checkpoint:
    """Store a fork: ``make`` stores the checkpoint, then the document ``first`` is written. Return the checkpoint.

    The document is written last. Until then, a tombstone marks the checkpoint as garbage. Raises SandboxExistsError.
    """
    name = metadata_name(first.sandbox_id)
    async with leased(first.sandbox_id, stores, owner) as lease:
        if await asyncio.to_thread(exists, stores, first.sandbox_id):
            raise SandboxExistsError(first.sandbox_id, stores.metadata.where)
        await asyncio.to_thread(_write_tombstone, stores, first.sandbox_id)
        checkpoint = await make(first.sandbox_id)
        first = replace(first, checkpoint=replace(checkpoint, contents={**checkpoint.contents, RESEED: True}))
        await Document.create(stores.metadata, stores.signer, name, lease, first)
        await asyncio.to_thread(_remove_tombstone, stores, first.sandbox_id)
    await lease.release()
    return checkpoint


def exists(stores: Stores, sandbox_id: str) -> bool:
    """Return True if the sandbox has a document. Blocks."""
    return stores.metadata.exists(metadata_name(sandbox_id))


async def copy_checkpoint(
    stores: Stores, sandbox_id: str, source: Checkpoint, new_id: str, advance: Advance = nothing
) -> Checkpoint:
    """Copy the checkpoint ``source`` of ``sandbox_id`` to the sandbox ``new_id`` in storage, and return the copy."""
    store = stores.required_checkpoints()
    checkpoints.check_names(source.artifact, checkpoints_prefix(sandbox_id))
    below = f"{checkpoints_prefix(new_id)}{checkpoints.new_name()}/"
    async with staging(stores.staging) as folder:
        artifact = await bulk(checkpoints.copy, store, source.artifact, folder / "image", below, advance)
    return replace(source, artifact=artifact)


async def fork_persistent(
    stores: Stores, sandbox_id: str, first: GCSSandboxMetadata, owner: Owner, savepoint: str = ""
) -> None:
    """Create the sandbox ``first`` with the memory of ``sandbox_id``, at a savepoint or at its latest checkpoint.

    Raises LeaseHeldError if ``sandbox_id`` is in use, StateError if it has no checkpoint, SavepointNotFoundError,
    SandboxExistsError.
    """
    async with borrowed(sandbox_id, stores, owner) as document:
        current = document.metadata
        source = current.savepoint(savepoint) if savepoint else current.checkpoint
        if source is None:
            raise StateError(sandbox_id, "fork", "it has no checkpoint")
        with EVENT_BUS.doing(
            replace(current.entry(EventKind.FORKED), kernel_name=first.kernel_name, user=first.user)
        ) as work:
            work.size = source.size
            await create_fork(
                stores, first, owner, lambda name: copy_checkpoint(stores, sandbox_id, source, name, work.advance)
            )


async def drop_savepoint(stores: Stores, sandbox_id: str, name: str, owner: Owner) -> None:
    """Delete a savepoint. Raises LeaseHeldError if the sandbox is in use, SavepointNotFoundError."""
    store = stores.required_checkpoints()
    async with borrowed(sandbox_id, stores, owner) as document:
        dropped = document.metadata.savepoint(name)
        checkpoints.check_names(dropped.artifact, checkpoints_prefix(sandbox_id))
        await sign(document, stores)
        await document.change(lambda current: current.without_savepoint(name))
        if dropped.artifact.name not in document.metadata.kept:
            await bulk(store.delete_all, dropped.artifact.name)


async def destroy_persistent(
    stores: Stores, sandbox_id: str, owner: Owner, only_empty: bool = False, unverified: bool = False
) -> int:
    """Delete a sandbox, even a damaged one, with its checkpoints and snapshots, and return the freed bytes.

    The document is deleted first: from then on the sandbox is gone, even if a later step fails. Artifacts that a new
    sandbox of the same id stores meanwhile are kept. With ``unverified``, the document's signature need not be valid,
    but the document must not name another user; use it only for a sandbox in the user's own registry.

    Raises ForeignSandboxError or SignatureError if it is another user's, LeaseHeldError if it is in use, and with
    ``only_empty``, SandboxExistsError if it has checkpoints, savepoints or file snapshots.
    """
    name = metadata_name(sandbox_id)
    async with leased(sandbox_id, stores, owner) as lease:
        found = await asyncio.to_thread(_all_artifacts, stores, sandbox_id)
        with suppress(SandboxNotFoundError):
            try:
                document = await open_document(stores, sandbox_id, lease)
                if only_empty and (document.metadata.kept or _has_snapshots(found)):
                    raise SandboxExistsError(sandbox_id, stores.metadata.where)
                await document.sign()
                generation = document.generation
            except (MetadataError, SignatureError) as error:
                if only_empty:
                    raise
                generation = await asyncio.to_thread(_unreadable_generation, stores, name, error, unverified)
            await asyncio.to_thread(_write_tombstone, stores, sandbox_id)
            await asyncio.to_thread(stores.metadata.delete, name, generation)
        freed = await bulk(_delete, stores, sandbox_id, found)
    await lease.release()
    return freed


async def require_deletable(stores: Stores, sandbox_id: str, unverified: bool = False) -> None:
    """Raise the error that ``destroy_persistent`` would raise for a sandbox now. Changes nothing."""
    if holder := await stores.leases.holder(lock_name(sandbox_id)):
        raise LeaseHeldError(lock_name(sandbox_id), holder)
    with suppress(SandboxNotFoundError):
        try:
            await asyncio.to_thread(describe_persistent, stores, sandbox_id)
        except (MetadataError, SignatureError) as error:
            await asyncio.to_thread(_unreadable_generation, stores, metadata_name(sandbox_id), error, unverified)


def _unreadable_generation(stores: Stores, name: str, error: MetadataError | SignatureError, unverified: bool) -> int:
    """Return the generation of a document that was refused with ``error``, for its deletion. Blocks.

    Raises SandboxNotFoundError. If another user may have signed the document, raises ``error``; with ``unverified``,
    raises SignatureError instead, and only if the document names another user.
    """
    foreign = isinstance(error, SignatureError) and error.foreign
    if foreign and not unverified:
        raise error
    try:
        data, info = stores.metadata.read(name)
    except ObjectNotFoundError as missing:
        raise SandboxNotFoundError(name, stores.metadata.where) from missing
    if foreign and not stores.signer.names_us(data):
        raise SignatureError.of_another(name, stores.metadata.where, named_user(data))
    return info.generation


async def destroy_remains(stores: Stores, sandbox_id: str, owner: Owner) -> None:
    """Delete the artifacts of a sandbox with a tombstone; if the sandbox has a document, delete only the tombstone.

    Raises LeaseHeldError.
    """
    async with leased(sandbox_id, stores, owner) as lease:
        if await asyncio.to_thread(exists, stores, sandbox_id):
            await asyncio.to_thread(_remove_tombstone, stores, sandbox_id)
        else:
            found = await asyncio.to_thread(_all_artifacts, stores, sandbox_id)
            await bulk(_delete, stores, sandbox_id, found)
    await lease.release()


def _all_artifacts(stores: Stores, sandbox_id: str) -> list[tuple[ObjectStore, set[str]]]:
    places = [(stores.snapshots, "snapshots/"), (stores.checkpoints, "checkpoints/")]
    return [(store, artifacts(store, prefix(sandbox_id) + at)) for store, at in places if store]


def _has_snapshots(found: list[tuple[ObjectStore, set[str]]]) -> bool:
    return any("/snapshots/" in name for _, names in found for name in names)


def _delete(stores: Stores, sandbox_id: str, found: list[tuple[ObjectStore, set[str]]]) -> int:
    """Delete these artifacts and the tombstone, and return the freed bytes. Blocks."""
    freed = sum(store.delete_all(below) for store, names in found for below in names)
    _remove_tombstone(stores, sandbox_id)
    return freed


def _write_tombstone(stores: Stores, sandbox_id: str) -> None:
    """Write a tombstone, which marks the artifacts of a sandbox without a document as garbage for every server.

    Artifacts without a tombstone are never garbage: their documents may be in another server's metadata store.
    """
    if stores.checkpoints:
        stores.checkpoints.write(tombstone_name(sandbox_id), stores.metadata.where.encode())


def _remove_tombstone(stores: Stores, sandbox_id: str) -> None:
    if stores.checkpoints:
        stores.checkpoints.delete(tombstone_name(sandbox_id))


async def revert_persistent(stores: Stores, sandbox_id: str, owner: Owner, left_running: bool = False) -> Checkpoint:
    """Revert a sandbox to its previous checkpoint and return that checkpoint; keep the latest one as a savepoint.

    With ``left_running``, the sandbox has a newer state that cannot be saved: the latest checkpoint stays the current
    one, and is returned. Raises LeaseHeldError if the sandbox is in use, StateError if it has no such checkpoint.
    """
    async with borrowed(sandbox_id, stores, owner) as document:
        older = document.metadata.checkpoint if left_running else document.metadata.previous
        if older is None:
            raise StateError(sandbox_id, "revert", "it has no previous checkpoint")
        await sign(document, stores)
        savepoint = f"before-revert-{checkpoints.new_name()}"
        await document.change(lambda current: current.given_up() if left_running else current.reverted(savepoint))
    return older


async def reset_persistent(stores: Stores, sandbox_id: str, owner: Owner) -> str:
    """Make the next start of a sandbox begin with a new kernel; keep the latest checkpoint as a savepoint.

    Return the savepoint's name; empty without a checkpoint. Raises LeaseHeldError if the sandbox is in use.
    """
    async with borrowed(sandbox_id, stores, owner) as document:
        kept = f"before-reset-{checkpoints.new_name()}" if document.metadata.checkpoint else ""
        await sign(document, stores)
        await document.change(lambda current: current.reset(kept))
    return kept


def with_tombstone(stores: Stores) -> set[str]:
    """Return the ids of the sandboxes in ``stores`` whose deletion or creation as a fork was interrupted. Blocks."""
    store = stores.checkpoints
    if store is None:
        return set()
    tombstones = [info.name for info in store.list("sandboxes/") if info.name.endswith("/doomed")]
    return {name.split("/")[1] for name in tombstones if store.read(name)[0] == stores.metadata.where.encode()}
