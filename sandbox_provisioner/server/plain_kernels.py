"""Refuse a plain kernel (a kernel without a sandbox) for a notebook that ran in a sandbox, until the user allows it.

Code in a sandbox can write to its notebook's file. It can change the kernel that the file names to a plain kernel with
the same display name. A user who opens the notebook again would then run its cells outside of any sandbox.

PlainKernelGuard replaces methods of the server's session and kernel managers, of any class. Jupyter Server calls these
methods whenever it starts a kernel for a notebook, or connects a notebook to a running kernel.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cached_property, wraps
from typing import Any, ParamSpec, TypeVar

from jupyter_core.utils import ensure_async
from jupyter_server.services.contents.manager import ContentsManager
from traitlets import Enum
from traitlets.config import LoggingConfigurable

from .. import config
from .._text import printable
from ..errors import BadRequestError, PlainKernelError, SandboxError
from ..gvisor.mounts import within
from ..sandbox.model import PlainNotebook, PlainNotebooks
from ..sandbox.sandboxed_notebooks import Replaced, SandboxedNotebooks
from .drives import DRIVE, server_path
from .kernel_manager import is_sandboxed, provisioner_of

P = ParamSpec("P")
T = TypeVar("T")

_session_path: ContextVar[str | None] = ContextVar("session_path", default=None)
"""Path of the session for which a kernel is being started: the kernel manager receives only its folder and name."""


class PlainKernelGuard(config.Settings, LoggingConfigurable):
    """Decides for one server, its ``parent``, which notebooks may use a plain kernel. Server loop only."""

    parent: Any

    plain_kernels = config.setting(
        "SANDBOX_PLAIN_KERNELS",
        Enum(
            ("confirm", "allow", "refuse"),
            help="Whether a notebook that ran in a sandbox may use a plain kernel (a kernel without a sandbox): "
            "'confirm': only if you allow it with `jupyter sandbox allow-plain`; 'allow': always; 'refuse': never.",
        ),
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.notebooks = SandboxedNotebooks()
        self._lock = asyncio.Lock()
        self._prepared = False

    @property
    def _kernels(self) -> Any:
        return self.parent.kernel_manager

    @cached_property
    def _root(self) -> str:
        return os.path.realpath(str(self.parent.root_dir))

    def attach(self) -> None:
        """Guard the managers, and follow notebooks that are renamed, copied or deleted in Jupyter."""
        self._guard_kernels()
        self._guard_sessions()
        self._follow_copies()
        self.parent.event_logger.add_listener(schema_id=ContentsManager.event_schema_id, listener=self._follow)

    def _guard_kernels(self) -> None:
        start_kernel = self._kernels.start_kernel

        @wraps(start_kernel)
        async def guarded_start(**kwargs: Any) -> Any:
            name = kwargs.get("kernel_name")
            files = self._files(kwargs.get("path"), _session_path.get())
            files += self._session_files((kwargs.get("env") or {}).get("JPY_SESSION_NAME", ""))
            if not await self._require_allowed(name, files):
                return await ensure_async(start_kernel(**kwargs))
            replaced = await self._record(files)
            try:
                return await ensure_async(start_kernel(**kwargs))
            except BaseException:
                await asyncio.to_thread(self.notebooks.withdraw, replaced)
                raise

        self._kernels.start_kernel = guarded_start

    def _guard_sessions(self) -> None:
        sessions = self.parent.session_manager
        start, save, update = sessions.start_kernel_for_session, sessions.save_session, sessions.update_session

        @wraps(start)
        async def guarded_start(session_id: str, path: Any, *args: Any, **kwargs: Any) -> Any:
            token = _session_path.set(path)
            try:
                return await start(session_id, path, *args, **kwargs)
            finally:
                _session_path.reset(token)

        @wraps(save)
        async def guarded_save(session_id: str, path: Any = None, *args: Any, **kwargs: Any) -> Any:
            await self._require_connectable(str(kwargs.get("kernel_id", args[2:] and args[2])), path)
            return await save(session_id, path, *args, **kwargs)

        @wraps(update)
        async def guarded_update(session_id: str, **changes: Any) -> Any:
            before = await sessions.get_session(session_id=session_id)
            kernel_id = changes.get("kernel_id", before["kernel"]["id"])
            await self._require_connectable(kernel_id, changes.get("path", before["path"]), before["path"])
            return await update(session_id, **changes)

        sessions.start_kernel_for_session = guarded_start
        sessions.save_session = guarded_save
        sessions.update_session = guarded_update

    def _follow_copies(self) -> None:
        """Record the copies of notebooks before the user learns their names. Copied folders cause no event."""
        contents = self.parent.contents_manager
        copy = contents.copy

        @wraps(copy)
        async def guarded_copy(from_path: str, to_path: str | None = None) -> Any:
            model = await ensure_async(copy(from_path, to_path))
            await self._apply(self.notebooks.copy, from_path, model["path"])
            return model

        contents.copy = guarded_copy

    async def require_allowed(self, kernel_name: str, *paths: str | None) -> None:
        """Raise PlainKernelError if a notebook at one of these paths may not use this kernel."""
        await self._require_allowed(kernel_name, self._files(*paths))

    async def _require_connectable(self, kernel_id: str, path: str | None, *earlier: str) -> None:
        """Record a notebook that connects to a running sandboxed kernel. Raises PlainKernelError for a refused one.

        ``earlier`` are paths that the notebook's session had until now.
        """
        if kernel_id not in self._kernels:
            return
        kernel, files = self._kernels.get_kernel(kernel_id), self._files(path, *earlier)
        if provisioner_of(kernel) or await self._require_allowed(kernel.kernel_name, files):
            await self._record(self._files(path))

    async def _require_allowed(self, kernel_name: str | None, files: Iterable[str]) -> bool:
        """Return True for a sandboxed kernel, False for an allowed plain one. Raises PlainKernelError otherwise."""
        name = str(kernel_name or self._kernels.default_kernel_name)
        try:
            spec = await ensure_async(self._kernels.kernel_spec_manager.get_kernel_spec(name))
        except KeyError:  # no such kernel: Jupyter Server reports that
            return False
        if is_sandboxed(spec.metadata, self.parent):
            return True
        if self.plain_kernels != "allow":
            for file in files:
                if await self.call(self.notebooks.refused, file, name, self.can_allow):
                    raise self.refusal(file, name)
        return False

    @property
    def can_allow(self) -> bool:
        """True if a permission by `jupyter sandbox allow-plain` has an effect on this server."""
        return self.plain_kernels == "confirm"

    def refusal(self, file: str, kernel_name: str) -> PlainKernelError:
        """Return the error for a refused kernel, with the notebook's path relative to the server's root folder."""
        notebook = printable(self._relative(file))[:300]
        # Code in the sandbox may have chosen the notebook's name.
        argument = shlex.quote(f"./{notebook}" if notebook.startswith("-") else notebook)
        confirm = (
            f" To use the plain kernel, run `jupyter sandbox allow-plain {argument}` in a terminal, and choose it "
            "again. The sandboxed kernel is then shut down."
            if self.can_allow
            else ""
        )
        return PlainKernelError(
            f"Notebook {notebook} ran in a sandbox. The requested kernel {kernel_name!r:.200} runs without a sandbox. "
            "If you did not choose it, code in the sandbox has changed the kernel that the notebook's file names.",
            "Reload the page to return to the sandboxed kernel if it still runs; otherwise choose a kernel whose name "
            f'ends in "(sandbox)".{confirm}',
        )

    def _relative(self, file: str) -> str:
        return os.path.relpath(file, self._root)

    async def _record(self, files: Iterable[str]) -> Replaced:
        """Record notebooks that run in a sandbox. If that fails, only log a warning, so that the kernel can start."""
        try:
            return await self.call(self.notebooks.record, list(filter(_is_document, files)))
        except SandboxError as error:
            self.log.warning(
                "A notebook that runs in a sandbox was not recorded: %s Code in the sandbox can change the notebook's "
                "kernel to one without a sandbox, and the server will start that kernel without a confirmation.",
                error,
            )
            return {}

    async def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of ``notebooks`` in a thread, after all earlier calls."""
        async with self._lock:
            if not self._prepared:
                await asyncio.to_thread(self.notebooks.prepare)
                self._prepared = True
            return await asyncio.to_thread(method, *args, **kwargs)

    def _files(self, *paths: str | None) -> list[str]:
        return list(dict.fromkeys(file for path in paths if path for file in self.files(path)))

    def _session_files(self, session: str) -> list[str]:
        """Return the absolute paths that a session's name may mean: a path, often below the unresolved root folder."""
        if not session:
            return []
        root = os.path.abspath(str(self.parent.root_dir))
        file = os.path.join(root, session)
        return self.files(os.path.relpath(file, root)) if within(file, root) else [file]

    def files(self, path: str) -> list[str]:
        """Return the absolute paths that a request's path may mean: with and without a leading name of a drive."""
        ways = [path]
        while DRIVE.match(ways[-1]):
            ways.append(DRIVE.sub("", ways[-1]))
        return [os.path.join(self._root, way.strip("/")) for way in ways]

    # -- operations of the REST API, by operationId ------------------------------------------------------------------

    async def list_plain_notebooks(self) -> PlainNotebooks:
        """Return the notebooks below the server's root folder that ran in a sandbox and may use a plain kernel."""
        entries = await self.call(self.notebooks.entries)
        below = [entry for entry in entries if entry.allowed and within(entry.notebook, self._root)]
        return PlainNotebooks(tuple(PlainNotebook(self._relative(entry.notebook), entry.allowed) for entry in below))

    async def allow_plain_notebook(self, notebook_path: str, kernel_name: str) -> PlainNotebook:
        """Let a notebook that ran in a sandbox use a plain kernel. Raises BadRequestError for any other notebook."""
        file = self.files(server_path(notebook_path))[0]
        if self._relative(file).startswith("../") or not await self.call(self.notebooks.find, file):
            problem = f"There is no record that notebook {printable(notebook_path)} ran in a sandbox."
            raise BadRequestError(problem, "Without such a record, it can use any kernel.", "notebook_path")
        if not self.can_allow:
            raise self.refusal(file, kernel_name)
        await self.call(self.notebooks.allow, file, kernel_name)
        return PlainNotebook(self._relative(file), kernel_name)

    async def revoke_plain_notebook(self, notebook_path: str) -> None:
        """Revoke a notebook's permission to use a plain kernel."""
        await self.call(self.notebooks.revoke, self.files(server_path(notebook_path))[0])

    # -- renamed notebooks -------------------------------------------------------------------------------------------

    async def _follow(self, logger: Any, schema_id: str, data: dict[str, Any]) -> None:
        """Follow a notebook or folder that was renamed or deleted. Called by Jupyter's event logger."""
        if data["action"] == "rename":
            await self._apply(self.notebooks.move, data["source_path"], data["path"])
        elif data["action"] == "delete":
            await self._apply(self.notebooks.forget, data["path"])

    async def _apply(self, change: Callable[..., None], *paths: str) -> None:
        """Record a change of notebooks' paths."""
        try:
            await self.call(change, *(self.files(path)[0] for path in paths))
        except SandboxError as error:
            self.log.warning("The new path of a notebook that ran in a sandbox was not recorded: %s", error)


def _is_document(file: str) -> bool:
    """Return True for the path of a file; False for a folder's, or for a console's, which has no extension."""
    named = os.path.splitext(file)[1] or os.path.isfile(file)
    return file.endswith(".ipynb") or bool(named and not os.path.isdir(file))
