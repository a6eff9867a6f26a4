"""Sandboxes: what a Jupyter Server can be asked about its sandboxes, and told to do with them.

It knows nothing of HTTP, takes what a request has been checked to say, and gives what openapi.yaml describes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from . import __version__
from .creation import Creation, delete, recorded
from .depiction import Subject
from .errors import SandboxError, StateError
from .execution import Execution
from .inventory import Inventory
from .iothread import IO
from .journal import JOURNAL, Entry, What
from .records import SandboxRecord
from .runsc import find
from .serverkernels import Live, ServerKernels
from .standby import STANDBY


class Sandboxes:
    """The sandboxes of one server. What changes one waits for what is under way with it."""

    def __init__(self, kernels: ServerKernels, storage_dir: str = "", runsc: str = "") -> None:
        self._kernels = kernels
        self._inventory = Inventory(kernels, storage_dir)
        self._creation = Creation(self._inventory)
        self._runsc = runsc
        self._acting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- seeing them -------------------------------------------------------------------------------------------------

    async def list(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """A page of them."""
        return await self._inventory.page(**query)

    async def show(self, wanted: str) -> dict[str, Any]:
        """All that is known of one."""
        return await self._inventory.show(await self._inventory.find(wanted))

    async def capabilities(self) -> dict[str, Any]:
        """What this server can do."""
        config = self._inventory.config
        try:
            version = (await asyncio.to_thread(find, self._runsc)).version
        except SandboxError:
            version = None
        return {
            "version": __version__,
            "runsc": version,
            "kernels": await self._kernels.names(),
            "storage": (await self._inventory.kept()).stores.kind if config.can_persist() else None,
            "persistent": config.can_persist(),
            "checkpoints": config.can_checkpoint(),
            "snapshots": config.can_snapshot(),
            "gcs": bool(config.metadata.bucket and config.locks.bucket),
        }

    # -- their life --------------------------------------------------------------------------------------------------

    async def create(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Start a kernel in one, unless there is one already; whether it was started."""
        path, named = body.get("notebook_path"), body.get("sandbox_id") or body.get("gcs_sandbox_id") or ""
        async with self._notebook(path) if path else self._lock(named):
            subject, started = await self._creation.create(body)
            return await self._inventory.show(subject), started

    async def fork(self, wanted: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Start a second kernel with the memory of one."""
        async with self._alone(wanted) as source, self._notebook(body.get("notebook_path")):
            return await self._inventory.show(await self._creation.fork(source, body))

    async def hibernate(self, wanted: str) -> dict[str, Any]:
        """Save its memory and give it back."""
        async with self._alone(wanted) as subject:
            _require_kept(subject, "hibernate")
            if subject.live:
                await subject.live.provisioner.hibernate()
            elif (state := await self._inventory.state(subject)) != "saved":
                raise StateError(subject.id, "hibernate", _not_here(state))
            return await self._inventory.show(subject)

    async def wake(self, wanted: str) -> dict[str, Any]:
        """Bring its kernel back, or start one for it."""
        async with self._alone(wanted) as subject:
            return await self._inventory.show(await self._awake(subject))

    async def restart(self, wanted: str) -> dict[str, Any]:
        """Start its kernel afresh."""
        async with self._alone(wanted) as subject:
            live = await self._open(subject, "restart")
            await self._kernels.restart(live.kernel_id)
            return await self._inventory.show(subject)

    async def revert(self, wanted: str) -> dict[str, Any]:
        """Give up the last checkpoint of one that is hibernated, whose kernel ends then, or that nobody has open."""
        async with self._alone(wanted) as subject:
            record = _require_kept(subject, "revert")
            if subject.live and not subject.live.provisioner.asleep:
                raise StateError(subject.id, "revert", "running")
            sight = await self._inventory.sight(subject)
            if sight and sight.problem:
                raise sight.problem
            if sight and sight.summary and not sight.summary.previous:
                raise StateError(subject.id, "revert", "without a checkpoint before its last one")
            kept = await self._inventory.kept()
            if subject.live:
                if not subject.live.provisioner.asleep:  # a cell came meanwhile
                    raise StateError(subject.id, "revert", "running")
                await self._kernels.end(subject.live.kernel_id)
            await asyncio.to_thread(kept.revert, record)
            return await self._inventory.show(await self._inventory.find(wanted))

    async def delete(self, wanted: str) -> dict[str, Any]:
        """End its kernel, and delete all that is kept of it."""
        async with self._kernels.changing(wanted):  # one that is being restarted is not to be seen
            subject = await self._inventory.find(wanted)
        if subject.standby:
            await IO.run(STANDBY.drop(subject.id))
        if subject.live:
            await self._kernels.end(subject.live.kernel_id)  # and whatever is under way with it fails
        if subject.record is None:
            return {"id": subject.id, "freed": 0}
        async with self._alone(wanted) as subject:
            if subject.live:
                await self._kernels.end(subject.live.kernel_id)
            return {"id": subject.id, "freed": await self._delete(_require_kept(subject, "delete"))}

    async def keep_awake(self, wanted: str, seconds: float | None) -> dict[str, Any]:
        """Keep its kernel from being hibernated for idleness."""
        subject = await self._inventory.find(wanted)
        live = await self._open(subject, "keep awake")
        if seconds != 0 and live.provisioner.asleep:
            await live.provisioner.wake()
        await live.provisioner.keep_awake(seconds)
        return await self._inventory.show(subject)

    async def execute(self, wanted: str, command: Sequence[str], cwd: str | None = None) -> Execution:
        """Start a command beside its kernel."""
        subject = await self._inventory.find(wanted)
        live = await self._open(subject, "run a command in")
        return await Execution.start(live.provisioner, command, cwd)

    # -- what is kept of them under names ----------------------------------------------------------------------------

    async def savepoints(self, wanted: str) -> dict[str, Any]:
        """The savepoints of one."""
        return {"items": (await self.show(wanted))["savepoints"]}

    async def create_savepoint(self, wanted: str, name: str) -> dict[str, Any]:
        """Keep its memory under a name."""
        async with self._alone(wanted) as subject:
            _require_kept(subject, "make a savepoint of")
            live = await self._open(subject, "make a savepoint of")
            made = await live.provisioner.savepoint(name)
        return {"name": name, "created": made.created, "size": made.size}

    async def delete_savepoint(self, wanted: str, name: str) -> None:
        """Delete a savepoint."""
        async with self._alone(wanted) as subject:
            record = _require_kept(subject, "delete a savepoint of")
            if subject.live:
                await subject.live.provisioner.drop_savepoint(name)
            else:
                await asyncio.to_thread((await self._inventory.kept()).drop_savepoint, record, name)

    async def rewind(self, wanted: str, name: str) -> dict[str, Any]:
        """Bring its kernel back as it was at a savepoint."""
        async with self._alone(wanted) as subject:
            _require_kept(subject, "rewind")
            subject = subject if subject.live else await self._awake(subject)
            live = await self._open(subject, "rewind")
            kept = await self._kernels.rewind(live, name)
            return {"sandbox": await self._inventory.show(subject), "kept": kept}

    async def snapshots(self, wanted: str) -> dict[str, Any]:
        """The snapshots of one."""
        return {"items": (await self.show(wanted))["snapshots"]}

    async def create_snapshot(self, wanted: str, name: str) -> dict[str, Any]:
        """Keep the files that were written in it under a name."""
        async with self._alone(wanted) as subject:
            _require_kept(subject, "make a snapshot of")
            live = await self._open(await self._awake(subject) if subject.live else subject, "make a snapshot of")
            made = await live.provisioner.save_snapshot(name)
        return {"name": name, "created": made.created, "size": made.size}

    async def delete_snapshot(self, wanted: str, name: str) -> None:
        """Delete a snapshot."""
        async with self._alone(wanted) as subject:
            record = _require_kept(subject, "delete a snapshot of")
            await asyncio.to_thread((await self._inventory.kept()).drop_snapshot, record, name)

    # -- how ---------------------------------------------------------------------------------------------------------

    async def _delete(self, record: SandboxRecord) -> int:
        """Delete what is kept of it, unless that went with its kernel; returns the bytes that went."""
        kept = await self._inventory.kept()
        if not await asyncio.to_thread(recorded, kept, record.id):
            return 0
        with JOURNAL.doing(Entry(record.sandbox_id, What.DELETED, kernel_name=record.kernel_name)) as work:
            work.size = await asyncio.to_thread(delete, kept, record.id)
            return work.size

    async def _awake(self, subject: Subject) -> Subject:
        """The same sandbox with a kernel that runs."""
        if subject.live is None:
            async with self._notebook(self._kernels.relative(subject.notebook_path)):
                subject = await self._inventory.find(subject.id)
                if subject.live is None:
                    return await self._creation.open(subject)
        if subject.live.provisioner.asleep:
            await subject.live.provisioner.wake()
        return subject

    async def _open(self, subject: Subject, action: str) -> Live:
        """Its kernel on this server; StateError if it has none."""
        if subject.live is None:
            raise StateError(subject.id, action, _not_here(await self._inventory.state(subject)))
        return subject.live

    @asynccontextmanager
    async def _alone(self, wanted: str) -> AsyncIterator[Subject]:
        """The sandbox of that id, while nobody else changes it; StateError for one that stands by, and is nobody's."""
        if (await self._inventory.find(wanted)).standby:
            raise StateError(wanted, "change", "standby")
        async with self._lock((await self._inventory.find(wanted)).sandbox_id):
            subject = await self._inventory.find(wanted)
            if subject.live:
                async with self._kernels.changing(subject.live.kernel_id):  # somebody may be deleting it
                    subject = await self._inventory.find(wanted)
            yield subject

    def _notebook(self, path: str | None) -> asyncio.Lock:
        """For all who open a notebook of that path."""
        return self._lock(f"notebook {path}" if path else "")

    def _lock(self, key: str) -> asyncio.Lock:
        """For all who do something with what ``key`` names; nobody waits for what has no name."""
        return self._acting.setdefault(key, asyncio.Lock()) if key else asyncio.Lock()


def _require_kept(subject: Subject, action: str) -> SandboxRecord:
    if subject.record is None:
        raise StateError(subject.id, action, "ephemeral")
    return subject.record


def _not_here(state: str) -> str:
    return "running on another server" if state == "running" else f"{state}, and not open on this server"
