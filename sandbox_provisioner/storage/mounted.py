"""MountedStore: objects in a folder that several machines see, where the kernel's locks cannot be relied on."""

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
from .disk import CREATE, READ, closing
from .folder import Check, FolderStore
from .tree import TEMPORARY, parent_of

LOCK = ".lock"


class MountedStore(FolderStore):
    """Objects in a shared or FUSE-mounted folder.

    Writers take turns by creating a lock file, which only one of them can do. One that is the same for ``stale``
    seconds is a dead writer's, and is broken. This needs of the file system that creating a file with O_EXCL and
    renaming one are atomic for all that see it. NFS is so. gcsfuse is not quite: it renames by copying, and two
    machines may both create a file before either closes it. There, use this for files that are written once
    (checkpoints, snapshots), and the bucket itself for metadata and locks. And a writer that is paused for longer
    than ``stale`` in the instant between its last look at the lock and its rename is not stopped by anything.
    """

    kind = "mounted"

    def __init__(self, folder: Path, patience: float = 120.0, stale: float = 30.0) -> None:
        super().__init__(folder)
        self._patience = patience
        self._stale = stale

    @contextmanager
    def _turn(self, root: int) -> Iterator[Check]:
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
                problem = f"Others have kept {self.where} locked for {self._patience:.0f} s."
                raise StorageUnavailableError(self.where, problem, "Try again; see whether its disk still answers.")
            time.sleep(random.uniform(0.001, 0.02))

        def check() -> None:
            if _holder(root) != mine:
                problem = f"This server was paused for so long that others took its place as a writer to {self.where}."
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
    """Who has the lock; None if nobody has it."""
    try:
        with closing(os.open(LOCK, READ, dir_fd=root)) as lock:
            return os.read(lock, 64)
    except FileNotFoundError:
        return None


def _break(root: int, holder: bytes, attempt: int) -> None:
    """Remove the lock of ``holder``: one process does in each attempt, so that nobody removes the next one's lock."""
    with parent_of(root, f"{TEMPORARY}/", create=True) as folder:
        claim = f"break-{hashlib.sha256(holder).hexdigest()}-{attempt}"
        try:
            os.close(os.open(claim, CREATE, 0o600, dir_fd=folder))
        except FileExistsError:
            return
        if _holder(root) == holder:
            os.unlink(LOCK, dir_fd=root)
        os.unlink(claim, dir_fd=folder)
