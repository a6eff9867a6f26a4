"""Read and change a sandbox's metadata.json by fenced compare-and-swap.

The server that acquires the lease writes the lease's token into the document, which changes its generation. The write
of a server that was suspended for longer than its lease then fails: the generation and the token are not those that it
expects. Each document is signed with the user's key when written and verified when read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ..errors import (
    ConflictError,
    FencedError,
    ObjectNotFoundError,
    SandboxExistsError,
    SandboxNotFoundError,
    UnsaveableError,
)
from ..events import EVENT_BUS, EventKind
from ..lock.base import Lease
from ..storage.base import NEW, ObjectInfo, ObjectStore
from . import metadata
from .metadata import GCSSandboxMetadata, Summary, Tenancy
from .signing import Signer

Change = Callable[[GCSSandboxMetadata], GCSSandboxMetadata]

ATTEMPTS = 10
MOST_DOCUMENT = 48 << 20
"""Maximum bytes of a changed document: reading it takes several times as much memory."""


class Document:
    """The current ``metadata`` of a sandbox whose lease this server holds, and the only way to change it.

    Owned by a SandboxHandle, or by an operation in ``sandbox.detached``. Made by ``create`` or ``open``.
    """

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
        """Size of the stored document in bytes."""
        self._swapping = asyncio.Lock()

    @classmethod
    async def create(
        cls, store: ObjectStore, signer: Signer, name: str, lease: Lease, first: GCSSandboxMetadata
    ) -> Document:
        """Write the first document, with the lease's token, and return it. Raises SandboxExistsError."""
        with_token = first.taken_over(lease.token, str(lease.owner), runs_on=False)

        def encode_and_write() -> ObjectInfo:
            return store.write(name, signer.sign(name, metadata.encode(with_token)), NEW)

        try:
            written = await asyncio.to_thread(encode_and_write)
        except ConflictError as error:
            raise SandboxExistsError(first.sandbox_id, store.where) from error
        EVENT_BUS.write(first.entry(EventKind.CREATED))
        return cls(store, signer, name, lease, with_token, written)

    @classmethod
    async def open(cls, store: ObjectStore, signer: Signer, name: str, lease: Lease, sandbox_id: str) -> Document:
        """Read the document without a change; call ``sign`` before ``change``. Raises the errors of ``load``."""
        current, info = await asyncio.to_thread(load, store, signer, name, sandbox_id)
        return cls(store, signer, name, lease, current, info)

    async def sign(self, runs_on: bool = False) -> None:
        """Write this lease's token into the document, so that earlier owners can no longer change it.

        The document then says that the sandbox has ended, unless it ``runs_on`` although its server was killed.
        """
        token, owner = self.lease.token, str(self.lease.owner)
        async with self._swapping:
            await self._swap(lambda document: document.taken_over(token, owner, runs_on), take_over=True)

    async def change(self, change: Change, most: int = MOST_DOCUMENT) -> None:
        """Replace the document with the result of ``change``, which may be called several times.

        Raises FencedError if the document has another owner's token, UnsaveableError if it would grow to more than
        ``most`` bytes.
        """
        async with self._swapping:
            await self._swap(change, most)

    async def continue_under(self, lease: Lease) -> None:
        """Continue under this server's new lease. Raises FencedError if the document had another owner in between."""
        async with self._swapping:
            await self._reload()
            tenancy = self._require_token()
            await self._write(replace(self.metadata, tenancy=replace(tenancy, token=lease.token)))
            self.lease = lease

    async def _swap(self, change: Change, most: int | None = None, take_over: bool = False) -> None:
        """Write the result of ``change``. If another server has written meanwhile, apply it to that document and retry.

        Raises FencedError after ATTEMPTS attempts or, except with ``take_over``, if another owner has written.
        """
        for _ in range(ATTEMPTS):
            with suppress(ConflictError):  # another server's write, or our own whose response was lost
                return await self._write(change(self.metadata), most)
            await self._reload()
            if not take_over:
                self._require_token()
        raise self._fenced()

    async def _write(self, changed: GCSSandboxMetadata, most: int | None = None) -> None:
        def encode_and_write() -> ObjectInfo:
            data = self._signer.sign(self._name, metadata.encode(changed))
            if most is not None and len(data) > max(most, self.size):
                problem = f"its stored document would have {len(data):,} bytes; at most {most:,} are allowed"
                raise UnsaveableError(changed.sandbox_id, [f"{problem}: delete some of its savepoints"])
            return self._store.write(self._name, data, self.generation)

        written = await asyncio.to_thread(encode_and_write)
        self.metadata, self.generation, self.size = changed, written.generation, written.size

    async def _reload(self) -> None:
        self.metadata, info = await asyncio.to_thread(
            load, self._store, self._signer, self._name, self.metadata.sandbox_id
        )
        self.generation, self.size = info.generation, info.size

    def _require_token(self) -> Tenancy:
        """Return the document's tenancy. Raises FencedError if its token is not that of this lease."""
        tenancy = self.metadata.tenancy
        if tenancy is None or tenancy.token != self.lease.token:
            raise self._fenced()
        return tenancy

    def _fenced(self) -> FencedError:
        tenancy = self.metadata.tenancy
        return FencedError(self.metadata.sandbox_id, tenancy.owner if tenancy else "nobody")


def load(store: ObjectStore, signer: Signer, name: str, sandbox_id: str) -> tuple[GCSSandboxMetadata, ObjectInfo]:
    """Read and verify a sandbox's document; no lease is needed. Blocks.

    Raises SandboxNotFoundError, MetadataError, or SignatureError or ForeignSandboxError if this user may not read it.
    """
    data, info = _read(store, signer, name, sandbox_id)
    document = metadata.decode(data, f"{name} in {store.where}", sandbox_id)
    signer.require_access(sandbox_id, document.user, document.shared_with)
    return document, info


def read_summary(store: ObjectStore, signer: Signer, name: str, sandbox_id: str) -> Summary:
    """Read the summary of a sandbox's document for a list. Blocks. Raises the errors of ``load``."""
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
