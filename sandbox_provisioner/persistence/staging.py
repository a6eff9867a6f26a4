"""Provide temporary folders for images on their way to or from storage, and remove those of dead processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

from ..storage.disk import disk_errors
from ..workers import BULK, control, finished


@asynccontextmanager
async def staging(top: Path) -> AsyncIterator[Path]:
    """Make a new folder in ``top`` for the block; it is removed soon after the block ends.

    The folder is locked while its process lives. Folders that dead processes left are removed as well. All file access
    is done in threads.
    """
    made: list[tuple[Path, int]] = []
    try:
        await finished(control(_make, top, made))
        _later(lambda: _collect_quietly(top))
        yield made[0][0]
    finally:
        for folder, lock in made:
            _later(partial(_remove, folder, lock))


def _make(top: Path, made: list[tuple[Path, int]]) -> None:
    """Add a new, locked folder in ``top`` and its lock to ``made``, where a cancelled caller finds them. Blocks."""
    folder = top / uuid4().hex[:12]
    with disk_errors(str(top), "make a folder"):
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(top, fcntl.LOCK_SH):  # ``_collect`` excludes this only while it lists and locks
            folder.mkdir(mode=0o700)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
    made.append((folder, lock))


def _later(work: Callable[[], None]) -> None:
    try:
        BULK.submit(work)
    except RuntimeError:  # the interpreter is exiting and starts no more threads
        work()


def _collect_quietly(top: Path) -> None:
    with suppress(OSError):
        _collect(top)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def collect(top: Path) -> None:
    """Remove the folders in ``top`` whose processes are dead. Blocks. Raises StorageError or DiskFullError."""
    with disk_errors(str(top), "remove a folder"), suppress(FileNotFoundError):
        _collect(top, fcntl.LOCK_EX)


def _collect(top: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> None:
    """Remove the folders of dead processes; by default, return at once while another process is making a folder."""
    with ExitStack() as stack:
        dead = []
        with suppress(BlockingIOError), locked(top, how):
            for path in top.iterdir():
                with suppress(OSError):
                    stack.enter_context(locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
                    dead.append(path)
        for path in dead:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """Hold the flock of a folder for the block. Raises BlockingIOError with LOCK_NB if the lock is taken."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
