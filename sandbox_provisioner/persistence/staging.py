"""A folder of one's own for images on their way to or from storage; those of dead processes are collected."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from .storage.disk import disk_errors
from .workers import BULK


@contextmanager
def staging(top: Path) -> Iterator[Path]:
    """A new folder in ``top``, which is on the storage's own disk where there is one; gone soon after the block ends.

    It is locked for as long as its process lives. What others left is removed, too. Removing large images takes time,
    so that is done in a thread: this may be used on an event loop.
    """
    folder = top / uuid4().hex[:12]
    with disk_errors(str(top), "make a folder"):
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(top, fcntl.LOCK_SH):  # held alone only for as long as it takes to list and lock
            folder.mkdir(mode=0o700)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
    _later(lambda: _collect_quietly(top))
    try:
        yield folder
    finally:
        _later(lambda: _remove(folder, lock))


def _later(work: Callable[[], None]) -> None:
    try:
        BULK.submit(work)
    except RuntimeError:  # the interpreter is exiting, and starts no more threads
        work()


def _collect_quietly(top: Path) -> None:
    with suppress(OSError):
        _collect(top)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def collect(top: Path) -> None:
    """Remove the folders in ``top`` whose processes are dead. Blocks."""
    with disk_errors(str(top), "remove a folder"), suppress(FileNotFoundError):
        _collect(top, fcntl.LOCK_EX)


def _collect(top: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> None:
    """Remove the folders of dead processes; by default not while another one makes a folder."""
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
    """The lock of a folder, as flock has it: BlockingIOError with LOCK_NB if somebody else has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
