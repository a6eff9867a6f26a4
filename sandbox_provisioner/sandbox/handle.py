"""Start, save, restore and release one sandbox: SandboxHandle, made only by its factories.

A persistent sandbox exists exactly as long as its metadata.json.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import SandboxNotFoundError
from ..events import EVENT_BUS, Entry, EventKind
from ..gvisor.bundle import BundleSpec
from ..gvisor.restore_plan import Grant
from ..gvisor.runsc import Runsc
from ..gvisor.runtime_dir import RuntimeFolder
from ..gvisor.sandbox import GVisorSandbox
from ..lock.base import Lease, Owner
from ..persistence import snapshots
from ..persistence.backends import SnapshotStorage, Stores, require_snapshots
from ..persistence.checkpoints import now
from ..persistence.metadata import Checkpoint, GCSArtifact, GCSSandboxMetadata, Note
from ..persistence.names import snapshot_prefix, valid_id
from ..persistence.records import SandboxRecord
from ..workers import finished
from .memory import SandboxMemory
from .registry import Registration
from .stored_state import StoredState

PATIENCE = 120.0
"""Seconds to wait for the lease of a killed server to expire. A local lease ends with its process."""


@dataclass(frozen=True)
class Identity:
    """The fields of a sandbox's document that are known before it is created."""

    kernel_name: str = ""
    notebook_path: str = ""
    user: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    shared_with: tuple[str, ...] = ()

    def document(self, sandbox_id: str) -> GCSSandboxMetadata:
        """Return the first document of a new sandbox."""
        return GCSSandboxMetadata(sandbox_id=sandbox_id, created=now(), last_used=now(), **vars(self))


class HandleObserver:
    """Methods that a SandboxHandle calls, in its loop, when it saves or loses its sandbox. A kernel overrides them."""

    def busy(self) -> bool:
        """Return True while the sandbox is in use, and must not be saved as idle. Called by the supervisor."""
        return False

    def saving(self) -> None:
        """Prepare for a hibernation. The handle stays open and can restore the sandbox. The handle's lock is held."""

    def saved(self) -> None:
        """React to a completed hibernation, for example wake the sandbox again. The handle's lock is held."""

    def gone(self, reason: str) -> None:
        """Release all use of the sandbox: another server has it now. Called after a hand-off or a lost lease."""


class SandboxHandle:
    """A sandbox that this process has open: its id, its driver ``instance`` and, if persistent, its document and lease.

    Owned by a SandboxManager; if ephemeral, by the kernel; during a rescue, by Recovery. Operations that change the
    sandbox run one at a time (``lock``) and raise SandboxNotFoundError once the handle is closed. If the caller of a
    save or restore is cancelled, the operation is completed first. Use a factory instead of the constructor.
    """

    def __init__(
        self, sandbox_id: str, runsc: Runsc, stored: StoredState | None = None, storage: SnapshotStorage | None = None
    ) -> None:
        self.sandbox_id = valid_id(sandbox_id)
        self.observer = HandleObserver()
        self.registration: Registration | None = None
        self.supervisor: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()
        self.closed = self.saving = False
        self.outdated = False  # True for a rescued sandbox if another server has saved a newer state of it
        self.hands_over = False  # True if another server can get the sandbox by a hand-off
        self.last_activity = time.monotonic()
        self.idle_timeout: float | None = None
        self.memory = SandboxMemory(sandbox_id, runsc, stored)
        self._stored = stored
        self._storage = stored.stores.snapshot_storage if stored else storage
        self._touching: asyncio.Task[None] | None = None

    # -- factories -------------------------------------------------------------------------------------------------

    @classmethod
    def create_ephemeral(
        cls,
        sandbox_id: str,
        spec: BundleSpec,
        runsc: Runsc,
        platform: str = "systrap",
        storage: SnapshotStorage | None = None,
    ) -> SandboxHandle:
        """Return an unstarted sandbox that stores nothing except snapshots on request."""
        handle = cls(sandbox_id, runsc, storage=storage)
        handle.memory.replace_instance(spec, platform, Grant.of(spec, platform))
        return handle

    @classmethod
    async def create_persistent(
        cls,
        sandbox_id: str,
        spec: BundleSpec | None,
        runsc: Runsc,
        stores: Stores,
        owner: Owner,
        identity: Identity | None = None,
    ) -> SandboxHandle:
        """Return a new, unstarted persistent sandbox. Raises SandboxExistsError, LeaseHeldError.

        Without a ``spec``, call ``memory.replace_instance`` before ``start``. After a failure, nothing is stored.
        """
        first = (identity or Identity()).document(sandbox_id)
        handle = cls(sandbox_id, runsc, await StoredState.create(stores, owner, first))
        if spec:
            grant = Grant.of(spec, "systrap")
            handle.memory.replace_instance(spec, grant.platform, grant)
        return handle

    @classmethod
    async def attach_persistent(
        cls,
        sandbox_id: str,
        spec: BundleSpec | None,
        runsc: Runsc,
        stores: Stores,
        owner: Owner,
        platform: str = "systrap",
        patience: float = 0.0,
    ) -> SandboxHandle:
        """Return an existing sandbox, not running yet. Call ``restore`` next, or ``start`` if it has no checkpoint.

        Its mounts come from ``spec``, never from its document alone. Without a ``spec``, call ``permit`` before
        ``restore``, and ``memory.replace_instance`` before ``start``. Raises SandboxNotFoundError, LeaseHeldError after
        ``patience`` seconds, and IncompatibleError, which offers the previous checkpoint if one exists.
        """
        grant = Grant.of(spec, platform) if spec else None
        async with StoredState.attached(sandbox_id, stores, owner, patience) as stored:
            handle = cls(sandbox_id, runsc, stored)
            if source := stored.metadata.checkpoint:
                stores.required_checkpoints()
                await handle.memory.plan_restore(source, grant)
            elif spec:
                handle.memory.replace_instance(spec, platform, grant)
        handle.describe(handle.contents)  # write the rescue note with the lease token that attached() has recorded
        return handle

    @classmethod
    async def rescue(
        cls, folder: RuntimeFolder, note: Note, runsc: Runsc, stores: Stores, owner: Owner, alive: bool
    ) -> SandboxHandle:
        """Return the sandbox of a killed server from its runtime ``folder`` and ``note``. Called by Recovery only.

        If the sandbox is ``alive``, call ``save`` next.
        """
        async with StoredState.attached(note.sandbox_id, stores, owner, PATIENCE, alive) as stored:
            handle = cls(note.sandbox_id, runsc, stored)
            handle.outdated = note.outdated(stored.metadata)
        handle.memory.adopt_orphan(folder, note)
        return handle

    # -- identity and metadata ---------------------------------------------------------------------------------------

    @property
    def instance(self) -> GVisorSandbox:
        """The driver; each restart and rewind replaces it. Raises SandboxError while the mounts are not known."""
        return self.memory.instance

    @property
    def running(self) -> bool:
        """True while the sandbox runs."""
        return self.memory.running

    @property
    def contents(self) -> Mapping[str, Any]:
        """The description of the processes in the sandbox, set by ``describe``."""
        return self.memory.contents

    @property
    def persistent(self) -> bool:
        """True if the sandbox has a document in storage."""
        return self._stored is not None

    @property
    def can_save(self) -> bool:
        """True if the sandbox is persistent and this server has a store for checkpoints."""
        return self.memory.can_save

    @property
    def saved(self) -> bool:
        """True if there is a checkpoint for ``restore``."""
        return self.memory.source is not None

    @property
    def metadata(self) -> GCSSandboxMetadata:
        """The current document. Raises SandboxError for an ephemeral sandbox."""
        return self.memory.stored.metadata

    @property
    def lease(self) -> Lease:
        """This server's lease of the sandbox. Raises SandboxError for an ephemeral sandbox."""
        return self.memory.stored.document.lease

    @property
    def record(self) -> SandboxRecord | None:
        """The sandbox's record in the user's registry; None if it is not recorded."""
        return self.registration.record if self.registration else None

    def touch(self) -> None:
        """Restart the sandbox's idle time."""
        self.last_activity = time.monotonic()

    def describe(self, contents: Mapping[str, Any]) -> None:
        """Set the description of the processes inside, which is stored with each checkpoint and in the rescue note."""
        self.memory.describe(contents)

    def entry(self, kind: EventKind) -> Entry:
        """Return an event of this ``kind`` about the sandbox."""
        return self.memory.entry(kind)

    async def change(self, **fields: Any) -> None:
        """Change fields of the document, such as ``notebook_path``."""
        await self.memory.stored.document.change(lambda document: replace(document, **fields))

    async def follow(self, notebook_path: str) -> None:
        """Record the new path of a renamed notebook in the user's registry and in the document."""
        if self.registration:
            await self.registration.rename(notebook_path)
        await self.change(notebook_path=notebook_path)

    # -- start, restore, save ----------------------------------------------------------------------------------------

    async def permit(self, grant: Grant) -> None:
        """Set the mounts that restores of this sandbox may use, and plan the next restore with them.

        Raises IncompatibleError if this server cannot restore its checkpoint with them; the saved state is kept.
        """
        async with self.exclusive():
            await self.memory.permit(grant)

    async def start(self, template: Path | None = None) -> None:
        """Start the sandbox without saved state, or as a copy of ``template``. An existing checkpoint is kept."""
        async with self.exclusive():
            await self.memory.start(template)
            self.touch()

    async def restore(self) -> None:
        """Restore the sandbox from its checkpoint.

        Raises CorruptObjectError if the checkpoint is damaged; the sandbox is then unchanged. If storage fails after
        the restore, the document is updated later, in the background. A cancellation during runsc's restore is raised
        only after the restore: clients may already use the sandbox.
        """
        async with self.exclusive():
            await self.memory.restore()
            self.touch()

    async def save(self, name: str = "", insist: float | None = None) -> Checkpoint:
        """Save the sandbox's memory and return the checkpoint.

        Without ``name``, make a new current checkpoint and end the sandbox; ``restore`` continues it. With ``name``,
        make a savepoint; the sandbox continues to run or stays hibernated. If the save fails, it continues to run.
        Raises FencedError if another server owns it now, SavepointExistsError, TooManySavepointsError, UnsaveableError.

        With ``insist``, wait for the guest for that many seconds at most. If the guest does not answer, cut it off and
        save the sandbox like that of a killed server; only another handle can then restore it. Raises UnresponsiveError
        if runsc cannot save a sandbox that was cut off: no other server could save it either.
        """
        async with self.exclusive(insist):
            return await finished(self.memory.save_as(name) if name else self.save_locked(insist))

    async def save_locked(self, insist: float | None = None) -> Checkpoint:
        """Hibernate the sandbox. The caller, ``save`` or Supervisor, holds ``lock`` and prevents a cancellation."""
        self.saving = True
        try:
            self.observer.saving()
            checkpoint = await self.memory.checkpoint(insist)
        finally:
            self.saving = False
        self.observer.saved()
        if self.registration:
            self._touching = asyncio.create_task(self.registration.touch())
        return checkpoint

    # -- savepoints and files ----------------------------------------------------------------------------------------

    async def drop_savepoint(self, name: str) -> None:
        """Delete a savepoint. Raises SavepointNotFoundError."""
        async with self.exclusive():
            await self.memory.stored.drop_savepoint(name)

    async def rewind_locked(self, name: str) -> str:
        """Keep the current state as a savepoint, restore the savepoint ``name``, and return the new savepoint's name.

        The caller holds ``lock`` until it has switched to the new ``instance``. If the restore fails, the current state
        is restored, also into a new ``instance``, and the error raised. Before any change, raises IncompatibleError,
        SavepointNotFoundError, and TooManySavepointsError or UnsaveableError if no more savepoints can be recorded.
        """
        target = self.metadata.savepoint(name)
        self.memory.stored.require_room()
        await self.memory.require_fit(target)
        kept = await finished(self.memory.rewind(target))
        self.touch()
        return kept

    async def save_snapshot(self, name: str) -> GCSArtifact:
        """Save the sandbox's files, without its memory, as the snapshot ``name``; the sandbox continues to run."""
        async with self.exclusive():
            storage, folder = require_snapshots(self._storage), snapshot_prefix(self.sandbox_id, name)
            with EVENT_BUS.doing(self.entry(EventKind.SAVED)) as work:
                artifact = await snapshots.save(storage, folder, self.instance, work.advance)
                work.size = artifact.size
            return artifact

    async def load_snapshot(self, sandbox_id: str, name: str) -> None:
        """Unpack a snapshot of this or another sandbox in this one, which must be running."""
        async with self.exclusive():
            await snapshots.load(require_snapshots(self._storage), snapshot_prefix(sandbox_id, name), self.instance)

    # -- ending ------------------------------------------------------------------------------------------------------

    async def release(self) -> None:
        """End the sandbox on this server without saving it, and release the lease."""
        self.closed = True
        if self.supervisor and self.supervisor is not asyncio.current_task():
            self.supervisor.cancel()
        try:
            await self.memory.end()
            if self._stored:
                await self._stored.end_tasks()
        finally:
            if self._stored:  # even if the sandbox did not end: nothing else stops the renewal of the lease
                await asyncio.shield(self._stored.document.lease.release())

    # -- internals ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def exclusive(self, insist: float | None = None) -> AsyncIterator[None]:
        """Hold ``lock`` during the block. Raises SandboxNotFoundError if the handle was closed meanwhile.

        With ``insist``, wait for the lock for that many seconds, then interrupt its holder if that waits for the guest.
        """
        loop = asyncio.get_running_loop()
        patience = None if insist is None else loop.call_later(insist, self.memory.give_up_waiting)
        try:
            await self.lock.acquire()
        finally:
            if patience:
                patience.cancel()
        try:
            if self.closed:
                raise SandboxNotFoundError(self.sandbox_id, "this server")
            yield
        finally:
            self.lock.release()
