"""What leases of every kind have in common: trying, waiting, renewing, noticing a loss, and letting go.

A kind of lease says, in methods that block, how each single step is done (Attempt, Claim); when it is done, how often
again, and in which thread, is said here.
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
"""A release is tried for so many times as long as the lease lasts: by then all others take it for dead."""
THREADS = 32


def now() -> float:
    """Seconds by a clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Pace:
    """How long a lease lasts without renewal, and how often things are done; in seconds."""

    lease_time: float
    renewal: float
    """How often an owner renews its lease, and looks whether somebody waits for it."""
    poll: float
    """How often a waiter looks whether it is free."""

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
        """How long to wait before each further try of something that failed."""
        pause = self.renewal / 50
        while True:
            yield pause * random.uniform(0.5, 1.0)
            pause = min(pause * 2, self.renewal / 2)


class Claim(Protocol):
    """A lease that this process has. All methods block, and may be called again after a StorageError."""

    token: int
    renewed: float
    """``now()`` from before the request was sent that last proved it ours."""

    def renew(self) -> bool:
        """Prove once more that the owner lives; tells whether somebody waits. LeaseLostError if it is not ours."""

    def end(self) -> None:
        """Remove it, if it is there and ours. May run while a ``renew`` does, which must then change nothing."""


class Attempt(Protocol):
    """One attempt to get one lease. All methods block, and may be called again after a StorageError."""

    holder: Owner
    """Who has it, once ``take`` failed."""

    def take(self) -> Claim | None:
        """Get the lease if it is free, or its owner dead."""

    def ask(self) -> None:
        """Be the one waiter, if there is none, or go on being it."""

    def withdraw(self) -> None:
        """Be the waiter no more."""

    def abandon(self) -> None:
        """Leave nothing of this attempt, not even a lease that it got and nobody was told of."""


class KeptLeases(Leases):
    """Leases that are kept by a task each, and whose blocking steps run in a few threads of their own.

    Not in asyncio's: a renewal must not queue behind the uploads of a gigabyte.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._threads = Workers("sandbox-lease", THREADS)

    @abstractmethod
    def _attempt(self, name: str, owner: Owner) -> Attempt:
        """A new attempt for ``owner``."""

    @abstractmethod
    def _holder(self, name: str) -> Owner | None:
        """What ``holder`` tells. Blocks."""

    async def acquire(self, name: str, owner: Owner, patience: float = 0.0) -> Lease:
        """See ``Leases``; StorageUnavailableError if storage cannot be reached for as long as a lease lasts."""
        attempt = self._attempt(valid_name("the leases", name), owner)
        try:
            claim = await self._win(attempt, name, patience)
            await self._finish(attempt.withdraw)
        except BaseException:
            await self._finish(attempt.abandon)
            raise
        return KeptLease(name, owner, claim, self.pace, self._threads)

    async def holder(self, name: str) -> Owner | None:
        """See ``Leases``."""
        valid_name("the leases", name)
        return await self._insist(lambda: self._holder(name), self.pace.lease_time)

    async def _win(self, attempt: Attempt, name: str, patience: float) -> Claim:
        give_up = now() + patience
        while True:
            claim = await self._insist(attempt.take, self.pace.lease_time)
            if claim is not None:
                return claim
            left = give_up - now()
            if left <= 0:
                raise LeaseHeldError(name, attempt.holder)
            await self._insist(attempt.ask, self.pace.lease_time)
            await asyncio.sleep(min(self.pace.poll, left))

    async def _insist(self, step: Callable[[], T], within: float) -> T:
        """Do one step, again and again while storage is out of reach, for ``within`` seconds."""
        give_up, retries = now() + within, self.pace.retries()
        while True:
            try:
                return await self._do(step)
            except StorageUnavailableError:
                pause = next(retries)
                if now() + pause > give_up:
                    raise
            await asyncio.sleep(pause)

    async def _finish(self, step: Callable[[], None]) -> None:
        """Do the last step of an attempt as well as it can be done; what is left of it will run out."""
        try:
            await self._insist(step, self.pace.renewal)
        except SandboxError:
            pass

    async def _do(self, step: Callable[[], T]) -> T:
        """Run one step in a thread; who cancels this waits for its end, so that it can be undone."""
        running = asyncio.wrap_future(self._threads.submit(step))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running}, timeout=min(self.pace.lease_time, LONGEST_LEASE))
            raise


class KeptLease(Lease):
    """A lease and the task that keeps it."""

    def __init__(self, name: str, owner: Owner, claim: Claim, pace: Pace, threads: Workers) -> None:
        self.name = name
        self.owner = owner
        self.token = claim.token
        self.wanted = asyncio.Event()
        self.lost = asyncio.get_running_loop().create_future()
        self._claim = claim
        self._pace = pace
        self._threads = threads
        self._ended = False
        self._releasing = asyncio.Lock()
        self._keeper = asyncio.create_task(self._keep(), name=f"lease of {name}")

    async def release(self) -> None:
        """See ``Lease``."""
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
        """Renew it for as long as that goes; why it does not go on.

        A renewal that was not known to have succeeded by the time at which the lease would have ended came too late,
        whatever its answer: others may have gone by what they saw before.
        """
        pause, retries, trouble = self._pace.renewal, self._pace.retries(), ""
        while True:
            await asyncio.sleep(max(0.0, min(pause, self._expiry() - now())))
            expiry = self._expiry()
            if now() >= expiry:
                return self._ran_out(trouble or "this process stood still")
            try:
                async with asyncio.timeout(expiry - now()):
                    wanted = await self._do(self._claim.renew)
            except LeaseLostError as error:
                return error.reason
            except Exception as error:  # whatever it is: unless a later try succeeds, the lease runs out
                trouble, pause = str(error) or trouble or "storage did not answer", next(retries)
                continue
            if now() >= expiry:
                return self._ran_out("this process stood still")
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
                if now() + pause >= give_up:
                    return None
            await asyncio.sleep(pause)

    def _expiry(self) -> float:
        return self._claim.renewed + self._pace.lease_time

    async def _do(self, step: Callable[[], T]) -> T:
        return await self._threads.run(step)
