"""Find or create the persistent sandbox for a kernel's start, and release or delete it at the end."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID, uuid5
from weakref import WeakValueDictionary

from ..config import GCSConfig
from ..errors import ForeignSandboxError, SandboxError, SandboxExistsError, SandboxNotFoundError, SignatureError
from ..gvisor.runsc import Runsc
from ..persistence.backends import Stores, share_stores
from ..persistence.records import SandboxRecord
from ..workers import control
from .handle import UNPLANNED, Identity, SandboxHandle
from .manager import Features, SandboxManager
from .registry import Facts, PersistentSandboxRegistry
from .user_sandboxes import registry

log = logging.getLogger(__name__)

NAMESPACE = UUID("5a0f7c0e-6a55-4f1c-9b7d-0d6f0c1a2b3c")


@dataclass(frozen=True)
class Wanted:
    """The sandbox that a start requests: by the user's own id, or by notebook and kernel."""

    kernel_name: str
    notebook_path: str = ""
    sandbox_id: str = ""
    gcs: bool = False
    user: str = ""
    shared_with: tuple[str, ...] = ()

    @property
    def facts(self) -> Facts:
        """Facts for the registry. A request without a notebook leaves the notebook in the record unchanged."""
        facts = Facts(kernel_name=self.kernel_name)
        if self.notebook_path:
            facts["notebook_path"] = self.notebook_path
        return facts


class Claim:
    """A persistent sandbox that a kernel of this process holds. Owned by the provisioner. I/O loop only."""

    def __init__(self, manager: SandboxManager, book: PersistentSandboxRegistry, record: SandboxRecord) -> None:
        self.manager = manager
        self.record = record
        self._registry = book

    @property
    def handle(self) -> SandboxHandle:
        """The handle of the sandbox. Raises SandboxNotFoundError if this server no longer has it."""
        return self.manager.get(self.record.sandbox_id)

    @classmethod
    async def make(
        cls, wanted: Wanted, config: GCSConfig, runsc: Runsc, server: str, features: Features, patience: float
    ) -> Claim:
        """Attach to the existing sandbox, or create a new one.

        Raises ConfigurationError first if this server does not support the request, LeaseHeldError after ``patience``
        seconds, and the other errors of SandboxManager.attach.
        """
        config.require(
            gcs_sandbox_id=wanted.sandbox_id if wanted.gcs else None,
            enable_handoff=features.enable_handoff,
            enable_checkpoint_at_idle=features.enable_checkpoint_at_idle,
            sandbox_id=wanted.sandbox_id,
        )
        async with _making.setdefault(wanted, asyncio.Lock()):  # a second start then sees that the sandbox is in use
            return await cls._make(wanted, config, runsc, server, features, patience)

    @classmethod
    async def _make(
        cls, wanted: Wanted, config: GCSConfig, runsc: Runsc, server: str, features: Features, patience: float
    ) -> Claim:
        manager, book = SandboxManager(config, runsc, server, await control(share_stores, config)), registry()
        before = await asyncio.to_thread(_identities, book)
        known = await asyncio.to_thread(_known, book, manager.stores, wanted)
        record = known if known else await asyncio.to_thread(_derived, book, manager.stores, wanted)
        if not wanted.sandbox_id and _in_use_here(record):  # the notebook's old kernel still has it
            known = record = await asyncio.to_thread(book.allocate, manager.stores, **wanted.facts)
        claim = cls(manager, book, record)
        try:
            await claim._attach(wanted, features, patience)
            if claim.handle.metadata.user == wanted.user and claim.handle.metadata.shared_with != wanted.shared_with:
                await claim.handle.change(shared_with=wanted.shared_with)
            path = claim.handle.metadata.notebook_path
            if known is None and wanted.notebook_path and path != wanted.notebook_path:
                await claim.give_up(forget=False)  # its notebook was renamed on another server
                claim = cls(manager, book, await asyncio.to_thread(book.allocate, manager.stores, **wanted.facts))
                await claim._attach(wanted, features, patience)
            elif wanted.notebook_path and path != wanted.notebook_path:
                await claim.handle.change(notebook_path=wanted.notebook_path)
            claim.record = await asyncio.to_thread(book.record, claim.record.sandbox_id, manager.stores, **wanted.facts)
        except BaseException as error:
            await asyncio.shield(claim._undo())
            if isinstance(error, ForeignSandboxError | SignatureError) and record.id not in before:
                await asyncio.to_thread(book.forget, record.id)  # the user's registry lists no sandboxes of others
            raise
        _here[claim.record.id] = claim
        return claim

    async def _undo(self) -> None:
        """Release the sandbox after a failed start, or its lease would be renewed for ever. Errors are logged."""
        try:
            if self.record.sandbox_id in self.manager.handles:
                await self.manager.release(self.record.sandbox_id)
        except Exception:
            log.exception("Sandbox %s was not released after a failed start", self.record.sandbox_id)

    async def _attach(self, wanted: Wanted, features: Features, patience: float) -> None:
        about = Identity(wanted.kernel_name, wanted.notebook_path, wanted.user, shared_with=wanted.shared_with)
        sandbox_id = self.record.sandbox_id
        try:
            await self.manager.attach(sandbox_id, None, features, patience=patience)
        except SandboxNotFoundError:
            try:
                await self.manager.create(sandbox_id, UNPLANNED, about, features)
            except SandboxExistsError:  # another server has just created it
                await self.manager.attach(sandbox_id, None, features, patience=patience)

    async def follow(self, notebook_path: str) -> None:
        """Record the new path of a renamed notebook, so that its sandbox is found under that path."""
        moved = await asyncio.to_thread(self._registry.rename, self.record.notebook_path, notebook_path)
        self.record = next((record for record in moved if record.id == self.record.id), self.record)
        await self.handle.change(notebook_path=notebook_path)

    async def give_up(self, forget: bool) -> None:
        """Release the sandbox without saving it; with ``forget``, delete it and everything stored for it."""
        sandbox_id = self.record.sandbox_id
        if sandbox_id not in self.manager.handles:
            return  # it was handed over or lost
        if forget:
            await self.manager.delete(sandbox_id)
            await asyncio.to_thread(self._registry.forget, self.record.id)
        else:
            await self.manager.release(sandbox_id)
            await self.touch()

    async def touch(self) -> None:
        """Record that the sandbox was used until now; sandboxes that are unused for long may be pruned."""
        with suppress(SandboxError):
            self.record = await asyncio.to_thread(self._registry.touch, self.record.id)


_making: WeakValueDictionary[Wanted, asyncio.Lock] = WeakValueDictionary()
"""Locks held while a claim for the same request is made. I/O loop only."""

_here: WeakValueDictionary[UUID, Claim] = WeakValueDictionary()
"""The latest claim of this process on each sandbox, by record id."""


def _in_use_here(record: SandboxRecord) -> bool:
    last = _here.get(record.id)
    return last is not None and record.sandbox_id in last.manager.handles


def _identities(book: PersistentSandboxRegistry) -> set[UUID]:
    return {record.id for record in book.list().records}


def _known(book: PersistentSandboxRegistry, stores: Stores, wanted: Wanted) -> SandboxRecord | None:
    """Return the record of the requested sandbox; None if the request has no id and no record matches. Blocks."""
    if wanted.sandbox_id:
        return book.record(wanted.sandbox_id, stores)
    records = book.find_notebook(wanted.notebook_path, wanted.kernel_name)
    return next((record for record in records if record.where == stores.metadata.where), None)


def _derived(book: PersistentSandboxRegistry, stores: Stores, wanted: Wanted) -> SandboxRecord:
    """Return a record for a notebook without one, with an id derived from user, notebook path and kernel. Blocks.

    A server that shares only the storage derives the same id and so finds the sandbox. If a record here has that id
    already, its notebook was renamed and it is not the requested sandbox: return one with a new id.
    """
    derived = uuid5(NAMESPACE, "\n".join((wanted.user, wanted.notebook_path, wanted.kernel_name)))
    if any(record.id == derived for record in book.list().records):
        return book.allocate(stores, **wanted.facts)
    return book.ensure(derived, stores, **wanted.facts)
