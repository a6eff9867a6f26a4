"""Sandboxes that nobody has open: what is recorded of them, and their end with everything that was kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from . import checkpoints, ledger, snapshots
from .errors import (
    LeaseHeldError,
    MetadataError,
    ObjectNotFoundError,
    SandboxError,
    SandboxExistsError,
    SandboxNotFoundError,
    SignatureError,
    StateError,
)
from .journal import JOURNAL, Entry, What
from .ledger import Ledger
from .lock.base import Lease, Owner
from .metadata import Checkpoint, GCSSandboxMetadata, Summary
from .names import artifacts, checkpoints_prefix, doomed_name, lock_name, metadata_name, prefix
from .staging import staging
from .storage.base import Advance, ObjectStore, nothing
from .stores import Stores
from .workers import bulk

RESEED = "reseed"
"""Among the contents of a checkpoint: it is a copy, which must not have the same random numbers as the original."""


@asynccontextmanager
async def leased(sandbox_id: str, stores: Stores, owner: Owner, patience: float = 0.0) -> AsyncIterator[Lease]:
    """The lease of a sandbox, kept after the block if that succeeds and released if it does not.

    Another user's server is not asked to hand its sandbox over: ForeignSandboxError, SignatureError.
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
async def borrowed(sandbox_id: str, stores: Stores, owner: Owner) -> AsyncIterator[Ledger]:
    """The document of a sandbox that nobody has open, leased for the block. LeaseHeldError, SandboxNotFoundError."""
    async with leased(sandbox_id, stores, owner) as lease:
        yield await open_document(stores, sandbox_id, lease)
    await lease.release()


async def open_document(stores: Stores, sandbox_id: str, lease: Lease) -> Ledger:
    """Read the document of a sandbox that we have the lease of. The errors are those of ``ledger.load``."""
    return await Ledger.open(stores.metadata, stores.signer, metadata_name(sandbox_id), lease, sandbox_id)


async def sign(book: Ledger, stores: Stores) -> None:
    """Make a document ours. That of a sandbox from before documents were signed is accepted unsigned no more."""
    await book.sign()
    await asyncio.to_thread(_sign_earlier, stores, book.metadata.sandbox_id)


def _sign_earlier(stores: Stores, sandbox_id: str) -> None:
    if sandbox_id in stores.signer.earlier:
        if stores.shelf:
            snapshots.sign_earlier(stores.shelf, sandbox_id)
        stores.signer.earlier.discard(sandbox_id)


def describe_persistent(stores: Stores, sandbox_id: str) -> GCSSandboxMetadata:
    """What is recorded of a sandbox, without any claim to it. Blocks."""
    return ledger.load(stores.metadata, stores.signer, metadata_name(sandbox_id), sandbox_id)[0]


def summarise_persistent(stores: Stores, sandbox_id: str) -> Summary:
    """What a list shows of a sandbox, without any claim to it. Blocks."""
    return ledger.glance(stores.metadata, stores.signer, metadata_name(sandbox_id), sandbox_id)


async def found_persistent(
    stores: Stores, first: GCSSandboxMetadata, owner: Owner, make: Callable[[str], Awaitable[Checkpoint]]
) -> Checkpoint:
    """A new sandbox that begins with the checkpoint that ``make`` stores for its id. SandboxExistsError.

    The document comes last: until then the checkpoint is doomed.
    """
    name = metadata_name(first.sandbox_id)
    async with leased(first.sandbox_id, stores, owner) as lease:
        if await asyncio.to_thread(_exists, stores.metadata, name):
            raise SandboxExistsError(first.sandbox_id, stores.metadata.where)
        await asyncio.to_thread(_doom, stores, first.sandbox_id)
        made = await make(first.sandbox_id)
        contents = {**made.contents, RESEED: True}
        first = replace(first, checkpoint=replace(made, contents=contents))
        await Ledger.create(stores.metadata, stores.signer, name, lease, first)
        await asyncio.to_thread(_spare, stores, first.sandbox_id)
    await lease.release()
    return made


def _exists(store: ObjectStore, name: str) -> bool:
    try:
        return bool(store.info(name))
    except ObjectNotFoundError:
        return False


async def copy_checkpoint(
    stores: Stores, sandbox_id: str, source: Checkpoint, new_id: str, advance: Advance = nothing
) -> Checkpoint:
    """Store the image of a checkpoint of ``sandbox_id`` once more, for the sandbox ``new_id``."""
    store = stores.required_checkpoints()
    checkpoints.check_names(source.artifact, checkpoints_prefix(sandbox_id))
    below = f"{checkpoints_prefix(new_id)}{checkpoints.new_name()}/"
    with staging(stores.staging) as folder:
        artifact = await bulk(checkpoints.copy, store, source.artifact, folder / "image", below, advance)
    return replace(source, artifact=artifact)


async def fork_persistent(
    stores: Stores, sandbox_id: str, first: GCSSandboxMetadata, owner: Owner, savepoint: str = ""
) -> None:
    """A new sandbox, ``first``, with the memory of one that nobody has open, at a savepoint or as it was saved last.

    LeaseHeldError if it is in use, SavepointNotFoundError, SandboxExistsError.
    """
    async with borrowed(sandbox_id, stores, owner) as book:
        document = book.metadata
        source = document.savepoint(savepoint) if savepoint else document.checkpoint
        if source is None:
            raise StateError(sandbox_id, "fork", "empty: nothing was saved of it")
        with JOURNAL.doing(Entry(sandbox_id, What.FORKED, kernel_name=first.kernel_name, user=first.user)) as work:
            work.size = source.size
            await found_persistent(
                stores, first, owner, lambda name: copy_checkpoint(stores, sandbox_id, source, name, work.advance)
            )


async def drop_savepoint(stores: Stores, sandbox_id: str, name: str, owner: Owner) -> None:
    """Forget a savepoint of a sandbox that nobody has open. LeaseHeldError if it is in use, SavepointNotFoundError."""
    store = stores.required_checkpoints()
    async with borrowed(sandbox_id, stores, owner) as book:
        dropped = book.metadata.savepoint(name)
        checkpoints.check_names(dropped.artifact, checkpoints_prefix(sandbox_id))
        await sign(book, stores)
        await book.change(lambda document: document.without_savepoint(name))
        if dropped.artifact.name not in book.metadata.kept:
            await bulk(store.delete_all, dropped.artifact.name)


async def destroy_persistent(stores: Stores, sandbox_id: str, owner: Owner, only_empty: bool = False) -> int:
    """Delete a sandbox with its checkpoints and snapshots, also a damaged one; returns how many bytes that freed.

    ForeignSandboxError, SignatureError if it is another user's; LeaseHeldError if it is in use; SandboxExistsError if
    it was to be ``only_empty``, and something is saved of it. First goes the document: whatever happens then, the
    sandbox is gone. What is deleted was there before that, so that one who comes after us loses nothing.
    """
    name = metadata_name(sandbox_id)
    async with leased(sandbox_id, stores, owner) as lease:
        found = await asyncio.to_thread(_all_artifacts, stores, sandbox_id)
        with suppress(SandboxNotFoundError):
            try:
                book = await open_document(stores, sandbox_id, lease)
                if only_empty and book.metadata.kept:
                    raise SandboxExistsError(sandbox_id, stores.metadata.where)
                await book.sign()
                generation = book.generation
            except (MetadataError, SignatureError) as error:
                if only_empty or getattr(error, "foreign", False):
                    raise
                generation = (await asyncio.to_thread(stores.metadata.info, name)).generation
            await asyncio.to_thread(_doom, stores, sandbox_id)
            await asyncio.to_thread(stores.metadata.delete, name, generation)
        freed = await bulk(_delete, stores, sandbox_id, found)
    await lease.release()
    return freed


async def destroy_remains(stores: Stores, sandbox_id: str, owner: Owner) -> None:
    """Delete what is left of a doomed sandbox; one that has a document is doomed no more. LeaseHeldError."""
    async with leased(sandbox_id, stores, owner) as lease:
        if await asyncio.to_thread(_exists, stores.metadata, metadata_name(sandbox_id)):
            await asyncio.to_thread(_spare, stores, sandbox_id)
        else:
            found = await asyncio.to_thread(_all_artifacts, stores, sandbox_id)
            await bulk(_delete, stores, sandbox_id, found)
    await lease.release()


def _all_artifacts(stores: Stores, sandbox_id: str) -> list[tuple[ObjectStore, set[str]]]:
    places = [(stores.snapshots, "snapshots/"), (stores.checkpoints, "checkpoints/")]
    return [(store, artifacts(store, prefix(sandbox_id) + at)) for store, at in places if store]


def _delete(stores: Stores, sandbox_id: str, found: list[tuple[ObjectStore, set[str]]]) -> int:
    """Delete these artifacts; returns how many bytes that freed."""
    freed = sum(store.delete_all(below) for store, names in found for below in names)
    _spare(stores, sandbox_id)
    return freed


def _doom(stores: Stores, sandbox_id: str) -> None:
    """Have what is kept of a sandbox collected if it has no document, wherever this server may be killed now.

    Nothing else is: those whose metadata is in another place may keep their checkpoints in the same one.
    """
    if stores.checkpoints:
        stores.checkpoints.write(doomed_name(sandbox_id), stores.metadata.where.encode())


def _spare(stores: Stores, sandbox_id: str) -> None:
    if stores.checkpoints:
        stores.checkpoints.delete(doomed_name(sandbox_id))


async def revert_persistent(stores: Stores, sandbox_id: str, owner: Owner) -> Checkpoint:
    """Give up a sandbox's last checkpoint for the one before, which is returned. LeaseHeldError if it is in use.

    What is given up stays, as a savepoint.
    """
    async with borrowed(sandbox_id, stores, owner) as book:
        older = book.metadata.previous
        if older is None:
            raise SandboxError(f"Sandbox {sandbox_id} has no checkpoint before its last one.")
        await sign(book, stores)
        given_up = f"before-revert-{checkpoints.new_name()}"
        await book.change(lambda document: document.reverted(given_up))
    return older


def doomed(stores: Stores) -> set[str]:
    """The ids of sandboxes whose deletion, or foundation, did not get to its end. Blocks."""
    store = stores.checkpoints
    if store is None:
        return set()
    marks = [info.name for info in store.list("sandboxes/") if info.name.endswith("/doomed")]
    return {name.split("/")[1] for name in marks if store.read(name)[0] == stores.metadata.where.encode()}
