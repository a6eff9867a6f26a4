"""MountedStore: objects in a folder that several machines share, where flock is not reliable."""

from __future__ import annotations

import hashlib
import os
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StorageUnavailableError
from .disk import CREATE, READ, TEMPORARY, closing, parent_of
from .folder import Check, FolderStore

LOCK = ".lock"


class MountedStore(FolderStore):
    """A store in a shared or FUSE-mounted folder.

    Writers exclude each other by a lock file: only one can create it. A lock file that is unchanged for ``stale``
    seconds belongs to a dead writer, and is removed. The file system must create files with O_EXCL, and rename files,
    atomically for all machines. NFS does. gcsfuse does not: it renames by copying, and two machines may both
    create a file before either closes it. With gcsfuse, use this store for files that are written once (checkpoints,
    snapshots), and the bucket itself for metadata and locks. One race remains: a writer that is paused for longer than
    ``stale`` between its last check of the lock and its rename still renames.
    """

    kind = "mounted"

    def __init__(self, folder: Path, patience: float = 120.0, stale: float = 30.0) -> None:
        super().__init__(folder)
        self._patience = patience
        self._stale = stale

    @contextmanager
    def _exclusive(self, root: int) -> Iterator[Check]:
        mine = uuid.uuid4().hex.encode()
        start = since = time.monotonic()
        seen: bytes | None = None
        while not _take(root, mine):
            holder, now = _holder(root), time.monotonic()
            if holder != seen:
                seen, since = holder, now
            elif holder is not None and now - since > self._stale:
                _break(root, holder, int((now - since) / self._stale))
            if now - start > self._patience:
                problem = f"Other servers have held the write lock of {self.where} for {self._patience:.0f} s."
                raise StorageUnavailableError(self.where, problem, "Try again; check that the file system responds.")
            time.sleep(random.uniform(0.001, 0.02))

        def check() -> None:
            if _holder(root) != mine:
                problem = f"This server was paused for too long and lost the write lock of {self.where}."
                raise StorageUnavailableError(self.where, problem)

        try:
            yield check
        finally:
            if _holder(root) == mine:
                os.unlink(LOCK, dir_fd=root)


def _take(root: int, mine: bytes) -> bool:
    try:
        with closing(os.open(LOCK, CREATE, 0o600, dir_fd=root)) as lock:
            os.write(lock, mine)
    except FileExistsError:
        return False
    return True


def _holder(root: int) -> bytes | None:
    """Return the id of the writer that holds the lock; None if it is free."""
    try:
        with closing(os.open(LOCK, READ, dir_fd=root)) as lock:
            return os.read(lock, 64)
    except FileNotFoundError:
        return None


def _break(root: int, holder: bytes, attempt: int) -> None:
    """Remove the lock of ``holder``. Only one process per ``attempt`` does so: none removes the next holder's lock."""
    with parent_of(root, f"{TEMPORARY}/", create=True) as folder:
        claim = f"break-{hashlib.sha256(holder).hexdigest()}-{attempt}"
        try:
            os.close(os.open(claim, CREATE, 0o600, dir_fd=folder))
        except FileExistsError:
            return
        if _holder(root) == holder:
            os.unlink(LOCK, dir_fd=root)
        os.unlink(claim, dir_fd=folder)
