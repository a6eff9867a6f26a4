"""Supervise one open sandbox: save it when idle, hand it over on request, replace a lost lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import FencedError, LeaseHeldError, SandboxError
from ..lock.base import Owner
from ..workers import finished
from .handle import SandboxHandle

log = logging.getLogger(__name__)

PAUSE = 5.0
"""Seconds until the supervisor continues after an error."""
SHORTEST = 0.1
"""Minimum seconds between two checks for idleness, even with a shorter idle timeout."""


class Supervisor:
    """The background work for one persistent sandbox. SandboxManager runs ``run`` as a task until the handle is closed.

    ``owner`` returns a new identity for an attempt to acquire a lease. ``hand_over`` saves and releases the sandbox if
    another server asks for it; None if hand-offs are disabled. ``lose`` releases a sandbox that another server took.
    """

    def __init__(
        self,
        handle: SandboxHandle,
        owner: Callable[[], Owner],
        hand_over: Callable[[SandboxHandle], Awaitable[None]] | None,
        lose: Callable[[SandboxHandle, str], Awaitable[None]],
    ) -> None:
        self._handle = handle
        self._owner = owner
        self._hand_over = hand_over
        self._lose = lose

    async def run(self) -> None:
        """Supervise the sandbox until it is closed. An unexpected error is logged, and the work goes on."""
        handle = self._handle
        while not handle.closed:
            try:
                await self._wait_and_react()
            except (FencedError, LeaseHeldError) as error:
                await self._lose(handle, str(error))
            except SandboxError as error:
                log.error("Sandbox %s: %s", handle.metadata.title, error)
                await asyncio.sleep(PAUSE)
            except Exception:
                log.exception(
                    "Sandbox %s: error in the idle timer, the hand-off or the lease; trying again in %g s",
                    handle.metadata.title,
                    PAUSE,
                )
                await asyncio.sleep(PAUSE)

    async def _wait_and_react(self) -> None:
        """Save the sandbox once it is idle, hand it over once another server asks for it, or replace a lost lease."""
        handle, lease = self._handle, self._handle.lease
        wanted = asyncio.create_task(lease.wanted.wait())
        waiting: set[asyncio.Future[Any]] = {lease.lost, wanted} if self._hand_over else {lease.lost}
        try:
            idle_in = self._idle_in()
            patience = None if idle_in is None else max(idle_in, SHORTEST)
            await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if lease.lost.done():
                await self._replace_lease()
            elif self._hand_over and wanted.done():
                await self._hand_over(handle)
            elif self._idle_in() == 0:
                await self._save_idle()
        finally:
            wanted.cancel()

    def _idle_in(self) -> float | None:
        """Return the seconds until the sandbox has been idle for ``idle_timeout``; None if that is not set."""
        handle = self._handle
        if handle.idle_timeout is None or not handle.running:
            return handle.idle_timeout
        if handle.observer.busy():
            handle.touch()
        return max(0.0, handle.last_activity + handle.idle_timeout - time.monotonic())

    async def _save_idle(self) -> None:
        handle = self._handle
        async with handle.lock:
            if handle.closed or not handle.running or self._idle_in() != 0:
                return
            handle.touch()  # a failure is retried after another idle timeout
            await finished(handle.save_locked())

    async def _replace_lease(self) -> None:
        """Replace a lost lease, so that the sandbox continues if the lease only expired while storage was unreachable.

        Raises FencedError or LeaseHeldError if another server took the sandbox.
        """
        log.warning("Sandbox %s lost its lease: %s", self._handle.metadata.title, self._handle.lease.lost.result())
        async with self._handle.lock:
            await self._handle.memory.stored.replace_lease(self._owner())
