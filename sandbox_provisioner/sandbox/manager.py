"""Hold open sandboxes by id and decide what is done to them, when and in which order.

The policy covers: which features this server supports, when an idle sandbox is checkpointed, when one is handed over
to another server, and what happens to all of them when the server stops. SandboxHandle does the work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..config import GCSConfig
from ..errors import FencedError, LeaseHeldError, SandboxError, SandboxNotFoundError, StateError
from ..events import JOURNAL, Entry, What
from ..gvisor.bundle import BundleSpec
from ..gvisor.restore_plan import Grant
from ..gvisor.runsc import Runsc
from ..gvisor.state import State
from ..lock.base import Owner
from ..mux.connection import Hooks
from ..persistence.backends import Stores, open_snapshot_storage, open_stores
from ..persistence.metadata import Checkpoint, GCSArtifact
from ..persistence.names import valid_id
from ..workers import finished
from . import detached
from .handle import Identity, SandboxHandle
from .recovery import Recovered, Recovery

log = logging.getLogger(__name__)

PAUSE = 5.0
SHORTEST = 0.1
"""Minimum seconds between two checks for idleness, however short the idle timeout."""


@dataclass(frozen=True)
class Features:
    """Automatic behaviour of a persistent sandbox. ``idle_timeout`` and ``hook_timeout`` are in seconds."""

    enable_handoff: bool = False
    enable_checkpoint_at_idle: bool = False
    idle_timeout: float = 1800.0
    hook_timeout: float = 0.0
    reseed: bool = False


Gone = Callable[[str, str], None]
"""Callback with the id of a sandbox that this server no longer has, and the reason."""


class SandboxManager:
    """Open sandboxes by id, with one lock each: methods that change a sandbox wait for each other.

    Each kernel's Claim has a manager of its own. Use a manager from one event loop only.

    Callbacks: ``busy`` is called before an idle sandbox is checkpointed. ``on_saving`` is called before, and
    ``on_saved`` after, the checkpoint of a sandbox that this server keeps. ``on_gone`` is called after a hand-off or
    loss.
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
        """The stores of persistent sandboxes. Raises ConfigurationError if this server has none."""
        if self._opened is None:
            self._opened = open_stores(self._config)
        return self._opened

    @property
    def _recovery(self) -> Recovery:
        return Recovery(self._runsc, self.stores, self.owner)

    def owner(self) -> Owner:
        """Return this server's identity, as shown to other servers, for one attempt to acquire a lease."""
        return Owner.here(self._server)

    # -- create, attach, find --------------------------------------------------------------------------------------

    def create_ephemeral(self, sandbox_id: str, spec: BundleSpec, platform: str = "systrap") -> SandboxHandle:
        """Return a new, unstarted sandbox that is not persistent."""
        storage = open_snapshot_storage(self._config)
        return self._keep(SandboxHandle.create_ephemeral(sandbox_id, spec, self._runsc, platform, storage))

    async def create(
        self,
        sandbox_id: str,
        spec: BundleSpec,
        identity: Identity | None = None,
        features: Features | None = None,
        platform: str = "systrap",
    ) -> SandboxHandle:
        """Return a new, unstarted persistent sandbox.

        Raises ConfigurationError, before anything is stored, if this server does not support ``features``; StateError
        if this manager has the sandbox already; and the errors of SandboxHandle.create_persistent.
        """
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
        spec: BundleSpec | None,
        features: Features | None = None,
        platform: str = "systrap",
        patience: float = 0.0,
        previous: bool = False,
    ) -> SandboxHandle:
        """Return an existing persistent sandbox, not running yet; if a killed server left it running, save it first.

        Arguments and errors are those of SandboxHandle.attach_persistent and ``create``. Raises SandboxError if the
        sandbox of a killed server could not be saved.
        """
        features = self._able(features)
        async with self._lock(sandbox_id):
            self._require_unknown(sandbox_id)
            for one in await self._recovery.save(sandbox_id):
                if one.runs_on:
                    raise SandboxError(
                        f"Sandbox {sandbox_id} runs on since its server was killed, and was not saved: {one.problem}",
                        "Nothing is lost: try once more when that is mended.",
                    )
            try:
                handle = await SandboxHandle.attach_persistent(
                    sandbox_id, spec, self._runsc, self.stores, self.owner(), platform, patience, previous
                )
            except SandboxNotFoundError:
                raise
            except SandboxError as error:
                JOURNAL.fail(Entry(sandbox_id, What.WOKEN), error)
                raise
            return self._keep(handle, features)

    async def permit(self, sandbox_id: str, grant: Grant) -> None:
        """Set the mounts for restores of a sandbox. Raises IncompatibleError if its checkpoint needs others."""
        async with self._lock(sandbox_id):
            try:
                await self.get(sandbox_id).permit(grant)
            except SandboxError as error:
                JOURNAL.fail(Entry(sandbox_id, What.WOKEN), error)
                raise

    async def recover(self) -> list[Recovered]:
        """Save the sandboxes of killed servers and delete the garbage that they left. Called when the server starts."""
        recovered = await self._recovery.save()
        await self._recovery.collect_garbage()
        return recovered

    def get(self, sandbox_id: str) -> SandboxHandle:
        """Return the handle of an open sandbox. Raises SandboxNotFoundError if this manager does not have it."""
        if sandbox_id not in self.handles:
            raise SandboxNotFoundError(sandbox_id, self._server)
        return self.handles[sandbox_id]

    def touch(self, sandbox_id: str) -> None:
        """Restart the idle time of a sandbox."""
        self.get(sandbox_id).last_activity = time.monotonic()

    # -- operations --------------------------------------------------------------------------------------------------

    async def start(self, sandbox_id: str, template: Path | None = None) -> None:
        """Start it without saved state, or as a copy of ``template``."""
        async with self._lock(sandbox_id):
            await self.get(sandbox_id).start(template)
            self.touch(sandbox_id)

    async def checkpoint(self, sandbox_id: str, insist: float | None = None) -> Checkpoint:
        """Save its memory and end it; this server keeps it for ``restore``. ``insist`` is SandboxHandle.checkpoint's.

        A cancellation is raised only after the save: ``on_saved`` must run, because it wakes the sandbox for requests
        that arrived meanwhile.
        """
        patience = None
        if insist is not None and sandbox_id in self.handles:  # the lock's holder may be waiting for the guest
            give_up = self.handles[sandbox_id].give_up_waiting
            patience = asyncio.get_running_loop().call_later(insist, give_up)
        lock = self._lock(sandbox_id)
        try:
            await lock.acquire()
        finally:
            if patience:
                patience.cancel()
        try:
            return await finished(self._save(self.get(sandbox_id), insist))
        finally:
            lock.release()

    async def _save(self, handle: SandboxHandle, insist: float | None = None) -> Checkpoint:
        self.on_saving(handle.sandbox_id)
        made = await handle.checkpoint(insist)
        self.on_saved(handle.sandbox_id)
        return made

    async def restore(self, sandbox_id: str) -> None:
        """Restore it from its checkpoint."""
        async with self._lock(sandbox_id):
            await self.get(sandbox_id).restore()
            self.touch(sandbox_id)

    async def save_snapshot(self, sandbox_id: str, name: str) -> GCSArtifact:
        """Save its files as the snapshot ``name``."""
        async with self._lock(sandbox_id):
            return await self.get(sandbox_id).save_snapshot(name)

    async def load_snapshot(self, sandbox_id: str, name: str, source_id: str = "") -> None:
        """Unpack a snapshot of this sandbox, or of the sandbox ``source_id``, in it."""
        async with self._lock(sandbox_id):
            await self.get(sandbox_id).load_snapshot(source_id or sandbox_id, name)

    async def savepoint(self, sandbox_id: str, name: str) -> Checkpoint:
        """Save its memory as the savepoint ``name``; it continues to run, or stays hibernated."""
        async with self._lock(sandbox_id):
            return await self.get(sandbox_id).savepoint(name)

    async def drop_savepoint(self, sandbox_id: str, name: str) -> None:
        """Delete a savepoint."""
        async with self._lock(sandbox_id):
            await self.get(sandbox_id).drop_savepoint(name)

    async def rewind(self, sandbox_id: str, name: str) -> str:
        """Keep the current state as a savepoint, restore the savepoint ``name``, and return the new savepoint's name.

        If the restore fails, the current state is restored and the error raised. The handle has a new ``instance`` in
        either case. A cancellation is raised only after that.
        """
        async with self._lock(sandbox_id):
            handle = self.get(sandbox_id)
            target = await handle.find_savepoint(name)
            kept = await finished(self._rewind(handle, target))
            self.touch(sandbox_id)
            return kept

    async def _rewind(self, handle: SandboxHandle, target: Checkpoint) -> str:
        with JOURNAL.doing(handle.entry(What.REWOUND)) as work:
            work.size = target.size
            present = handle.metadata.checkpoint
            if handle.instance.state == State.RUNNING:
                present = await handle.checkpoint()
            kept = await handle.keep_present()
            handle.go_to(target)
            try:
                await handle.restore()
            except BaseException:
                assert present is not None
                handle.go_to(present)
                await handle.restore()
                with suppress(SandboxError):
                    await handle.drop_savepoint(kept)
                raise
            return kept

    async def fork(self, sandbox_id: str, new_id: str, about: Identity, savepoint: str = "") -> None:
        """Store a new sandbox with the memory of this one, current or at a savepoint; this one continues to run."""
        first = about.document(valid_id(new_id))
        async with self._lock(sandbox_id):
            handle = self.get(sandbox_id)
            with JOURNAL.doing(handle.entry(What.FORKED)) as work:
                made = await detached.found_persistent(
                    self.stores, first, self.owner(), lambda name: handle.copy(name, savepoint, work.advance)
                )
                work.size = made.size

    async def delete(self, sandbox_id: str) -> int:
        """End it, delete everything stored for it and return the freed bytes. It need not be open in this manager."""
        async with self._lock(sandbox_id):
            handle = self.handles.get(sandbox_id)
            entry = handle.entry(What.DELETED) if handle else Entry(sandbox_id, What.DELETED)
            with JOURNAL.doing(entry) as work:
                if handle:
                    await self._drop(handle)
                    if not handle.persistent:
                        return 0
                work.size = await detached.destroy_persistent(self.stores, sandbox_id, self.owner())
            return work.size

    async def hand_over(self, sandbox_id: str, reason: str = "it was handed over") -> None:
        """Save it if it runs, and release it for another server."""
        async with self._lock(sandbox_id):
            handle = self.get(sandbox_id)
            with JOURNAL.doing(handle.entry(What.HANDED_OFF)) as work:
                if handle.can_save and handle.instance.state == State.RUNNING:
                    work.size = (await handle.checkpoint()).size
                await self._drop(handle)
        self.on_gone(sandbox_id, reason)

    async def release(self, sandbox_id: str) -> None:
        """End it without saving it, and release it for another server."""
        async with self._lock(sandbox_id):
            handle = self.get(sandbox_id)
            await handle.instance.delete()
            if handle.persistent and handle.metadata.running:
                with suppress(SandboxError):  # the next owner finds that no server runs it
                    await handle.record_dead()
            await self._drop(handle)

    async def shutdown(self, deadline: float) -> dict[str, Exception | None]:
        """Hand over all sandboxes in parallel, and return the error of each, or None.

        A sandbox that is not saved after ``deadline`` seconds continues to run, for a rescue.
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
            return error
        return None

    # -- background work ---------------------------------------------------------------------------------------------

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
        """Background task of one sandbox: save it when idle, hand it over on request, replace a lost lease."""
        while True:
            lease = handle.lease
            wanted = asyncio.create_task(lease.wanted.wait())
            waiting: set[asyncio.Future[Any]] = {lease.lost, wanted} if features.enable_handoff else {lease.lost}
            try:
                idle_in = self._idle_in(handle)
                patience = None if idle_in is None else max(idle_in, SHORTEST)
                await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
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
            except Exception:
                log.exception("Sandbox %s: a background task failed and is retried", handle.sandbox_id)
                await asyncio.sleep(PAUSE)
            finally:
                wanted.cancel()
            if self.handles.get(handle.sandbox_id) is not handle:
                return  # the failure came after the sandbox was dropped

    def _idle_in(self, handle: SandboxHandle) -> float | None:
        """Return the seconds until the sandbox has been idle for ``idle_timeout``; None if that is not set."""
        if handle.idle_timeout is None or handle.instance.state != State.RUNNING:
            return None if handle.idle_timeout is None else handle.idle_timeout
        if self.busy(handle.sandbox_id):
            handle.last_activity = time.monotonic()
        return max(0.0, handle.last_activity + handle.idle_timeout - time.monotonic())

    async def _save_idle(self, handle: SandboxHandle) -> None:
        async with self._lock(handle.sandbox_id):
            if handle.instance.state != State.RUNNING or self._idle_in(handle) != 0:
                return
            handle.last_activity = time.monotonic()  # a failure is retried after another idle timeout
            await finished(self._save(handle))

    async def _regain(self, handle: SandboxHandle) -> None:
        """Replace a lost lease, so that the sandbox runs on if the lease only expired while storage was unreachable.

        Raises FencedError or LeaseHeldError if another server took the sandbox.
        """
        log.warning("Sandbox %s: %s", handle.sandbox_id, handle.lease.lost.result())
        async with self._lock(handle.sandbox_id):
            await handle.regain(self.owner())

    async def _lose(self, handle: SandboxHandle, reason: str) -> None:
        JOURNAL.write(handle.entry(What.LOST))
        log.error("Sandbox %s is lost to this server: %s", handle.sandbox_id, reason)
        async with self._lock(handle.sandbox_id):
            await self._drop(handle)
        self.on_gone(handle.sandbox_id, reason)
