"""Acquire, wait for, renew and release leases, and detect their loss, the same way for every kind of lease.

A kind of lease implements the single steps as blocking methods (Attempt, Claim). This module decides when, how often
and in which thread they run.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..errors import ConfigurationError, LeaseHeldError, LeaseLostError, SandboxError, StorageUnavailableError
from ..storage.names import valid_name
from ..workers import Workers
from .base import Lease, Leases, Owner

T = TypeVar("T")

LONGEST_LEASE = 3600.0
OVERTIME = 1.2
"""Lease times, from the last renewal, for which a release is retried: by then others treat the lease as expired."""
THREADS = 32


class Clock:
    """The time that leases are measured by. Tests replace it."""

    def now(self) -> float:
        """Return seconds by a clock that is never set and that continues while the machine is suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds`` of this clock."""
        await asyncio.sleep(seconds)


CLOCK = Clock()


@dataclass(frozen=True)
class Pace:
    """The lease time without renewal, and the intervals of renewal and polling, in seconds."""

    lease_time: float
    renewal: float
    """Interval at which an owner renews its lease and checks for a waiter."""
    poll: float
    """Interval at which a waiter tries to acquire the lease."""

    def __post_init__(self) -> None:
        usable = 0 < self.poll < self.renewal < self.lease_time
        if not usable or (self.lease_time > LONGEST_LEASE and self.lease_time != math.inf):
            raise ConfigurationError(
                "lease_time",
                f"A lease of {self.lease_time:g} s cannot be renewed every {self.renewal:g} s and looked at by others "
                f"every {self.poll:g} s.",
                f"Each must be shorter than the one before, and the lease at most {LONGEST_LEASE:g} s.",
            )

    def retries(self) -> Iterator[float]:
        """Yield the pause in seconds before each further try of a step that failed."""
        pause = self.renewal / 50
        while True:
            yield pause * random.uniform(0.5, 1.0)
            pause = min(pause * 2, self.renewal / 2)


class Claim(Protocol):
    """A lease that this process holds. All methods block, and may be called again after a StorageError."""

    token: int
    renewed: float
    """The clock's time just before the last request that proved the lease ours."""

    def renew(self) -> bool:
        """Prove again that the owner is alive. Return True if another server waits.

        Raises LeaseLostError if the lease is not ours.
        """

    def end(self) -> None:
        """Remove the lease if it exists and is ours. May run during a ``renew``, which must then change nothing."""


class Attempt(Protocol):
    """One attempt to acquire one lease. All methods block, and may be called again after a StorageError."""

    holder: Owner
    """The current owner, known once ``take`` has returned None."""

    def take(self) -> Claim | None:
        """Acquire the lease if it is free or expired. Return None if another server holds it."""

    def ask(self) -> None:
        """Become the waiter if there is no other, or renew that place."""

    def withdraw(self) -> None:
        """Give up the waiter's place."""

    def abandon(self) -> None:
        """Remove everything of this attempt, even a lease that it acquired without learning of it."""


class KeptLeases(Leases):
    """Leases that are each renewed by a task. Their blocking steps run in a separate group of threads.

    asyncio's default threads are not used, because a renewal must not queue behind the upload of a gigabyte.
    """

    def __init__(self, pace: Pace, clock: Clock = CLOCK) -> None:
        self.pace = pace
        self.clock = clock
        self._threads = Workers("sandbox-lease", THREADS)

    @abstractmethod
    def _attempt(self, name: str, owner: Owner) -> Attempt:
        """Return a new attempt for ``owner``."""

    @abstractmethod
    def _holder(self, name: str) -> Owner | None:
        """Return the result of ``holder``. Blocks."""

    async def acquire(self, name: str, owner: Owner, patience: float = 0.0) -> Lease:
        """Acquire the lease of ``name``, waiting up to ``patience`` seconds.

        Raises LeaseHeldError, or StorageUnavailableError if storage cannot be reached for a whole lease time.
        """
        attempt = self._attempt(valid_name("the leases", name), owner)
        try:
            claim = await self._win(attempt, name, patience)
            await self._finish(attempt.withdraw)
        except BaseException:
            await self._finish(attempt.abandon)
            raise
        return KeptLease(name, owner, claim, self.pace, self.clock, self._threads)

    async def holder(self, name: str) -> Owner | None:
        """Return the current owner, or None. Raises StorageUnavailableError."""
        valid_name("the leases", name)
        return await self._insist(lambda: self._holder(name), self.pace.lease_time)

    async def _win(self, attempt: Attempt, name: str, patience: float) -> Claim:
        give_up = self.clock.now() + patience
        while True:
            claim = await self._insist(attempt.take, self.pace.lease_time)
            if claim is not None:
                return claim
            left = give_up - self.clock.now()
            if left <= 0:
                raise LeaseHeldError(name, attempt.holder)
            await self._insist(attempt.ask, self.pace.lease_time)
            await self.clock.sleep(min(self.pace.poll, left))

    async def _insist(self, step: Callable[[], T], within: float) -> T:
        """Run one step, and retry it for ``within`` seconds while storage is unavailable."""
        give_up, retries = self.clock.now() + within, self.pace.retries()
        while True:
            try:
                return await self._do(step)
            except StorageUnavailableError:
                pause = next(retries)
                if self.clock.now() + pause > give_up:
                    raise
            await self.clock.sleep(pause)

    async def _finish(self, step: Callable[[], None]) -> None:
        """Run the last step of an attempt and ignore its failure: the remains will expire."""
        try:
            await self._insist(step, self.pace.renewal)
        except SandboxError:
            pass

    async def _do(self, step: Callable[[], T]) -> T:
        """Run one step in a thread. If cancelled, wait for the step to end, so that it can be undone."""
        running = asyncio.wrap_future(self._threads.submit(step))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running}, timeout=min(self.pace.lease_time, LONGEST_LEASE))
            raise


class KeptLease(Lease):
    """A lease and the task that renews it."""

    def __init__(self, name: str, owner: Owner, claim: Claim, pace: Pace, clock: Clock, threads: Workers) -> None:
        self.name = name
        self.owner = owner
        self.token = claim.token
        self.wanted = asyncio.Event()
        self.lost = asyncio.get_running_loop().create_future()
        self._claim = claim
        self._pace = pace
        self._clock = clock
        self._threads = threads
        self._ended = False
        self._releasing = asyncio.Lock()
        self._keeper = asyncio.create_task(self._keep(), name=f"lease of {name}")

    async def release(self) -> None:
        """Stop renewing, and remove the lease."""
        async with self._releasing:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            self.lost.cancel()
            if not self._ended:
                await self._end()
                self._ended = True

    async def _keep(self) -> None:
        reason = await self._until_lost()
        self.wanted.clear()
        if not self.lost.done():
            self.lost.set_result(reason)

    async def _until_lost(self) -> str:
        """Renew the lease until it is lost. Return the reason.

        A renewal that is not confirmed before the lease would have expired is too late, even if it succeeded: others
        may already have acted on the older state.
        """
        pause, retries, trouble = self._pace.renewal, self._pace.retries(), ""
        while True:
            await self._clock.sleep(max(0.0, min(pause, self._expiry() - self._clock.now())))
            expiry = self._expiry()
            if self._clock.now() >= expiry:
                return self._ran_out(trouble or "this process was suspended")
            try:
                async with asyncio.timeout(expiry - self._clock.now()):
                    wanted = await self._do(self._claim.renew)
            except LeaseLostError as error:
                return error.reason
            except Exception as error:  # Any error: unless a later try succeeds, the lease expires.
                trouble, pause = str(error) or trouble or "storage did not answer", next(retries)
                continue
            if self._clock.now() >= expiry:
                return self._ran_out("this process was suspended")
            (self.wanted.set if wanted else self.wanted.clear)()
            pause, retries, trouble = self._pace.renewal, self._pace.retries(), ""

    def _ran_out(self, trouble: str) -> str:
        return f"it was not renewed for {self._pace.lease_time:g} s: {trouble}"

    async def _end(self) -> None:
        retries, give_up = self._pace.retries(), self._claim.renewed + self._pace.lease_time * OVERTIME
        while True:
            try:
                return await self._do(self._claim.end)
            except SandboxError:
                pause = next(retries)
                if self._clock.now() + pause >= give_up:
                    return None
            await self._clock.sleep(pause)

    def _expiry(self) -> float:
        return self._claim.renewed + self._pace.lease_time

    async def _do(self, step: Callable[[], T]) -> T:
        return await self._threads.run(step)
