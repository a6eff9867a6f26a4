"""SandboxManager: the sandboxes of one server by their ids, and the policy for them: who may, when, and in which order.

It answers "should I?": whether this server is able to do what is asked, when an idle sandbox is checkpointed, whom one
is handed over to, what happens to all of them when the server stops, and to those whose server was killed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from . import estates
from .bundle import BundleSpec
from .config import GCSConfig
from .errors import FencedError, LeaseHeldError, SandboxError, SandboxNotFoundError, StateError
from .handle import Identity, SandboxHandle
from .link import Hooks
from .lock.base import Owner
from .metadata import Checkpoint, GCSArtifact, Note, decode_note
from .names import valid_id
from .runsc import Runsc
from .runtime import RuntimeFolder, left_behind
from .states import State
from .stores import Stores, open_shelf, open_stores

log = logging.getLogger(__name__)

RESCUES_AT_ONCE = 2
PATIENCE = 120.0
"""Seconds to wait for the lease of a server that was killed; a dead process on this machine has none."""
PAUSE = 5.0


@dataclass(frozen=True)
class Recovered:
    """A sandbox whose server was killed: whether its memory was saved, and if not, why."""

    sandbox_id: str
    saved: bool
    problem: str = ""


@dataclass(frozen=True)
class Features:
    """What a persistent sandbox is to do by itself. ``idle_timeout`` and ``hook_timeout`` are in seconds."""

    enable_handoff: bool = False
    enable_checkpoint_at_idle: bool = False
    idle_timeout: float = 1800.0
    hook_timeout: float = 0.0
    reseed: bool = False


Gone = Callable[[str, str], None]
"""Told the id of a sandbox that this server has no more, and why."""


class SandboxManager:
    """All sandboxes of this server. Every method that changes one waits for what is under way with it.

    ``busy`` is asked before an idle sandbox is checkpointed; ``on_saving`` is told when one that stays is about to be
    checkpointed, and ``on_saved`` when it was; ``on_gone`` when one was handed over or lost.
    """

    def __init__(self, config: GCSConfig, runsc: Runsc, server: str = "", stores: Stores | None = None) -> None:
        self.handles: dict[str, SandboxHandle] = {}
        self.busy: Callable[[str], bool] = lambda sandbox_id: False
        self.on_saving: Callable[[str], None] = lambda sandbox_id: None
        self.on_saved: Callable[[str], None] = lambda sandbox_id: None
        self.on_gone: Gone = lambda sandbox_id, reason: None
        self._config = config
        self._runsc = runsc
        self._server = server or f"server-{uuid4().hex[:8]}"
        self._opened = stores
        self._acting: dict[str, asyncio.Lock] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    @property
    def stores(self) -> Stores:
        """Where persistent sandboxes are; ConfigurationError if this server can keep none."""
        if self._opened is None:
            self._opened = open_stores(self._config)
        return self._opened

    def owner(self) -> Owner:
        """This server, as others get to know it, for one attempt to get a lease."""
        return Owner.here(self._server)

    # -- having sandboxes ------------------------------------------------------------------------------------------

    def create_ephemeral(self, sandbox_id: str, spec: BundleSpec, platform: str = "systrap") -> SandboxHandle:
        """A sandbox that leaves nothing behind, not started yet."""
        shelf = open_shelf(self._config)
        return self._keep(SandboxHandle.create_ephemeral(sandbox_id, spec, self._runsc, platform, shelf))

    async def create(
        self,
        sandbox_id: str,
        spec: BundleSpec,
        identity: Identity | None = None,
        features: Features | None = None,
        platform: str = "systrap",
    ) -> SandboxHandle:
        """A new persistent sandbox, not started yet; what this server cannot do is refused before anything exists."""
        features = self._able(features)
        about = identity or Identity()
        about = replace(about, settings={**about.settings, **vars(features)})
        async with self._lock(sandbox_id):
            self._require_unknown(sandbox_id)
            handle = await SandboxHandle.create_persistent(
                sandbox_id, spec, self._runsc, self.stores, self.owner(), about, platform
            )
            return self._keep(handle, features)

    async def attach(
        self,
        sandbox_id: str,
        spec: BundleSpec,
        features: Features | None = None,
        platform: str = "systrap",
        patience: float = 0.0,
        previous: bool = False,
    ) -> SandboxHandle:
        """The persistent sandbox that there is, not running yet; one that a killed server left running is saved first.

        The arguments and errors are those of SandboxHandle.attach_persistent.
        """
        features = self._able(features)
        async with self._lock(sandbox_id):
            self._require_unknown(sandbox_id)
            await self._recover(lambda note: note.sandbox_id == sandbox_id)
            handle = await SandboxHandle.attach_persistent(
                sandbox_id, spec, self._runsc, self.stores, self.owner(), platform, patience, previous
            )
            return self._keep(handle, features)

    def get(self, sandbox_id: str) -> SandboxHandle:
        """A sandbox that this server has; SandboxNotFoundError if it has not."""
        if sandbox_id not in self.handles:
            raise SandboxNotFoundError(sandbox_id, self._server)
        return self.handles[sandbox_id]

    def touch(self, sandbox_id: str) -> None:
        """Say that a sandbox was used just now."""
        self.get(sandbox_id).last_activity = time.monotonic()

    # -- what is done to them ----------------------------------------------------------------------------------------

    async def start(self, sandbox_id: str) -> None:
        """Start it afresh."""
        async with self._lock(sandbox_id):
            await self.get(sandbox_id).start()
            self.touch(sandbox_id)

    async def checkpoint(self, sandbox_id: str) -> Checkpoint:
        """Save its memory and end it; it stays ours, to be restored."""
        async with self._lock(sandbox_id):
            self.on_saving(sandbox_id)
            made = await self.get(sandbox_id).checkpoint()
        self.on_saved(sandbox_id)
        return made

    async def restore(self, sandbox_id: str) -> None:
        """Bring it back."""
        async with self._lock(sandbox_id):
            await self.get(sandbox_id).restore()
            self.touch(sandbox_id)

    async def save_snapshot(self, sandbox_id: str, name: str) -> GCSArtifact:
        """Keep what was written in it under ``name``."""
        async with self._lock(sandbox_id):
            return await self.get(sandbox_id).save_snapshot(name)

    async def load_snapshot(self, sandbox_id: str, name: str, source_id: str = "") -> None:
        """Put the files of a snapshot, of this or of the sandbox ``source_id``, in their places in it."""
        async with self._lock(sandbox_id):
            await self.get(sandbox_id).load_snapshot(source_id or sandbox_id, name)

    async def delete(self, sandbox_id: str) -> int:
        """End it and delete all that is kept of it, whether this server has it or nobody; returns the freed bytes."""
        async with self._lock(sandbox_id):
            handle = self.handles.get(sandbox_id)
            if handle:
                await self._drop(handle)
                if not handle.persistent:
                    return 0
            return await estates.destroy_persistent(self.stores, sandbox_id, self.owner())

    async def hand_over(self, sandbox_id: str, reason: str = "it was handed over") -> None:
        """Save it, if it runs, and let another server have it."""
        async with self._lock(sandbox_id):
            handle = self.get(sandbox_id)
            if handle.persistent and handle.instance.state == State.RUNNING:
                await handle.checkpoint()
            await self._drop(handle)
        self.on_gone(sandbox_id, reason)

    async def release(self, sandbox_id: str) -> None:
        """End it without saving anything, and let another server have it."""
        async with self._lock(sandbox_id):
            await self._drop(self.get(sandbox_id))

    async def shutdown(self, deadline: float) -> dict[str, Exception | None]:
        """Save and let go of all sandboxes at once; what is not saved after ``deadline`` seconds runs on, for a rescue.

        Says of each what went wrong with it, or None.
        """
        names = list(self.handles)
        tasks = [asyncio.create_task(self._stop(name)) for name in names]
        if tasks:
            await asyncio.wait(tasks, timeout=deadline)
        late = TimeoutError(f"it was not saved within {deadline:g} seconds, and runs on")
        return {name: task.result() if task.done() else late for name, task in zip(names, tasks, strict=True)}

    async def _stop(self, sandbox_id: str) -> Exception | None:
        try:
            await self.hand_over(sandbox_id, "the server stopped")
        except Exception as error:
            log.error("Sandbox %s was not saved: %s", sandbox_id, error)
            return error
        return None

    # -- by themselves -----------------------------------------------------------------------------------------------

    def _able(self, features: Features | None) -> Features:
        features = features or Features()
        self._config.require(
            enable_handoff=features.enable_handoff, enable_checkpoint_at_idle=features.enable_checkpoint_at_idle
        )
        return features

    def _require_unknown(self, sandbox_id: str) -> None:
        if sandbox_id in self.handles:
            raise StateError(sandbox_id, "create or attach", "in use by this server already")

    def _lock(self, sandbox_id: str) -> asyncio.Lock:
        return self._acting.setdefault(valid_id(sandbox_id), asyncio.Lock())

    def _keep(self, handle: SandboxHandle, features: Features | None = None) -> SandboxHandle:
        self.handles[handle.sandbox_id] = handle
        if features:
            handle.instance.link.hooks = Hooks(features.hook_timeout, features.reseed)
            handle.idle_timeout = features.idle_timeout if features.enable_checkpoint_at_idle else None
            self._watches[handle.sandbox_id] = asyncio.create_task(self._watch(handle, features))
        return handle

    async def _drop(self, handle: SandboxHandle) -> None:
        self.handles.pop(handle.sandbox_id, None)
        watch = self._watches.pop(handle.sandbox_id, None)
        if watch and watch is not asyncio.current_task():
            watch.cancel()
        await handle.release()
        self._acting.pop(handle.sandbox_id, None)

    async def _watch(self, handle: SandboxHandle, features: Features) -> None:
        """See to it that an idle sandbox is saved, one wanted elsewhere handed over, a lost lease regained."""
        while True:
            lease = handle.lease
            wanted = asyncio.create_task(lease.wanted.wait())
            waiting: set[asyncio.Future[Any]] = {lease.lost, wanted} if features.enable_handoff else {lease.lost}
            try:
                await asyncio.wait(waiting, timeout=self._idle_in(handle), return_when=asyncio.FIRST_COMPLETED)
                if lease.lost.done():
                    await self._regain(handle)
                elif wanted.done():
                    await self.hand_over(handle.sandbox_id, "another server asked for it")
                    return
                elif self._idle_in(handle) == 0:
                    await self._save_idle(handle)
            except (FencedError, LeaseHeldError) as error:
                await self._lose(handle, str(error))
                return
            except SandboxError as error:
                log.error("Sandbox %s: %s", handle.sandbox_id, error)
                await asyncio.sleep(PAUSE)
            finally:
                wanted.cancel()

    def _idle_in(self, handle: SandboxHandle) -> float | None:
        """Seconds until the sandbox will have been idle for long enough; None if that is never."""
        if handle.idle_timeout is None or handle.instance.state != State.RUNNING:
            return None if handle.idle_timeout is None else handle.idle_timeout
        if self.busy(handle.sandbox_id):
            handle.last_activity = time.monotonic()
        return max(0.0, handle.last_activity + handle.idle_timeout - time.monotonic())

    async def _save_idle(self, handle: SandboxHandle) -> None:
        async with self._lock(handle.sandbox_id):
            if handle.instance.state != State.RUNNING or self._idle_in(handle) != 0:
                return
            handle.last_activity = time.monotonic()  # a failure is tried again after as long a time
            self.on_saving(handle.sandbox_id)
            await handle.checkpoint()
        self.on_saved(handle.sandbox_id)

    async def _regain(self, handle: SandboxHandle) -> None:
        """A lease that ran out while storage could not be reached is no reason to end anything that nobody took."""
        log.warning("Sandbox %s: %s", handle.sandbox_id, handle.lease.lost.result())
        async with self._lock(handle.sandbox_id):
            await handle.regain(self.owner())

    async def _lose(self, handle: SandboxHandle, reason: str) -> None:
        log.error("Sandbox %s is lost to this server: %s", handle.sandbox_id, reason)
        async with self._lock(handle.sandbox_id):
            await self._drop(handle)
        self.on_gone(handle.sandbox_id, reason)

    # -- those whose server was killed -------------------------------------------------------------------------------

    async def recover(self) -> list[Recovered]:
        """Call it when the server starts: save the sandboxes of killed servers, and collect what they left behind."""
        recovered = await self._recover(lambda note: True)
        await self._collect_garbage()
        return recovered

    async def _recover(self, wanted: Callable[[Note], bool]) -> list[Recovered]:
        found = []
        for folder in await asyncio.to_thread(lambda: list(left_behind())):
            note = _read(folder)
            if note and note.where == self.stores.metadata.where and wanted(note):
                found.append((folder, note))
            else:
                folder.let_go()
        few = asyncio.Semaphore(RESCUES_AT_ONCE)
        return await asyncio.gather(*(self._rescue(folder, note, few) for folder, note in found))

    async def _rescue(self, folder: RuntimeFolder, note: Note, few: asyncio.Semaphore) -> Recovered:
        async with few:
            try:
                alive = folder.inhabited
                handle = await SandboxHandle.rescue(folder, note, self._runsc, self.stores, self.owner(), PATIENCE)
                try:
                    if alive:
                        await handle.checkpoint()
                    else:
                        await handle.record_dead()
                finally:
                    await handle.release()
                if alive:
                    await self._take_inventory(note)
                return Recovered(note.sandbox_id, saved=alive)
            except SandboxNotFoundError:
                await asyncio.to_thread(folder.remove)
                return Recovered(note.sandbox_id, saved=False, problem="it was deleted")
            except SandboxError as error:
                folder.let_go()
                log.error("Sandbox %s, whose server was killed, was not saved: %s", note.sandbox_id, error)
                return Recovered(note.sandbox_id, saved=False, problem=str(error))

    async def _take_inventory(self, note: Note) -> None:
        """Checkpoint it again after a restore: only one that can be asked tells which files it depends on."""
        try:
            handle = await SandboxHandle.attach_persistent(
                note.sandbox_id, note.spec, self._runsc, self.stores, self.owner()
            )
            try:
                await handle.restore()
                await handle.checkpoint()
            finally:
                await handle.release()
        except SandboxError as error:
            log.warning("Sandbox %s is saved, but what it depends on is not known: %s", note.sandbox_id, error)

    async def _collect_garbage(self) -> None:
        """Delete what is left of sandboxes whose deletion was interrupted."""
        for sandbox_id in await asyncio.to_thread(estates.without_metadata, self.stores):
            try:
                await estates.destroy_persistent(self.stores, sandbox_id, self.owner())
            except SandboxError as error:
                log.info("What is left of sandbox %s stays for now: %s", sandbox_id, error)


def _read(folder: RuntimeFolder) -> Note | None:
    value = folder.read_note()
    try:
        return decode_note(value, str(folder.path)) if value else None
    except SandboxError as error:
        log.error("A sandbox of a killed server cannot be saved: %s", error)
        return None
