"""SandboxProvisioner: Jupyter's way to start a kernel inside a gVisor sandbox.

Deriving from LocalProvisioner keeps what a client sees (connection file, ports, CurveZMQ keys, resolve_path)
exactly as Jupyter's own; the process, and everything the kernel can reach, is ours.
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

from . import persistence, prospects, startrequest
from .activity import ActivityWatch, KernelActivity
from .apology import apologise
from .asks import attend
from .bundle import BundleSpec, Mount, parse_mount
from .claims import Claim, Wanted
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
from .folders import require_below_root, unlinked, within, working_folder
from .gvisor import GVisorSandbox
from .handle import Identity, SandboxHandle
from .inside import Inside
from .iothread import EXIT_DEADLINE, IO
from .kernel import Ending, SandboxedKernel
from .launch import Launch, plan, shares_log, sink
from .link import GuestLink
from .metadata import Checkpoint, GCSArtifact
from .programs import note_writable
from .prospects import Prospect
from .relay import CHANNELS
from .reserved import reserved_folders
from .runsc import Runsc, find
from .settings import SandboxSettings
from .shared_folders import list_file, protected_file, remember
from .standby import STANDBY
from .variables import filtered
from .words import printable
from .workers import control

STABLE_START = 20.0
LOOPBACK = ("", "localhost", "127.0.0.1", "::1")
MAX_SOCKET_PATH = 107
"""Bytes of the path of a unix socket."""
COMMAND = "A command runs beside it"
HELP = 20.0
"""Seconds that a kernel which is shut down may take to help to save itself."""
TEMPLATE_ERRORS = (RunscError, GuestError, LinkClosedError, ProtocolError, FileNotFoundError)
"""What a template that does not fit can cause; anything else would happen without it, too."""


class SandboxProvisioner(SandboxSettings):
    """Starts a kernel inside a gVisor sandbox, and keeps its state if it is a notebook's."""

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
        self._kernel.heeds_calls = lambda: not self.parent.shutting_down
        self._kernel.on_trouble = self._not_woken
        self._kernel.on_joined = self._joined
        self._kernel.relay.max_message_size = self.max_message_size
        self._kernel.relay.on_oversized = self._refused_large
        self._claim: Claim | None = None
        self._activity: ActivityWatch | None = None
        self.executions: set[object] = set()
        """Commands that somebody has running beside the kernel."""
        self._keeps_state = False
        self._tcp_address: str | None = None
        self._touching: asyncio.Task[None] | None = None
        self._moved = ""
        self._left: Future[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._launched = False
        self._launched_before = False
        self._releasing = False

    # -- the contract of KernelProvisionerBase; KernelManager calls all of these -----------------------------------

    @property
    def has_process(self) -> bool:
        """Whether a kernel was launched and its end not yet waited for."""
        return self._launched

    async def poll(self) -> int | None:
        """None while the kernel runs, else its exit status."""
        return self._kernel.status

    async def wait(self) -> int | None:
        """Wait until the kernel has ended and its sandbox is gone."""
        await self._wait_until_left()
        if not self._launched:
            return 0
        status = await IO.run(self._kernel.ended())
        self._launched = False
        return status

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel's process group inside the sandbox."""
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
        """The kernel was asked to end, by a person; one that sleeps does not hear that, and is not woken for it."""
        self._moved = ""
        if self._launched and self._kernel.asleep:
            await self.kill(restart)

    async def kill(self, restart: bool = False) -> None:
        """End the kernel and its sandbox at once."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel to end."""
        await self.send_signal(signal.SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:
        """Give everything back; before a restart the listeners stay, so that clients find the same ports."""
        if not restart:
            await self._release(forget=self.on_shutdown == "delete" and not self._keeps_state)

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Reserve the ports, and only then write the connection file; a machine that is not ready says so first."""
        shared = [mount.source for mount in map(parse_mount, self.mounts) if mount.writable]
        note_writable(self._root, kwargs.get("cwd") or "", self.working_folder, *shared)
        find(self.runsc)
        if self._moved:  # a restart that no person asked for would take it back
            raise SandboxError(
                f"The kernel is not here any more: {self._moved}.", "Open the notebook again to have it back."
            )
        await self._wait_until_left()
        self._left = None
        IO.hold(self, self._at_exit)
        self._releasing = False
        try:
            env = kwargs.get("env") or {}
            startrequest.heed(env, self)
            wanted = startrequest.wanted(env, self, self.parent.kernel_name)
            if wanted and not self._claim:
                if kwargs.get("cwd"):
                    self._folder(kwargs["cwd"])  # one that is refused leaves no record of a sandbox
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
        """Start the sandbox and the kernel in it."""
        try:
            await self._launch(cmd, **kwargs)
        except BaseException as error:
            if isinstance(error, SandboxError):
                self.log.error("Kernel %s was not started: %s", self.kernel_id, error)
            await asyncio.shield(self._release())
            raise
        return self.connection_info

    async def get_provisioner_info(self) -> dict[str, Any]:
        """What identifies this kernel's sandbox, besides the connection."""
        info: dict[str, Any] = await super().get_provisioner_info()
        if self.sandbox:
            info.update(sandbox_id=self.sandbox.sandbox_id, container_id=self.sandbox.container_id)
        return info

    def get_stable_start_time(self, recommended: float = 10.0) -> float:
        """A start takes longer in a sandbox, the more so when many start at once."""
        return max(recommended, STABLE_START)

    @property
    def sandbox(self) -> GVisorSandbox | None:
        """The driver of the sandbox that the present kernel runs in; call its methods through ``iothread.IO.run``."""
        return self._kernel.handle.instance if self._kernel.handle else None

    # -- how -----------------------------------------------------------------------------------------------------

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
        """In the I/O thread: nothing of the kernel is left, but what was saved of it unless that is to be forgotten."""
        if self._activity:
            self._activity.close()
            self._activity = None
        await self._kernel.close()
        if self._claim:
            await self._claim.give_up(forget)

    async def _at_exit(self) -> None:
        """In the I/O thread, when the process ends with the kernel still there: keep its state if it is to be kept.

        One that cannot be saved any more is left running, for the next server to find, unless it refuses to be saved.
        """
        if self.can_save and self._kernel.status is None and not self._kernel.asleep:
            with suppress(UnresponsiveError):
                await self._kernel.hibernate(insist=EXIT_DEADLINE / 3)
        await self._close(forget=False)

    def abandon(self) -> None:
        """Leave a persistent kernel running when the server ends, for the next server to save it.

        Nothing is waited for: an upload under way may take long, and it ends with this process.
        """
        IO.drop(self)
        self._claim = None
        self._launched = False
        self._forget_ipc()

    # -- keeping a kernel's state ------------------------------------------------------------------------------------

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
        """Whether the kernel is hibernated."""
        return self._kernel.asleep

    @property
    def activity(self) -> KernelActivity:
        """The kernel's unfinished requests, and whether it is to be kept awake."""
        return self._kernel.activity

    @property
    def busy(self) -> bool:
        """True while the kernel is not idle: the one answer for timer, culler, REST, command line and metrics."""
        return self.waited_for or self.activity.busy

    @property
    def waited_for(self) -> bool:
        """True while a client waits for a first sign of life of the kernel, or a command runs beside it."""
        return bool(self.executions) or self._kernel.relay.waited_for

    def busy_reasons(self) -> list[str]:
        """Return why the kernel is not idle, as sentences without a full stop; empty if it is."""
        reasons = self.activity.reasons()
        if self.executions:
            reasons.append(f"{len(self.executions)} commands run beside it" if len(self.executions) > 1 else COMMAND)
        if not reasons and self.waited_for:
            reasons.append("A client waits for its answer")
        return reasons

    async def hibernate(self, insist: float | None = None) -> None:
        """Save the kernel and give its memory back; the next thing that a client asks of it brings it back.

        When the server or the kernel ends, ``insist`` is how many seconds the guest may take to help; after that it is
        saved without its help. UnresponsiveError if that is impossible, too.
        """
        if self._claim and self._launched and self._kernel.status is None:
            await IO.run(self._kernel.hibernate(insist))

    async def wake(self) -> None:
        """Bring a hibernated kernel back now."""
        await IO.run(self._kernel.wake())

    async def keep_awake(self, seconds: float | None) -> None:
        """Keep the kernel from being hibernated or culled for idleness: None without end, 0 no more."""
        await IO.run(self._keep_awake(seconds))

    async def _keep_awake(self, seconds: float | None) -> None:
        self._kernel.keep_awake("api", seconds)

    async def follow(self, notebook_path: str) -> None:
        """The notebook has this path now."""
        named = self.sandbox_id or self.gcs_sandbox_id
        if self._claim and not named and notebook_path != self._claim.record.notebook_path:
            await IO.run(self._claim.follow(notebook_path))

    async def savepoint(self, name: str) -> Checkpoint:
        """Keep the kernel's memory under a name; it runs on."""
        self._require_kept()
        return await IO.run(self._kernel.savepoint(name))

    async def drop_savepoint(self, name: str) -> None:
        """Forget a savepoint."""
        claim = self._require_kept()
        await IO.run(claim.manager.drop_savepoint(claim.record.sandbox_id, name))

    async def rewind(self, name: str) -> str:
        """Bring the kernel back as it was at a savepoint; returns the name of one that has the present.

        To its clients that is a restart: what they had asked for and not got yet, they do not get.
        """
        self._require_kept()
        return await IO.run(self._kernel.rewind(name))

    async def fork(self, new_id: str, savepoint: str = "", notebook_path: str = "") -> None:
        """Found the sandbox ``new_id`` with this kernel's memory, now or at a savepoint; it is not started."""
        claim = self._require_kept()
        about = Identity(claim.record.kernel_name, notebook_path, user_name())
        await IO.run(claim.manager.fork(claim.record.sandbox_id, new_id, about, savepoint))

    async def save_snapshot(self, name: str) -> GCSArtifact:
        """Keep the files that were written in the sandbox under a name; it runs on."""
        claim = self._require_kept()
        return await IO.run(claim.manager.save_snapshot(claim.record.sandbox_id, name))

    async def load_snapshot(self, name: str, source_id: str) -> None:
        """Put the files of a snapshot of the sandbox ``source_id`` in their places."""
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
        """Why the kernel is not here any more; empty while it is."""
        return self._moved

    def keep_state(self) -> None:
        """Whatever ends the kernel now is no reason to forget what was saved of it: the server stops."""
        self._keeps_state = True

    async def _make_claim(self, wanted: Wanted) -> None:
        settings, runsc = persistence.settings(self.storage_dir), find(self.runsc)
        patience = self.handoff_timeout if self.enable_handoff else 0.0

        async def make() -> None:
            """Set the claim in the I/O thread: a caller that is cancelled meanwhile finds it there and releases it."""
            self._claim = await Claim.make(wanted, settings, runsc, persistence.server(), self.features, patience)

        await IO.run(make())
        claim = self._claim
        assert claim is not None
        claim.manager.on_saving = lambda sandbox_id: self._kernel.saving()
        claim.manager.on_saved = self._saved
        claim.manager.on_gone = self._gone
        claim.manager.busy = lambda sandbox_id: self.busy
        self._kernel.manager = claim.manager

    def _saved(self, sandbox_id: str) -> None:
        """In the I/O thread: it was hibernated."""
        self._kernel.saved()
        if self._claim:
            self._touching = asyncio.create_task(self._claim.touch())

    def _joined(self, link: GuestLink) -> None:
        """In the I/O thread: there is another kernel, or the same as it once was."""
        attend(link, Inside(self._kernel, self._own_session))
        self._watch_activity()

    def _own_session(self) -> Session:
        """To speak in the kernel's name."""
        return Session(key=self.parent.session.key, signature_scheme=self.parent.session.signature_scheme)

    def _watch_activity(self) -> None:
        """Learn what a persistent kernel publishes, to know when it was used and when its requests have ended."""
        if self._claim is None:
            return
        if self._activity:
            self._activity.close()
        manager, sandbox_id, km = self._claim.manager, self._claim.record.sandbox_id, self.parent
        self._activity = ActivityWatch(self.activity, lambda: manager.touch(sandbox_id))
        curve = (km.curve_publickey, km.curve_secretkey) if getattr(km, "curve_publickey", None) else None
        self._activity.listen(km._make_url("iopub"), self._own_session(), curve)
        if self._kernel.restored:
            self._activity.probe(km._make_url("shell"), self._own_session(), curve)

    @property
    def _resumes(self) -> bool:
        """Whether this launch brings a saved kernel back: only the first of a claim does."""
        return self._claim is not None and not self._launched_before and self._claim.handle.saved

    def _take_up_connection(self) -> dict[str, str]:
        """A kernel that comes back knows its old keys; so will its clients."""
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
        """In the I/O thread: another server has the sandbox."""
        self._left = Future()
        self._left.set_running_or_notify_cancel()
        self._moved = reason
        self.log.warning("Kernel %s is not here any more: %s", self.kernel_id, reason)
        self._leaving = asyncio.create_task(self._leave(self._left))

    async def _leave(self, left: Future[None]) -> None:
        """In the I/O thread: give back what the kernel had here, as its listeners and the file with its key."""
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
        """Wait until a kernel that moved to another server has left nothing here."""
        if self._left:
            await asyncio.shield(asyncio.wrap_future(self._left))

    def _not_woken(self, error: SandboxError) -> None:
        """In the I/O thread: say why in the notebook; the next cell tries again."""
        reason = f"The kernel could not be woken, and its state is kept. {error}"
        self._kernel.relay.answer(lambda held: apologise(held, self._own_session(), reason))

    def _refused_large(self, channel: str) -> None:
        """In the I/O thread: a message was not passed on."""
        self.log.warning(
            "Kernel %s: a message on %s with more than max_message_size (%d bytes) was not passed on. Set "
            "SandboxProvisioner.max_message_size or SANDBOX_MAX_MESSAGE_SIZE to allow it.",
            self.kernel_id,
            channel,
            self.max_message_size,
        )

    # -- starting ----------------------------------------------------------------------------------------------------

    def _prefer_ipc(self) -> None:
        """Use unix sockets, which only this user can open, unless the configuration names another transport."""
        km = self.parent
        configured = any(
            "transport" in km.config[kind.__name__] for kind in type(km).__mro__ if kind.__name__ in km.config
        )
        if km.transport != "tcp" or km.ip not in LOOPBACK or self.client_transport != "ipc" or configured:
            return
        folder = Path(jupyter_runtime_dir())
        names = (folder / f"kernel-{self.kernel_id[:length]}" for length in (8, 13, 36))
        prefix = next(name for name in names if not os.path.lexists(f"{name}-1"))
        if len(os.fsencode(prefix)) > MAX_SOCKET_PATH - len("-1"):
            self.log.warning("Kernel %s is reached over TCP: %s is too long for unix sockets", self.kernel_id, folder)
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tcp_address = km.ip
        km.transport, km.ip = "ipc", str(prefix)

    def _forget_ipc(self) -> None:
        """Undo ``_prefer_ipc`` when the sockets are closed."""
        if self._tcp_address is not None:
            self.parent.transport, self.parent.ip = "tcp", self._tcp_address
            self._tcp_address = None

    async def _reserve(self) -> None:
        self._prefer_ipc()
        km = self.parent
        if km.transport == "ipc":
            paths = {channel: os.path.abspath(f"{km.ip}-{number}") for number, channel in enumerate(CHANNELS, 1)}
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
            km._record_random_port_names()  # so that a restart with new ports forgets these
        for channel, port in ports.items():
            setattr(km, f"{channel}_port", port)

    async def _launch(self, cmd: list[str], **kwargs: Any) -> None:
        env = filtered(kwargs["env"], [*self.kernel_spec.env, *self.pass_environment])
        runsc, folder = find(self.runsc), self._folder(kwargs.get("cwd") or self._recorded_folder())
        self._remember_shared(folder)
        launch = plan(cmd, env, folder, self.parent.connection_file, self, runsc, self._root)
        self._remember_protected(launch.spec)
        if self._resumes:
            await self._resume(launch, kwargs)
            return
        prospect = await IO.run(control(prospects.find, launch, runsc, self))
        self._require_wanted()
        await IO.run(self._begin(launch, runsc, prospect, kwargs))
        self._launched = self._launched_before = True
        self.cwd = launch.start.cwd

    async def _resume(self, launch: Launch, kwargs: dict[str, Any]) -> None:
        """Restore a saved kernel with the mounts that a start would have now."""
        assert self._claim is not None
        claim, handle = self._claim, self._claim.handle
        await IO.run(claim.manager.permit(claim.record.sandbox_id, prospects.grant_of(launch, self.platform)))
        self.cwd = handle.contents["cwd"]
        await IO.run(self._kernel.resume(handle, self._ending(kwargs)))
        self._launched = self._launched_before = True

    def _recorded_folder(self) -> str | None:
        """Return the folder of the notebook that the registry has for a sandbox which is opened without a notebook."""
        path = self._claim.record.notebook_path if self._claim else ""
        folder = os.path.dirname(path)
        return folder if os.path.isabs(folder) and os.path.isdir(folder) else None

    async def _begin(self, launch: Launch, runsc: Runsc, prospect: Prospect | None, kwargs: dict[str, Any]) -> None:
        """In the I/O thread: a copy of a template if there is one, or a kernel that starts from nothing."""
        if prospect and prospect.template:
            if await self._start_copy(prospect, launch, runsc, kwargs):
                STANDBY.aim(prospect, self.standby)
                return
            prospect.drop()
        await self._start_in(launch.spec, launch, runsc, kwargs)
        if prospect and self.template == "build":
            with suppress(OSError):  # it is tried again with the next start
                await control(prospect.build)

    def _require_wanted(self) -> None:
        """A start that failed because the kernel was ended meanwhile is not tried in another way."""
        if self._releasing:
            raise StateError(self.kernel_id, "start", "being shut down")

    async def _start_copy(self, prospect: Prospect, launch: Launch, runsc: Runsc, kwargs: dict[str, Any]) -> bool:
        """In the I/O thread: one that stands by, or a new one; False if the template is no good."""
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
        """In the I/O thread: a new kernel, in the sandbox that was claimed or in one of its own."""
        if self._claim is None:
            handle = SandboxHandle.create_ephemeral(self.kernel_id, spec, runsc, self.platform)
        else:
            handle = self._claim.handle
            await self._kernel.kill()
            handle.begin_anew(spec, self.platform, prospects.grant_of(launch, self.platform))
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
        """The root folder of the Jupyter Server that the kernel is of; empty under any other kernel manager."""
        return str(getattr(getattr(self.parent, "parent", None), "root_dir", "") or "")

    def _folder(self, cwd: str | None) -> Mount | None:
        """The folder that the kernel works in and may write to; None if it gets only its private home."""
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
        """Note the read-only places in folders that the kernel can write to: the server does not write there."""
        writable = [mount.source for mount in spec.mounts if mount.source and mount.writable]
        shown = [mount.source for mount in spec.mounts if mount.source and not mount.writable]
        inner = {os.path.realpath(path) for path in shown if any(within(path, place) for place in writable)}
        with suppress(OSError):  # the same problem was told for the shared folders
            remember(inner, protected_file())

    def _remember_shared(self, folder: Mount | None) -> None:
        """Note the folders that the kernel can write to, where the server trusts links less from now on."""
        given = [*([folder] if folder else []), *map(parse_mount, self.mounts)]
        mounts = [mount for mount in given if mount.writable]
        try:
            remember({os.path.realpath(mount.source) for mount in mounts}, list_file())
        except OSError as error:
            self.log.warning("Links that this kernel makes may lead anywhere in the server's folder: %s", error)
