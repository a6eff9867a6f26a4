"""The KernelProvisioner that starts Jupyter kernels in gVisor sandboxes.

SandboxProvisioner derives from LocalProvisioner, so that clients see the same connection file, ports, CurveZMQ keys and
resolved paths as without a sandbox.
"""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from jupyter_client.connect import KernelConnectionInfo

from ._text import printable
from .errors import SandboxError, StateError, UnresponsiveError
from .gvisor.runsc import Runsc, find
from .gvisor.sandbox import GVisorSandbox
from .io_thread import EXIT_DEADLINE, IO
from .kernel import folders, output, start_request
from .kernel.client_side import ClientSide
from .kernel.env_filter import filtered
from .kernel.host_api import NotebookActions, attend
from .kernel.kernel import AWAKE
from .kernel.launch_plan import Launch, plan
from .kernel.operations import KernelOperations
from .mux.connection import GuestConnection
from .sandbox import user_sandboxes
from .sandbox.manager import SandboxManager
from .sandbox.start_request import StartRequest
from .templates import match
from .templates.start import KernelStart
from .workers import control

STABLE_START = 20.0
"""Seconds after which a kernel that still runs counts as started; KernelRestarter uses it."""
SHUTDOWN_SAVE_TIMEOUT = 20.0
"""Seconds to wait for answers of the guest when its kernel is shut down; then it is saved without them."""


class SandboxProvisioner(KernelOperations):
    """The provisioner of one kernel in a gVisor sandbox; saves its state if it is persistent. Owned by KernelManager.

    Has the methods that jupyter_client calls; KernelOperations has those that the server calls. They run on the
    caller's loop and delegate to the I/O thread, where the callbacks of the kernel run.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._client_side = ClientSide(self.parent, self._kernel, self.log)
        self._kernel.may_wake = lambda: not (self.parent.shutting_down or self._keeps_state)
        self._kernel.on_wake_failed = self._client_side.refuse_held
        self._kernel.on_connected = self._serve
        self._kernel.on_gone = self._release_lost
        self._kernel.relay.max_message_size = self.max_message_size
        self._kernel.relay.on_oversized = self._report_oversized
        self._lost: Future[None] | None = None
        """Set when another server has taken over the kernel; done when this server has released all its resources."""
        self._releasing_lost: asyncio.Task[None] | None = None
        self._launched_before = False
        self._workplace: folders.Workplace | None = None

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
        await self._wait_until_released()
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
            if self._handle and self.on_shutdown == "checkpoint":
                if self.can_save:
                    await self.hibernate(insist=SHUTDOWN_SAVE_TIMEOUT)
                self._keeps_state = True
            if self._kernel.asleep:
                return
        await IO.run(self._kernel.signal(signum))

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Kill a hibernated kernel. Called by KernelManager when it has sent a shutdown request.

        If the kernel moved to another server, automatic restarts here are refused until a user requests a restart or a
        shutdown.
        """
        self._moved, self._final = "", not restart
        if self._launched and self._kernel.asleep:
            await self.kill(restart)

    async def kill(self, restart: bool = False) -> None:
        """End the kernel and its sandbox; before a restart, keep the files in its home folder."""
        await self.keep_home(restart)
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """Send SIGTERM to the kernel."""
        await self.send_signal(signal.SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:
        """Release all resources. Before a restart keep them, so that clients find the same ports."""
        if not restart:
            await self._release(delete_state=self.on_shutdown == "delete" and not self._keeps_state)

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Check the machine, open the persistent sandbox, reserve the ports, and then write the connection file.

        Raises SandboxError if runsc is missing or the kernel has moved to another server.
        """
        if self._moved:  # an automatic restart must not take the sandbox back
            raise SandboxError(
                f"The kernel is no longer on this server: {self._moved}.",
                "Open the notebook again to restore the kernel here.",
            )
        await self._wait_until_released()
        self._lost = None
        IO.hold(self, self._at_exit)
        self._releasing = self._final = False
        try:
            cwd = kwargs.get("cwd") or ""
            # First: if the folder is refused, no record is created, and programs in the folder stay trusted.
            self._workplace = await control(folders.choose_folder, self, self._root, cwd) if cwd else None
            await control(self._find_runsc, cwd)
            request = start_request.requested(kwargs, self, self.parent.kernel_name)
            kwargs.pop(start_request.KEYWORD, None)
            if request and not self._handle:
                runsc = await control(find, self.runsc)
                await IO.run(self._open(request, runsc))
            if self._handle and self._resumes:
                kwargs |= self._client_side.adopt_keys(self._handle.sandbox_id, self._handle.contents)
            await self._client_side.reserve_addresses(self.client_transport)
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
                self.log.error("Kernel %s was not started: %s", self.title, error)
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

    async def _release(self, delete_state: bool = False) -> None:
        self._releasing = True
        await self._wait_until_released()
        if IO.held_by(self):
            await IO.run(self._close(delete_state))
            await IO.release(self)
        self._client_side.restore_address()
        self._handle = None
        self._launched = False

    async def _close(self, delete_state: bool) -> None:
        """End the kernel and release its sandbox; with ``delete_state``, delete its saved state. I/O thread only."""
        self._client_side.stop_watching()
        await self._kernel.close()
        if self._manager and self._handle and not self._handle.closed:
            if delete_state:
                await self._manager.delete(self._handle.sandbox_id)
            else:
                await self._manager.close(self._handle, save=False)

    async def _at_exit(self) -> None:
        """Save a persistent kernel and end it. Called in the I/O thread if the process exits while the kernel runs.

        If the save fails, the kernel keeps running, and the next server saves it. After UnresponsiveError it is ended:
        no server could save it.
        """
        if self.can_save and self.state in AWAKE:
            with suppress(UnresponsiveError):
                await self._kernel.hibernate(insist=EXIT_DEADLINE / 3)
        await self._close(delete_state=False)

    def abandon(self) -> None:
        """Leave a persistent kernel running when the server ends. The next server saves it, so none is started here.

        Does not wait for an upload in progress, which ends with this process.
        """
        self.parent.stop_restarter()
        self._moved = "it was left running, and the next server saves it"
        IO.drop(self)
        self._handle = None
        self._launched = False
        self._client_side.restore_address()

    async def _open(self, request: StartRequest, runsc: Runsc) -> None:
        """Open the persistent sandbox. ``_release`` closes it, also if the caller was cancelled. I/O thread only."""
        settings = user_sandboxes.settings(self.storage_dir)
        self._manager = SandboxManager.shared(settings, runsc, user_sandboxes.server())
        self._handle = await self._manager.open(request)
        self._handle.observer = self._kernel

    def _serve(self, connection: GuestConnection) -> None:
        """Serve the guest's requests and watch the activity of a new or restored kernel. Called in the I/O thread."""
        attend(connection, NotebookActions(self._kernel, self._client_side.session))
        if self._handle:
            self._client_side.watch(self._handle)

    @property
    def _resumes(self) -> bool:
        """True if the next launch restores a saved kernel. Only the first launch can; a restart starts a new kernel."""
        return self._handle is not None and not self._launched_before and self._handle.saved

    def _release_lost(self, reason: str) -> None:
        """Start to release everything: another server has the sandbox. Called by the kernel in the I/O thread."""
        self._lost = Future()
        self._lost.set_running_or_notify_cancel()
        self._moved = reason
        self.log.warning("Kernel %s is no longer on this server: %s", self.title, reason)
        self._releasing_lost = asyncio.create_task(self._release_all(self._lost))

    async def _release_all(self, released: Future[None]) -> None:
        """Release the kernel's resources, including its listeners and the connection file. I/O thread only."""
        try:
            await self._close(delete_state=False)
        except Exception:
            self.log.exception("Kernel %s: not everything was released", self.title)
        finally:
            self.parent.cleanup_connection_file()
            self._handle = None
            self._launched = False
            IO.drop(self)
            released.set_result(None)

    async def _wait_until_released(self) -> None:
        """Wait until this server has released the resources of a kernel that moved to another server."""
        if self._lost:
            await asyncio.shield(asyncio.wrap_future(self._lost))

    def _report_oversized(self, channel: str) -> None:
        """Log that a message was dropped. Called by the relay in the I/O thread."""
        self.log.warning(
            "Kernel %s: a message on %s was larger than max_message_size (%d bytes), so the client's connection was "
            "closed. Increase SandboxProvisioner.max_message_size or SANDBOX_MAX_MESSAGE_SIZE to allow it.",
            self.title,
            channel,
            self.max_message_size,
        )

    # -- starting ----------------------------------------------------------------------------------------------------

    async def _launch(self, cmd: list[str], **kwargs: Any) -> None:
        runsc, launch = await control(self._plan, cmd, kwargs)
        ending = partial(output.ending, kwargs, self._report_end)
        if self._handle and self._resumes:
            # The restored sandbox gets the mounts that a new start would get.
            await IO.run(self._handle.permit(match.grant_of(launch)))
            self.cwd = self._handle.contents["cwd"]
            await IO.run(self._kernel.resume(self._handle, ending()))
        else:
            found = await IO.run(control(match.find, launch, runsc, self))
            self._require_wanted()
            start = KernelStart(self._kernel, self._handle, launch, runsc, self.kernel_id, ending, self._require_wanted)
            await IO.run(start.run(found, self))
            self.cwd = launch.start.cwd
        self._launched = self._launched_before = True

    def _find_runsc(self, cwd: str) -> None:
        """Check that runsc is found outside the folders that kernels can write to. Raises SandboxError. Blocks."""
        folders.distrust_programs(self, self._root, cwd, self._workplace)
        find(self.runsc)

    def _plan(self, cmd: list[str], kwargs: dict[str, Any]) -> tuple[Runsc, Launch]:
        """Return runsc and the plan for the start. Blocks."""
        env = filtered(kwargs["env"], [*self.kernel_spec.env, *self.pass_environment])
        workplace = self._workplace or folders.choose_folder(self, self._root, self._recorded_folder())
        runsc = find(self.runsc)
        folders.remember_shared(self, workplace.folder if workplace else None)
        launch = plan(cmd, env, workplace, self.parent.connection_file, self, runsc, self._root)
        folders.remember_protected(launch.spec)
        return runsc, launch

    def _recorded_folder(self) -> str | None:
        """Return the recorded folder, for a sandbox that is opened without a notebook, or None."""
        record = self._handle.record if self._handle else None
        folder = record.working_folder if record else ""
        return folder if os.path.isabs(folder) and os.path.isdir(folder) else None

    def _require_wanted(self) -> None:
        """Raise StateError if the kernel was shut down meanwhile: no other way to start it is tried then."""
        if self._releasing:
            sandbox_id = self._handle.sandbox_id if self._handle else self.kernel_id
            raise StateError(sandbox_id, "start", "its kernel is being shut down")

    def _report_end(self, status: int) -> None:
        """Log the exit status and the last output of a kernel that failed. Called in the I/O thread."""
        if status > 0:
            output = printable(self._kernel.last_words)
            self.log.warning("Kernel %s ended with status %d. %s", self.title, status, output)

    @property
    def _root(self) -> str:
        return folders.server_root(self.parent)
