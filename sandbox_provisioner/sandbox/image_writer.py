"""Write the memory of a running sandbox to storage, with the facts that a server needs to restore it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..errors import GuestError, RunscError, SandboxError, UnresponsiveError, UnsaveableError
from ..gvisor.sandbox import GVisorSandbox
from ..persistence import capture, checkpoints
from ..persistence.backends import Stores
from ..persistence.metadata import Checkpoint
from ..persistence.names import checkpoints_prefix
from ..persistence.staging import staging
from ..storage.base import Advance
from ..workers import bulk, control

log = logging.getLogger(__name__)

Contents = Callable[[], Mapping[str, Any]]
"""Return the description of the processes inside, which is stored with the image."""


class ImageWriter:
    """Writes checkpoints and copies of one sandbox to ``stores``, one at a time. Owned by a SandboxHandle."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._inventory: asyncio.Task[dict[str, Any]] | None = None

    async def checkpoint(
        self,
        instance: GVisorSandbox,
        contents: Contents,
        record: Callable[[Checkpoint], Awaitable[None]],
        insist: float | None,
        advance: Advance,
    ) -> Checkpoint:
        """Store the memory of ``instance`` and return the checkpoint. ``record`` must commit it; then the sandbox ends.

        On failure the sandbox continues to run. Errors and ``insist`` are those of SandboxHandle.save.
        """
        store, began = self._stores.required_checkpoints(), time.monotonic()
        below = f"{checkpoints_prefix(instance.sandbox_id)}{checkpoints.new_name()}/"
        made: list[Checkpoint] = []
        async with staging(self._stores.staging) as folder:
            files = await self._prepare(instance, insist)
            image = folder / "image"

            async def commit() -> None:
                artifact = await bulk(checkpoints.save, store, below, image, advance)
                seconds = time.monotonic() - began
                made.append(await control(capture.recorded, instance, artifact, files, contents(), seconds))
                await record(made[0])

            try:
                await instance.checkpoint(image, commit, force=insist is not None)
            except RunscError as error:
                if insist is None or instance.reachable or error.hosts_fault:
                    raise
                problem = f"did not help to save itself, and runsc cannot save it without: {error.problem}"
                raise UnresponsiveError(instance.sandbox_id, problem) from error
        return made[0]

    async def copy(self, instance: GVisorSandbox, contents: Contents, sandbox_id: str, advance: Advance) -> Checkpoint:
        """Store the memory of ``instance``, which runs on, as a checkpoint of ``sandbox_id``, and return it."""
        store, began = self._stores.required_checkpoints(), time.monotonic()
        below = f"{checkpoints_prefix(sandbox_id)}{checkpoints.new_name()}/"
        async with staging(self._stores.staging) as folder:
            image = folder / "image"
            files = await self._take_inventory(instance)
            await instance.copy(image)
            artifact = await bulk(checkpoints.save, store, below, image, advance)
        seconds = time.monotonic() - began
        return await control(capture.recorded, instance, artifact, files, contents(), seconds)

    def give_up_waiting(self, instance: GVisorSandbox) -> None:
        """Interrupt a checkpoint or copy that waits for the guest. Called when the server stops."""
        if self._inventory:
            self._inventory.cancel()
        instance.hurry()

    async def _take_inventory(self, instance: GVisorSandbox) -> dict[str, Any]:
        """Return the host files that it depends on. Raises SandboxError if ``give_up_waiting`` interrupts that."""
        self._inventory = asyncio.create_task(capture.prepare(instance, self._stores.digests))
        try:
            return await self._inventory
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                self._inventory.cancel()
                raise
            raise SandboxError(f"Sandbox {instance.sandbox_id} did not say in time which files it uses.") from None
        finally:
            self._inventory = None

    async def _prepare(self, instance: GVisorSandbox, insist: float | None) -> dict[str, Any]:
        """Return the host files that it depends on.

        With ``insist``, a guest that fails or takes longer than that many seconds is cut off, and the result is empty.
        """
        try:
            async with asyncio.timeout(insist):
                return await self._take_inventory(instance)
        except (TimeoutError, GuestError, UnsaveableError) as error:
            if insist is None:
                raise
            reason = str(error) or f"it did not answer within {insist:g} seconds"
            log.warning("Sandbox %s is saved without its help: %s", instance.sandbox_id, reason)
            await instance.cut_off()
            return {}
