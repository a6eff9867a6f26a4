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

from ..storage.disk import FOLDER, closing, disk_errors
from ..workers import BULK, control, finished


@asynccontextmanager
async def staging(top: Path) -> AsyncIterator[Path]:
    """Make a new folder in ``top`` for the block; it is removed soon after the block ends.

    The folder is locked while its process lives. Folders that dead processes left are removed as well. All file access
    is done in threads.
    """
    created: list[tuple[Path, int]] = []
    try:
        await finished(control(_create, top, created))
        _in_background(lambda: _collect_quietly(top))
        yield created[0][0]
    finally:
        for folder, lock in created:
            _in_background(partial(_remove, folder, lock))


def _create(top: Path, created: list[tuple[Path, int]]) -> None:
    """Create and lock a folder in ``top``, and add it with its lock to ``created``. Blocks.

    The result is in a list because a cancelled caller gets no return value, but must remove the folder.
    """
    folder = top / uuid4().hex[:12]
    with disk_errors(str(top), "make a folder"):
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(top, fcntl.LOCK_SH):  # waits only while ``_collect`` lists and locks the folders
            folder.mkdir(mode=0o700)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
    created.append((folder, lock))


def _in_background(work: Callable[[], None]) -> None:
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


def _collect(top: Path, mode: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> None:
    """Remove the folders of dead processes; by default, return at once while another process is making a folder."""
    with ExitStack() as stack:
        dead = []
        with suppress(BlockingIOError), locked(top, mode):
            for path in top.iterdir():
                with suppress(OSError):
                    stack.enter_context(locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
                    dead.append(path)
        for path in dead:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(folder: Path, mode: int) -> Iterator[None]:
    """Hold the flock of a folder for the block. With LOCK_NB in ``mode``, raises BlockingIOError if it is locked."""
    with closing(os.open(folder, FOLDER)) as descriptor:
        fcntl.flock(descriptor, mode)
        yield
