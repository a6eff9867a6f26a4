"""Save sandboxes that still run after their server was killed, and delete the garbage that such servers left."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import LeaseHeldError, SandboxError, SandboxNotFoundError
from ..errors.saving import ReplacedFilesError
from ..gvisor.bundle import BundleSpec
from ..gvisor.mounts import require_itself, unlinked, within
from ..gvisor.runsc import Runsc
from ..gvisor.runtime_dir import RuntimeFolder, scan
from ..lock.base import Owner
from ..persistence import checkpoints
from ..persistence.backends import Stores
from ..persistence.metadata import GCSSandboxMetadata, Note, decode_note
from ..persistence.staging import collect
from ..workers import control, finished
from . import detached
from .handle import SandboxHandle

log = logging.getLogger(__name__)

KEEP_FILES = {"name": "keep files", "reseed": False}
"""The request to the kernel's process to keep the content of replaced files; see ``guest.hooks``."""
HOOK_SECONDS = 50
MOST_AT_ONCE = 2
"""Maximum number of sandboxes that are rescued at the same time."""
POLL = 0.1
"""Seconds between two checks whether another process has completed a rescue."""
RESCUE_LIMIT = 900.0
"""Maximum seconds that a start waits for a rescue by another thread or process; then the start fails."""


@dataclass(frozen=True)
class Recovered:
    """The result of a rescue: ``saved``, or the ``problem``; ``runs_on`` is True if the sandbox still runs.

    ``title`` has the id, and the notebook if the sandbox's document could be read. ``checkpoint`` is the time of the
    checkpoint from before, which is still stored; empty without one.
    """

    sandbox_id: str
    saved: bool
    problem: str = ""
    runs_on: bool = False
    title: str = ""
    checkpoint: str = ""


@dataclass(frozen=True)
class Recovery:
    """Saves the sandboxes of killed servers. ``owner`` returns a new identity for each attempt to acquire a lease."""

    runsc: Runsc
    stores: Stores
    owner: Callable[[], Owner]

    async def save(self, sandbox_id: str = "") -> list[Recovered]:
        """Save the sandboxes of killed servers, or only ``sandbox_id``.

        If another thread or process is saving ``sandbox_id``, wait for it. Raises SandboxError if that takes too long.
        """
        found: list[tuple[RuntimeFolder, Note]] = []
        try:
            await self._find(sandbox_id, found)
            slots, keys = asyncio.Semaphore(MOST_AT_ONCE), [self._key(note.sandbox_id) for _, note in found]
            ended: Future[None] = Future()
            _in_progress.update(dict.fromkeys(keys, ended))
            try:
                return await asyncio.gather(*(self._rescue(folder, note, slots) for folder, note in found))
            finally:
                ended.set_result(None)
                for key in keys:
                    _in_progress.pop(key, None)
        except BaseException:
            for folder, _ in found:
                folder.release()
            raise

    async def _find(self, sandbox_id: str, found: list[tuple[RuntimeFolder, Note]]) -> None:
        """Wait until no other rescue of ``sandbox_id`` is in progress, and add the folders to rescue to ``found``."""
        give_up = time.monotonic() + RESCUE_LIMIT
        while True:
            rescued = await finished(control(self._scan, sandbox_id, found))
            other = _in_progress.get(self._key(sandbox_id))
            if found or not sandbox_id or not (rescued or other):
                return
            if time.monotonic() > give_up:
                raise SandboxError(
                    f"Sandbox {sandbox_id} is still being saved after its server was killed.",
                    "Nothing is lost. Try again later.",
                )
            if other:
                await asyncio.wait({asyncio.shield(asyncio.wrap_future(other))}, timeout=RESCUE_LIMIT)
            else:
                await asyncio.sleep(POLL)

    def _scan(self, sandbox_id: str, found: list[tuple[RuntimeFolder, Note]]) -> bool:
        """Add the folders of killed servers to ``found``; return True if another rescue has locked one. Blocks."""

        def wanted(value: dict[str, Any] | None) -> bool:
            note, here = _decode(value), self.stores.metadata.where
            return note is not None and note.where == here and sandbox_id in ("", note.sandbox_id)

        folders, rescued = scan(wanted)
        for folder in folders:
            note = _decode(folder.read_note())
            assert note is not None
            found.append((folder, note))
        return bool(rescued)

    def _key(self, sandbox_id: str) -> tuple[str, str]:
        return self.stores.metadata.where, sandbox_id

    async def end(self, sandbox_id: str) -> None:
        """End a sandbox that a killed server left behind, without saving it."""
        found: list[tuple[RuntimeFolder, Note]] = []
        await self._find(sandbox_id, found)
        for folder, _ in found:
            await finished(control(folder.remove))

    async def collect_garbage(self) -> None:
        """Delete staged images of killed servers, and artifacts of sandboxes whose deletion or fork was interrupted."""
        try:
            await asyncio.to_thread(collect, self.stores.staging)
        except SandboxError as error:
            log.warning("Images of killed servers in %s were not deleted: %s", self.stores.staging, error)
        for sandbox_id in await asyncio.to_thread(detached.with_tombstone, self.stores):
            try:
                await detached.destroy_remains(self.stores, sandbox_id, self.owner())
            except SandboxError as error:
                log.info("Sandbox %s: cleanup deferred until the next recovery: %s", sandbox_id, error)

    async def _rescue(self, folder: RuntimeFolder, note: Note, slots: asyncio.Semaphore) -> Recovered:
        async with slots:
            alive, checkpoint = await control(lambda: folder.has_processes), ""
            try:
                handle = await SandboxHandle.rescue(folder, note, self.runsc, self.stores, self.owner(), alive)
                checkpoint = handle.metadata.checkpoint.created if handle.metadata.checkpoint else ""
                try:
                    if alive:
                        await self._save(handle)
                except BaseException:
                    if alive and not handle.outdated:
                        with suppress(SandboxError):
                            await asyncio.shield(handle.memory.stored.record_left_running())
                    await asyncio.shield(handle.lease.release())
                    raise
                await handle.release()
                if alive and not handle.outdated:
                    await self._record_files(note)
                return Recovered(note.sandbox_id, saved=alive, title=handle.metadata.title)
            except SandboxNotFoundError:
                await control(folder.remove)
                return Recovered(note.sandbox_id, saved=False, problem="it was deleted")
            except Exception as error:
                folder.release()
                log.error("Sandbox %s of a killed server was not saved: %s", note.sandbox_id, error)
                runs_on = alive and not isinstance(error, LeaseHeldError)  # its holder has taken over the sandbox
                # Without the remedy of that error: no client can reach the kernel.
                problem = error.problem if isinstance(error, ReplacedFilesError) else str(error)
                return Recovered(note.sandbox_id, False, problem, runs_on, checkpoint=checkpoint)

    @staticmethod
    async def _save(handle: SandboxHandle) -> None:
        """Save the sandbox, as a savepoint if another server has saved a newer state."""
        if handle.outdated:
            name = f"left-behind-{checkpoints.new_name()}"
            await _save_orphan(handle, name)
            log.warning(
                "Sandbox %s: another server has saved a newer state; the state of the killed server is savepoint %s",
                handle.metadata.title,
                name,
            )
        else:
            await _save_orphan(handle)

    async def _record_files(self, note: Note) -> None:
        """Restore and save the sandbox again to record the files it depends on, which an orphan cannot report.

        Does nothing but log if a kernel may have replaced one of the mounted folders by a link since the sandbox began.
        """
        try:
            await control(_require_unlinked, note.spec)
            handle = await SandboxHandle.attach_persistent(
                note.sandbox_id, note.spec, self.runsc, self.stores, self.owner(), note.platform
            )
            try:
                await handle.restore()
                try:
                    await handle.save()
                except SandboxError:  # it ends in the state of its checkpoint: no cell has run since the restore
                    await handle.memory.end()
                    await handle.memory.stored.document.change(GCSSandboxMetadata.given_up)
                    raise
            finally:
                await handle.release()
        except SandboxError as error:
            log.warning(
                "Sandbox %s is saved, but a restore cannot check the files that it uses: they were not recorded: %s",
                note.sandbox_id,
                error,
            )


async def _save_orphan(handle: SandboxHandle, name: str = "") -> None:
    """Save an orphan. If replaced files prevent that, first have its kernel keep their content; then try again."""
    try:
        await handle.save(name)
    except ReplacedFilesError as error:
        log.info("Sandbox %s: its kernel now keeps the replaced files: %s", handle.sandbox_id, error)
        await handle.instance.execute_in_orphan(f"import hooks; hooks.call_hook({KEEP_FILES!r}, {HOOK_SECONDS})")
        await handle.save(name)


def _require_unlinked(spec: BundleSpec) -> None:
    """Raise ConfigurationError if a link that a kernel may have made now leads a mount out of its folder. Blocks."""
    mounts = [mount for mount in (*spec.mounts, spec.carried) if mount and mount.source]
    writable = [mount.source for mount in mounts if mount.writable]
    for mount in mounts:
        if mount.writable:
            require_itself(mount)
        elif not any(within(os.path.realpath(mount.source), folder) for folder in writable):
            unlinked(mount, writable, "mounts")


_in_progress: dict[tuple[str, str], Future[None]] = {}
"""The rescues in progress in this process, by storage and sandbox id. A future is done when its rescue has ended."""


def _decode(value: dict[str, Any] | None) -> Note | None:
    try:
        return decode_note(value, "its rescue note") if value else None
    except SandboxError as error:
        log.error("A sandbox of a killed server cannot be saved: %s", error)
        return None
