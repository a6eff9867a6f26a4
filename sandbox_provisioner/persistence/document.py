"""Ledger: a sandbox's metadata.json in the hands of its tenant, changed only by compare-and-swap.

The swap is the fence. Whoever gets the lease writes its token into the document, which changes the generation; a server
that was away for longer than its lease finds another's token there, and can change nothing any more. Each document that
is written is signed with the user's key, and each that is read is verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from . import metadata
from .errors import (
    ConflictError,
    FencedError,
    ObjectNotFoundError,
    SandboxExistsError,
    SandboxNotFoundError,
    UnsaveableError,
)
from .journal import JOURNAL, Entry, What
from .lock.base import Lease
from .metadata import GCSSandboxMetadata, Summary, Tenancy
from .signing import Signer
from .storage.base import NEW, ObjectInfo, ObjectStore

Change = Callable[[GCSSandboxMetadata], GCSSandboxMetadata]

ATTEMPTS = 10
MOST_DOCUMENT = 48 << 20
"""Bytes that a change may make of a document: those who read it need several times as much memory."""


class Ledger:
    """The present ``metadata`` of a sandbox that this server has the lease of. Use a factory."""

    def __init__(
        self,
        store: ObjectStore,
        signer: Signer,
        name: str,
        lease: Lease,
        current: GCSSandboxMetadata,
        info: ObjectInfo,
    ) -> None:
        self.metadata = current
        self.lease = lease
        self._store = store
        self._signer = signer
        self._name = name
        self.generation = info.generation
        self.size = info.size
        """The document's bytes in storage."""
        self._swapping = asyncio.Lock()

    @classmethod
    async def create(
        cls, store: ObjectStore, signer: Signer, name: str, lease: Lease, first: GCSSandboxMetadata
    ) -> Ledger:
        """Write the first document, with the lease's token; SandboxExistsError if there is one."""
        ours = replace(first, tenancy=_tenancy(lease))

        def encode_and_write() -> ObjectInfo:
            return store.write(name, signer.sign(name, metadata.encode(ours)), NEW)

        try:
            written = await asyncio.to_thread(encode_and_write)
        except ConflictError as error:
            raise SandboxExistsError(first.sandbox_id, store.where) from error
        JOURNAL.write(Entry(first.sandbox_id, What.CREATED, kernel_name=first.kernel_name, user=first.user))
        return cls(store, signer, name, lease, ours, written)

    @classmethod
    async def open(cls, store: ObjectStore, signer: Signer, name: str, lease: Lease, sandbox_id: str) -> Ledger:
        """Read the document as it is. It is not ours before ``sign``. The errors are those of ``load``."""
        current, info = await asyncio.to_thread(load, store, signer, name, sandbox_id)
        return cls(store, signer, name, lease, current, info)

    async def sign(self) -> None:
        """Make the document ours, so that nobody who had it before can change it."""
        async with self._swapping:
            for _ in range(ATTEMPTS):
                try:
                    return await self._write(replace(self.metadata, tenancy=_tenancy(self.lease)))
                except ConflictError:  # the last words of the tenant before us
                    await self._reload()
            raise self._fenced()

    async def change(self, change: Change, most: int = MOST_DOCUMENT) -> None:
        """Replace the document by what ``change`` makes of it; FencedError if it is not ours any more.

        UnsaveableError if it would grow to more than ``most`` bytes.
        """
        async with self._swapping:
            for _ in range(ATTEMPTS):
                try:
                    return await self._write(change(self.metadata), most)
                except ConflictError:  # either another's, or ours, of which we never heard that it had succeeded
                    await self._reload()
                    tenancy = self.metadata.tenancy
                    if tenancy is None or tenancy.token != self.lease.token:
                        raise self._fenced() from None
            raise self._fenced()

    async def pass_on(self, lease: Lease) -> None:
        """Go on under another lease of our own; FencedError if the document was another's in between."""
        async with self._swapping:
            await self._reload()
            tenancy = self.metadata.tenancy
            if tenancy is None or tenancy.token != self.lease.token:
                raise self._fenced()
            await self._write(replace(self.metadata, tenancy=replace(tenancy, token=lease.token)))
            self.lease = lease

    async def _write(self, changed: GCSSandboxMetadata, most: int | None = None) -> None:
        def encode_and_write() -> ObjectInfo:
            data = self._signer.sign(self._name, metadata.encode(changed))
            if most is not None and len(data) > max(most, self.size):
                problem = f"its record in storage would have {len(data):,} bytes, and {most:,} at most can be kept"
                raise UnsaveableError(changed.sandbox_id, [f"{problem}: delete some of its savepoints"])
            return self._store.write(self._name, data, self.generation)

        written = await asyncio.to_thread(encode_and_write)
        self.metadata, self.generation, self.size = changed, written.generation, written.size

    async def _reload(self) -> None:
        self.metadata, info = await asyncio.to_thread(
            load, self._store, self._signer, self._name, self.metadata.sandbox_id
        )
        self.generation, self.size = info.generation, info.size

    def _fenced(self) -> FencedError:
        tenancy = self.metadata.tenancy
        return FencedError(self.metadata.sandbox_id, tenancy.owner if tenancy else "nobody")


def load(store: ObjectStore, signer: Signer, name: str, sandbox_id: str) -> tuple[GCSSandboxMetadata, ObjectInfo]:
    """Read a sandbox's document, without any claim to it. Blocks.

    SandboxNotFoundError, MetadataError; SignatureError, ForeignSandboxError if it is not this user's to read.
    """
    data, info = _read(store, signer, name, sandbox_id)
    document = metadata.decode(data, f"{name} in {store.where}", sandbox_id)
    signer.require_access(sandbox_id, document.user, document.shared_with)
    return document, info


def glance(store: ObjectStore, signer: Signer, name: str, sandbox_id: str) -> Summary:
    """Read what a list shows of a sandbox's document. Blocks. The errors are those of ``load``."""
    data, _ = _read(store, signer, name, sandbox_id)
    summary = metadata.summarise(data, f"{name} in {store.where}", sandbox_id)
    signer.require_access(sandbox_id, summary.user, summary.shared_with)
    return summary


def _read(store: ObjectStore, signer: Signer, name: str, sandbox_id: str) -> tuple[bytes, ObjectInfo]:
    try:
        data, info = store.read(name)
    except ObjectNotFoundError as error:
        raise SandboxNotFoundError(sandbox_id, store.where) from error
    signer.verify(name, store.where, sandbox_id, data)
    return data, info


def _tenancy(lease: Lease) -> Tenancy:
    return Tenancy(lease.token, str(lease.owner), running=False)
