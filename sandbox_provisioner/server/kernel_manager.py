"""Hibernate persistent kernels where Jupyter Server would shut them down.

SandboxKernelManager is AsyncMappingKernelManager with three differences. The culler, with the server's own settings,
hibernates a persistent kernel instead of shutting it down; the kernel stays listed under its id and keeps its clients.
A stopping server hibernates all persistent kernels in parallel, within a deadline. The first start of a sandboxed
kernel saves the sandboxes that killed servers left behind. Other kernels are not affected.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_core.utils import ensure_async
from jupyter_server.prometheus.metrics import KERNEL_CURRENTLY_RUNNING_TOTAL
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from tornado.ioloop import PeriodicCallback
from traitlets import Float, TraitError, default
from zmq import MAX_SOCKETS
from zmq.asyncio import Context

from .. import config
from ..errors import SandboxError, UnresponsiveError
from ..gvisor.programs import note_writable
from ..kernel.start_request import KEYWORD
from ..sandbox.start_request import StartRequest
from ..setup.kernelspecs import PROVISIONER
from ..workers import bulk
from .drives import notebook_file
from .kernel_messages import OfflineMessages, tolerant

if TYPE_CHECKING:  # code that only kernels need is imported with the first of them, to keep the server's start short
    from ..provisioner import SandboxProvisioner
    from ..sandbox.recovery import Recovered

CHECK_EVERY = 5.0
"""Seconds between two checks for renamed notebooks and for kernels that moved to another server."""

SOCKETS = 16_384
"""Maximum ZeroMQ sockets to all kernels. A notebook uses six, so ZeroMQ's default of 1023 is enough for only 170."""

JUST_NOW = 1.0
"""Seconds after a start during which another request for the same notebook shares the started kernel."""

StartKey = tuple[str, str, StartRequest | None, frozenset[tuple[str, str]]]
"""A kernel's name, its notebook, and the request or the environment variables that choose its sandbox."""

_culling: ContextVar[str] = ContextVar("culling", default="")
"""Id of the persistent kernel that the culler is checking; its shutdown becomes a hibernation."""


class SandboxKernelManager(config.Settings, AsyncMappingKernelManager):
    """The value of ServerApp.kernel_manager_class on a server with sandboxed kernels. Server loop only."""

    hibernate_deadline = config.setting(
        "SANDBOX_HIBERNATE_DEADLINE",
        Float(
            60.0,
            help="Maximum seconds that a stopping server spends on saving its persistent kernels. Kernels that take "
            "longer continue to run, and the next server saves them. A kernel that has not prepared for the save "
            "(hooks, list of the files in use) within a third of this time is saved without this preparation.",
        ),
    )

    @default("context")
    def _context_default(self) -> Context:
        """Return a ZeroMQ context for many kernels. The limit must be set before the first socket is created."""
        context = super()._context_default()
        context.set(MAX_SOCKETS, SOCKETS)
        return context

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._recovery: asyncio.Task[None] | None = None
        self._checking: PeriodicCallback | None = None
        self._start_locks: WeakValueDictionary[StartKey, asyncio.Lock] = WeakValueDictionary()
        self._recent_starts: dict[StartKey, tuple[str, float]] = {}

    # -- called by Jupyter Server ------------------------------------------------------------------------------------

    async def _async_start_kernel(self, **kwargs: Any) -> str:
        """Start a kernel and return its id. Concurrent requests for one notebook and kernel share one start."""
        key = self._start_key(kwargs)
        if key is None:
            return await self._start(kwargs)
        starting = self._start_locks.setdefault(key, asyncio.Lock())
        waited = starting.locked()
        async with starting:
            if shared := await self._just_started(key, waited):
                return shared
            kernel_id = await self._start(kwargs)
            self._recent_starts = {one: found for one, found in self._recent_starts.items() if found[0] in self}
            self._recent_starts[key] = kernel_id, time.monotonic()
            return kernel_id

    start_kernel = _async_start_kernel  # type: ignore[assignment]

    async def _start(self, kwargs: dict[str, Any]) -> str:
        """Start a kernel. With the first sandboxed one, start to save killed servers' sandboxes in the background.

        A start waits only for the recovery of its own sandbox, in ``SandboxManager.attach``.
        """
        if self._recovery is None and self._sandboxed(kwargs.get("kernel_name")):
            _stop_on_interrupt(self.parent)
            self._recovery = asyncio.create_task(_recover(self))
            self._checking = PeriodicCallback(self._check_kernels, CHECK_EVERY * 1000)
            self._checking.start()
        created = datetime.now(UTC)
        try:
            kernel_id = str(await super()._async_start_kernel(**kwargs))
        except BaseException:
            self._forget_failed_starts()
            raise
        kernel = self._kernels.get(kernel_id)
        if kernel and not hasattr(kernel, "created"):
            kernel.created = created
        return kernel_id

    async def _add_kernel_when_ready(self, kernel_id: str, km: Any, kernel_awaitable: Awaitable[Any]) -> None:
        """Add a started kernel to the list. Called by jupyter_client.

        Jupyter Server sets these attributes only after that, and a request for the list in between would fail.
        """
        km.execution_state, km.reason, km.last_activity = "starting", "", datetime.now(UTC)
        await super()._add_kernel_when_ready(kernel_id, km, kernel_awaitable)

    def _start_key(self, kwargs: dict[str, Any]) -> StartKey | None:
        """Return the key shared by requests for one notebook and sandboxed kernel; None for other starts."""
        env, name = kwargs.get("env") or {}, kwargs.get("kernel_name") or self.default_kernel_name
        notebook = env.get("JPY_SESSION_NAME", "")
        if kwargs.get("kernel_id") or not notebook.endswith(".ipynb") or not self._sandboxed(name):
            return None
        variables = {(variable, env[variable]) for variable in env if "SANDBOX_" in variable}
        return str(name), notebook, kwargs.get(KEYWORD), frozenset(variables)

    async def _just_started(self, key: StartKey, waited: bool) -> str | None:
        """Return the persistent kernel that a concurrent request started for ``key``; None if there is no such kernel.

        A request counts as concurrent while that kernel's session is not recorded, for at most JUST_NOW seconds. A
        later request is for a new kernel that replaces the current one.
        """
        kernel_id, when = self._recent_starts.get(key, ("", 0.0))
        if kernel_id not in self:
            return None
        with suppress(Exception):  # a failed start is not shared
            await asyncio.wrap_future(self.get_kernel(kernel_id).ready)
        if self.persistent(kernel_id) is None:
            return None
        if not waited:
            sessions = getattr(self.parent, "session_manager", None)
            known = sessions is None or any(
                session["kernel"] and session["kernel"]["id"] == kernel_id for session in await sessions.list_sessions()
            )
            if known or time.monotonic() - when > JUST_NOW:
                return None
        self.log.info("Kernel %s also answers a concurrent request for the same notebook", kernel_id)
        return kernel_id

    async def cull_kernel_if_idle(self, kernel_id: str) -> None:
        """Cull a kernel by the server's own criteria and our busy state. Called by the culler for each kernel."""
        sandboxed = self._correct_state(kernel_id)
        if sandboxed and (sandboxed.asleep or sandboxed.waited_for or sandboxed.activity.kept_awake):
            return
        provisioner = self.persistent(kernel_id)
        token = _culling.set(kernel_id if provisioner else "")
        try:
            await super().cull_kernel_if_idle(kernel_id)  # type: ignore[no-untyped-call]
        finally:
            _culling.reset(token)

    async def _async_shutdown_kernel(
        self, kernel_id: str, now: bool | None = False, restart: bool | None = False
    ) -> None:
        """Shut a kernel down. If the culler requests it, hibernate a persistent kernel that can be saved instead."""
        provisioner = self.persistent(kernel_id)
        if provisioner and _culling.get() == kernel_id:
            if provisioner.can_save:
                await self._hibernate(provisioner)
                return
            provisioner.keep_state()
        await super()._async_shutdown_kernel(kernel_id, now=now, restart=restart)  # type: ignore[no-untyped-call]

    shutdown_kernel = _async_shutdown_kernel  # type: ignore[assignment]

    async def _async_shutdown_all(self, now: bool = False) -> None:
        """Hibernate the persistent kernels within the deadline and end all others. Called when the server stops."""
        from ..kernel.kernel import AWAKE
        from ..templates.warm_pool import WARM_POOL

        if self._checking:
            self._checking.stop()
        persistent_kernels = {name: found for name in self.list_kernel_ids() if (found := self.persistent(name))}
        for provisioner in persistent_kernels.values():
            provisioner.keep_state()
        saveable = {name: found for name, found in persistent_kernels.items() if found.can_save}
        insist = self.hibernate_deadline / 3
        saving = [asyncio.create_task(self._hibernate(found, insist)) for found in saveable.values()]
        if saving:
            self.log.info("Saving %d kernels ...", len(saving))
            renaming = asyncio.create_task(self._follow_notebooks())
            await asyncio.wait([renaming, *saving], timeout=self.hibernate_deadline)
            renaming.cancel()
        for kernel_id, provisioner in persistent_kernels.items():
            if not provisioner.can_save:
                self.log.warning("Kernel %s ends unsaved: SANDBOX_CHECKPOINT_BUCKET is not set", provisioner.title)
            elif provisioner.state in AWAKE:
                self._leave_running(kernel_id, provisioner)
        await super()._async_shutdown_all(now=now)
        await WARM_POOL.end()

    shutdown_all = _async_shutdown_all  # type: ignore[assignment]

    def __len__(self) -> int:
        """Return the number of kernels that are not hibernated: a server stops for inactivity only if this is 0."""
        return sum(1 for name in self.list_kernel_ids() if not ((found := self.persistent(name)) and found.asleep))

    def __bool__(self) -> bool:
        """Return True even if all kernels are hibernated: the server shuts kernels down only if its manager is true."""
        return True

    def start_watching_activity(self, kernel_id: str) -> None:
        """Record a kernel's activity and state from its messages on iopub. Called for each started kernel.

        A malformed message is dropped: after an exception, Jupyter would stop reading the stream, and later messages
        would fill the server's memory.
        """
        super().start_watching_activity(kernel_id)  # type: ignore[no-untyped-call]
        kernel = self._kernels[kernel_id]
        kernel._activity_stream.on_recv(tolerant(kernel, kernel._activity_stream._recv_callback, self.log))

    def start_buffering(self, kernel_id: str, session_key: str, channels: dict[str, Any]) -> None:
        """Keep a kernel's messages for a client that left, up to a limit. Called by Jupyter Server."""
        super().start_buffering(kernel_id, session_key, channels)  # type: ignore[no-untyped-call]
        if kernel_id in self._kernel_buffers:
            self._kernel_buffers[kernel_id]["buffer"] = OfflineMessages()

    def kernel_model(self, kernel_id: str) -> dict[str, Any]:
        """Return the model of a kernel with the corrected state. Called for ``/api/kernels``."""
        self._correct_state(kernel_id)
        model: dict[str, Any] = super().kernel_model(kernel_id)  # type: ignore[no-untyped-call]
        return model

    def _handle_kernel_died(self, kernel_id: str) -> None:
        """Close connections that Jupyter would leave open. Called when a kernel exited and will not be restarted."""
        self._disconnect(kernel_id)
        super()._handle_kernel_died(kernel_id)  # type: ignore[no-untyped-call]

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _correct_state(self, kernel_id: str) -> SandboxProvisioner | None:
        """Mark an executing sandboxed kernel as busy and return its provisioner; return None for other kernels.

        Jupyter uses the last status on iopub, which may belong to a request on the control channel that ended while a
        cell was running.
        """
        kernel = self._kernels.get(kernel_id)
        provisioner = provisioner_of(kernel)
        if kernel and provisioner and provisioner.activity.executing:
            kernel.execution_state = "busy"
        return provisioner

    def persistent(self, kernel_id: str) -> SandboxProvisioner | None:
        """Return the provisioner of a persistent kernel; None for other kernels."""
        provisioner = provisioner_of(self._kernels.get(kernel_id))
        return provisioner if provisioner and provisioner.handle else None

    def _sandboxed(self, kernel_name: str | None) -> bool:
        assert self.kernel_spec_manager is not None
        try:
            spec = self.kernel_spec_manager.get_kernel_spec(kernel_name or self.default_kernel_name)
        except KeyError:
            return False
        return is_sandboxed(spec.metadata, self.parent)

    async def _hibernate(self, provisioner: SandboxProvisioner, insist: float | None = None) -> None:
        """Hibernate a kernel and log any failure. With ``insist`` (seconds), end an unresponsive kernel."""
        try:
            await provisioner.hibernate(insist)
        except UnresponsiveError as error:
            if insist is None:
                self.log.error("Kernel %s was not hibernated and keeps running: %s", provisioner.title, error)
                return
            self.log.error("Kernel %s is ended without being saved: %s", provisioner.title, error)
            provisioner.keep_state()
            await provisioner.kill()
        except SandboxError as error:
            self.log.error("Kernel %s was not hibernated and keeps running: %s", provisioner.title, error)
        except Exception:
            self.log.exception("Kernel %s was not hibernated and keeps running", provisioner.title)

    def _leave_running(self, kernel_id: str, provisioner: SandboxProvisioner) -> None:
        """Detach from a kernel that was not saved in time. The next server saves it when it starts."""
        self.log.error("Kernel %s was not saved in time and keeps running; the next server saves it", provisioner.title)
        self._disconnect(kernel_id)
        self.remove_kernel(kernel_id)
        provisioner.abandon()

    async def _check_kernels(self) -> None:
        for kernel_id in self.list_kernel_ids():
            provisioner = provisioner_of(self._kernels.get(kernel_id))
            if provisioner and provisioner.moved:
                self._report_moved(kernel_id)
        await self._follow_notebooks()

    def _report_moved(self, kernel_id: str) -> None:
        """Report a kernel that moved to another server as dead, and remove it. Its state is on the other server."""
        restarter = getattr(self._kernels[kernel_id], "_restarter", None)
        if restarter:
            restarter.stop()
            restarter._fire_callbacks("dead")
        if kernel_id in self:
            self._disconnect(kernel_id)
            self.remove_kernel(kernel_id)

    def _disconnect(self, kernel_id: str) -> None:
        """Close the server's own connections to a kernel that is about to be removed without a shutdown.

        Jupyter keeps the connections of a closed browser tab, to buffer the kernel's messages.
        """
        kernel = self._kernels[kernel_id]
        KERNEL_CURRENTLY_RUNNING_TOTAL.labels(type=kernel.kernel_name).dec()
        kernel._close_control_socket()
        self.stop_watching_activity(kernel_id)  # type: ignore[no-untyped-call]
        self.stop_buffering(kernel_id)  # type: ignore[no-untyped-call]

    async def _follow_notebooks(self) -> None:
        """Record the new paths of renamed notebooks."""
        sessions = getattr(self.parent, "session_manager", None)
        if sessions is None:
            return
        renaming = []
        for session in await sessions.list_sessions():
            provisioner = self.persistent(session["kernel"]["id"])
            if provisioner and session["type"] == "notebook":
                renaming.append(self._follow(provisioner, notebook_file(session["path"], self.root_dir)))
        await asyncio.gather(*renaming)

    async def _follow(self, provisioner: SandboxProvisioner, path: str) -> None:
        try:
            await provisioner.follow(path)
        except Exception as error:  # the next check tries again; other kernels must not be affected
            self.log.warning("Kernel %s: its notebook's new path %s was not stored: %s", provisioner.title, path, error)

    def _forget_failed_starts(self) -> None:
        """Remove failed and cancelled starts. If they stayed pending, the server could not stop."""
        for kernel_id, pending in list(self._pending_kernels.items()):
            if pending.done() and kernel_id not in self._kernels:
                del self._pending_kernels[kernel_id]


async def _recover(kernel_manager: SandboxKernelManager) -> None:
    """Save the sandboxes of killed servers, in a thread with its own loop to keep the server's loop free."""
    from ..provisioner import SandboxProvisioner

    settings, log = SandboxProvisioner(config=kernel_manager.config), kernel_manager.log
    note_writable(kernel_manager.root_dir)

    def work() -> list[Recovered]:
        from ..gvisor.runsc import find
        from ..sandbox import user_sandboxes
        from ..sandbox.manager import SandboxManager

        manager = SandboxManager(
            user_sandboxes.settings(settings.storage_dir), find(settings.runsc), user_sandboxes.server()
        )
        recovered = asyncio.run(manager.recover())
        user_sandboxes.touch(one.sandbox_id for one in recovered if one.saved)
        return recovered

    try:
        for one in await bulk(work):
            state = "saved" if one.saved else f"not saved: {one.problem or 'it had ended'}"
            log.warning("Sandbox %s, whose server was killed, was found and %s", one.title or one.sandbox_id, state)
    except SandboxError as error:
        log.warning("The search for sandboxes of killed servers failed: %s", error)
    except Exception:  # kernels of this server are not affected
        log.exception("The search for sandboxes of killed servers failed")


def provisioner_of(kernel: Any) -> SandboxProvisioner | None:
    """Return the provisioner of a sandboxed kernel; None for other kernels, and if ``kernel`` is None."""
    found = getattr(kernel, "provisioner", None)
    if found is None:
        return None
    from ..provisioner import SandboxProvisioner

    return found if isinstance(found, SandboxProvisioner) else None


def sandboxed_kernels(kernel_manager: Any) -> dict[str, SandboxProvisioner]:
    """Return the provisioners of a server's started sandboxed kernels by kernel id, for any class of kernel manager."""
    found = {}
    for kernel_id, kernel in list(getattr(kernel_manager, "_kernels", {}).items()):
        provisioner = provisioner_of(kernel)
        if provisioner and _is_started(kernel) and provisioner.has_process and not provisioner.moved:
            found[kernel_id] = provisioner
    return found


def _is_started(kernel: Any) -> bool:
    """Return True if the server has finished starting a kernel: only then is its last activity set."""
    try:
        return hasattr(kernel, "last_activity")
    except TraitError:  # the trait has no value yet
        return False


async def sandboxed_names(kernel_manager: Any) -> list[str]:
    """Return the names of a server's sandboxed kernelspecs: the server's default first, the others by name."""
    specs = await ensure_async(kernel_manager.kernel_spec_manager.get_all_specs())
    metadata_by_name = {name: found["spec"].get("metadata", {}) for name, found in specs.items()}
    found = [name for name, metadata in metadata_by_name.items() if is_sandboxed(metadata, kernel_manager.parent)]
    return sorted(found, key=lambda name: (name != kernel_manager.default_kernel_name, name))


def is_sandboxed(metadata: dict[str, Any], server: Any) -> bool:
    """Return True if a kernelspec with this metadata starts kernels in sandboxes on this server."""
    default_name = KernelProvisionerFactory.instance(parent=server).default_provisioner_name
    return bool(metadata.get("kernel_provisioner", {}).get("provisioner_name", default_name) == PROVISIONER)


def _stop_on_interrupt(server: Any) -> None:
    """Make SIGINT, which JupyterHub sends, stop the server like SIGTERM; otherwise it may raise KeyboardInterrupt."""
    alone = threading.current_thread() is threading.main_thread()
    if alone and hasattr(server, "stop") and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: server.stop(from_signal=True))
