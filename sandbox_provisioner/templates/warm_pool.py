"""Keep a warm pool: running copies of templates without an owner, so that a start only has to activate one.

A copy's folder is fixed when it is restored. The pool therefore has copies for the folder of the last start of their
kernelspec. A start in another folder uses the template itself, and the pool is then refilled for that folder.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from ..errors import GuestError, SandboxError
from ..guest.capabilities import CARRIED
from ..gvisor.bundle import Mount, carried_mounts, folder_cover
from ..gvisor.carried import parts
from ..gvisor.mounts import identity, replaced_error
from ..gvisor.sandbox import GVisorSandbox
from ..gvisor.state import State
from ..io_thread import IO
from ..kernel.starting import IDENTIFY_TRIES
from ..mux.activation import ACTIVATING, tell
from .match import TemplateMatch

log = logging.getLogger(__name__)

LATER = 1.0
"""Delay in seconds before the pool is filled, so that the kernel that has just started comes first."""
LOOK_EVERY = 5.0
"""Seconds between two checks of a full pool."""
SCARCE = 0.1
"""Fraction of free memory below which the pool is emptied."""

FolderIds = tuple[tuple[int, int], ...]
"""Device and inode of each host folder that a sandbox sees: a replaced folder has other numbers."""


@dataclass(frozen=True)
class Copy:
    """A running copy in the warm pool, and the folders that it was restored with."""

    match: TemplateMatch
    sandbox: GVisorSandbox
    folder_ids: FolderIds
    created: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def kernel_name(self) -> str:
        """Name of the copy's kernelspec."""
        return self.match.recipe.kernel_name

    def fits(self, match: TemplateMatch) -> bool:
        """Return True if the copy runs, and has the image and the folders that a start of ``match`` would have."""
        template, own = match.template, self.match.template
        if template is None or own is None or template.image != own.image:
            return False
        same_folder = carried_mounts(match.spec) == carried_mounts(self.match.spec)
        return same_folder and _folder_ids(match) == self.folder_ids and self.sandbox.state == State.RUNNING


class WarmPool:
    """The warm pool of this process. I/O thread only, unless a method states otherwise."""

    def __init__(self) -> None:
        self._copies: list[Copy] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def copies(self) -> list[Copy]:
        """The copies in the pool. Thread-safe."""
        return list(self._copies)

    def take(self, match: TemplateMatch) -> GVisorSandbox | None:
        """Remove a copy that fits ``match`` and return its sandbox, now owned by the caller; None if none fits."""
        for copy in self._copies:
            if copy.fits(match):
                self._copies.remove(copy)
                return copy.sandbox
        return None

    def keep_ready(self, match: TemplateMatch, count: int) -> None:
        """Keep ``count`` copies for the next start like this one, and end other copies of the kernelspec."""
        name = match.recipe.kernel_name
        if not count and not any(copy.kernel_name == name for copy in self._copies):
            return
        IO.hold(self, self.close)
        before = self._tasks.get(name)
        if before:
            before.cancel()
        self._tasks[name] = asyncio.create_task(self._keep(match, count, before))

    async def close(self) -> None:
        """Stop refilling the pool and end all copies."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end(self.copies)

    async def drop(self, sandbox_id: str) -> None:
        """End a copy; the pool is refilled later."""
        await self._end([copy for copy in self._copies if copy.sandbox.sandbox_id == sandbox_id])

    async def end(self) -> None:
        """End all copies and release the I/O thread. Do not call in the I/O thread."""
        if IO.held_by(self):
            await IO.run(self.close())
            await IO.release(self)

    def forget(self) -> None:
        """Empty the pool in a forked child process: the copies belong to the parent. Called after ``os.fork``."""
        self._copies, self._tasks = [], {}

    async def _keep(self, match: TemplateMatch, count: int, before: asyncio.Task[None] | None) -> None:
        """Keep ``count`` fitting copies until cancelled.

        End all copies of the kernelspec and stop if memory is scarce, the template is outdated or a restore fails.
        ``before`` is the cancelled task that kept them until now.
        """
        if before:
            await asyncio.gather(before, return_exceptions=True)
        await asyncio.sleep(LATER)
        name = match.recipe.kernel_name
        while count:
            own = [copy for copy in self._copies if copy.kernel_name == name]
            if scarce() or await asyncio.to_thread(match.outdated):
                break
            await self._end([copy for copy in own if not copy.fits(match)])
            fitting = [copy for copy in self._copies if copy.fits(match)]
            if len(fitting) < count:
                try:
                    await self._add(match)
                except (SandboxError, OSError) as error:
                    log.warning("The warm pool of %s could not be filled: %s", name, error)
                    break
                await asyncio.sleep(LATER if len(fitting) + 1 < count else 0)
            else:
                await self._end(fitting[count:])
                await asyncio.sleep(LOOK_EVERY)
        await self._end([copy for copy in self._copies if copy.kernel_name == name])

    async def _add(self, match: TemplateMatch) -> None:
        """Restore a copy and add it to the pool. Raises SandboxError or OSError if that fails."""
        sandbox = GVisorSandbox(str(uuid4()), match.spec, match.recipe.runsc, match.recipe.platform)
        folder, folder_ids, template = match.spec.carried, _folder_ids(match), match.template
        assert template is not None
        if folder is None or folder_ids is None:
            raise SandboxError("The kernel's last folder, or another mounted folder, does not exist any more.")
        try:
            with match.shelf.using(template) as image:
                await sandbox.start(image)
            async with asyncio.timeout(ACTIVATING):
                await self._prepare(sandbox, folder)
        except TimeoutError:
            await asyncio.shield(sandbox.delete())
            raise SandboxError(f"A copy of the template was not ready within {ACTIVATING:g} seconds.") from None
        except BaseException:
            await asyncio.shield(sandbox.delete())
            raise
        self._copies.append(Copy(match, sandbox, folder_ids))

    @staticmethod
    async def _prepare(sandbox: GVisorSandbox, folder: Mount) -> None:
        """Do the part of the activation that is the same for each start: bind the folder, wait for the kernel."""
        for _ in range(IDENTIFY_TRIES):
            expected = identity(folder._replace(destination=CARRIED))
            try:
                await sandbox.connection.activate(
                    folder=folder.destination,
                    parts=parts(sandbox.spec),
                    cover=folder_cover(sandbox.spec),
                    files={},
                    expect=expected,
                    outlive=False,
                )
                break
            except GuestError as error:
                if error.errno != errno.ESTALE:  # ESTALE: a write of others changed the time that identifies the folder
                    raise
        else:
            raise replaced_error(folder)
        await tell(sandbox.connection, op="report")

    async def _end(self, copies: list[Copy]) -> None:
        for copy in copies:
            if copy in self._copies:
                self._copies.remove(copy)
                await asyncio.shield(copy.sandbox.delete())


def _folder_ids(match: TemplateMatch) -> FolderIds | None:
    """Return the device and inode of each folder that ``match`` mounts now; None if one is gone."""
    mounts = [*carried_mounts(match.spec), *match.spec.mounts]
    try:
        found = [os.stat(mount.source) for mount in mounts if mount.source]
    except OSError:
        return None
    return tuple((status.st_dev, status.st_ino) for status in found)


def scarce(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> bool:
    """Return True if little memory is left, on this machine or in a control group of this process."""
    return any(left < SCARCE * total for left, total in _memory(proc, cgroups))


def _memory(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield free and total memory for the machine (kilobytes) and each control group with a limit (bytes)."""
    with suppress(OSError, ValueError, LookupError):
        sizes = _numbers(proc / "meminfo")
        yield sizes["MemAvailable:"], sizes["MemTotal:"]
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = cgroups / line[len("0::/") :]
                yield from filter(None, map(_left, (own, *own.parents)))


def _left(cgroup: Path) -> tuple[int, int] | None:
    """Return a control group's free memory, including its file cache, and its limit; None if it has no limit."""
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        return limit - used + _numbers(cgroup / "memory.stat").get("inactive_file", 0), limit
    except (OSError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


WARM_POOL = WarmPool()
os.register_at_fork(after_in_child=WARM_POOL.forget)
