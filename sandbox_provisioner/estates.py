"""Sandboxes that nobody has open: what is recorded of them, and their end with everything that was kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from . import ledger
from .errors import MetadataError, SandboxError, SandboxNotFoundError
from .ledger import Ledger
from .lock.base import Lease, Owner
from .metadata import Checkpoint, GCSSandboxMetadata
from .names import artifacts, lock_name, metadata_name, prefix
from .stores import Stores


@asynccontextmanager
async def leased(sandbox_id: str, stores: Stores, owner: Owner, patience: float = 0.0) -> AsyncIterator[Lease]:
    """The lease of a sandbox, kept after the block if that succeeds and released if it does not."""
    lease = await stores.leases.acquire(lock_name(sandbox_id), owner, patience)
    try:
        yield lease
    except BaseException:
        await asyncio.shield(lease.release())
        raise


def describe_persistent(stores: Stores, sandbox_id: str) -> GCSSandboxMetadata:
    """What is recorded of a sandbox, without any claim to it. Blocks."""
    return ledger.load(stores.metadata, metadata_name(sandbox_id), sandbox_id)[0]


async def destroy_persistent(stores: Stores, sandbox_id: str, owner: Owner) -> int:
    """Delete a sandbox with its checkpoints and snapshots, also a damaged one; returns how many bytes that freed.

    LeaseHeldError if it is in use. First goes the document: whatever happens then, the sandbox is gone. What is deleted
    was there before that, so that one who comes after us loses nothing.
    """
    freed, name = 0, metadata_name(sandbox_id)
    places = [(stores.snapshots, "snapshots/"), (stores.checkpoints, "checkpoints/")]
    async with leased(sandbox_id, stores, owner) as lease:
        found = [
            (store, await asyncio.to_thread(artifacts, store, prefix(sandbox_id) + at)) for store, at in places if store
        ]
        with suppress(SandboxNotFoundError):
            try:
                book = await Ledger.open(stores.metadata, name, lease, sandbox_id)
                await book.sign()
                generation = book.generation
            except MetadataError:
                generation = (await asyncio.to_thread(stores.metadata.info, name)).generation
            await asyncio.to_thread(stores.metadata.delete, name, generation)
        for store, names in found:
            for below in names:
                freed += await asyncio.to_thread(store.delete_all, below)
    await lease.release()
    return freed


async def revert_persistent(stores: Stores, sandbox_id: str, owner: Owner) -> Checkpoint:
    """Give up a sandbox's last checkpoint for the one before, which is returned. LeaseHeldError if it is in use."""
    async with leased(sandbox_id, stores, owner) as lease:
        book = await Ledger.open(stores.metadata, metadata_name(sandbox_id), lease, sandbox_id)
        older = book.metadata.previous
        if older is None:
            raise SandboxError(f"Sandbox {sandbox_id} has no checkpoint before its last one.")
        await book.sign()
        await book.change(lambda document: replace(document, checkpoint=older, previous=None))
    await lease.release()
    return older


def without_metadata(stores: Stores) -> set[str]:
    """The ids with checkpoints but no document: of sandboxes whose deletion did not get to its end. Blocks."""
    top = "sandboxes/"
    ids = {info.name.split("/")[1] for info in stores.checkpoints.list(top)} if stores.checkpoints else set()
    return ids - {info.name.split("/")[1] for info in stores.metadata.list(top) if info.name.endswith("metadata.json")}
