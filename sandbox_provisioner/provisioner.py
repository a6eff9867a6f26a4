"""The KernelProvisioner that starts Jupyter kernels in gVisor sandboxes.

SandboxProvisioner derives from LocalProvisioner, so that everything a client sees (connection file, ports, CurveZMQ
keys, resolve_path) is the same as without a sandbox. Only the process and its surroundings differ.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import sys
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.session import Session
from jupyter_core.paths import jupyter_runtime_dir

from ._text import printable
from .config import user_name
from .errors import (
    ConfigurationError,
    GuestError,
    LinkClosedError,
    ProtocolError,
    RunscError,
    SandboxError,
    StateError,
    UnresponsiveError,
)
from .gvisor.bundle import BundleSpec, Mount, parse_mount
from .gvisor.mounts import require_below_root, unlinked, within, working_folder
from .gvisor.programs import note_writable
from .gvisor.reserved_dirs import reserved_folders
from .gvisor.runsc import Runsc, find
from .gvisor.sandbox import GVisorSandbox
from .io_thread import EXIT_DEADLINE, IO
from .kernel import start_request
from .kernel.activity import PLAIN, ActivityWatch, KernelActivity
from .kernel.env_filter import filtered
from .kernel.host_api import attend
from .kernel.kernel import Ending, SandboxedKernel
from .kernel.launch_plan import Launch, plan, shares_log, sink
from .kernel.notebook_actions import Inside
from .kernel.relay import CHANNELS
from .kernel.settings import SandboxSettings
from .kernel.shared_folders import list_file, protected_file, remember
from .kernel.synthetic_replies import error_replies
from .mux.connection import GuestConnection
from .persistence.metadata import Checkpoint, GCSArtifact
from .sandbox import user_sandboxes
from .sandbox.claims import Claim, Wanted
from .sandbox.handle import Identity, SandboxHandle
from .templates import match
from .templates.match import Prospect
from .templates.warm_pool import STANDBY
from .workers import control

STABLE_START = 20.0
"""Seconds after which a kernel that still runs counts as started; KernelRestarter uses it."""
LOOPBACK = ("", "localhost", "127.0.0.1", "::1")
MAX_SOCKET_PATH = 107
"""Longest path of a unix socket, in bytes."""
COMMAND = "A command runs beside it"
HELP = 20.0
"""Seconds that the guest has to help with the save when its kernel is shut down."""
TEMPLATE_ERRORS = (RunscError, GuestError, LinkClosedError, ProtocolError, FileNotFoundError)
"""Errors that a bad template can cause. Any other error would also occur without a template."""


class SandboxProvisioner(SandboxSettings):
    """The provisioner of one kernel in a gVisor sandbox; saves its state if it is persistent. Owned by KernelManager.

    Runs on the caller's loop and delegates to the I/O thread, where the callbacks of kernel and SandboxManager run.
    """

    parent: Any

    def __init__(self, **kwargs: Any) -> None:
        known = set(self.trait_names())
        for name in kwargs:
            if name not in known:
                settings = ", ".join(sorted(self.trait_names(config=True)))
                raise ConfigurationError(
                    name,
                    f"The kernelspec gives the sandbox a setting {name!r}, which there is not.",
                    f"There are: {settings}.",
                )
        super().__init__(**kwargs)
        self._kernel = SandboxedKernel()
        self._kernel.heeds_calls = lambda: not (self.parent.shutting_down or self._keeps_state)
        self._kernel.on_trouble = self._not_woken
        self._kernel.on_joined = self._joined
        self._kernel.relay.max_message_size = self.max_message_size
        self._kernel.relay.on_oversized = self._refused_large
        self._claim: Claim | None = None
        self._activity: ActivityWatch | None = None
        self.executions: set[object] = set()
        """Commands that currently run beside the kernel."""
        self._keeps_state = False
        self._tcp_address: str | None = None
        self._touching: asyncio.Task[None] | None = None
        self._moved = ""
        self._left: Future[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._launched = False
        self._launched_before = False
        self._releasing = False

    # -- the interface of KernelProvisionerBase; called by KernelManager -------------------------------------------

    @property
    def has_process(self) -> bool:
        """True from the launch of a kernel until ``wait`` returns or its resources are released."""
        return self._launched

    async def poll(self) -> int | None:
        """Return None while the kernel runs or is hibernated, else its exit status."""
        return self._kernel.status

    async def wait(self) -> int | None:
        """Wait until the kernel and its sandbox have ended, and return the exit status; 0 if none was launched."""
        await self._wait_until_left()
        if not self._launched:
            return 0
        status = await IO.run(self._kernel.ended())
        self._launched = False
        return status

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel's process group in the sandbox.

        The SIGINT at the start of a shutdown first hibernates a persistent kernel if ``on_shutdown`` is "checkpoint". A
        hibernated kernel is not woken for that SIGINT.
        """
        if not self._launched:
            return
        if self.parent.shutting_down and signum == signal.SIGINT:
            if self._claim and self.on_shutdown == "checkpoint":
                if self.can_save:
                    await self.hibernate(insist=HELP)
                self._keeps_state = True
            if self._kernel.asleep:
                return
        await IO.run(self._kernel.signal(signum))

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Kill a hibernated kernel instead of waking it. Called by KernelManager when it has sent a shutdown request.

        A person requested this, so a kernel that moved to another server may be started here again.
        """
        self._moved = ""
        if self._launched and self._kernel.asleep:
            await self.kill(restart)

    async def kill(self, restart: bool = False) -> None:
        """End the kernel and its sandbox immediately."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """Send SIGTERM to the kernel."""
        await self.send_signal(signal.SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:
        """Release all resources. Before a restart keep them, so that clients find the same ports."""
        if not restart:
            await self._release(forget=self.on_shutdown == "delete" and not self._keeps_state)

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Check the machine, open the persistent sandbox, reserve the ports, and then write the connection file.

        Raises SandboxError if runsc is missing or the kernel has moved to another server.
        """
        if self._moved:  # an automatic restart must not take the sandbox back
            raise SandboxError(
                f"The kernel is not here any more: {self._moved}.", "Open the notebook again to have it back."
            )
        await self._wait_until_left()
        self._left = None
        IO.hold(self, self._at_exit)
        self._releasing = False
        try:
            await control(self._find_runsc, kwargs.get("cwd") or "")  # before the claim, and while the thread is held
            env = kwargs.get("env") or {}
            start_request.heed(env, self)
            wanted = start_request.wanted(env, self, self.parent.kernel_name)
            if wanted and not self._claim:
                if kwargs.get("cwd"):
                    await control(self._folder, kwargs["cwd"])  # check first: a refused folder must not leave a record
                await self._make_claim(wanted)
            if self._resumes:
                kwargs |= self._take_up_connection()
            await self._reserve()
            self.ports_cached = True
            return await super().pre_launch(**kwargs)
        except BaseException:
            await asyncio.shield(self._release())
            raise

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start or restore the sandbox and its kernel, and return the connection info. Release all on failure."""
        try:
            await self._launch(cmd, **kwargs)
        except BaseException as error:
            if isinstance(error, SandboxError):
                self.log.error("Kernel %s was not started: %s", self.kernel_id, error)
            await asyncio.shield(self._release())
            raise
        return self.connection_info

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return the connection info and the ids of the sandbox and its container."""
        info: dict[str, Any] = await super().get_provisioner_info()
        if self.sandbox:
            info.update(sandbox_id=self.sandbox.sandbox_id, container_id=self.sandbox.container_id)
        return info

    def get_stable_start_time(self, recommended: float = 10.0) -> float:
        """Return at least STABLE_START: starts in sandboxes take longer, most of all when many start at once."""
        return max(recommended, STABLE_START)

    @property
    def sandbox(self) -> GVisorSandbox | None:
        """The driver of the current kernel's sandbox, or None. Call its methods through ``io_thread.IO.run``."""
        return self._kernel.handle.instance if self._kernel.handle else None

    # -- ending ----------------------------------------------------------------------------------------------------

    async def _release(self, forget: bool = False) -> None:
        self._releasing = True
        await self._wait_until_left()
        if IO.held_by(self):
            await IO.run(self._close(forget))
            await IO.release(self)
        self._forget_ipc()
        self._claim = None
        self._launched = False

    async def _close(self, forget: bool) -> None:
        """End the kernel and release its sandbox; with ``forget``, also delete its saved state. I/O thread only."""
        if self._activity:
            self._activity.close()
            self._activity = None
        await self._kernel.close()
        if self._claim:
            await self._claim.give_up(forget)

    async def _at_exit(self) -> None:
        """Save a persistent kernel and end it. Called in the I/O thread if the process exits while the kernel runs.

        If the save fails, the kernel keeps running, and the next server saves it. After UnresponsiveError it is ended:
        no server could save it.
        """
        if self.can_save and self._kernel.status is None and not self._kernel.asleep:
            with suppress(UnresponsiveError):
                await self._kernel.hibernate(insist=EXIT_DEADLINE / 3)
        await self._close(forget=False)

    def abandon(self) -> None:
        """Leave a persistent kernel running when the server ends. The next server saves it.

        Does not wait for an upload in progress: that may take long, and it ends with this process.
        """
        IO.drop(self)
        self._claim = None
        self._launched = False
        self._forget_ipc()

    # -- saving a kernel's state -------------------------------------------------------------------------------------

    @property
    def claim(self) -> Claim | None:
        """The persistent sandbox that the kernel runs in; None if it is ephemeral."""
        return self._claim

    @property
    def can_save(self) -> bool:
        """True if the kernel is persistent and this server has a place for checkpoints."""
        return self._claim is not None and self._claim.manager.stores.checkpoints is not None

    @property
    def asleep(self) -> bool:
        """True while the kernel is hibernated."""
        return self._kernel.asleep

    @property
    def activity(self) -> KernelActivity:
        """The kernel's unfinished requests and its reasons to be kept awake."""
        return self._kernel.activity

    @property
    def busy(self) -> bool:
        """True while the kernel is not idle. Used by timer, culler, REST, command line and metrics alike."""
        return self.waited_for or self.activity.busy

    @property
    def waited_for(self) -> bool:
        """True while the kernel has sent nothing since a client's last request, or a command runs beside it."""
        return bool(self.executions) or self._kernel.relay.waited_for

    def busy_reasons(self) -> list[str]:
        """Return the reasons why the kernel is busy, as sentences without a full stop; empty if it is idle."""
        reasons = self.activity.reasons()
        if self.executions:
            reasons.append(f"{len(self.executions)} commands run beside it" if len(self.executions) > 1 else COMMAND)
        if not reasons and self.waited_for:
            reasons.append("A client waits for its answer")
        return reasons

    async def hibernate(self, insist: float | None = None) -> None:
        """Save the kernel and free its memory. A client's next request wakes it. Does nothing if it is not persistent.

        Give ``insist`` when the server or the kernel ends: after that many seconds the kernel is saved without the help
        of the guest. Raises UnresponsiveError if that fails too.
        """
        if self._claim and self._launched and self._kernel.status is None:
            await IO.run(self._kernel.hibernate(insist))

    async def wake(self) -> None:
        """Restore a hibernated kernel now."""
        await IO.run(self._kernel.wake())

    async def keep_awake(self, seconds: float | None) -> None:
        """Prevent hibernation and culling for idleness for ``seconds``: None for no limit, 0 to stop."""
        await IO.run(self._keep_awake(seconds))

    async def _keep_awake(self, seconds: float | None) -> None:
        self._kernel.keep_awake(PLAIN, seconds)

    async def follow(self, notebook_path: str) -> None:
        """Record the notebook's new path, unless the sandbox was opened by its own id."""
        named = self.sandbox_id or self.gcs_sandbox_id
        if self._claim and not named and notebook_path != self._claim.record.notebook_path:
            await IO.run(self._claim.follow(notebook_path))

    async def savepoint(self, name: str) -> Checkpoint:
        """Save the kernel's memory as a savepoint and return it. The kernel continues to run."""
        self._require_kept()
        return await IO.run(self._kernel.savepoint(name))

    async def drop_savepoint(self, name: str) -> None:
        """Delete a savepoint."""
        claim = self._require_kept()
        await IO.run(claim.manager.drop_savepoint(claim.record.sandbox_id, name))

    async def rewind(self, name: str) -> str:
        """Restore the kernel to a savepoint. Return the name of the savepoint that has the state from before.

        Clients see a restart: their unanswered requests are lost.
        """
        self._require_kept()
        return await IO.run(self._kernel.rewind(name))

    async def fork(self, new_id: str, savepoint: str = "", notebook_path: str = "") -> None:
        """Store a new sandbox ``new_id`` with this kernel's memory, current or at a savepoint; do not start it."""
        claim = self._require_kept()
        about = Identity(claim.record.kernel_name, notebook_path, user_name())
        await IO.run(claim.manager.fork(claim.record.sandbox_id, new_id, about, savepoint))

    async def save_snapshot(self, name: str) -> GCSArtifact:
        """Save the files that were written in the sandbox as a file snapshot. The kernel continues to run."""
        claim = self._require_kept()
        return await IO.run(claim.manager.save_snapshot(claim.record.sandbox_id, name))

    async def load_snapshot(self, name: str, source_id: str) -> None:
        """Write the files of a snapshot of the sandbox ``source_id`` to their places in this one."""
        claim = self._require_kept()
        await IO.run(claim.manager.load_snapshot(claim.record.sandbox_id, name, source_id))

    def _require_kept(self) -> Claim:
        if self._claim is None:
            raise SandboxError(
                f"Sandbox {self.kernel_id} is ephemeral: nothing of it is kept.",
                "A kernel is kept if it is started for a notebook or with a sandbox_id, and persistent is set.",
            )
        return self._claim

    @property
    def moved(self) -> str:
        """The reason why another server has the kernel; empty while this one has it."""
        return self._moved

    def keep_state(self) -> None:
        """Keep the saved state, however the kernel ends now, and do not wake it for clients.

        Called by the server before it stops, culls the kernel, or ends it with its state kept.
        """
        self._keeps_state = True

    async def _make_claim(self, wanted: Wanted) -> None:
        settings, runsc = user_sandboxes.settings(self.storage_dir), await control(find, self.runsc)
        patience = self.handoff_timeout if self.enable_handoff else 0.0

        async def make() -> None:
            """Set the claim in the I/O thread, so that a caller that is cancelled meanwhile can release it."""
            self._claim = await Claim.make(wanted, settings, runsc, user_sandboxes.server(), self.features, patience)

        await IO.run(make())
        claim = self._claim
        assert claim is not None
        claim.manager.on_saving = lambda sandbox_id: self._kernel.saving()
        claim.manager.on_saved = self._saved
        claim.manager.on_gone = self._gone
        claim.manager.busy = lambda sandbox_id: self.busy
        self._kernel.manager = claim.manager

    def _saved(self, sandbox_id: str) -> None:
        """Record that the kernel was hibernated. Called by the manager in the I/O thread."""
        self._kernel.saved()
        if self._claim:
            self._touching = asyncio.create_task(self._claim.touch())

    def _joined(self, link: GuestConnection) -> None:
        """Serve the guest's calls and watch the activity of a new or restored kernel. Called in the I/O thread."""
        attend(link, Inside(self._kernel, self._own_session))
        self._watch_activity()

    def _own_session(self) -> Session:
        """Return a session to sign messages on behalf of the kernel."""
        return Session(key=self.parent.session.key, signature_scheme=self.parent.session.signature_scheme)

    def _watch_activity(self) -> None:
        """Listen to a persistent kernel's iopub channel, to record when it is used and when its requests end."""
        if self._claim is None:
            return
        if self._activity:
            self._activity.close()
        manager, sandbox_id, km = self._claim.manager, self._claim.record.sandbox_id, self.parent
        self._activity = ActivityWatch(self.activity, lambda: manager.touch(sandbox_id), self.max_message_size)
        curve = (km.curve_publickey, km.curve_secretkey) if getattr(km, "curve_publickey", None) else None
        self._activity.listen(km._make_url("iopub"), self._own_session(), curve)
        if self._kernel.restored:
            self._activity.probe(km._make_url("shell"), self._own_session(), curve)

    @property
    def _resumes(self) -> bool:
        """True if the next launch restores a saved kernel. Only the first launch can; a restart starts a new kernel."""
        return self._claim is not None and not self._launched_before and self._claim.handle.saved

    def _take_up_connection(self) -> dict[str, str]:
        """Use the keys of the saved kernel, which knows no others. Return arguments for ``pre_launch``."""
        assert self._claim is not None
        km, saved = self.parent, self._claim.handle.contents.get("connection")
        if saved is None:
            raise SandboxError(
                f"Sandbox {self._claim.record.sandbox_id} was not saved by Jupyter: there is no kernel in it.",
                "Name another sandbox, or delete this one.",
            )
        km.session.key = saved["key"].encode()
        km.session.signature_scheme = saved["signature_scheme"]
        if "curve_publickey" not in saved:
            return {"transport_encryption": "disabled"}
        km.curve_publickey, km.curve_secretkey = saved["curve_publickey"].encode(), saved["curve_secretkey"].encode()
        return {}

    def _gone(self, sandbox_id: str, reason: str) -> None:
        """Start to release everything: another server has the sandbox. Called by the manager in the I/O thread."""
        self._left = Future()
        self._left.set_running_or_notify_cancel()
        self._moved = reason
        self.log.warning("Kernel %s is not here any more: %s", self.kernel_id, reason)
        self._leaving = asyncio.create_task(self._leave(self._left))

    async def _leave(self, left: Future[None]) -> None:
        """Release the kernel's resources, including its listeners and the connection file. I/O thread only."""
        try:
            await self._close(forget=False)
        except Exception:
            self.log.exception("Kernel %s: not everything was given back", self.kernel_id)
        finally:
            self.parent.cleanup_connection_file()
            self._claim = None
            self._launched = False
            IO.drop(self)
            left.set_result(None)

    async def _wait_until_left(self) -> None:
        """Wait until everything of a kernel that moved to another server is released here."""
        if self._left:
            await asyncio.shield(asyncio.wrap_future(self._left))

    def _not_woken(self, error: SandboxError) -> None:
        """Answer held requests with the reason why the kernel was not woken; the next cell retries. I/O thread only."""
        reason = f"The kernel could not be woken, and its state is kept. {error}"
        self._kernel.relay.answer(lambda held: error_replies(held, self._own_session(), reason))

    def _refused_large(self, channel: str) -> None:
        """Log that a message was dropped. Called by the relay in the I/O thread."""
        self.log.warning(
            "Kernel %s: a message on %s with more than max_message_size (%d bytes) was not passed on. Set "
            "SandboxProvisioner.max_message_size or SANDBOX_MAX_MESSAGE_SIZE to allow it.",
            self.kernel_id,
            channel,
            self.max_message_size,
        )

    # -- starting ----------------------------------------------------------------------------------------------------

    async def _prefer_ipc(self) -> None:
        """Use unix sockets, which only this user can open, unless the configuration names another transport."""
        km = self.parent
        configured = any(
            "transport" in km.config[kind.__name__] for kind in type(km).__mro__ if kind.__name__ in km.config
        )
        if km.transport != "tcp" or km.ip not in LOOPBACK or self.client_transport != "ipc" or configured:
            return
        if prefix := await control(self._ipc_prefix, Path(jupyter_runtime_dir())):
            self._tcp_address = km.ip
            km.transport, km.ip = "ipc", prefix

    def _ipc_prefix(self, folder: Path) -> str:
        """Return the prefix of the socket paths in ``folder``; empty if they would be too long. Blocks."""
        names = (folder / f"kernel-{self.kernel_id[:length]}" for length in (8, 13, 36))
        prefix = next(name for name in names if not os.path.lexists(f"{name}-1"))
        if len(os.fsencode(prefix)) > MAX_SOCKET_PATH - len("-1"):
            self.log.warning("Kernel %s is reached over TCP: %s is too long for unix sockets", self.kernel_id, folder)
            return ""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(prefix)

    def _forget_ipc(self) -> None:
        """Undo ``_prefer_ipc`` after the sockets are closed."""
        if self._tcp_address is not None:
            self.parent.transport, self.parent.ip = "tcp", self._tcp_address
            self._tcp_address = None

    async def _reserve(self) -> None:
        await self._prefer_ipc()
        km = self.parent
        if km.transport == "ipc":
            paths = _socket_paths(km.ip)
            await IO.run(self._kernel.relay.reserve_ipc(paths))
            ports = {channel: number for number, channel in enumerate(CHANNELS, 1)}
        else:
            ip = "127.0.0.1" if km.ip == "localhost" else km.ip
            if not ipaddress.ip_address(ip).is_loopback:
                raise ConfigurationError(
                    "KernelManager.ip",
                    f"A sandboxed kernel can only be reached over loopback, and {km.ip} is not.",
                    "Leave KernelManager.ip at 127.0.0.1.",
                )
            wanted = {channel: getattr(km, f"{channel}_port") for channel in CHANNELS}
            ports = await IO.run(self._kernel.relay.reserve_tcp(ip, wanted))
        if not km.cache_ports:
            km._record_random_port_names()  # a restart with new ports then clears these
        for channel, port in ports.items():
            setattr(km, f"{channel}_port", port)

    async def _launch(self, cmd: list[str], **kwargs: Any) -> None:
        runsc, launch = await control(self._plan, cmd, kwargs)
        if self._resumes:
            await self._resume(launch, kwargs)
            return
        prospect = await IO.run(control(match.find, launch, runsc, self))
        self._require_wanted()
        await IO.run(self._begin(launch, runsc, prospect, kwargs))
        self._launched = self._launched_before = True
        self.cwd = launch.start.cwd

    def _find_runsc(self, cwd: str) -> None:
        """Check that runsc is found outside the folders that kernels can write to. Raises SandboxError. Blocks."""
        shared = [mount.source for mount in map(parse_mount, self.mounts) if mount.writable]
        note_writable(self._root, cwd, self.working_folder, *shared)
        find(self.runsc)

    def _plan(self, cmd: list[str], kwargs: dict[str, Any]) -> tuple[Runsc, Launch]:
        """Return runsc and the plan for the start. Blocks."""
        env = filtered(kwargs["env"], [*self.kernel_spec.env, *self.pass_environment])
        runsc, folder = find(self.runsc), self._folder(kwargs.get("cwd") or self._recorded_folder())
        self._remember_shared(folder)
        launch = plan(cmd, env, folder, self.parent.connection_file, self, runsc, self._root)
        self._remember_protected(launch.spec)
        return runsc, launch

    async def _resume(self, launch: Launch, kwargs: dict[str, Any]) -> None:
        """Restore a saved kernel, with the mounts that a start would have now."""
        assert self._claim is not None
        claim, handle = self._claim, self._claim.handle
        await IO.run(claim.manager.permit(claim.record.sandbox_id, match.grant_of(launch, self.platform)))
        self.cwd = handle.contents["cwd"]
        await IO.run(self._kernel.resume(handle, self._ending(kwargs)))
        self._launched = self._launched_before = True

    def _recorded_folder(self) -> str | None:
        """Return the folder of the registered notebook, for a sandbox that is opened without a notebook, or None."""
        path = self._claim.record.notebook_path if self._claim else ""
        folder = os.path.dirname(path)
        return folder if os.path.isabs(folder) and os.path.isdir(folder) else None

    async def _begin(self, launch: Launch, runsc: Runsc, prospect: Prospect | None, kwargs: dict[str, Any]) -> None:
        """Start a copy of the template or, without a usable template, a new kernel. I/O thread only."""
        if prospect and prospect.template:
            if await self._start_copy(prospect, launch, runsc, kwargs):
                STANDBY.aim(prospect, self.standby)
                return
            prospect.drop()
        await self._start_in(launch.spec, launch, runsc, kwargs)
        if prospect and self.template == "build":
            with suppress(OSError):  # the next start retries
                await control(prospect.build)

    def _require_wanted(self) -> None:
        """Raise StateError if the kernel was shut down meanwhile: its start is then not tried in another way."""
        if self._releasing:
            raise StateError(self.kernel_id, "start", "being shut down")

    async def _start_copy(self, prospect: Prospect, launch: Launch, runsc: Runsc, kwargs: dict[str, Any]) -> bool:
        """Start a copy from the warm pool or the image. Return False if the template failed. I/O thread only."""
        if copy := STANDBY.take(prospect):
            try:
                await self._start_in(prospect.spec, launch, runsc, kwargs, copy=copy)
                return True
            except SandboxError as error:
                await copy.delete()
                self._require_wanted()
                self.log.warning("Kernel %s could not have the sandbox that stood by: %s", self.kernel_id, error)
            except BaseException:
                await asyncio.shield(copy.delete())
                raise
        try:
            with prospect.image() as image:
                await self._start_in(prospect.spec, launch, runsc, kwargs, image)
            return True
        except TEMPLATE_ERRORS as error:
            self._require_wanted()
            self.log.warning("Kernel %s starts without its template, which failed: %s", self.kernel_id, error)
            return False

    async def _start_in(
        self,
        spec: BundleSpec,
        launch: Launch,
        runsc: Runsc,
        kwargs: dict[str, Any],
        template: Path | None = None,
        copy: GVisorSandbox | None = None,
    ) -> None:
        """Start a new kernel, in the claimed sandbox or in a new ephemeral one. I/O thread only."""
        if self._claim is None:
            handle = SandboxHandle.create_ephemeral(self.kernel_id, spec, runsc, self.platform)
        else:
            handle = self._claim.handle
            await self._kernel.kill()
            handle.begin_anew(spec, self.platform, match.grant_of(launch, self.platform))
        if copy:
            handle.take_over(copy)
        await self._kernel.launch(handle, launch.start, launch.targets, self._ending(kwargs), template)

    def _ending(self, kwargs: dict[str, Any]) -> Ending:
        sinks = {name: sink(kwargs.get(name), inherited) for name, inherited in (("stdout", 1), ("stderr", 2))}
        return Ending(sinks, self._ended, frozenset(name for name in sinks if shares_log(kwargs.get(name))))

    def _ended(self, status: int) -> None:
        if status > 0:
            words = printable(self._kernel.last_words)
            self.log.warning("Kernel %s ended with status %d. %s", self.kernel_id, status, words)

    @property
    def _root(self) -> str:
        """The root folder of the kernel's Jupyter Server; empty under any other kernel manager."""
        return str(getattr(getattr(self.parent, "parent", None), "root_dir", "") or "")

    def _folder(self, cwd: str | None) -> Mount | None:
        """Return the folder that the kernel works in and can write to; None if it gets only its private home. Blocks.

        Raises ConfigurationError if the requested folder is not allowed.
        """
        wanted, allowed = self.working_folder or cwd, self.allow_home
        try:
            folder = working_folder(wanted or os.getcwd(), allowed, reserved_folders(self.storage_dir))
            if self.working_folder and self._root:
                folder = unlinked(folder._replace(source=folder.destination), [self._root], "working_folder")
            elif cwd and self._root:
                require_below_root(folder, self._root, map(parse_mount, self.mounts))
        except ConfigurationError as error:
            if wanted:
                raise
            self.log.warning("The kernel works in a private, empty home. %s", error.problem)
            return None
        if folder.source in map(os.path.realpath, sys.path):
            self.log.warning("The server itself imports from %s, which this kernel can write to.", folder.source)
        return folder

    def _remember_protected(self, spec: BundleSpec) -> None:
        """Record the read-only mounts in folders that the kernel can write to: the server does not write there."""
        writable = [mount.source for mount in spec.mounts if mount.source and mount.writable]
        shown = [mount.source for mount in spec.mounts if mount.source and not mount.writable]
        inner = {os.path.realpath(path) for path in shown if any(within(path, place) for place in writable)}
        with suppress(OSError):  # _remember_shared has logged the same problem
            remember(inner, protected_file())

    def _remember_shared(self, folder: Mount | None) -> None:
        """Record the folders that the kernel can write to: from now on the server does not trust links there."""
        given = [*([folder] if folder else []), *map(parse_mount, self.mounts)]
        mounts = [mount for mount in given if mount.writable]
        try:
            remember({os.path.realpath(mount.source) for mount in mounts}, list_file())
        except OSError as error:
            self.log.warning("Links that this kernel makes may lead anywhere in the server's folder: %s", error)


def _socket_paths(prefix: str) -> dict[str, str]:
    """Return the path of each channel's unix socket: the prefix and a number, as in jupyter_client."""
    return {channel: os.path.abspath(f"{prefix}-{number}") for number, channel in enumerate(CHANNELS, 1)}
