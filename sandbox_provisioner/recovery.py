"""Recovery: sandboxes that run on though their server was killed are saved, and what such servers left is collected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from . import checkpoints, estates
from .errors import LeaseHeldError, SandboxError, SandboxNotFoundError
from .handle import SandboxHandle
from .lock.base import Owner
from .metadata import Note, decode_note
from .runsc import Runsc
from .runtime import RuntimeFolder, left_behind
from .stores import Stores

log = logging.getLogger(__name__)

AT_ONCE = 2
PATIENCE = 120.0
"""Seconds to wait for the lease of a server that was killed; a dead process on this machine has none."""


@dataclass(frozen=True)
class Recovered:
    """A sandbox whose server was killed: whether its memory was saved, and if not, why, and whether it runs on."""

    sandbox_id: str
    saved: bool
    problem: str = ""
    runs_on: bool = False


@dataclass(frozen=True)
class Recovery:
    """By whom sandboxes of ``stores`` are recovered: ``owner`` makes a name for each lease; ``runsc`` saves them."""

    runsc: Runsc
    stores: Stores
    owner: Callable[[], Owner]

    async def save(self, wanted: Callable[[Note], bool] = lambda note: True) -> list[Recovered]:
        """Save those that are wanted, at most a few at a time."""
        found = []
        for folder in await asyncio.to_thread(lambda: list(left_behind())):
            note = _read(folder)
            if note and note.where == self.stores.metadata.where and wanted(note):
                found.append((folder, note))
            else:
                folder.let_go()
        few = asyncio.Semaphore(AT_ONCE)
        return await asyncio.gather(*(self._rescue(folder, note, few) for folder, note in found))

    async def collect_garbage(self) -> None:
        """Delete what is left of sandboxes whose deletion was interrupted."""
        for sandbox_id in await asyncio.to_thread(estates.doomed, self.stores):
            try:
                await estates.destroy_remains(self.stores, sandbox_id, self.owner())
            except SandboxError as error:
                log.info("What is left of sandbox %s stays for now: %s", sandbox_id, error)

    async def _rescue(self, folder: RuntimeFolder, note: Note, few: asyncio.Semaphore) -> Recovered:
        async with few:
            alive = folder.inhabited
            try:
                handle = await SandboxHandle.rescue(folder, note, self.runsc, self.stores, self.owner(), PATIENCE)
                try:
                    await self._keep(handle, alive)
                except BaseException:
                    await asyncio.shield(handle.lease.release())
                    raise
                await handle.release()
                if alive and not handle.outdated:
                    await self._take_inventory(note)
                return Recovered(note.sandbox_id, saved=alive)
            except SandboxNotFoundError:
                await asyncio.to_thread(folder.remove)
                return Recovered(note.sandbox_id, saved=False, problem="it was deleted")
            except (SandboxError, OSError) as error:
                folder.let_go()
                log.error("Sandbox %s, whose server was killed, was not saved: %s", note.sandbox_id, error)
                runs_on = alive and not isinstance(error, LeaseHeldError)  # whose holder went on without it
                return Recovered(note.sandbox_id, saved=False, problem=str(error), runs_on=runs_on)

    @staticmethod
    async def _keep(handle: SandboxHandle, alive: bool) -> None:
        """Save it, as what it is now, or as a savepoint if another server has gone on without it."""
        if not alive:
            await handle.record_dead()
        elif handle.outdated:
            name = f"left-behind-{checkpoints.new_name()}"
            await handle.savepoint(name)
            log.warning("Sandbox %s went on elsewhere; what ran here is its savepoint %s", handle.sandbox_id, name)
        else:
            await handle.checkpoint()

    async def _take_inventory(self, note: Note) -> None:
        """Checkpoint it again after a restore: only one that can be asked tells which files it depends on."""
        try:
            handle = await SandboxHandle.attach_persistent(
                note.sandbox_id, note.spec, self.runsc, self.stores, self.owner(), note.platform
            )
            try:
                await handle.restore()
                await handle.checkpoint()
            finally:
                await handle.release()
        except SandboxError as error:
            log.warning("Sandbox %s is saved, but what it depends on is not known: %s", note.sandbox_id, error)


def _read(folder: RuntimeFolder) -> Note | None:
    value = folder.read_note()
    try:
        return decode_note(value, str(folder.path)) if value else None
    except SandboxError as error:
        log.error("A sandbox of a killed server cannot be saved: %s", error)
        return None
