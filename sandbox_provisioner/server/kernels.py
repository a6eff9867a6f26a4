"""ServerKernels: the sandboxed kernels of a Jupyter Server, and how one is started for a notebook, restarted and ended.

Any class of kernel manager will do; what only ours can do is not asked of others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any
from weakref import WeakValueDictionary

from jupyter_core.utils import ensure_async
from jupyter_server.utils import ApiPath, to_os_path
from tornado.web import HTTPError

from .contract import BadRequestError
from .errors import SandboxError, SandboxNotFoundError
from .folders import planted_link, within
from .kernelmanager import sandboxed_kernels, sandboxed_names
from .provisioner import SandboxProvisioner
from .records import SandboxRecord

LOOK_EVERY = 0.2
LONGEST = 255
"""Bytes that the name of a file can have."""


class NotebookInUseError(SandboxError):
    """A notebook has a kernel already, on this server or saved; ``path`` says which."""

    def __init__(self, path: str, kernel: str = "a kernel on this server") -> None:
        self.path = path
        super().__init__(f"Notebook {path} has {kernel}.", "Shut it down or delete it, or name another notebook.")


@dataclass(frozen=True)
class Live:
    """A sandboxed kernel of this server."""

    kernel_id: str
    kernel_name: str
    provisioner: SandboxProvisioner
    created: datetime
    last_used: datetime

    @property
    def record(self) -> SandboxRecord | None:
        """What is remembered of its sandbox; None of an ephemeral one."""
        return self.provisioner.claim.record if self.provisioner.claim else None

    @property
    def state(self) -> str:
        """How it is, in a word."""
        return "hibernated" if self.provisioner.asleep else "running"

    @property
    def busy_reasons(self) -> list[str]:
        """Why it is not idle, as sentences; empty if it is idle or hibernated."""
        return [] if self.provisioner.asleep else self.provisioner.busy_reasons()


@dataclass(frozen=True)
class Notebook:
    """A notebook as the server knows it: by its path below the root folder, and by that on the machine."""

    path: str
    absolute: str

    @property
    def name(self) -> str:
        """The last part of its path."""
        return PurePath(self.path).name


class ServerKernels:
    """The kernels of a server, with their sessions and notebooks."""

    def __init__(self, kernel_manager: Any, session_manager: Any, contents_manager: Any, root_dir: str) -> None:
        self._manager = kernel_manager
        self._sessions = session_manager
        self._contents = contents_manager
        self._root = root_dir
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def live(self) -> list[Live]:
        """Those that were launched and have not moved to another server."""
        found = []
        for kernel_id, provisioner in sandboxed_kernels(self._manager).items():
            kernel = self._manager.get_kernel(kernel_id)
            used = kernel.last_activity.astimezone(UTC)
            created = getattr(kernel, "created", used)
            found.append(Live(kernel_id, str(kernel.kernel_name), provisioner, created, used))
        return found

    def get(self, kernel_id: str) -> Live:
        """One of them; SandboxNotFoundError if it has just gone."""
        found = next((live for live in self.live() if live.kernel_id == kernel_id), None)
        if found is None:
            raise SandboxNotFoundError(kernel_id, "this server's list")
        return found

    async def names(self) -> list[str]:
        """The sandboxed kernels that can be started, the one that is taken if none is named first."""
        return await sandboxed_names(self._manager)

    # -- notebooks ---------------------------------------------------------------------------------------------------

    def relative(self, absolute: str) -> str | None:
        """The path of a notebook as the server knows it; None if it is not below the root folder."""
        path = PurePath(absolute)
        return path.relative_to(self._root).as_posix() if absolute and path.is_relative_to(self._root) else None

    def notebook(self, path: str) -> Notebook:
        """The notebook of that path, which need not exist; BadRequestError if its folder does not, or is not ours."""
        parts = path.split("/")
        if any(part in ("", ".", "..") or len(part.encode()) > LONGEST for part in parts):
            raise BadRequestError(
                f"{path!r:.200} is not the path of a notebook.",
                "Give it relative to the server's root folder, without . and .. in it.",
                "notebook_path",
            )
        if not self._contents.allow_hidden and any(part.startswith(".") for part in parts):
            raise BadRequestError(f"{path!r:.200} is hidden on this server.", "Name another one.", "notebook_path")
        absolute = to_os_path(ApiPath(path), self._root)
        if not os.path.isdir(os.path.dirname(absolute)) or os.path.isdir(absolute):
            raise BadRequestError(
                f"There can be no notebook {path!r:.200}, for there is no such folder.",
                "Make the folder first.",
                "notebook_path",
            )
        folder, root = os.path.dirname(absolute), os.path.realpath(self._root)
        if not within(os.path.realpath(folder), root):
            link = planted_link(folder, [root])
            raise BadRequestError(
                f"There can be no notebook {path!r:.200} for a sandbox: a link leads out of the server's root folder"
                + (f", {os.path.relpath(link[0], root)!r:.200}." if link else "."),
                "Use a folder that is itself below the root folder.",
                "notebook_path",
            )
        return Notebook(path, absolute)

    async def copy_notebook(self, source: str, to: Notebook) -> bool:
        """Copy a notebook to where there is none; whether that was done: nothing is to be copied if there is none."""
        if os.path.lexists(to.absolute) or not await ensure_async(self._contents.file_exists(source)):
            return False
        try:
            await ensure_async(self._contents.copy(source, to.path))
        except HTTPError as error:
            raise SandboxError(f"The notebook {source} was not copied: {error.log_message}.") from error
        return True

    async def remove_notebook(self, notebook: Notebook) -> None:
        """Remove a copy that was made for nothing."""
        await ensure_async(self._contents.delete_file(notebook.path))

    async def kernel_of(self, notebook: Notebook) -> str | None:
        """The kernel that a notebook has on this server."""
        for session in await self._sessions.list_sessions():
            if session["path"] == notebook.path and session["kernel"]:
                return str(session["kernel"]["id"])
        return None

    # -- their life --------------------------------------------------------------------------------------------------

    async def start(self, kernel_name: str, notebook: Notebook | None, env: Mapping[str, str]) -> Live:
        """Start a kernel, for a notebook if there is one: then there is a session as if it had been opened."""
        path, session = None, {}
        if notebook:
            path = await ensure_async(self._contents.get_kernel_path(path=notebook.path))
            session = {"JPY_SESSION_NAME": notebook.absolute}
        kernel_id = await self._manager.start_kernel(
            kernel_name=kernel_name, path=path, env={**os.environ, **session, **env}
        )
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
        """Held while a kernel is restarted or ended."""
        return self._changing.setdefault(kernel_id, asyncio.Lock())

    async def restart(self, kernel_id: str) -> None:
        """Start a kernel afresh, and wait until it answers."""
        try:
            async with self.changing(kernel_id):
                answered = await self._manager.restart_kernel(kernel_id)
            if isinstance(answered, asyncio.Future):
                await self._answer(kernel_id, answered)
        except (TimeoutError, RuntimeError) as error:
            raise SandboxError(f"Kernel {kernel_id} was restarted and does not answer.", "Try once more.") from error

    async def _answer(self, kernel_id: str, answered: asyncio.Future[Any]) -> None:
        """Wait for a restarted kernel, unless it is ended meanwhile: Jupyter would wait on for a minute."""
        answered.add_done_callback(lambda done: done.cancelled() or done.exception())
        while not answered.done():
            await asyncio.wait({answered}, timeout=LOOK_EVERY)
            self.get(kernel_id)
        await answered

    async def rewind(self, live: Live, savepoint: str) -> str:
        """Bring a kernel back as it was at a savepoint; returns the name of the one that has the present.

        To clients that wait for a cell of the present it was restarted, so that they wait no more.
        """
        kernel = self._manager.get_kernel(live.kernel_id)
        busy = kernel.execution_state == "busy"
        kept = await live.provisioner.rewind(savepoint)
        if busy:
            kernel.execution_state = "idle"
            if restarter := getattr(kernel, "_restarter", None):
                restarter._fire_callbacks("restart")
        return kept

    async def end(self, kernel_id: str) -> None:
        """End a kernel at once, with its sessions; what was saved of it stays."""
        async with self.changing(kernel_id):
            if kernel_id in self._manager:
                if provisioner := sandboxed_kernels(self._manager).get(kernel_id):
                    provisioner.keep_state()
                await self._manager.shutdown_kernel(kernel_id, now=True)
                if pending := self._manager._pending_kernels.get(kernel_id):  # with use_pending_kernels
                    await pending
                    self._manager._pending_kernels.pop(kernel_id, None)
        await self._sessions.list_sessions()  # which forgets those whose kernel is gone
