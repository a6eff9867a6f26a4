"""Snapshots of a sandbox's files: what it wrote in its home, in /tmp and on its root, as a tar that only guests unpack.

Memory is not in it, nor are the host's folders that the sandbox sees. The tar is a stranger's: here its bytes are
counted and its structure is followed, and no more.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from .bundle import BundleSpec, windows
from .errors import DiskFullError, SnapshotError
from .guesttool import GuestTool
from .gvisor import GVisorSandbox
from .tarcheck import TarCheck

PIECE = 1 << 18

logger = logging.getLogger(__name__)


async def save(sandbox: GVisorSandbox, target: Path, limit: int) -> int:
    """Write a snapshot of a running sandbox to ``target``, of ``limit`` bytes at most; returns its size.

    SnapshotError, GuestError or DiskFullError say why there is none; then there is no file either. A file that
    changes meanwhile is in it as it was found, and logged.
    """
    partial = target.with_name(f".{target.name}.{uuid4().hex[:8]}")
    try:
        with _words(target):
            with _created(partial) as file:
                size = await _receive(sandbox, file, limit)
                await asyncio.to_thread(os.fsync, file.fileno())
            partial.rename(target)
            await asyncio.to_thread(_sync_folder, target.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size


async def load(sandbox: GVisorSandbox, source: Path) -> None:
    """Put a snapshot's files into a running sandbox; SnapshotError or GuestError if it is none, or does not fit.

    What has no place there, because one of the host's folders has taken it, is left out and logged.
    """
    check = TarCheck()
    async with GuestTool.run(
        sandbox, "Putting the snapshot in place", "archive.py", "extract", *_places(sandbox.spec), stdin=True
    ) as tool:
        try:
            with _words(source), source.open("rb") as file:
                while data := await asyncio.to_thread(file.read, PIECE):
                    check.feed(data)
                    if not await tool.write(data):
                        break
                else:
                    check.end()
        except ValueError as error:
            raise SnapshotError(f"{source} is not a snapshot: {error}.") from error
        _log(sandbox, await tool.finish())


async def _receive(sandbox: GVisorSandbox, file: BinaryIO, limit: int) -> int:
    check, size = TarCheck(), 0
    async with GuestTool.run(sandbox, "The snapshot", "archive.py", "create", *_places(sandbox.spec)) as tool:
        try:
            async for data in tool.output():
                size += len(data)
                if size > limit:
                    raise SnapshotError(
                        f"The snapshot of sandbox {sandbox.sandbox_id} is larger than {limit:,} bytes.",
                        "Delete what is not needed in the sandbox's home and /tmp, or allow more.",
                    )
                check.feed(data)
                await asyncio.to_thread(_write, file, data)
            _log(sandbox, await tool.finish())
            check.end()
        except ValueError as error:
            raise SnapshotError(f"Sandbox {sandbox.sandbox_id} sent a snapshot that is no tar: {error}.") from error
    return size


def _places(spec: BundleSpec) -> list[str]:
    """What of the sandbox is its own to pack and unpack: NAME=FOLDER for each."""
    of_the_host = {mount.destination for mount in windows(spec) if mount.source}
    places = {"/": "root", "/tmp": "tmp", spec.home: "home"}
    return [f"{name}={folder}" for folder, name in places.items() if folder not in of_the_host]


def _created(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _words(path: Path) -> Iterator[None]:
    """Errors of the disk, as ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            raise DiskFullError(str(error)) from error
        raise SnapshotError(f"The snapshot {path} cannot be read or written: {error.strerror}.") from error


def _log(sandbox: GVisorSandbox, words: str) -> None:
    if words:
        logger.warning("A snapshot of sandbox %s is not complete: %s", sandbox.sandbox_id, words)
