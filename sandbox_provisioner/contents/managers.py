"""Keep Jupyter Server's file contents managers and checkpoints from leaving the server's folder through links.

A notebook's code can write to its folder, and so replace a file, a folder or a checkpoint by a link to one of the
user's files. The classes here run the code of the installed Jupyter Server's own classes with the file functions of
``file_functions`` instead. Each function checks and uses a file in one step, so no check can be outdated when the file
is used.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property, wraps
from inspect import iscoroutinefunction
from typing import IO, TYPE_CHECKING, Any

from anyio.to_thread import run_sync
from jupyter_core.paths import jupyter_config_path, jupyter_path
from jupyter_core.utils import ensure_async
from jupyter_server.base.handlers import AuthenticatedFileHandler
from jupyter_server.files.handlers import FilesHandler
from jupyter_server.services.contents import filecheckpoints, filemanager, largefilemanager
from jupyter_server.services.contents.checkpoints import AsyncCheckpoints
from jupyter_server.services.contents.manager import AsyncContentsManager
from tornado import web
from traitlets import Int, List, Unicode, default, validate
from traitlets.config import LoggingConfigurable

from .. import config
from .._text import one_line
from ..errors import ConfigurationError
from ..gvisor.bundle import parse_mount
from ..gvisor.reserved_dirs import reserved_folders
from .beneath import Beneath
from .file_functions import Refused, call, guard, is_hidden
from .file_handler import GuardedFileHandler
from .links import Area, LinkRules, one_request
from .rebinding import REBOUND

if TYPE_CHECKING:
    from ..provisioner import SandboxProvisioner

HASH_CHUNK = 1 << 20
MAX_FILE_SIZE = 512 << 20
"""Default limit in bytes: the longest string in Chromium, so JupyterLab cannot open a larger file."""


class GuardedContents(config.Settings, LoggingConfigurable):
    """Base class of the guarded managers and checkpoints, with their settings."""

    root_dir: str

    allowed_link_targets = config.setting(
        "SANDBOX_ALLOWED_LINK_TARGETS",
        List(
            Unicode(),
            help="Further folders that links in the server's folder may lead to, besides the sources of "
            "SandboxProvisioner.mounts.",
        ),
    )
    max_file_size = config.setting(
        "SANDBOX_MAX_FILE_SIZE",
        Int(
            MAX_FILE_SIZE,
            min=1,
            help="The largest file, in bytes, that the server loads into its memory, to open, copy, convert or hash "
            "it. Downloads, uploads and checkpoints are not limited.",
        ),
    )

    @validate("allowed_link_targets")
    def _absolute_targets(self, proposal: Any) -> list[str]:
        targets = [os.path.expanduser(target) for target in proposal["value"]]
        for target in targets:
            if not os.path.isabs(target):
                raise ConfigurationError(
                    "allowed_link_targets",
                    f"GuardedContents.allowed_link_targets has {target!r}, which is not an absolute path.",
                    "Begin it with / or ~.",
                )
        return targets

    def _get_os_path(self, path: str) -> str:
        """Return the path of a file in the file system. The first call registers the guard of the server's folder."""
        if self.__dict__.get("_guarded_dir") != self.root_dir:
            rules = LinkRules(self.root_dir, self._areas(), _shared, _protected, self._forbidden)
            guard(Beneath(rules, _share))
            self.__dict__["_guarded_dir"] = self.root_dir
        os_path: str = super()._get_os_path(path)  # type: ignore[misc]
        return os_path

    @contextmanager
    def open(self, os_path: str, mode: str = "r", **options: Any) -> Iterator[Any]:
        """Open a file. Raises HTTPError 400 in mode "rb" if it is larger than ``max_file_size``."""
        with super().open(os_path, mode, **options) as file:  # type: ignore[misc]
            if mode != "rb":
                yield file
                return
            size = os.fstat(file.fileno()).st_size
            if size > self.max_file_size:
                name = os.path.relpath(os_path, self.root_dir)
                raise web.HTTPError(
                    400,
                    f"{name} has {size} bytes, and the server loads files of at most {self.max_file_size} bytes. "
                    "Download it, open it in a notebook, or raise the setting GuardedContents.max_file_size.",
                )
            # Files in /proc report a size of 0.
            yield _BoundedReader(file, size or self.max_file_size)

    def _forbidden(self) -> Iterable[str]:
        """Return the folders of Jupyter and of this package, which kernels do not see."""
        return reserved_folders(self._kernel_settings.storage_dir)

    @cached_property
    def _kernel_settings(self) -> SandboxProvisioner:
        from ..provisioner import SandboxProvisioner  # not at the server's start, which it would make longer

        return SandboxProvisioner(config=self.config)

    def _areas(self) -> Iterator[Area]:
        for target in self.allowed_link_targets:
            yield Area(os.path.realpath(target))
        for text in self._kernel_settings.mounts:
            try:
                mount = parse_mount(text)
            except ConfigurationError as error:
                self.log.warning("Links to the mount %r are refused. %s", text, error.problem)
            else:
                yield Area(os.path.realpath(mount.source), mount.writable)


class _BoundedReader:
    """A file reader that ends after ``size`` bytes, even if the file grows while it is read."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._left = size

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes, or all that are left."""
        content = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(content)
        return content


def _shared() -> Iterable[str]:
    """Return the folders that sandboxes can write to."""
    from ..kernel.folders import list_file, recall

    return recall(list_file())


def _share(folders: Iterable[str]) -> None:
    """Remember folders with links that a sandbox may have made."""
    from ..kernel.folders import list_file, remember

    remember(folders, list_file())


def _protected() -> list[str]:
    """Return the folders that the server and kernels load code or settings from; sandboxes see them as read-only."""
    from ..kernel.folders import protected_file, recall

    return [sys.prefix, *jupyter_path(), *jupyter_config_path(), *recall(protected_file())]


def _bypasses_trash(os_path: str) -> bool:
    """Return True if an entry is a link, or neither a file nor a folder; such entries bypass the trash."""
    try:
        return stat.S_IFMT(call(Beneath.lstat, os_path).st_mode) not in (stat.S_IFDIR, stat.S_IFREG)
    except OSError:
        return False


class _Manager(GuardedContents):
    """Base class of the guarded contents managers."""

    _in_thread = staticmethod(run_sync)

    @default("checkpoints_class")
    def _checkpoints_class_default(self) -> type:
        return CLASSES[super()._checkpoints_class_default()]  # type: ignore[misc]

    @default("files_handler_class")
    def _files_handler_class_default(self) -> type:
        return GuardedFileHandler

    @validate("files_handler_class")
    def _guard_files_handler(self, proposal: Any) -> type | None:
        chosen: type | None = proposal["value"]
        if chosen is AuthenticatedFileHandler:
            return GuardedFileHandler
        if chosen not in (None, FilesHandler, GuardedFileHandler):
            self.log.warning("The files that %s serves are not guarded against links that a notebook made.", chosen)
        return chosen

    @validate("checkpoints_class")
    def _guard_checkpoints(self, proposal: Any) -> type:
        chosen: type = proposal["value"]
        if not issubclass(chosen, _Checkpoints) and chosen not in CLASSES:
            self.log.warning("The files of %s are not guarded against links that a notebook made.", chosen.__name__)
        return CLASSES.get(chosen, chosen)

    def _entry_itself(self, path: str) -> dict[str, Any]:
        """Return a model of an entry that must not be accessed, so that the user can see and delete it."""
        found = call(Beneath.lstat, self._get_os_path(path))
        changed = datetime.fromtimestamp(found.st_mtime, UTC)
        nothing = dict.fromkeys(("content", "format", "mimetype", "hash", "hash_algorithm"))
        known = {"name": path.rsplit("/", 1)[-1], "path": path, "type": "file", "size": found.st_size}
        return {**nothing, **known, "created": changed, "last_modified": changed, "writable": False}

    def _hash(self, path: str) -> dict[str, str]:
        """Return the hash of a file for its model, without loading the whole file at once."""
        digest = hashlib.new(self.hash_algorithm)  # type: ignore[attr-defined]
        with self.open(self._get_os_path(path), "rb") as file:
            while chunk := file.read(HASH_CHUNK):
                digest.update(chunk)
        return {"hash": digest.hexdigest(), "hash_algorithm": self.hash_algorithm}  # type: ignore[attr-defined]

    def _delete_link_or_special_file(self, path: str) -> bool:
        """Delete an entry that is a link or a special file, not a link's target. Return False for other entries."""
        os_path = self._get_os_path(path.strip("/"))
        if not _bypasses_trash(os_path) or (not self.allow_hidden and is_hidden(os_path, self.root_dir)):  # type: ignore[attr-defined]
            return False
        with self.perm_to_403():  # type: ignore[attr-defined]
            call(Beneath.unlink, os_path)
        return True

    async def get(
        self,
        path: str,
        content: bool = True,
        type: str | None = None,
        format: str | None = None,
        require_hash: bool = False,
    ) -> Any:
        """Return the model of a path; for an entry that must not be accessed, a model of the entry itself."""
        with one_request():
            try:
                model = await ensure_async(super().get(path, content, type, format, require_hash and content))  # type: ignore[misc]
            except Refused:
                if content or require_hash:
                    raise
                return self._entry_itself(path.strip("/"))
            if require_hash and not content and model["type"] != "directory":
                model.update(await self._in_thread(self._hash, path.strip("/")))
            return model

    async def delete_file(self, path: str) -> None:
        """Delete a file, a folder or a link, not a link's target."""
        if not self._delete_link_or_special_file(path):
            await ensure_async(super().delete_file(path))  # type: ignore[misc]

    async def _get_dir_size(self, path: str = ".") -> str:
        return str(call(Beneath.size, path))


class _Checkpoints(GuardedContents):
    """Base class of the guarded checkpoints."""

    async def rename_all_checkpoints(self, old_path: str, new_path: str) -> None:
        """Rename the checkpoints of a renamed file. Log a warning if a link prevents that."""
        with self._refusals_logged(old_path):
            await ensure_async(super().rename_all_checkpoints(old_path, new_path))  # type: ignore[misc]

    async def delete_all_checkpoints(self, path: str) -> None:
        """Delete the checkpoints of a deleted file. Log a warning if a link prevents that."""
        with self._refusals_logged(path):
            await ensure_async(super().delete_all_checkpoints(path))  # type: ignore[misc]

    @contextmanager
    def _refusals_logged(self, path: str) -> Iterator[None]:
        try:
            yield
        except Refused as refusal:
            self.log.warning("The checkpoint of %s was not changed. %s", one_line(path), refusal.log_message)


def _without_loop(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Return a plain function that runs a coroutine function, which must never wait, and returns its result."""

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            function(*arguments, **options).send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError(f"{function.__name__} has to wait")

    return run


async def _directly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _guarded_class(stock: type, common: type) -> type:
    """Return the guarded class for one of Jupyter Server's. For a synchronous one, its methods are plain functions."""
    rebound = REBOUND[stock]
    members: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"{stock.__name__} that does not follow links to places outside.",
    }
    if not issubclass(stock, AsyncContentsManager | AsyncCheckpoints):
        coroutines = {name: value for name, value in vars(common).items() if iscoroutinefunction(value)}
        members |= {name: _without_loop(value) for name, value in coroutines.items()}
        members["_in_thread"] = staticmethod(_directly)
    CLASSES[stock] = type(rebound)(f"Guarded{stock.__name__}", (common, rebound), members)
    return CLASSES[stock]


CLASSES: dict[type, type] = {}
"""The guarded class for each of Jupyter Server's own classes."""
GuardedFileContentsManager = _guarded_class(filemanager.FileContentsManager, _Manager)
GuardedAsyncFileContentsManager = _guarded_class(filemanager.AsyncFileContentsManager, _Manager)
GuardedLargeFileManager = _guarded_class(largefilemanager.LargeFileManager, _Manager)
GuardedAsyncLargeFileManager = _guarded_class(largefilemanager.AsyncLargeFileManager, _Manager)
GuardedFileCheckpoints = _guarded_class(filecheckpoints.FileCheckpoints, _Checkpoints)
GuardedAsyncFileCheckpoints = _guarded_class(filecheckpoints.AsyncFileCheckpoints, _Checkpoints)
GuardedGenericFileCheckpoints = _guarded_class(filecheckpoints.GenericFileCheckpoints, _Checkpoints)
GuardedAsyncGenericFileCheckpoints = _guarded_class(filecheckpoints.AsyncGenericFileCheckpoints, _Checkpoints)


def is_guarded(manager_class: type) -> bool:
    """Return True if a contents manager's class is guarded, or will be replaced by a guarded one at server start."""
    return issubclass(manager_class, GuardedContents) or manager_class in CLASSES
