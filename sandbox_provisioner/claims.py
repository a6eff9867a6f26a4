"""Claim: the persistent sandbox that a kernel's start belongs to, found or made, and what becomes of it in the end."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from .bundle import BundleSpec
from .config import GCSConfig
from .errors import SandboxExistsError, SandboxNotFoundError
from .handle import Identity, SandboxHandle
from .manager import Features, SandboxManager
from .persistence import registry
from .records import SandboxRecord
from .registry import Facts, PersistentSandboxRegistry
from .runsc import Runsc

UNKNOWN = BundleSpec(python=sys.executable, home="/home", user="user")
"""Until the kernel's command is known: a sandbox that was claimed is not started with it."""


@dataclass(frozen=True)
class Wanted:
    """Which sandbox a start asks for: by an id of the user's own, or by its notebook and kernel."""

    kernel_name: str
    notebook_path: str = ""
    sandbox_id: str = ""
    gcs: bool = False
    user: str = ""


class Claim:
    """One persistent sandbox in this process's hands; all methods belong to the I/O thread."""

    def __init__(self, manager: SandboxManager, book: PersistentSandboxRegistry, record: SandboxRecord) -> None:
        self.manager = manager
        self.record = record
        self._registry = book

    @property
    def handle(self) -> SandboxHandle:
        """The sandbox."""
        return self.manager.get(self.record.sandbox_id)

    @classmethod
    async def make(
        cls, wanted: Wanted, config: GCSConfig, runsc: Runsc, server: str, features: Features, patience: float
    ) -> Claim:
        """Attach to the sandbox that there is, or make a new one; what this server cannot do is refused first."""
        config.require(
            gcs_sandbox_id=wanted.sandbox_id if wanted.gcs else None,
            enable_handoff=features.enable_handoff,
            enable_checkpoint_at_idle=features.enable_checkpoint_at_idle,
            sandbox_id=wanted.sandbox_id,
        )
        manager, book = SandboxManager(config, runsc, server), registry()
        record = await asyncio.to_thread(_record, book, manager, wanted)
        claim = cls(manager, book, record)
        about = Identity(wanted.kernel_name, wanted.notebook_path, wanted.user)
        try:
            await manager.attach(record.sandbox_id, UNKNOWN, features, patience=patience)
        except SandboxNotFoundError:
            try:
                await manager.create(record.sandbox_id, UNKNOWN, about, features)
            except SandboxExistsError:  # another server was quicker
                await manager.attach(record.sandbox_id, UNKNOWN, features, patience=patience)
        await asyncio.to_thread(book.touch, record.id)
        return claim

    async def follow(self, notebook_path: str) -> None:
        """The notebook was renamed: its sandbox is found under the new name from now on."""
        if notebook_path != self.record.notebook_path:
            await self.handle.change(notebook_path=notebook_path)
            moved = await asyncio.to_thread(self._registry.rename, self.record.notebook_path, notebook_path)
            self.record = next((record for record in moved if record.id == self.record.id), self.record)

    async def give_up(self, forget: bool) -> None:
        """Let others have the sandbox; or delete it, with everything that was saved of it."""
        sandbox_id = self.record.sandbox_id
        if sandbox_id not in self.manager.handles:
            return  # another server has it
        if forget:
            await self.manager.delete(sandbox_id)
            await asyncio.to_thread(self._registry.forget, self.record.id)
        else:
            await self.manager.release(sandbox_id)


def _record(book: PersistentSandboxRegistry, manager: SandboxManager, wanted: Wanted) -> SandboxRecord:
    facts = Facts(kernel_name=wanted.kernel_name, notebook_path=wanted.notebook_path)
    if wanted.sandbox_id:
        return book.record(wanted.sandbox_id, manager.stores, **facts)
    where = manager.stores.metadata.where
    for record in book.find_notebook(wanted.notebook_path, wanted.kernel_name):
        if record.where == where:
            return record
    return book.allocate(manager.stores, **facts)
