"""Find, start, restart and end a Jupyter Server's sandboxed kernels, with their sessions and notebooks.

This works with any class of kernel manager: nothing here needs SandboxKernelManager.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any
from weakref import WeakValueDictionary

from jupyter_core.utils import ensure_async
from jupyter_server.utils import ApiPath, to_os_path
from tornado.web import HTTPError

from ..errors import BadRequestError, SandboxError, SandboxNotFoundError
from ..gvisor.mounts import planted_link, within
from ..kernel.kernel import KernelState
from ..persistence.records import SandboxRecord
from ..provisioner import SandboxProvisioner
from ..sandbox.start_request import StartRequest
from ..workers import control
from .drives import server_path
from .kernel_manager import sandboxed_kernels, sandboxed_names

CHECK_EVERY = 0.2
"""Seconds between two checks whether a restarting kernel was ended."""
PAUSED = "A cell is paused: it continues when the kernel receives its next message"
MAX_NAME = 255
"""Maximum bytes of a file name."""


@dataclass(frozen=True)
class Live:
    """A sandboxed kernel that this server has open, running or hibernated, as ``ServerKernels.live`` found it."""

    kernel_id: str
    kernel_name: str
    provisioner: SandboxProvisioner
    created: datetime
    last_used: datetime

    @property
    def record(self) -> SandboxRecord | None:
        """The record of its sandbox; None if ephemeral."""
        return self.provisioner.handle.record if self.provisioner.handle else None

    @property
    def state(self) -> str:
        """``hibernated`` or ``running``; empty if its kernel has ended and will not be restarted."""
        if self.provisioner.state == KernelState.GONE:
            return ""
        return "hibernated" if self.provisioner.asleep else "running"

    @property
    def busy_reasons(self) -> list[str]:
        """Reasons why the kernel is not idle, as sentences, or that its cell is paused; empty if idle or ended."""
        if self.provisioner.asleep:
            return [PAUSED] if self.provisioner.activity.has_cell else []
        return self.provisioner.busy_reasons() if self.state else []


@dataclass(frozen=True)
class Notebook:
    """A notebook: its path relative to the server's root folder, and its absolute path."""

    path: str
    absolute: str

    @property
    def name(self) -> str:
        """The file name."""
        return PurePath(self.path).name


class ServerKernels:
    """A server's sandboxed kernels, with their sessions and notebooks. Server loop only."""

    def __init__(self, kernel_manager: Any, session_manager: Any, contents_manager: Any, root_dir: str) -> None:
        self._manager = kernel_manager
        self._sessions = session_manager
        self._contents = contents_manager
        self._root = root_dir
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def live(self) -> list[Live]:
        """Return the started sandboxed kernels, without those that have moved to another server.

        An ephemeral sandbox ends with its kernel, so a kernel that has ended is left out if it is ephemeral.
        """
        found = []
        for kernel_id, provisioner in sandboxed_kernels(self._manager).items():
            if provisioner.state == KernelState.GONE and not provisioner.handle:
                continue
            kernel = self._manager.get_kernel(kernel_id)
            used = kernel.last_activity.astimezone(UTC)
            created = getattr(kernel, "created", used)
            found.append(Live(kernel_id, str(kernel.kernel_name), provisioner, created, used))
        return found

    def get(self, kernel_id: str) -> Live:
        """Return the kernel with this id. Raises SandboxNotFoundError if it has ended or moved to another server."""
        found = next((live for live in self.live() if live.kernel_id == kernel_id), None)
        if found is None:
            raise SandboxNotFoundError(kernel_id, "this server's list")
        return found

    async def names(self) -> list[str]:
        """Return the names of the sandboxed kernelspecs, the default first."""
        return await sandboxed_names(self._manager)

    # -- notebooks ---------------------------------------------------------------------------------------------------

    def relative(self, absolute: str) -> str | None:
        """Return a notebook's path relative to the root folder; None if it is empty or not below that folder."""
        path = PurePath(absolute)
        return path.relative_to(self._root).as_posix() if absolute and path.is_relative_to(self._root) else None

    def notebook(self, path: str) -> Notebook:
        """Return the notebook at ``path``, which need not exist.

        Raises BadRequestError if the path is invalid or hidden, or if its folder is missing or outside the root folder.
        """
        path = server_path(path)
        parts = path.split("/")
        if any(part in ("", ".", "..") or len(part.encode()) > MAX_NAME for part in parts):
            raise BadRequestError(
                f"{path!r:.200} is not the path of a notebook.",
                "Use a path relative to the server's root folder, without . and .. in it.",
                "notebook_path",
            )
        if not self._contents.allow_hidden and any(part.startswith(".") for part in parts):
            raise BadRequestError(f"{path!r:.200} is hidden on this server.", "Choose another path.", "notebook_path")
        absolute = to_os_path(ApiPath(path), self._root)
        if not os.path.isdir(os.path.dirname(absolute)) or os.path.isdir(absolute):
            raise BadRequestError(
                f"The folder of the notebook {path!r:.200} does not exist.",
                "Create the folder first.",
                "notebook_path",
            )
        folder, root = os.path.dirname(absolute), os.path.realpath(self._root)
        if not within(os.path.realpath(folder), root):
            link = planted_link(folder, [root])
            raise BadRequestError(
                f"The notebook {path!r:.200} cannot have a sandbox: a link leads out of the server's root folder"
                + (f", {os.path.relpath(link[0], root)!r:.200}." if link else "."),
                "Move the notebook to a folder that is reached from the root folder without a link.",
                "notebook_path",
            )
        return Notebook(path, absolute)

    async def copy_notebook(self, source: str, to: Notebook) -> bool:
        """Copy a notebook. Return False, without copying, if ``to`` exists or ``source`` does not.

        Raises SandboxError if the copy fails.
        """
        if await control(os.path.lexists, to.absolute) or not await ensure_async(self._contents.file_exists(source)):
            return False
        try:
            await ensure_async(self._contents.copy(source, to.path))
        except HTTPError as error:
            raise SandboxError(f"The notebook {source} was not copied: {error.log_message}.") from error
        return True

    async def remove_notebook(self, notebook: Notebook) -> None:
        """Delete a notebook: the copy that was made for a failed fork."""
        await ensure_async(self._contents.delete_file(notebook.path))

    async def kernel_of(self, notebook: Notebook) -> str | None:
        """Return the id of the kernel of a notebook's session; None without one."""
        for session in await self._sessions.list_sessions():
            if server_path(session["path"]) == notebook.path and session["kernel"]:
                return str(session["kernel"]["id"])
        return None

    # -- starting and ending -----------------------------------------------------------------------------------------

    async def start(self, kernel_name: str, notebook: Notebook | None, request: StartRequest) -> Live:
        """Start a kernel and return it. With a notebook, also create a session, as if the notebook had been opened."""
        path, session = None, notebook.absolute if notebook else request.notebook_path
        if notebook:
            path = await ensure_async(self._contents.get_kernel_path(path=notebook.path))
        env = {**os.environ, **({"JPY_SESSION_NAME": session} if session else {})}
        kernel_id = await self._manager.start_kernel(kernel_name=kernel_name, path=path, env=env, start_request=request)
        try:
            await asyncio.wrap_future(self._manager.get_kernel(kernel_id).ready)
            if notebook:
                await self._sessions.create_session(
                    path=notebook.path,
                    name=notebook.name,
                    type="notebook",
                    kernel_name=kernel_name,
                    kernel_id=kernel_id,
                )
            return self.get(kernel_id)
        except BaseException:
            await self.end(kernel_id)
            raise

    def changing(self, kernel_id: str) -> asyncio.Lock:
        """Return the lock that is held while a kernel is restarted or ended."""
        return self._changing.setdefault(kernel_id, asyncio.Lock())

    async def restart(self, kernel_id: str) -> None:
        """Restart a kernel and wait until it answers. Raises SandboxError if it does not."""
        try:
            async with self.changing(kernel_id):
                answered = await self._manager.restart_kernel(kernel_id)
            if isinstance(answered, asyncio.Future):
                await self._wait_for_answer(kernel_id, answered)
        except (TimeoutError, RuntimeError) as error:
            raise SandboxError(f"Kernel {kernel_id} was restarted and does not answer.", "Try again.") from error

    async def _wait_for_answer(self, kernel_id: str, answered: asyncio.Future[Any]) -> None:
        """Wait until a restarted kernel answers. Raises SandboxNotFoundError once it has ended."""
        answered.add_done_callback(lambda done: done.cancelled() or done.exception())
        while not answered.done():
            await asyncio.wait({answered}, timeout=CHECK_EVERY)
            self.get(kernel_id)
        await answered

    async def rewind(self, live: Live, savepoint: str) -> str:
        """Rewind a kernel to a savepoint, and return the name of the new savepoint with its previous state.

        If a cell was running, clients are notified of a restart, so that they stop waiting for the cell.
        """
        kernel = self._manager.get_kernel(live.kernel_id)
        busy = kernel.execution_state == "busy"
        savepoint_before = await live.provisioner.rewind(savepoint)
        if busy:
            kernel.execution_state = "idle"
            if restarter := getattr(kernel, "_restarter", None):
                restarter._fire_callbacks("restart")
        return savepoint_before

    async def end(self, kernel_id: str) -> None:
        """End a kernel and its sessions at once; keep its saved state."""
        async with self.changing(kernel_id):
            if kernel_id in self._manager:
                if provisioner := sandboxed_kernels(self._manager).get(kernel_id):
                    provisioner.keep_state()
                await self._manager.shutdown_kernel(kernel_id, now=True)
                if pending := self._manager._pending_kernels.get(kernel_id):  # with use_pending_kernels
                    await pending
                    self._manager._pending_kernels.pop(kernel_id, None)
        await self._sessions.list_sessions()  # this deletes sessions without a kernel
