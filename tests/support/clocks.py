"""A clock for leases that jumps to the end of the next sleep instead of waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sandbox_provisioner.lock.base import Clock, Leases
from sandbox_provisioner.workers import Workers

QUIET_TURNS = 20
"""Number of iterations of the loop without a running worker after which all tasks count as waiting."""


class JumpingClock(Clock):
    """A clock that stops while a worker of watched leases runs, and otherwise jumps to the end of the next sleep.

    While a test awaits anything except ``sleep`` and these workers, the clock runs much faster than real time.
    """

    def __init__(self) -> None:
        self._now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []
        self._watched: list[Workers] = []
        self.on_jump: Callable[[float], None] = lambda elapsed: None
        """Called after each jump with the seconds since the start, so that a test can set another clock."""

    def now(self) -> float:
        """Return the current time."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds`` of this clock."""
        sleeper = self._now + max(0.0, seconds), asyncio.get_running_loop().create_future()
        self._sleepers.append(sleeper)
        try:
            await sleeper[1]
        finally:
            self._sleepers.remove(sleeper)

    def watch(self, leases: Leases) -> Leases:
        """Stop the clock while workers of these leases run. Returns the leases."""
        self._watched.append(leases._threads)
        return leases

    async def run(self) -> None:
        """Jump repeatedly, until cancelled."""
        while True:
            await self._wait_until_quiet()
            waiting = [(moment, woken) for moment, woken in self._sleepers if not woken.done()]
            if waiting:
                moment, woken = min(waiting, key=lambda sleeper: sleeper[0])
                if moment > self._now:
                    self._now = moment
                    self.on_jump(moment - 1000.0)
                woken.set_result(None)

    async def _wait_until_quiet(self) -> None:
        quiet = 0
        while quiet < QUIET_TURNS:
            await asyncio.sleep(0)
            quiet += 1
            while any(workers._jobs or len(workers._threads) > len(workers._idle) for workers in self._watched):
                await asyncio.sleep(0.0005)
                quiet = 0
