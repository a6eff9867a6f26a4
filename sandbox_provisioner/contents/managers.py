"""Keep Jupyter Server's file contents managers and checkpoints from leaving the server's folder through links.

A notebook's code can write to its folder, and so replace a file, a folder or a checkpoint by a link to one of the
user's files. The classes here run the code of the installed Jupyter Server's own classes with the file functions of
``file_functions`` instead. Each of these checks and uses a file in one step, so no check can be outdated when the file
is used.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import CellType, FunctionType, ModuleType
from typing import IO, Any

from anyio.to_thread import run_sync
from jupyter_core.paths import jupyter_config_path, jupyter_path
from jupyter_server.base.handlers import AuthenticatedFileHandler
from jupyter_server.files.handlers import FilesHandler
from jupyter_server.services.contents import filecheckpoints, fileio, filemanager, largefilemanager
from tornado import web
from traitlets import Int, List, TraitType, Unicode, default, validate
from traitlets.config import LoggingConfigurable

from .. import config
from .._text import one_line
from ..errors import ConfigurationError
from ..gvisor.bundle import parse_mount
from ..gvisor.reserved_dirs import reserved_folders
from ..kernel.shared_folders import list_file, protected_file, recall, remember
from ..provisioner import SandboxProvisioner
from .beneath import Area, Beneath
from .file_functions import REPLACEMENTS, Refused, call, exists, guard, is_hidden, leads_outside

MAX_FILE_SIZE = 512 << 20
"""Default limit in bytes. Chromium has no longer strings, so JupyterLab cannot open a larger file."""
HASHED_AT_ONCE = 1 << 20
MODULES = (fileio, filecheckpoints, filemanager, largefilemanager)


class GuardedContents(LoggingConfigurable):
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
            guard(Beneath(self.root_dir, self._areas(), _shared, _protected, _share, self._forbidden))
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
        return reserved_folders(str(self.config.SandboxProvisioner.get("storage_dir", "")))

    def _areas(self) -> Iterator[Area]:
        for target in self.allowed_link_targets:
            yield Area(os.path.realpath(target))
        for text in SandboxProvisioner(config=self.config).mounts:
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
    return recall(list_file())


def _share(folders: Iterable[str]) -> None:
    """Remember folders with links that a sandbox may have made."""
    remember(folders, list_file())


def _protected() -> list[str]:
    """Return the folders that the server and kernels load code or settings from; sandboxes see them as read-only."""
    return [sys.prefix, *jupyter_path(), *jupyter_config_path(), *recall(protected_file())]


class GuardedFileHandler(AuthenticatedFileHandler):
    """A handler that serves ``/files/`` from one descriptor that was opened beneath the server's folder."""

    _file: Any = None

    def validate_absolute_path(self, root: str, absolute_path: str) -> str:
        """Open the file and return its path. Raises HTTPError 404 if it is hidden or missing, 403 if it is refused.

        Called by tornado before it serves the file.
        """
        manager: Any = self.contents_manager
        absolute_path = manager._get_os_path(self.path)
        if not manager.allow_hidden and is_hidden(absolute_path, root):
            self.log.info("Refusing to serve hidden file, via 404 Error, use ContentsManager.allow_hidden to enable")
            raise web.HTTPError(404)
        if not exists(absolute_path):
            raise web.HTTPError(404)
        try:
            number = call(Beneath.open, absolute_path, os.O_RDONLY)
        except FileNotFoundError:
            raise web.HTTPError(404) from None
        except PermissionError:
            raise web.HTTPError(403, f"Permission denied: {self.path}") from None
        try:
            self._file = os.fdopen(number, "rb")
        except IsADirectoryError:
            os.close(number)
            raise web.HTTPError(403, f"{self.path} is not a file") from None
        self._stat_result = os.fstat(number)
        return absolute_path

    def get_content(  # type: ignore[override]
        self, abspath: str, start: int | None = None, end: int | None = None
    ) -> Iterator[bytes]:
        """Yield the content of the file that was opened, from ``start`` to ``end``."""
        self._file.seek(start or 0)
        left = (self._stat_result.st_size if end is None else end) - (start or 0)
        while left > 0 and (chunk := self._file.read(min(left, 1 << 16))):
            left -= len(chunk)
            yield chunk

    def on_finish(self) -> None:
        """Close the file. Called by tornado after the response."""
        if self._file:
            self._file.close()
        super().on_finish()


def _rebind(function: Any, names: dict[str, Any], own_class: CellType) -> Any:
    """Return a copy of a function with the globals ``names`` and, for ``super()``, the class in ``own_class``."""
    if hasattr(function, "__wrapped__"):
        return contextmanager(_rebind(function.__wrapped__, names, own_class))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(own_class if name == "__class__" else cell for name, cell in cells.items())
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    copy.__qualname__, copy.__annotations__ = function.__qualname__, function.__annotations__
    return copy


def _guarded_names(module: ModuleType) -> dict[str, Any]:
    """Return a copy of a module's globals, in which it and its own functions use guarded file functions."""
    names = {name: value for name, value in vars(module).items() if not isinstance(value, TraitType)}
    names |= REPLACEMENTS
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            names[name] = _rebind(value, names, CellType())
    return names


def _guarded_classes() -> dict[type, type]:
    """Return a guarded subclass for each class in MODULES."""
    made: dict[type, Any] = {}
    for module in MODULES:
        names = _guarded_names(module)
        for stock in [value for value in vars(module).values() if isinstance(value, type)]:
            if stock.__module__ == module.__name__:
                made[stock] = _guarded_class(stock, names, made)
    return made


def _guarded_class(stock: type, names: dict[str, Any], made: dict[type, Any]) -> type:
    own_class = CellType()
    members: dict[str, Any] = {"__module__": __name__, "__doc__": stock.__doc__}
    ours = [base for base in stock.__bases__ if base in made]
    # Copy mixins such as GenericCheckpointsMixin, which override methods of the guarded class that comes after them.
    for mixin in stock.__bases__[: stock.__bases__.index(ours[-1])] if ours else ():
        if mixin not in made:
            members |= {name: value for name, value in vars(mixin).items() if isinstance(value, FunctionType)}
    for name, value in vars(stock).items():
        if isinstance(value, FunctionType):
            members[name] = _rebind(value, names, own_class)
    twin = type(stock)(f"Confined{stock.__name__}", (*(made[base] for base in ours), stock), members)
    own_class.cell_contents = twin
    return twin


_CONFINED = _guarded_classes()


def _is_leftover(os_path: str) -> bool:
    """Return True if an entry is a link, or neither a file nor a folder; such entries bypass the trash."""
    try:
        return stat.S_IFMT(call(Beneath.lstat, os_path).st_mode) not in (stat.S_IFDIR, stat.S_IFREG)
    except OSError:
        return False


class _Manager(GuardedContents):
    """Base class of the guarded contents managers."""

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

    def _link_model(self, path: str) -> dict[str, Any]:
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
            while chunk := file.read(HASHED_AT_ONCE):
                digest.update(chunk)
        return {"hash": digest.hexdigest(), "hash_algorithm": self.hash_algorithm}  # type: ignore[attr-defined]

    def _is_refused_entry(self, path: str, to_read: bool) -> bool:
        return not to_read and leads_outside(self._get_os_path(path))

    def _delete_leftover(self, path: str) -> bool:
        """Delete an entry that is a link or a special file, not a link's target. Return False for other entries."""
        os_path = self._get_os_path(path.strip("/"))
        if not _is_leftover(os_path) or (not self.allow_hidden and is_hidden(os_path, self.root_dir)):  # type: ignore[attr-defined]
            return False
        with self.perm_to_403():  # type: ignore[attr-defined]
            call(Beneath.unlink, os_path)
        return True


class _SyncManager(_Manager):
    @default("checkpoints_class")
    def _checkpoints_class_default(self) -> type:
        return GuardedFileCheckpoints

    def get(
        self,
        path: str,
        content: bool = True,
        type: str | None = None,
        format: str | None = None,
        require_hash: bool = False,
    ) -> Any:
        """Return the model of a path; for an entry that must not be accessed, a model of the entry itself."""
        if self._is_refused_entry(path.strip("/"), content or require_hash):
            return self._link_model(path.strip("/"))
        model = super().get(path, content, type, format, require_hash and content)  # type: ignore[misc]
        if require_hash and not content and model["type"] != "directory":
            model.update(self._hash(path.strip("/")))
        return model

    def delete_file(self, path: str) -> None:
        """Delete a file, a folder or a link, not a link's target."""
        if not self._delete_leftover(path):
            super().delete_file(path)  # type: ignore[misc]

    def _get_dir_size(self, path: str = ".") -> str:
        return str(call(Beneath.size, path))


class _AsyncManager(_Manager):
    @default("checkpoints_class")
    def _checkpoints_class_default(self) -> type:
        return GuardedAsyncFileCheckpoints

    async def get(
        self,
        path: str,
        content: bool = True,
        type: str | None = None,
        format: str | None = None,
        require_hash: bool = False,
    ) -> Any:
        """Return the model of a path; for an entry that must not be accessed, a model of the entry itself."""
        if self._is_refused_entry(path.strip("/"), content or require_hash):
            return self._link_model(path.strip("/"))
        model = await super().get(path, content, type, format, require_hash and content)  # type: ignore[misc]
        if require_hash and not content and model["type"] != "directory":
            model.update(await run_sync(self._hash, path.strip("/")))
        return model

    async def delete_file(self, path: str) -> None:
        """Delete a file, a folder or a link, not a link's target."""
        if not self._delete_leftover(path):
            await super().delete_file(path)  # type: ignore[misc]

    async def _get_dir_size(self, path: str = ".") -> str:
        return str(call(Beneath.size, path))


class _Checkpoints(GuardedContents):
    """Base class of the guarded checkpoints."""

    def _skip(self, path: str, refusal: Refused) -> None:
        self.log.warning("The checkpoint of %s stays as it is. %s", one_line(path), refusal.log_message)


class _SyncCheckpoints(_Checkpoints):
    def rename_all_checkpoints(self, old_path: str, new_path: str) -> None:
        """Rename the checkpoints of a renamed file. Log a warning if a link is in the way."""
        try:
            super().rename_all_checkpoints(old_path, new_path)  # type: ignore[misc]
        except Refused as refusal:
            self._skip(old_path, refusal)

    def delete_all_checkpoints(self, path: str) -> None:
        """Delete the checkpoints of a deleted file. Log a warning if a link is in the way."""
        try:
            super().delete_all_checkpoints(path)  # type: ignore[misc]
        except Refused as refusal:
            self._skip(path, refusal)


class _AsyncCheckpoints(_Checkpoints):
    async def rename_all_checkpoints(self, old_path: str, new_path: str) -> None:
        """Rename the checkpoints of a renamed file. Log a warning if a link is in the way."""
        try:
            await super().rename_all_checkpoints(old_path, new_path)  # type: ignore[misc]
        except Refused as refusal:
            self._skip(old_path, refusal)

    async def delete_all_checkpoints(self, path: str) -> None:
        """Delete the checkpoints of a deleted file. Log a warning if a link is in the way."""
        try:
            await super().delete_all_checkpoints(path)  # type: ignore[misc]
        except Refused as refusal:
            self._skip(path, refusal)


def _join(stock: type, common: type) -> type:
    confined = _CONFINED[stock]
    members = {"__module__": __name__, "__doc__": f"{stock.__name__} that does not follow links to places outside."}
    joined: type = type(confined)(f"Guarded{stock.__name__}", (common, confined), members)
    return joined


GuardedFileContentsManager = _join(filemanager.FileContentsManager, _SyncManager)
GuardedAsyncFileContentsManager = _join(filemanager.AsyncFileContentsManager, _AsyncManager)
GuardedLargeFileManager = _join(largefilemanager.LargeFileManager, _SyncManager)
GuardedAsyncLargeFileManager = _join(largefilemanager.AsyncLargeFileManager, _AsyncManager)
GuardedFileCheckpoints = _join(filecheckpoints.FileCheckpoints, _SyncCheckpoints)
GuardedAsyncFileCheckpoints = _join(filecheckpoints.AsyncFileCheckpoints, _AsyncCheckpoints)
GuardedGenericFileCheckpoints = _join(filecheckpoints.GenericFileCheckpoints, _SyncCheckpoints)
GuardedAsyncGenericFileCheckpoints = _join(filecheckpoints.AsyncGenericFileCheckpoints, _AsyncCheckpoints)

CLASSES: dict[type, type] = {
    filemanager.FileContentsManager: GuardedFileContentsManager,
    filemanager.AsyncFileContentsManager: GuardedAsyncFileContentsManager,
    largefilemanager.LargeFileManager: GuardedLargeFileManager,
    largefilemanager.AsyncLargeFileManager: GuardedAsyncLargeFileManager,
    filecheckpoints.FileCheckpoints: GuardedFileCheckpoints,
    filecheckpoints.AsyncFileCheckpoints: GuardedAsyncFileCheckpoints,
    filecheckpoints.GenericFileCheckpoints: GuardedGenericFileCheckpoints,
    filecheckpoints.AsyncGenericFileCheckpoints: GuardedAsyncGenericFileCheckpoints,
}
"""The guarded class for each of Jupyter Server's own classes."""


def is_guarded(manager_class: type) -> bool:
    """Return True if a contents manager's class is guarded, or will be replaced by a guarded one at server start."""
    return issubclass(manager_class, GuardedContents) or manager_class in CLASSES
