"""Find the record of the sandbox that a start requests, and keep the record of an open sandbox up to date."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from uuid import UUID, uuid5

from ..errors import SandboxError
from ..persistence.backends import Stores
from ..persistence.records import SandboxRecord
from .registry import Facts, PersistentSandboxRegistry
from .start_request import StartRequest

NAMESPACE = UUID("5a0f7c0e-6a55-4f1c-9b7d-0d6f0c1a2b3c")


class Registration:
    """The record of an open sandbox in the user's registry."""

    def __init__(self, registry: PersistentSandboxRegistry, record: SandboxRecord) -> None:
        self.record = record
        self._registry = registry

    async def touch(self) -> None:
        """Record that the sandbox was used until now; sandboxes that are unused for long may be pruned."""
        with suppress(SandboxError):
            self.record = await asyncio.to_thread(self._registry.touch, self.record.id)

    async def rename(self, notebook_path: str) -> None:
        """Record the new path of the notebook, so that the sandbox is found under that path."""
        moved = await asyncio.to_thread(self._registry.rename, self.record.notebook_path, notebook_path)
        self.record = next((record for record in moved if record.id == self.record.id), self.record)

    async def forget(self) -> None:
        """Delete the record."""
        await asyncio.to_thread(self._registry.forget, self.record.id)


def facts(request: StartRequest) -> Facts:
    """Return the facts to record. A request without a notebook leaves the notebook in the record unchanged."""
    found = Facts(kernel_name=request.kernel_name)
    if request.notebook_path:
        found["notebook_path"] = request.notebook_path
    return found


def identities(registry: PersistentSandboxRegistry) -> set[UUID]:
    """Return the ids of all records. Blocks."""
    return {record.id for record in registry.list().records}


def known(registry: PersistentSandboxRegistry, stores: Stores, request: StartRequest) -> SandboxRecord | None:
    """Return the record of the requested sandbox; None if the request has no id and no record matches. Blocks."""
    if request.sandbox_id:
        return registry.record(request.sandbox_id, stores)
    records = registry.find_notebook(request.notebook_path, request.kernel_name)
    return next((record for record in records if record.where == stores.metadata.where), None)


def derived(registry: PersistentSandboxRegistry, stores: Stores, request: StartRequest) -> SandboxRecord:
    """Return a record for a notebook without one, with an id derived from user, notebook path and kernel. Blocks.

    A server that shares only the storage derives the same id and so finds the sandbox. If a record here has that id
    already, its notebook was renamed and it is not the requested sandbox: return one with a new id.
    """
    identity = uuid5(NAMESPACE, "\n".join((request.user, request.notebook_path, request.kernel_name)))
    if identity in identities(registry):
        return registry.allocate(stores, **facts(request))
    return registry.ensure(identity, stores, **facts(request))
