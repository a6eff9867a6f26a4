"""Standby: copies of templates that run already and that nobody has claimed, so that a start costs only the hand-over.

A copy's folder is chosen when it is restored. So those that stand by are for the folder in which a kernel of their
kernelspec was started last; one that is started elsewhere comes of the template, and the next ones stand by there.
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

from .activation import ACTIVATING, tell
from .bundle import Mount
from .errors import GuestError, SandboxError
from .folders import identity, replaced
from .guest.powers import CARRIED
from .gvisor import GVisorSandbox
from .iothread import IO
from .kernel import IDENTIFY_TRIES
from .prospects import Prospect
from .states import State

log = logging.getLogger(__name__)

LATER = 1.0
"""Seconds for which the kernel that was started just now goes before."""
LOOK_EVERY = 5.0
SCARCE = 0.1
"""The part of the memory below which nothing stands by."""


Place = tuple[tuple[int, int], ...]
"""By what the folders that a sandbox sees are known for as long as it has them: their devices and inodes."""


@dataclass(frozen=True)
class Copy:
    """One that stands by, with the folders of this place."""

    prospect: Prospect
    sandbox: GVisorSandbox
    place: Place
    created: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def kernel_name(self) -> str:
        """The kernelspec that it is for."""
        return self.prospect.recipe.kernel_name

    def fits(self, prospect: Prospect) -> bool:
        """Whether it is what ``prospect`` would make."""
        template, own = prospect.template, self.prospect.template
        same = template is not None and own is not None and template.image == own.image
        same = same and prospect.spec.carried == self.prospect.spec.carried and self.sandbox.state == State.RUNNING
        return same and _place(prospect) == self.place


class Standby:
    """What stands by in this process. All methods belong to the I/O thread, unless they say otherwise."""

    def __init__(self) -> None:
        self._copies: list[Copy] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def copies(self) -> list[Copy]:
        """Those that there are; for any thread."""
        return list(self._copies)

    def take(self, prospect: Prospect) -> GVisorSandbox | None:
        """One that is what ``prospect`` would make, which is the caller's from now on; None if there is none."""
        for copy in self._copies:
            if copy.fits(prospect):
                self._copies.remove(copy)
                return copy.sandbox
        return None

    def aim(self, prospect: Prospect, count: int) -> None:
        """Have ``count`` copies stand by for the next start like this one, and no others of its kernelspec."""
        name = prospect.recipe.kernel_name
        if not count and not any(copy.kernel_name == name for copy in self._copies):
            return
        IO.hold(self, self.close)
        before = self._tasks.get(name)
        if before:
            before.cancel()
        self._tasks[name] = asyncio.create_task(self._keep(prospect, count, before))

    async def close(self) -> None:
        """End them all."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end(self.copies)

    async def drop(self, sandbox_id: str) -> None:
        """End one; another takes its place."""
        await self._end([copy for copy in self._copies if copy.sandbox.sandbox_id == sandbox_id])

    async def end(self) -> None:
        """End them all, from any other thread; the I/O thread may end then."""
        if IO.held_by(self):
            await IO.run(self.close())
            await IO.release(self)

    def forget(self) -> None:
        """Called in a forked child: they are its parent's."""
        self._copies, self._tasks = [], {}

    async def _keep(self, prospect: Prospect, count: int, before: asyncio.Task[None] | None) -> None:
        """See to it, for as long as nobody else is told to, that there are so many; none if memory is scarce."""
        if before:
            await asyncio.gather(before, return_exceptions=True)
        await asyncio.sleep(LATER)
        name = prospect.recipe.kernel_name
        while count:
            own = [copy for copy in self._copies if copy.kernel_name == name]
            if scarce() or await asyncio.to_thread(prospect.outdated):
                break
            await self._end([copy for copy in own if not copy.fits(prospect)])
            fitting = [copy for copy in self._copies if copy.fits(prospect)]
            if len(fitting) < count:
                try:
                    await self._add(prospect)
                except (SandboxError, OSError) as error:
                    log.warning("No copy of the template of %s stands by: %s", name, error)
                    break
                await asyncio.sleep(LATER if len(fitting) + 1 < count else 0)
            else:
                await self._end(fitting[count:])
                await asyncio.sleep(LOOK_EVERY)
        await self._end([copy for copy in self._copies if copy.kernel_name == name])

    async def _add(self, prospect: Prospect) -> None:
        """Restore a copy, and have done all that does not depend on whose it will be."""
        sandbox = GVisorSandbox(str(uuid4()), prospect.spec, prospect.recipe.runsc, prospect.recipe.platform)
        folder, place = prospect.spec.carried, _place(prospect)
        if folder is None or place is None:
            raise SandboxError("The folder is gone.")
        try:
            with prospect.image() as image:
                await sandbox.start(image)
            async with asyncio.timeout(ACTIVATING):
                await self._rehearse(sandbox, folder)
        except TimeoutError:
            await asyncio.shield(sandbox.delete())
            raise SandboxError(f"It was not ready within {ACTIVATING:g} seconds.") from None
        except BaseException:
            await asyncio.shield(sandbox.delete())
            raise
        self._copies.append(Copy(prospect, sandbox, place))

    @staticmethod
    async def _rehearse(sandbox: GVisorSandbox, folder: Mount) -> None:
        """Have its folder in its place, and hear that its kernel listens."""
        for _ in range(IDENTIFY_TRIES):
            expected = identity(folder._replace(destination=CARRIED))
            try:
                await sandbox.link.activate(folder=folder.destination, files={}, expect=expected, outlive=False)
                break
            except GuestError as error:
                if error.errno != errno.ESTALE:  # somebody writes into the folder
                    raise
        else:
            raise replaced(folder)
        await tell(sandbox.link, op="report")

    async def _end(self, copies: list[Copy]) -> None:
        for copy in copies:
            if copy in self._copies:
                self._copies.remove(copy)
                await asyncio.shield(copy.sandbox.delete())


def _place(prospect: Prospect) -> Place | None:
    """By what the folders that ``prospect`` shows are known now; None if one is gone."""
    shown = [prospect.spec.carried, *prospect.spec.mounts]
    try:
        found = [os.stat(mount.source) for mount in shown if mount and mount.source]
    except OSError:
        return None
    return tuple((one.st_dev, one.st_ino) for one in found)


def scarce(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether little memory is left, on this machine or in a control group that this process is in."""
    return any(left < SCARCE * total for left, total in _memory(proc, cgroups))


def _memory(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """What is left of what there is, in bytes, for each limit that is known."""
    with suppress(OSError, ValueError, LookupError):
        sizes = _numbers(proc / "meminfo")
        yield sizes["MemAvailable:"], sizes["MemTotal:"]
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = cgroups / line[len("0::/") :]
                yield from filter(None, map(_left, (own, *own.parents)))


def _left(cgroup: Path) -> tuple[int, int] | None:
    """What a control group has left of its limit; what its files keep in memory can be had back."""
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        return limit - used + _numbers(cgroup / "memory.stat").get("inactive_file", 0), limit
    except (OSError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


STANDBY = Standby()
os.register_at_fork(after_in_child=STANDBY.forget)
