"""SandboxKernelManager: what Jupyter Server does with kernels whose state is kept: culling, stopping, coming back.

It is AsyncMappingKernelManager with three differences. A persistent sandbox that the culler would shut down is
hibernated instead, by the server's own settings, and stays listed under its id with its clients. When the server stops,
all of them are hibernated at once, within a deadline. When it starts, those that a killed server left are saved.
Other kernels are not touched.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any
from weakref import WeakValueDictionary

from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_core.utils import ensure_async
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from jupyter_server.utils import to_os_path
from tornado.ioloop import PeriodicCallback
from traitlets import Float, default
from zmq import MAX_SOCKETS
from zmq.asyncio import Context

from . import config, persistence
from .errors import SandboxError, UnresponsiveError
from .kernelspecs import PROVISIONER
from .manager import SandboxManager
from .programs import note_writable
from .provisioner import SandboxProvisioner
from .recovery import Recovered
from .runsc import find
from .standby import STANDBY
from .workers import bulk

LOOK_EVERY = 5.0
"""Seconds in which a notebook's new name is known, and a kernel that moved to another server is gone from here."""

SOCKETS = 16_384
"""How many the server may have to all its kernels: a notebook has six, and ZeroMQ's own limit of 1023 ends at 170."""

JUST_NOW = 1.0
"""Seconds in which a request that began before another one's start had ended may still arrive."""

StartKey = tuple[str, str, frozenset[tuple[str, str]]]
"""A kernel's name, its notebook, and the variables that choose its sandbox."""

_culling: ContextVar[str] = ContextVar("culling", default="")
"""The kernel that the culler looks at just now, in whose place a shutdown is a hibernation."""


class SandboxKernelManager(AsyncMappingKernelManager):
    """The kernel manager of a Jupyter Server with sandboxed kernels: ServerApp.kernel_manager_class."""

    hibernate_deadline = Float(
        config=True,
        help="Seconds that a stopping server takes to save its persistent kernels; those that take longer run on, and "
        "are saved when the next server starts. A kernel that does not help for a third of it is saved without its "
        "help. Environment: SANDBOX_HIBERNATE_DEADLINE",
    )

    @default("hibernate_deadline")
    def _default_hibernate_deadline(self) -> float:
        return config.seconds("SANDBOX_HIBERNATE_DEADLINE", 60.0)

    @default("context")
    def _context_default(self) -> Context:
        """Called for the first socket, before which the limit has to be set: there can be many kernels that sleep."""
        context = super()._context_default()
        context.set(MAX_SOCKETS, SOCKETS)
        return context

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._recovery: asyncio.Task[None] | None = None
        self._looking: PeriodicCallback | None = None
        self._starts: WeakValueDictionary[StartKey, asyncio.Lock] = WeakValueDictionary()
        self._newest: dict[StartKey, tuple[str, float]] = {}

    # -- called by the server ----------------------------------------------------------------------------------------

    async def _async_start_kernel(self, **kwargs: Any) -> str:
        """Start a kernel and return its id. Two requests at once for one notebook and kernel share one start."""
        key = self._start_key(kwargs)
        if key is None:
            return await self._start(kwargs)
        starting = self._starts.setdefault(key, asyncio.Lock())
        waited = starting.locked()
        async with starting:
            if shared := await self._just_started(key, waited):
                return shared
            kernel_id = await self._start(kwargs)
            self._newest = {one: found for one, found in self._newest.items() if found[0] in self}
            self._newest[key] = kernel_id, time.monotonic()
            return kernel_id

    start_kernel = _async_start_kernel  # type: ignore[assignment]

    async def _start(self, kwargs: dict[str, Any]) -> str:
        """Start a kernel. The first sandboxed one begins to save what killed servers left, and does not wait for it.

        A start waits only for the sandbox that it is for: see ``SandboxManager.attach``.
        """
        if self._recovery is None and self._sandboxed(kwargs.get("kernel_name")):
            _heed_interrupts(self.parent)
            self._recovery = asyncio.create_task(self._recover())
            self._looking = PeriodicCallback(self._look_around, LOOK_EVERY * 1000)
            self._looking.start()
        created = datetime.now(UTC)
        try:
            kernel_id = str(await super()._async_start_kernel(**kwargs))
        except SandboxError:
            self._forget_failed_starts()
            raise
        kernel = self._kernels.get(kernel_id)
        if kernel and not hasattr(kernel, "created"):
            kernel.created = created
        return kernel_id

    def _start_key(self, kwargs: dict[str, Any]) -> StartKey | None:
        """Return what two requests for the same notebook and sandboxed kernel have in common; None for any other."""
        env, name = kwargs.get("env") or {}, kwargs.get("kernel_name") or self.default_kernel_name
        notebook = env.get("JPY_SESSION_NAME", "")
        if kwargs.get("kernel_id") or not notebook.endswith(".ipynb") or not self._sandboxed(name):
            return None
        asked = {(variable, env[variable]) for variable in env if "SANDBOX_" in variable}
        return str(name), notebook, frozenset(asked)

    async def _just_started(self, key: StartKey, waited: bool) -> str | None:
        """Return the persistent kernel that another request started for ``key`` while this one was under way.

        The other one's session may not be recorded yet. A later request is for a new kernel: the notebook's user
        exchanges the old one, which is still there, for it.
        """
        kernel_id, when = self._newest.get(key, ("", 0.0))
        if kernel_id not in self:
            return None
        with suppress(Exception):  # a start that failed is not shared
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
        self.log.info("Kernel %s is shared with another request for the same notebook", kernel_id)
        return kernel_id

    async def cull_kernel_if_idle(self, kernel_id: str) -> None:
        """Called by the culler for each kernel: the criteria are the server's own, with our answer to "is it busy?"."""
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
        """Shut a kernel down, unless it is the culler that wants it: then a persistent one is hibernated."""
        provisioner = self.persistent(kernel_id)
        if provisioner and _culling.get() == kernel_id:
            if provisioner.can_save:
                await self._hibernate(kernel_id, provisioner)
                return
            provisioner.keep_state()
        await super()._async_shutdown_kernel(kernel_id, now=now, restart=restart)  # type: ignore[no-untyped-call]

    shutdown_kernel = _async_shutdown_kernel  # type: ignore[assignment]

    async def _async_shutdown_all(self, now: bool = False) -> None:
        """Called when the server stops: persistent kernels are saved, all others end."""
        if self._looking:
            self._looking.stop()
        kept = {name: found for name in self.list_kernel_ids() if (found := self.persistent(name))}
        insist, able = self.hibernate_deadline / 3, {name: found for name, found in kept.items() if found.can_save}
        saving = [asyncio.create_task(self._hibernate(name, found, insist)) for name, found in able.items()]
        if saving:
            self.log.info("Saving %d kernels ...", len(saving))
            following = asyncio.create_task(self._follow_notebooks())
            await asyncio.wait([following, *saving], timeout=self.hibernate_deadline)
            following.cancel()
        for kernel_id, provisioner in kept.items():
            provisioner.keep_state()
            if not provisioner.can_save:
                self.log.warning("Kernel %s ends unsaved: SANDBOX_CHECKPOINT_BUCKET is not set", kernel_id)
            elif not provisioner.asleep and await provisioner.poll() is None:
                self._leave_running(kernel_id, provisioner)
        await super()._async_shutdown_all(now=now)
        await STANDBY.end()

    shutdown_all = _async_shutdown_all  # type: ignore[assignment]

    def __len__(self) -> int:
        """Kernels that are awake: for a server that ends when there are none, hibernated ones are none."""
        return sum(1 for name in self.list_kernel_ids() if not ((found := self.persistent(name)) and found.asleep))

    def __bool__(self) -> bool:
        """True, however many kernels are awake: a server asks it before it shuts the kernels down."""
        return True

    def kernel_model(self, kernel_id: str) -> dict[str, Any]:
        """Called for ``/api/kernels``: a sandboxed kernel's state is ours, not that of its last status message."""
        self._correct_state(kernel_id)
        model: dict[str, Any] = super().kernel_model(kernel_id)  # type: ignore[no-untyped-call]
        return model

    # -- how ---------------------------------------------------------------------------------------------------------

    def _correct_state(self, kernel_id: str) -> SandboxProvisioner | None:
        """Set the state that Jupyter shows of a sandboxed kernel; return its provisioner, None for another kernel.

        Jupyter takes the last status on iopub for the kernel's state, though it may belong to a request on the control
        channel that ended while a cell was running.
        """
        kernel = self._kernels.get(kernel_id)
        provisioner = getattr(kernel, "provisioner", None)
        if not isinstance(provisioner, SandboxProvisioner):
            return None
        if kernel and provisioner.activity.executing:
            kernel.execution_state = "busy"
        return provisioner

    def persistent(self, kernel_id: str) -> SandboxProvisioner | None:
        """The provisioner of a kernel whose state is kept; None for any other."""
        kernel = self._kernels.get(kernel_id)
        provisioner = getattr(kernel, "provisioner", None)
        return provisioner if isinstance(provisioner, SandboxProvisioner) and provisioner.claim else None

    def _sandboxed(self, kernel_name: str | None) -> bool:
        assert self.kernel_spec_manager is not None
        try:
            spec = self.kernel_spec_manager.get_kernel_spec(kernel_name or self.default_kernel_name)
        except KeyError:
            return False
        return _is_sandboxed(spec.metadata, self.parent)

    async def _hibernate(self, kernel_id: str, provisioner: SandboxProvisioner, insist: float | None = None) -> None:
        """Save a kernel. One that refuses, and that no server could save, does not outlive a server that insists."""
        try:
            await provisioner.hibernate(insist)
        except UnresponsiveError as error:
            if insist is None:
                self.log.error("Kernel %s was not hibernated, and runs on: %s", kernel_id, error)
                return
            self.log.error("Kernel %s is ended without being saved: %s", kernel_id, error)
            provisioner.keep_state()
            await provisioner.kill()
        except SandboxError as error:
            self.log.error("Kernel %s was not hibernated, and runs on: %s", kernel_id, error)
        except Exception:
            self.log.exception("Kernel %s was not hibernated, and runs on", kernel_id)

    def _leave_running(self, kernel_id: str, provisioner: SandboxProvisioner) -> None:
        """One that could not be saved in time is not ended either: it is saved when the next server starts."""
        self.log.error("Kernel %s was not saved in time, and runs on", kernel_id)
        self.stop_watching_activity(kernel_id)  # type: ignore[no-untyped-call]
        self.remove_kernel(kernel_id)
        provisioner.abandon()

    async def _recover(self) -> None:
        """In a thread with a loop of its own, because the server's has other things to do."""
        configured = self.config.SandboxProvisioner
        storage_dir, runsc = str(configured.get("storage_dir", "")), str(configured.get("runsc", ""))
        note_writable(self.root_dir)

        def work() -> list[Recovered]:
            manager = SandboxManager(persistence.settings(storage_dir), find(runsc), persistence.server())
            recovered = asyncio.run(manager.recover())
            persistence.touch(one.sandbox_id for one in recovered if one.saved)
            return recovered

        try:
            for one in await bulk(work):
                state = "saved" if one.saved else f"not saved: {one.problem or 'it had ended'}"
                self.log.warning("Sandbox %s, whose server was killed, was found and %s", one.sandbox_id, state)
        except SandboxError as error:
            self.log.warning("Sandboxes of killed servers were not looked for: %s", error)
        except Exception:  # whatever it was, no kernel of this server has to do with it
            self.log.exception("Sandboxes of killed servers were not looked for")

    async def _look_around(self) -> None:
        for kernel_id in self.list_kernel_ids():
            provisioner = getattr(self._kernels.get(kernel_id), "provisioner", None)
            if isinstance(provisioner, SandboxProvisioner) and provisioner.moved:
                self._tell_moved(kernel_id)
        await self._follow_notebooks()

    def _tell_moved(self, kernel_id: str) -> None:
        """To its clients it is dead; they find it, with its state, where it went."""
        restarter = getattr(self._kernels[kernel_id], "_restarter", None)
        if restarter:
            restarter.stop()
            restarter._fire_callbacks("dead")
        if kernel_id in self:
            self.stop_watching_activity(kernel_id)  # type: ignore[no-untyped-call]
            self.remove_kernel(kernel_id)

    async def _follow_notebooks(self) -> None:
        """Tell sandboxes of their notebooks' new names."""
        sessions = getattr(self.parent, "session_manager", None)
        if sessions is None:
            return
        following = []
        for session in await sessions.list_sessions():
            provisioner = self.persistent(session["kernel"]["id"])
            if provisioner and session["type"] == "notebook":
                following.append(self._follow(provisioner, to_os_path(session["path"], self.root_dir)))
        await asyncio.gather(*following)

    async def _follow(self, provisioner: SandboxProvisioner, path: str) -> None:
        try:
            await provisioner.follow(path)
        except Exception as error:  # the next look tries again, and the others must not wait for that
            self.log.warning(
                "Sandbox of kernel %s: the new name %s was not stored: %s", provisioner.kernel_id, path, error
            )

    def _forget_failed_starts(self) -> None:
        """jupyter_client keeps the ids of failed starts, and a server that stops would wait for them for ever."""
        for kernel_id, pending in list(self._pending_kernels.items()):
            if pending.done() and kernel_id not in self._kernels:
                del self._pending_kernels[kernel_id]


def sandboxed_kernels(kernel_manager: Any) -> dict[str, SandboxProvisioner]:
    """The kernels of a server that run or sleep in sandboxes, by their ids; any class of manager will do."""
    found = {}
    for kernel_id, kernel in list(getattr(kernel_manager, "_kernels", {}).items()):
        provisioner = getattr(kernel, "provisioner", None)
        known = hasattr(kernel, "last_activity")  # the server has finished starting it
        if isinstance(provisioner, SandboxProvisioner) and known and provisioner.has_process and not provisioner.moved:
            found[kernel_id] = provisioner
    return found


async def sandboxed_names(kernel_manager: Any) -> list[str]:
    """The kernelspecs of a server whose kernels run in sandboxes: the server's default first, the others by name."""
    specs = await ensure_async(kernel_manager.kernel_spec_manager.get_all_specs())
    stanzas = {name: found["spec"].get("metadata", {}) for name, found in specs.items()}
    found = [name for name, metadata in stanzas.items() if _is_sandboxed(metadata, kernel_manager.parent)]
    return sorted(found, key=lambda name: (name != kernel_manager.default_kernel_name, name))


def _is_sandboxed(metadata: dict[str, Any], server: Any) -> bool:
    usual = KernelProvisionerFactory.instance(parent=server).default_provisioner_name
    return bool(metadata.get("kernel_provisioner", {}).get("provisioner_name", usual) == PROVISIONER)


def _heed_interrupts(server: Any) -> None:
    """Let SIGINT stop the server as SIGTERM does: a hub sends it, and without a terminal the server would just fall."""
    alone = threading.current_thread() is threading.main_thread()
    if alone and hasattr(server, "stop") and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: server.stop(from_signal=True))
