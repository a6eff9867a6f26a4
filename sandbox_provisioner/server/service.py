"""Implement the operations of the REST API, without HTTP.

The methods are named like the operations in openapi.yaml. They take validated requests and return instances of the
classes in ``sandbox.model``. ``wanted`` is always a sandbox's id or id in storage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from weakref import WeakValueDictionary

from .. import __version__
from ..errors import SandboxError, StateError, UnknownSandboxError
from ..events import EVENT_BUS, Entry, EventKind
from ..gvisor.runsc import find
from ..io_thread import IO
from ..persistence.records import SandboxRecord
from ..sandbox.model import Capabilities, Deleted, NamedState, NamedStates, Rewound, Sandbox, SandboxPage
from ..templates.warm_pool import WARM_POOL
from .creation import Creation, delete
from .drives import server_path
from .execution import Execution
from .kernels import Live, ServerKernels
from .models import Subject
from .queries import Inventory


class Sandboxes:
    """The operations on one server's sandboxes. Changes of one sandbox run one after the other. Server loop only."""

    def __init__(self, kernels: ServerKernels, storage_dir: str = "", runsc: str = "") -> None:
        self._kernels = kernels
        self._inventory = Inventory(kernels, storage_dir)
        self._creation = Creation(self._inventory)
        self._runsc = runsc
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- reading -----------------------------------------------------------------------------------------------------

    async def list_sandboxes(self, **query: Any) -> SandboxPage:
        """Return a page of the list of sandboxes."""
        return await self._inventory.page(**query)

    async def show_sandbox(self, wanted: str) -> Sandbox:
        """Return a sandbox. Raises SandboxNotFoundError, as do all methods that take ``wanted``."""
        return await self._inventory.show(await self._inventory.find(wanted))

    async def get_capabilities(self) -> Capabilities:
        """Return the server's versions, kernels and storage abilities."""
        config = self._inventory.config
        try:
            version = (await asyncio.to_thread(find, self._runsc)).version
        except SandboxError:
            version = None
        return Capabilities(
            version=__version__,
            runsc=version,
            kernels=tuple(await self._kernels.names()),
            storage=(await self._inventory.persistence()).stores.kind if config.can_persist() else None,
            persistent=config.can_persist(),
            checkpoints=config.can_checkpoint(),
            snapshots=config.can_snapshot(),
            gcs=bool(config.metadata.bucket and config.locks.bucket),
        )

    # -- starting, saving and ending ---------------------------------------------------------------------------------

    async def create_sandbox(self, **body: Any) -> tuple[Sandbox, bool]:
        """Return the requested sandbox, and True if its kernel was started, False if it was already open here."""
        path, named = body.get("notebook_path"), body.get("sandbox_id") or body.get("gcs_sandbox_id") or ""
        async with self._notebook_lock(path) if path else self._lock(named):
            subject, started = await self._creation.create(body)
            return await self._inventory.show(subject), started

    async def fork_sandbox(self, wanted: str, **body: Any) -> tuple[Sandbox, bool]:
        """Start a second kernel with the memory of a sandbox. Return the new sandbox and True."""
        async with self._exclusive(wanted) as source, self._notebook_lock(body.get("notebook_path")):
            return await self._inventory.show(await self._creation.fork(source, body)), True

    async def hibernate_sandbox(self, wanted: str, force: bool = False) -> Sandbox:
        """Hibernate a sandbox's kernel; with ``force`` also a busy one, which continues after the next message.

        Raises StateError if it is ephemeral, or neither open here nor saved; KernelBusyError.
        """
        async with self._exclusive(wanted) as subject:
            _require_persistent(subject, "hibernate")
            if subject.live:
                if not force:
                    subject.live.provisioner.require_idle()
                await subject.live.provisioner.hibernate()
            elif (state := await self._inventory.state(subject)) != "saved":
                raise StateError(subject.id, "hibernate", _describe_state(state))
            return await self._inventory.show(subject)

    async def wake_sandbox(self, wanted: str) -> Sandbox:
        """Wake a sandbox's kernel, or start one for a stored sandbox."""
        async with self._exclusive(wanted) as subject:
            return await self._inventory.show(await self._ensure_awake(subject))

    async def restart_sandbox(self, wanted: str) -> Sandbox:
        """Restart a sandbox's kernel. Raises StateError if this server does not have it open."""
        async with self._exclusive(wanted) as subject:
            live = await self._require_open(subject, "restart")
            await self._kernels.restart(live.kernel_id)
            return await self._inventory.show(subject)

    async def revert_sandbox(self, wanted: str) -> Sandbox:
        """Return a sandbox to its previous checkpoint; end its kernel on this server.

        Raises StateError if it is running here, ephemeral or without a previous checkpoint. For a kernel that this
        server has open, raises IncompatibleError if that checkpoint cannot be restored either; nothing is changed then.
        """
        async with self._exclusive(wanted) as subject:
            record = _require_persistent(subject, "revert")
            persistence, stored = await self._inventory.persistence(), await self._inventory.stored(subject)
            if subject.live and not subject.live.provisioner.asleep:
                raise StateError(subject.id, "revert", "it is running")
            if stored and stored.problem:
                raise stored.problem
            if subject.live:
                await subject.live.provisioner.require_revertible()
                if not subject.live.provisioner.asleep:  # a message woke it meanwhile
                    raise StateError(subject.id, "revert", "it is running")
                await self._kernels.end(subject.live.kernel_id)
            await asyncio.to_thread(persistence.revert, record, self._runsc)
            return await self._inventory.show(await self._inventory.find(wanted))

    async def reset_sandbox(self, wanted: str) -> Sandbox:
        """Make a sandbox's next start begin with a new kernel; keep its state as a savepoint; end its kernel here.

        Raises StateError if it is running here or ephemeral.
        """
        async with self._exclusive(wanted) as subject:
            record = _require_persistent(subject, "reset")
            if subject.live and not subject.live.provisioner.asleep:
                raise StateError(subject.id, "reset", "it is running; restart it instead")
            persistence = await self._inventory.persistence()
            if subject.live:
                await self._kernels.end(subject.live.kernel_id)
            await asyncio.to_thread(persistence.reset, record, self._runsc)
            return await self._inventory.show(await self._inventory.find(wanted))

    async def delete_sandbox(self, wanted: str, unverified: bool = False) -> Deleted:
        """End a sandbox's kernel and delete its stored state; ``unverified`` is passed to ``Persistence.destroy``."""
        async with self._kernels.changing(wanted):  # a kernel is not listed while it restarts
            subject = await self._inventory.find(wanted)
        if subject.standby:
            await IO.run(WARM_POOL.drop(subject.id))
        if subject.live:
            await self._kernels.end(subject.live.kernel_id)  # running operations on this kernel fail
        if subject.record is None:
            return Deleted(subject.id, 0)
        async with self._exclusive(wanted) as subject:
            if subject.live:
                await self._kernels.end(subject.live.kernel_id)
            return Deleted(subject.id, await self._delete_stored(_require_persistent(subject, "delete"), unverified))

    async def keep_sandbox_awake(self, wanted: str, seconds: float | None) -> Sandbox:
        """Keep a sandbox's kernel awake for ``seconds``, waking it first; None for no limit, 0 to allow hibernation."""
        subject = await self._inventory.find(wanted)
        live = await self._require_open(subject, "keep awake")
        if seconds != 0 and live.provisioner.asleep:
            await live.provisioner.wake()
        await live.provisioner.keep_awake(seconds)
        return await self._inventory.show(subject)

    async def execute_in_sandbox(self, wanted: str, command: Sequence[str], cwd: str | None = None) -> Execution:
        """Start a command beside a sandbox's kernel. Raises StateError if this server does not have it open."""
        subject = await self._inventory.find(wanted)
        live = await self._require_open(subject, "run a command in")
        return await Execution.start(live.provisioner, command, cwd)

    # -- savepoints and snapshots ------------------------------------------------------------------------------------

    async def list_savepoints(self, wanted: str) -> NamedStates:
        """Return the savepoints of a sandbox."""
        return NamedStates((await self.show_sandbox(wanted)).savepoints)

    async def create_savepoint(self, wanted: str, name: str) -> NamedState:
        """Save the memory of a sandbox's kernel as a savepoint. Raises StateError if it is not open here."""
        async with self._exclusive(wanted) as subject:
            _require_persistent(subject, "make a savepoint of")
            live = await self._require_open(subject, "make a savepoint of")
            saved = await live.provisioner.savepoint(name)
        return NamedState(name, datetime.fromisoformat(saved.created), saved.size)

    async def delete_savepoint(self, wanted: str, name: str) -> None:
        """Delete a savepoint, through the kernel if this server has it open."""
        async with self._exclusive(wanted) as subject:
            record = _require_persistent(subject, "delete a savepoint of")
            if subject.live:
                await subject.live.provisioner.drop_savepoint(name)
            else:
                await asyncio.to_thread((await self._inventory.persistence()).drop_savepoint, record, name)

    async def rewind_sandbox(self, wanted: str, name: str) -> Rewound:
        """Rewind a sandbox's kernel to a savepoint, starting the kernel if this server does not have it open."""
        async with self._exclusive(wanted) as subject:
            _require_persistent(subject, "rewind")
            subject = subject if subject.live else await self._ensure_awake(subject)
            live = await self._require_open(subject, "rewind")
            saved = await self._kernels.rewind(live, name)
            return Rewound(await self._inventory.show(subject), saved)

    async def list_snapshots(self, wanted: str) -> NamedStates:
        """Return the file snapshots of a sandbox."""
        return NamedStates((await self.show_sandbox(wanted)).snapshots)

    async def create_snapshot(self, wanted: str, name: str) -> NamedState:
        """Wake a sandbox and save its files as a file snapshot. Raises StateError if it is not open here."""
        async with self._exclusive(wanted) as subject:
            _require_persistent(subject, "make a snapshot of")
            live = await self._require_open(
                await self._ensure_awake(subject) if subject.live else subject, "make a snapshot of"
            )
            saved = await live.provisioner.save_snapshot(name)
        return NamedState(name, datetime.fromisoformat(saved.created), saved.size)

    async def delete_snapshot(self, wanted: str, name: str) -> None:
        """Delete a file snapshot."""
        async with self._exclusive(wanted) as subject:
            record = _require_persistent(subject, "delete a snapshot of")
            await asyncio.to_thread((await self._inventory.persistence()).drop_snapshot, record, name)

    # -- helpers -----------------------------------------------------------------------------------------------------

    async def _delete_stored(self, record: SandboxRecord, unverified: bool) -> int:
        """Delete a sandbox's stored state and return the freed bytes; 0 if it was deleted with its kernel."""
        persistence = await self._inventory.persistence()
        try:
            await asyncio.to_thread(persistence.registry.load, record.id)
        except UnknownSandboxError:
            return 0
        name, path = record.kernel_name, record.notebook_path
        with EVENT_BUS.doing(Entry(record.sandbox_id, EventKind.DELETED, kernel_name=name, notebook=path)) as work:
            work.size = await asyncio.to_thread(delete, persistence, record.id, unverified)
            return work.size

    async def _ensure_awake(self, subject: Subject) -> Subject:
        """Wake a sandbox's kernel, or start one on this server, and return the sandbox."""
        if subject.live is None:
            async with self._notebook_lock(self._kernels.relative(subject.notebook_path)):
                subject = await self._inventory.find(subject.id)
                if subject.live is None:
                    return await self._creation.open(subject)
        if subject.live.provisioner.asleep:
            await subject.live.provisioner.wake()
        return subject

    async def _require_open(self, subject: Subject, action: str) -> Live:
        """Return a sandbox's kernel. Raises StateError if this server does not have it open."""
        if subject.live is None:
            raise StateError(subject.id, action, _describe_state(await self._inventory.state(subject)))
        return subject.live

    @asynccontextmanager
    async def _exclusive(self, wanted: str) -> AsyncIterator[Subject]:
        """Yield a sandbox while no other operation changes it. Raises StateError for a sandbox in the warm pool."""
        if (await self._inventory.find(wanted)).standby:
            raise StateError(wanted, "change", "it waits in the warm pool")
        async with self._lock((await self._inventory.find(wanted)).sandbox_id):
            subject = await self._inventory.find(wanted)
            if subject.live:
                async with self._kernels.changing(subject.live.kernel_id):  # wait for a restart or an end
                    subject = await self._inventory.find(wanted)
            yield subject

    def _notebook_lock(self, path: str | None) -> asyncio.Lock:
        """Return the lock for starting the kernel of a notebook."""
        return self._lock(f"notebook {server_path(path)}" if path else "")

    def _lock(self, key: str) -> asyncio.Lock:
        """Return the lock of ``key``; a new lock that is never contended if the key is empty."""
        return self._locks.setdefault(key, asyncio.Lock()) if key else asyncio.Lock()


def _require_persistent(subject: Subject, action: str) -> SandboxRecord:
    if subject.record is None:
        raise StateError(subject.id, action, "it is ephemeral")
    return subject.record


def _describe_state(state: str) -> str:
    return "it runs on another server" if state == "running" else f"it is {state}, and not open on this server"
