"""Pack the files that a sandbox wrote in its home, in /tmp and on its root into a tar, and unpack them in a guest.

The tar contains neither memory nor mounted folders of the host. Its contents are untrusted: the host only counts
its bytes and checks its structure, and never unpacks it.
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

from ..errors import DiskFullError, SnapshotError
from ..gvisor.bundle import BundleSpec, visible_mounts
from ..gvisor.guest_tool import GuestTool
from ..gvisor.sandbox import GVisorSandbox
from .tar_check import TarCheck

PIECE = 1 << 18

logger = logging.getLogger(__name__)


async def save(sandbox: GVisorSandbox, target: Path, limit: int) -> int:
    """Write a snapshot of a running sandbox to ``target``, of ``limit`` bytes at most, and return its size.

    Raises SnapshotError, GuestError or DiskFullError; there is no ``target`` then. A file that shrinks while it is
    read is filled up with zeros; that is logged.
    """
    with _disk_errors(target), _created(target) as file:
        return await _receive(sandbox, file, limit)


async def load(sandbox: GVisorSandbox, source: Path) -> None:
    """Unpack a snapshot in a running sandbox. Raises SnapshotError if ``source`` is not a snapshot, and GuestError.

    Files whose place is covered by a host folder are left out; that is logged.
    """
    check = TarCheck()
    async with GuestTool.run(
        sandbox, "Putting the snapshot in place", "archive.py", "extract", *_places(sandbox.spec), stdin=True
    ) as tool:
        try:
            with _disk_errors(source), source.open("rb") as file:
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
                        "Delete files that are not needed in the sandbox's home and /tmp.",
                    )
                check.feed(data)
                await asyncio.to_thread(_write, file, data)
            _log(sandbox, await tool.finish())
            check.end()
        except ValueError as error:
            raise SnapshotError(f"Sandbox {sandbox.sandbox_id} sent an invalid tar archive: {error}.") from error
    return size


def _places(spec: BundleSpec) -> list[str]:
    """Return NAME=FOLDER for each folder to pack or unpack: root, /tmp and home, unless mounted from the host."""
    of_the_host = {mount.destination for mount in visible_mounts(spec) if mount.source}
    places = {"/": "root", "/tmp": "tmp", spec.home: "home"}
    return [f"{name}={folder}" for folder, name in places.items() if folder not in of_the_host]


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """Yield an empty file, which is removed if the block raises."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb", buffering=0) as file:
        try:
            yield file
        except BaseException:
            path.unlink()
            raise


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Translate OSError into DiskFullError or SnapshotError."""
    try:
        yield
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            raise DiskFullError(str(error)) from error
        raise SnapshotError(f"The snapshot {path} cannot be read or written: {error.strerror}.") from error


def _log(sandbox: GVisorSandbox, words: str) -> None:
    if words:
        logger.warning("A snapshot of sandbox %s is not complete: %s", sandbox.sandbox_id, words)
