"""Find or create sandboxes, hold the open ones by id, and decide when to save, hand over or close each.

SandboxHandle does the work on one sandbox; Supervisor does the background work for it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4
from weakref import WeakValueDictionary

from ..config import GCSConfig
from ..errors import (
    ForeignSandboxError,
    LeaseHeldError,
    SandboxError,
    SandboxExistsError,
    SandboxNotFoundError,
    StateError,
)
from ..errors.saving import LeftRunningError
from ..errors.signature import SignatureError
from ..events import EVENT_BUS, Entry, EventKind
from ..gvisor.bundle import BundleSpec
from ..gvisor.runsc import Runsc
from ..lock.base import Owner
from ..mux.connection import Hooks
from ..persistence.backends import Stores, open_snapshot_storage, open_stores, share_stores
from ..persistence.names import lock_name, valid_id
from ..workers import control, finished
from . import detached, user_sandboxes
from .handle import Identity, SandboxHandle
from .recovery import Recovered, Recovery
from .registry import Registration, facts, find_or_write
from .start_request import Features, StartRequest
from .supervisor import Supervisor

log = logging.getLogger(__name__)

REQUESTED = "another server asked for it"


class SandboxManager:
    """The open sandboxes of one process and configuration, by id. Use it from one event loop only.

    All kernels with the same storage and runsc share a manager (``shared``). The manager owns the handles.

    Some objects guard only their own data with a lock in which no other lock is taken, such as a Document's writes. The
    other locks, outermost first; a task that holds one may wait only for those below it:

    1. the start lock, one per notebook or requested id: in the REST API, around a whole request; in the server's kernel
       manager, around a start; and here, in ``open``
    2. ``SandboxHandle.lock``, one per sandbox id: around each operation that changes the sandbox
    3. the driver's lock in GVisorSandbox: around each command to runsc
    """

    def __init__(self, config: GCSConfig, runsc: Runsc, server: str = "", stores: Stores | None = None) -> None:
        self.handles: dict[str, SandboxHandle] = {}
        self._config = config
        self._runsc = runsc
        self._server = server or f"server-{uuid4().hex[:8]}"
        self._stores = stores
        self._starting: WeakValueDictionary[tuple[str, str, str], asyncio.Lock] = WeakValueDictionary()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @classmethod
    def shared(cls, config: GCSConfig, runsc: Runsc, server: str) -> SandboxManager:
        """Return the manager of the running event loop, which must be the I/O loop, for these settings."""
        key = asyncio.get_running_loop(), config, runsc
        return _shared.get(key) or _shared.setdefault(key, cls(config, runsc, server))

    @property
    def stores(self) -> Stores:
        """The stores of persistent sandboxes. Raises ConfigurationError if this server has none."""
        if self._stores is None:
            self._stores = open_stores(self._config)
        return self._stores

    @property
    def _recovery(self) -> Recovery:
        return Recovery(self._runsc, self.stores, self.owner)

    def owner(self) -> Owner:
        """Return a new identity of this server for one attempt to acquire a lease. Other servers see it."""
        return Owner.here(self._server)

    def get(self, sandbox_id: str) -> SandboxHandle:
        """Return the handle of an open sandbox. Raises SandboxNotFoundError if it is not open here."""
        if sandbox_id not in self.handles:
            raise SandboxNotFoundError(sandbox_id, self._server)
        return self.handles[sandbox_id]

    # -- find or create ----------------------------------------------------------------------------------------------

    def require(self, request: StartRequest) -> None:
        """Raise ConfigurationError if this server does not support the request. Stores nothing."""
        features = self._features(request)
        self._config.require(
            gcs_sandbox_id=request.sandbox_id if request.gcs else None,
            enable_handoff=features.enable_handoff,
            enable_checkpoint_at_idle=features.enable_checkpoint_at_idle,
            sandbox_id=request.sandbox_id,
        )

    async def open(self, request: StartRequest) -> SandboxHandle:
        """Return the sandbox that a start requests, not running yet: attach to the existing one or create a new one.

        Raises the errors of ``require``, and of ``attach``; LeaseHeldError after the request's ``patience``.
        """
        self.require(request)
        key = request.kernel_name, request.notebook_path, request.sandbox_id
        async with self._starting.setdefault(key, asyncio.Lock()):  # so that a second start finds the sandbox in use
            self._stores = self._stores or await control(share_stores, self._config)
            return await self._open(request)

    async def _open(self, request: StartRequest) -> SandboxHandle:
        registry, stores, known_facts = user_sandboxes.registry(), self.stores, facts(request)
        found = await asyncio.to_thread(find_or_write, registry, stores, request, set(self.handles))
        record, handle = found.record, None
        try:
            handle = await self._attach_or_create(record.sandbox_id, request)
            if handle.metadata.user == request.user and handle.metadata.shared_with != request.shared_with:
                await handle.change(shared_with=request.shared_with)
            if request.notebook_path and handle.metadata.notebook_path != request.notebook_path:
                if found.is_derived:  # the sandbox's notebook was renamed on another server
                    await self.close(handle, save=False)
                    record = await asyncio.to_thread(registry.allocate, stores, **known_facts)
                    handle = await self._attach_or_create(record.sandbox_id, request)
                else:
                    await handle.change(notebook_path=request.notebook_path)
            record = await asyncio.to_thread(registry.record, record.sandbox_id, stores, **known_facts)
            handle.registration = Registration(registry, record)
            return handle
        except BaseException as error:
            if handle:  # an open handle renews its lease for ever
                await asyncio.shield(self._undo(handle))
            if found.is_new and isinstance(error, ForeignSandboxError | SignatureError):
                await asyncio.to_thread(registry.forget, found.record.id)  # do not list other users' sandboxes
            raise

    async def _undo(self, handle: SandboxHandle) -> None:
        """Release the sandbox after a failed start. Errors are logged."""
        try:
            await self.close(handle, save=False)
        except Exception:
            log.exception("Sandbox %s was not released after a failed start", handle.metadata.title)

    async def _attach_or_create(self, sandbox_id: str, request: StartRequest) -> SandboxHandle:
        if handle := self.handles.get(sandbox_id):
            if not request.patience or not handle.hands_over:
                raise LeaseHeldError(lock_name(sandbox_id), self.owner())
            await self.close(handle, save=True, reason=REQUESTED)
        about = Identity(request.kernel_name, request.notebook_path, request.user, shared_with=request.shared_with)
        features = self._features(request)
        try:
            return await self.attach(sandbox_id, None, features, patience=request.patience)
        except SandboxNotFoundError:
            try:
                return await self.create(sandbox_id, None, about, features)
            except SandboxExistsError:  # another server has just created it
                return await self.attach(sandbox_id, None, features, patience=request.patience)

    def create_ephemeral(self, sandbox_id: str, spec: BundleSpec) -> SandboxHandle:
        """Return a new, unstarted sandbox that is not persistent."""
        storage = open_snapshot_storage(self._config)
        return self._add(SandboxHandle.create_ephemeral(sandbox_id, spec, self._runsc, storage=storage))

    async def create(
        self,
        sandbox_id: str,
        spec: BundleSpec | None,
        identity: Identity | None = None,
        features: Features | None = None,
    ) -> SandboxHandle:
        """Return a new, unstarted persistent sandbox.

        Raises ConfigurationError, before anything is stored, if this server does not support ``features``; StateError
        if this manager has the sandbox already; and the errors of SandboxHandle.create_persistent.
        """
        features = self._supported(features)
        about = identity or Identity()
        about = replace(about, settings={**about.settings, **vars(features)})
        async with self._lock(sandbox_id):
            self._require_closed(sandbox_id)
            handle = await SandboxHandle.create_persistent(
                sandbox_id, spec, self._runsc, self.stores, self.owner(), about
            )
            return self._add(handle, features)

    async def attach(
        self,
        sandbox_id: str,
        spec: BundleSpec | None,
        features: Features | None = None,
        patience: float = 0.0,
    ) -> SandboxHandle:
        """Return an existing persistent sandbox, not running yet; if a killed server left it running, save it first.

        Arguments and errors are those of SandboxHandle.attach_persistent and ``create``. Also raises
        LeftRunningError if the sandbox of a killed server could not be saved.
        """
        features = self._supported(features)
        async with self._lock(sandbox_id):
            self._require_closed(sandbox_id)
            for rescue in await self._recovery.save(sandbox_id):
                if rescue.runs_on:
                    raise LeftRunningError(sandbox_id, rescue.problem, rescue.checkpoint)
            try:
                handle = await SandboxHandle.attach_persistent(
                    sandbox_id, spec, self._runsc, self.stores, self.owner(), patience=patience
                )
            except SandboxNotFoundError:
                raise
            except SandboxError as error:
                EVENT_BUS.fail(Entry(sandbox_id, EventKind.WOKEN), error)
                raise
            return self._add(handle, features)

    async def recover(self) -> list[Recovered]:
        """Save the sandboxes of killed servers and delete the garbage that they left. Called when the server starts."""
        recovered = await self._recovery.save()
        await self._recovery.collect_garbage()
        return recovered

    # -- fork, close, delete -----------------------------------------------------------------------------------------

    async def fork(self, handle: SandboxHandle, new_id: str, identity: Identity, savepoint: str = "") -> None:
        """Store a new sandbox with the memory of this one, current or at a savepoint; this one continues to run."""
        first = identity.document(valid_id(new_id))
        async with handle.exclusive():
            with EVENT_BUS.doing(handle.entry(EventKind.FORKED)) as work:
                checkpoint = await detached.create_fork(
                    self.stores, first, self.owner(), lambda name: handle.memory.copy_to(name, savepoint, work.advance)
                )
                work.size = checkpoint.size

    async def close(self, handle: SandboxHandle, *, save: bool, reason: str = "") -> None:
        """End a sandbox on this server and release it for others. Does nothing if it is closed already.

        With ``save``, save it first if it runs and can be saved, even if the caller is cancelled; if that fails, the
        sandbox stays open. With a ``reason``, call the observer's ``gone``.
        """
        async with handle.lock:
            if handle.closed:
                return
            if save:
                with EVENT_BUS.doing(handle.entry(EventKind.HANDED_OFF)) as work:
                    if handle.can_save and handle.running:
                        work.size = (await finished(handle.memory.checkpoint())).size
                    await self._remove(handle)
            else:
                await handle.memory.end()
                if handle.persistent and handle.metadata.running:
                    with suppress(SandboxError):  # the next server corrects the document
                        await handle.memory.stored.record_stopped()
                await self._remove(handle)
        if reason:
            handle.observer.gone(reason)
        elif handle.registration:
            await handle.registration.touch()

    async def delete(self, sandbox_id: str) -> int:
        """End a sandbox, delete everything stored for it and return the freed bytes. It need not be open here."""
        async with self._lock(sandbox_id):
            handle = self.handles.get(sandbox_id)
            entry = handle.entry(EventKind.DELETED) if handle else Entry(sandbox_id, EventKind.DELETED)
            with EVENT_BUS.doing(entry) as work:
                if handle:
                    await self._remove(handle)
                    if not handle.persistent:
                        return 0
                work.size = await detached.destroy_persistent(self.stores, sandbox_id, self.owner())
        if handle and handle.registration:
            await handle.registration.forget()
        return work.size

    async def _lose(self, handle: SandboxHandle, reason: str) -> None:
        """Release a sandbox that another server has taken."""
        EVENT_BUS.write(handle.entry(EventKind.LOST))
        log.error("Sandbox %s was taken over by another server: %s", handle.metadata.title, reason)
        async with handle.lock:
            await self._remove(handle)
        handle.observer.gone(reason)

    # -- internals ---------------------------------------------------------------------------------------------------

    def _features(self, request: StartRequest) -> Features:
        return request.features(self._config.can_checkpoint())

    def _supported(self, features: Features | None) -> Features:
        features = features or Features()
        self._config.require(
            enable_handoff=features.enable_handoff, enable_checkpoint_at_idle=features.enable_checkpoint_at_idle
        )
        return features

    def _require_closed(self, sandbox_id: str) -> None:
        if sandbox_id in self.handles:
            raise StateError(sandbox_id, "create or attach", "it is already open on this server")

    def _lock(self, sandbox_id: str) -> asyncio.Lock:
        """Return the lock of a sandbox id, which is also the ``lock`` of that sandbox's handle."""
        return self._locks.setdefault(valid_id(sandbox_id), asyncio.Lock())

    def _add(self, handle: SandboxHandle, features: Features | None = None) -> SandboxHandle:
        self.handles[handle.sandbox_id] = handle
        handle.lock = self._lock(handle.sandbox_id)
        if features:
            handle.memory.hooks = Hooks(features.hook_timeout, features.reseed)
            handle.idle_timeout = features.idle_timeout or None if features.enable_checkpoint_at_idle else None
            handle.hands_over = features.enable_handoff
            hand_over = self._hand_over if features.enable_handoff else None
            supervisor = Supervisor(handle, self.owner, hand_over, self._lose)
            handle.supervisor = asyncio.create_task(supervisor.run())
        return handle

    async def _hand_over(self, handle: SandboxHandle) -> None:
        await self.close(handle, save=True, reason=REQUESTED)

    async def _remove(self, handle: SandboxHandle) -> None:
        self.handles.pop(handle.sandbox_id, None)
        await handle.release()


_shared: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, GCSConfig, Runsc], SandboxManager] = WeakValueDictionary()
"""The managers that ``shared`` returns. A forked process gets new ones, because its event loops are new."""
