"""A folder of one's own for images on their way to or from storage; those of dead processes are collected."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from .storage.disk import disk_errors


@contextmanager
def staging(top: Path) -> Iterator[Path]:
    """A new folder in ``top``, which is on the storage's own disk where there is one; gone when the block ends.

    It is locked for as long as its process lives. What others left is removed on the way.
    """
    folder = top / uuid4().hex[:12]
    with disk_errors(str(top), "make a folder"):
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(top, fcntl.LOCK_EX) as _:
            _collect(top)
            folder.mkdir(mode=0o700)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def collect(top: Path) -> None:
    """Remove the folders in ``top`` whose processes are dead. Blocks."""
    with disk_errors(str(top), "remove a folder"), suppress(FileNotFoundError), locked(top, fcntl.LOCK_EX):
        _collect(top)


def _collect(top: Path) -> None:
    for path in top.iterdir():
        try:
            with locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


@contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """The lock of a folder, as flock has it: BlockingIOError with LOCK_NB if somebody else has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
