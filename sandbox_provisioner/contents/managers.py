"""Keep Jupyter Server's file contents managers and checkpoints from leaving the server's folder through links.

A notebook's code can write to its folder, and so replace a file, a folder or a checkpoint by a link to one of the
user's files. The classes here run the code of the installed Jupyter Server's own classes with the file functions of
``file_functions`` instead. Each of these checks and uses a file in one step, so no check can be outdated when the file
is used.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from anyio.to_thread import run_sync
from jupyter_server.base.handlers import AuthenticatedFileHandler
from jupyter_server.files.handlers import FilesHandler
from jupyter_server.services.contents import filecheckpoints, filemanager, largefilemanager
from traitlets import default, validate

from .._text import one_line
from .beneath import Beneath
from .file_functions import Refused, call, is_hidden, leads_outside
from .file_handler import GuardedFileHandler
from .guarded import GuardedContents
from .rebinding import REBOUND

HASHED_AT_ONCE = 1 << 20


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

    def _refused_entry(self, path: str, to_read: bool) -> dict[str, Any] | None:
        """Return a model of an entry that must not be accessed, so that the user can see and delete it; else None.

        Returns None also for an entry that is ``to_read``, which is refused later.
        """
        os_path = self._get_os_path(path)
        if to_read or not leads_outside(os_path):
            return None
        found = call(Beneath.lstat, os_path)
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
        if model := self._refused_entry(path.strip("/"), content or require_hash):
            return model
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
        if model := self._refused_entry(path.strip("/"), content or require_hash):
            return model
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

    @contextmanager
    def _refusals_logged(self, path: str) -> Iterator[None]:
        try:
            yield
        except Refused as refusal:
            self.log.warning("The checkpoint of %s stays as it is. %s", one_line(path), refusal.log_message)


class _SyncCheckpoints(_Checkpoints):
    def rename_all_checkpoints(self, old_path: str, new_path: str) -> None:
        """Rename the checkpoints of a renamed file. Log a warning if a link is in the way."""
        with self._refusals_logged(old_path):
            super().rename_all_checkpoints(old_path, new_path)  # type: ignore[misc]

    def delete_all_checkpoints(self, path: str) -> None:
        """Delete the checkpoints of a deleted file. Log a warning if a link is in the way."""
        with self._refusals_logged(path):
            super().delete_all_checkpoints(path)  # type: ignore[misc]


class _AsyncCheckpoints(_Checkpoints):
    async def rename_all_checkpoints(self, old_path: str, new_path: str) -> None:
        """Rename the checkpoints of a renamed file. Log a warning if a link is in the way."""
        with self._refusals_logged(old_path):
            await super().rename_all_checkpoints(old_path, new_path)  # type: ignore[misc]

    async def delete_all_checkpoints(self, path: str) -> None:
        """Delete the checkpoints of a deleted file. Log a warning if a link is in the way."""
        with self._refusals_logged(path):
            await super().delete_all_checkpoints(path)  # type: ignore[misc]


def _join(stock: type, common: type) -> type:
    confined = REBOUND[stock]
    members = {"__module__": __name__, "__doc__": f"{stock.__name__} that does not follow links to places outside."}
    joined: type = type(confined)(f"Guarded{stock.__name__}", (common, confined), members)
    CLASSES[stock] = joined
    return joined


CLASSES: dict[type, type] = {}
"""The guarded class for each of Jupyter Server's own classes."""
GuardedFileContentsManager = _join(filemanager.FileContentsManager, _SyncManager)
GuardedAsyncFileContentsManager = _join(filemanager.AsyncFileContentsManager, _AsyncManager)
GuardedLargeFileManager = _join(largefilemanager.LargeFileManager, _SyncManager)
GuardedAsyncLargeFileManager = _join(largefilemanager.AsyncLargeFileManager, _AsyncManager)
GuardedFileCheckpoints = _join(filecheckpoints.FileCheckpoints, _SyncCheckpoints)
GuardedAsyncFileCheckpoints = _join(filecheckpoints.AsyncFileCheckpoints, _AsyncCheckpoints)
GuardedGenericFileCheckpoints = _join(filecheckpoints.GenericFileCheckpoints, _SyncCheckpoints)
GuardedAsyncGenericFileCheckpoints = _join(filecheckpoints.AsyncGenericFileCheckpoints, _AsyncCheckpoints)


def is_guarded(manager_class: type) -> bool:
    """Return True if a contents manager's class is guarded, or will be replaced by a guarded one at server start."""
    return issubclass(manager_class, GuardedContents) or manager_class in CLASSES
