"""Leases: the right to run a sandbox, held by one server at a time, with a way to request a hand-off.

Each kind of lease implements the single steps as blocking methods (``Attempt``, ``Claim``). This module decides when,
how often and in which thread they run: acquire, wait, renew, detect a loss, release.

A lease alone does not protect stored state: a process that has not yet noticed its loss could still write. Therefore
each change of a sandbox's document is a compare-and-swap that also checks the lease's token (``persistence.document``).

Limits:

- An owner may learn of a loss only after the next owner has begun. A process that was stopped, or whose machine was
  suspended, notices when it runs again, and its work in progress continues until it checks ``lost``.
- The lease of a crashed owner is free at once only on one machine. Elsewhere it must expire first, and in a shared
  folder, which has no trusted clock, a newcomer must watch it for its whole lease time.
- The waiter is not always next. A free lease goes to the first server that tries; the waiter tries about every second.
- A failed attempt may leave an object behind: if a request reaches storage after its sender gave up, or after a SIGKILL
  in the middle. Such an object is not renewed, and is taken over like the lease of a crashed owner.
- Nothing is guaranteed on storage that breaks its contract: a mounted bucket with cached metadata, a network file
  system without atomic renames, two machines whose clocks run at speeds that differ by more than 5 %.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar
from uuid import uuid4

from .._text import json_object
from ..config import user_name
from ..errors import ConfigurationError, LeaseHeldError, LeaseLostError, SandboxError, StorageUnavailableError
from ..storage.names import valid_name
from ..workers import Workers

T = TypeVar("T")

LONGEST_FIELD = 200
LONGEST_LEASE = 3600.0
OVERTIME = 1.2
"""A release is retried until this many lease times after the last renewal: by then others treat it as expired."""
THREADS = 32


@dataclass(frozen=True)
class Owner:
    """The server that holds a lease, described for error messages. ``nonce`` is new for each attempt to acquire one."""

    server: str
    host: str
    pid: int
    user: str
    nonce: str

    def __str__(self) -> str:
        return f"{self.server} (process {self.pid} of {self.user} on {self.host})"

    @classmethod
    def here(cls, server: str) -> Owner:
        """Return this process as an owner with a new nonce; ``server`` is the server's name in messages for users."""
        return cls(server, socket.gethostname(), os.getpid(), user_name(), uuid4().hex)

    def to_json(self) -> str:
        """Return the stored form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Owner:
        """Parse the result of ``to_json``, or any other, untrusted text.

        Unusable fields become "an unknown ..." (0 for ``pid``); nothing is raised.
        """
        fields = json_object(text)
        texts = {key: _printable(fields.get(key)) or f"an unknown {key}" for key in ("server", "host", "user", "nonce")}
        pid = fields.get("pid")
        return cls(pid=pid if type(pid) is int and 0 < pid < 1 << 32 else 0, **texts)


def _printable(field: object) -> str:
    return "".join(filter(str.isprintable, field[:LONGEST_FIELD])) if isinstance(field, str) else ""


class Clock:
    """The time that leases are measured by. Tests replace it."""

    def now(self) -> float:
        """Return the seconds since the machine was booted, including the time in which it was suspended."""
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
                f"A lease of {self.lease_time:g} s that is renewed every {self.renewal:g} s and polled every "
                f"{self.poll:g} s is not possible.",
                f"Each time must be shorter than the one before, and the lease at most {LONGEST_LEASE:g} s.",
            )

    def pauses(self) -> Iterator[float]:
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
        """Become the waiter of this lease, unless another server already is."""

    def withdraw(self) -> None:
        """Stop being the waiter."""

    def abandon(self) -> None:
        """Remove everything that this attempt stored, even a lease whose creation was not confirmed."""


async def retry(
    step: Callable[[], Awaitable[T]], errors: type[Exception], clock: Clock, pauses: Iterator[float], deadline: float
) -> T:
    """Return the result of ``step``. After one of ``errors``, pause and retry; raise the error at the ``deadline``."""
    while True:
        try:
            return await step()
        except errors:
            pause = next(pauses)
            if clock.now() + pause >= deadline:
                raise
        await clock.sleep(pause)


class Leases(ABC):
    """A place that leases are acquired from. Each lease is renewed by a task.

    Blocking steps run in separate threads, so that a renewal does not queue behind the upload of a gigabyte.
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
        """Return the current owner, as ``holder`` does. Blocks."""

    async def acquire(self, name: str, owner: Owner, patience: float = 0.0) -> Lease:
        """Acquire the lease of ``name``. If a server holds it, request a hand-off and wait up to ``patience`` seconds.

        Only one server at a time can be the waiter. Raises LeaseHeldError, which names the owner, and leaves nothing in
        storage. Raises StorageUnavailableError if storage cannot be reached for a whole lease time.
        """
        attempt = self._attempt(valid_name("the leases", name), owner)
        try:
            claim = await self._wait_for_claim(attempt, name, patience)
            await self._clean_up(attempt.withdraw)
        except BaseException:
            await self._clean_up(attempt.abandon)
            raise
        return Lease(name, owner, claim, self.pace, self.clock, self._threads)

    async def holder(self, name: str) -> Owner | None:
        """Return the current owner of the lease of ``name``; None if it is free or expired.

        Raises StorageUnavailableError.
        """
        valid_name("the leases", name)
        return await self._retry(lambda: self._holder(name), self.pace.lease_time)

    async def _wait_for_claim(self, attempt: Attempt, name: str, patience: float) -> Claim:
        give_up = self.clock.now() + patience
        while True:
            claim = await self._retry(attempt.take, self.pace.lease_time)
            if claim is not None:
                return claim
            left = give_up - self.clock.now()
            if left <= 0:
                raise LeaseHeldError(name, attempt.holder)
            await self._retry(attempt.ask, self.pace.lease_time)
            await self.clock.sleep(min(self.pace.poll, left))

    async def _retry(self, step: Callable[[], T], within: float) -> T:
        """Run one step, and retry it for ``within`` seconds while storage is unavailable."""
        pauses, deadline = self.pace.pauses(), self.clock.now() + within
        return await retry(lambda: self._run(step), StorageUnavailableError, self.clock, pauses, deadline)

    async def _clean_up(self, step: Callable[[], None]) -> None:
        """Run the last step of an attempt and ignore its failure: objects that remain will expire."""
        with suppress(SandboxError):
            await self._retry(step, self.pace.renewal)

    async def _run(self, step: Callable[[], T]) -> T:
        """Run one step in a thread. If cancelled, wait for the step to end, so that it can be undone."""
        running = asyncio.wrap_future(self._threads.submit(step))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running}, timeout=min(self.pace.lease_time, LONGEST_LEASE))
            raise


class Lease:
    """An acquired lease. It renews itself until ``release``, or until it is lost. Belongs to one event loop."""

    def __init__(self, name: str, owner: Owner, claim: Claim, pace: Pace, clock: Clock, threads: Workers) -> None:
        self.name = name
        self.owner = owner
        self.token = claim.token
        """The fencing token: never the same for two leases of a name."""
        self.wanted = asyncio.Event()
        """Set while another server waits for a hand-off."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the lease was lost; cancelled by ``release``."""
        self._claim = claim
        self._pace = pace
        self._clock = clock
        self._threads = threads
        self._ended = False
        self._releasing = asyncio.Lock()
        self._keeper = asyncio.create_task(self._keep(), name=f"lease of {name}")

    async def release(self) -> None:
        """Release the lease; return when its task has ended and its object is deleted. May be called again.

        If storage cannot be reached, it retries until other servers treat the lease as expired, and then gives up.
        """
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
        pause, pauses, trouble = self._pace.renewal, self._pace.pauses(), ""
        while True:
            await self._clock.sleep(max(0.0, min(pause, self._expiry() - self._clock.now())))
            expiry = self._expiry()
            if self._clock.now() >= expiry:
                return self._expired(trouble or "this process was suspended")
            try:
                async with asyncio.timeout(expiry - self._clock.now()):
                    wanted = await self._threads.run(self._claim.renew)
            except LeaseLostError as error:
                return error.reason
            except Exception as error:  # Any error: unless a later try succeeds, the lease expires.
                trouble, pause = str(error) or trouble or "storage did not answer", next(pauses)
                continue
            if self._clock.now() >= expiry:
                return self._expired("this process was suspended")
            (self.wanted.set if wanted else self.wanted.clear)()
            pause, pauses, trouble = self._pace.renewal, self._pace.pauses(), ""

    def _expired(self, trouble: str) -> str:
        return f"it was not renewed for {self._pace.lease_time:g} s: {trouble}"

    async def _end(self) -> None:
        pauses, deadline = self._pace.pauses(), self._claim.renewed + self._pace.lease_time * OVERTIME
        with suppress(SandboxError):
            await retry(lambda: self._threads.run(self._claim.end), SandboxError, self._clock, pauses, deadline)

    def _expiry(self) -> float:
        return self._claim.renewed + self._pace.lease_time
