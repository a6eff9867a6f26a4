"""Find the record of the sandbox that a start requests, and update the record of an open sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
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
        """Set the time of the last use, which ``jupyter sandbox prune`` compares, to now. Errors are ignored."""
        with suppress(SandboxError):
            self.record = await asyncio.to_thread(self._registry.touch, self.record.id)

    async def rename(self, notebook_path: str) -> None:
        """Record the new path of the notebook, so that the sandbox is found under that path."""
        moved = await asyncio.to_thread(self._registry.rename, self.record.notebook_path, notebook_path)
        self.record = next((record for record in moved if record.id == self.record.id), self.record)

    async def forget(self) -> None:
        """Delete the record."""
        await asyncio.to_thread(self._registry.forget, self.record.id)


@dataclass(frozen=True)
class Requested:
    """The record of the sandbox that a start requests.

    ``is_new`` is True if the record was written for this start. If ``is_derived``, the sandbox's id was derived from
    the notebook: if another server created it, its notebook may have been renamed since.
    """

    record: SandboxRecord
    is_new: bool = False
    is_derived: bool = False


def facts(request: StartRequest) -> Facts:
    """Return the facts of a request to record. Without a notebook in it, the recorded notebook does not change."""
    found = Facts(kernel_name=request.kernel_name)
    if request.notebook_path:
        found["notebook_path"] = request.notebook_path
    return found


def find_or_write(
    registry: PersistentSandboxRegistry, stores: Stores, request: StartRequest, open_ids: Container[str]
) -> Requested:
    """Find or write the record of the requested sandbox. Blocks.

    A notebook gets a new record if it has none, or if another kernel has its sandbox open (``open_ids``). The new id is
    derived from user, notebook path and kernel, so that a server that shares only the storage finds the same sandbox.
    If a record has that id already, the notebook of that record was renamed, and the new id is random.
    """
    recorded = {record.id for record in registry.list().records}
    if request.sandbox_id:
        record = registry.record(request.sandbox_id, stores)
        return Requested(record, is_new=record.id not in recorded)
    for record in registry.find_notebook(request.notebook_path, request.kernel_name):
        if record.where == stores.metadata.where:
            if record.sandbox_id in open_ids:
                return Requested(registry.allocate(stores, **facts(request)), is_new=True)
            return Requested(record)
    identity = uuid5(NAMESPACE, "\n".join((request.user, request.notebook_path, request.kernel_name)))
    if identity in recorded or str(identity) in open_ids:
        return Requested(registry.allocate(stores, **facts(request)), is_new=True)
    return Requested(registry.ensure(identity, stores, **facts(request)), is_new=True, is_derived=True)
