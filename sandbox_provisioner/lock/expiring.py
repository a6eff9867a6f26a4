"""Leases that expire, over any storage for entries with an owner: the common part of ``objects`` and ``gcs``.

The lease is one entry of a board, the place of its only waiter another. Both are kept alive by renewal, and any server
may take over an entry that was not renewed within its lease time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..errors import LeaseLostError, StorageUnavailableError
from .base import LONGEST_LEASE, Clock, Leases, Owner, Pace

TRIES = 5
"""Number of tries in a row while other servers change the same entry."""


GRACE = 1.05
"""Factor on a lease time: the clocks of two machines may run at speeds that differ by 5 %."""


@dataclass(frozen=True)
class Entry:
    """An entry as it was last read."""

    name: str
    generation: int
    """Never the same for two entries."""
    version: int
    """New for each renewal; 0 if the entry is incomplete and cannot be renewed."""
    updated: float
    """Time of the last renewal, by the board's own clock."""
    owner: Owner
    seconds: float
    """Lease time: the entry expires if it is not renewed for longer."""


class Board(ABC):
    """Storage for entries. All methods block. After StorageUnavailableError a change may or may not have happened."""

    clock: Clock

    @abstractmethod
    def create(self, name: str, owner: Owner) -> Entry | None:
        """Create an entry. Return None if one exists."""

    @abstractmethod
    def read(self, name: str) -> Entry | None:
        """Return the entry, or None."""

    @abstractmethod
    def renew(self, entry: Entry) -> Entry | None:
        """Renew the entry and return it. Return None if it was changed or removed."""

    @abstractmethod
    def remove(self, entry: Entry) -> None:
        """Remove the entry, renewed or not, but no newer entry of that name."""

    @abstractmethod
    def evict(self, entry: Entry) -> None:
        """Remove an expired entry, unless it was renewed meanwhile."""

    @abstractmethod
    def silence(self, entry: Entry) -> float:
        """Return the seconds for which the entry has, at least, not been renewed."""

    def is_dead(self, entry: Entry) -> bool:
        """Return True if the entry has expired."""
        return self.silence(entry) > entry.seconds * GRACE


def waiter_of(name: str) -> str:
    """Return the name of the entry for the lease's waiter."""
    return f"{name}.waiter"


def duration(found: object, usual: float) -> float:
    """Return the lease time that an entry states, or ``usual`` if that is not a valid number."""
    try:
        seconds = float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return usual
    return seconds if math.isfinite(seconds) and 0 < seconds <= LONGEST_LEASE else usual


class BoardLeases(Leases):
    """The leases on a board."""

    def __init__(self, board: Board, pace: Pace) -> None:
        super().__init__(pace, board.clock)
        self._board = board

    def _attempt(self, name: str, owner: Owner) -> BoardAttempt:
        return BoardAttempt(self._board, name, owner, self.pace.renewal / 2)

    def _holder(self, name: str) -> Owner | None:
        entry = self._board.read(name)
        return None if entry is None or self._board.is_dead(entry) else entry.owner


class BoardAttempt:
    """Attempt to acquire a lease on a board.

    The waiter's entry is renewed every ``pause`` seconds, more often than the owner checks it.
    """

    def __init__(self, board: Board, name: str, owner: Owner, pause: float) -> None:
        self.holder = Owner.from_json("")
        self._board = board
        self._name = name
        self._owner = owner
        self._pause = pause
        self._asked = -math.inf
        """The clock's time when the waiter's entry was last renewed."""
        self._taken: set[str] = set()
        """Entries that existed when last checked: read first, because storage limits the rate of changes."""
        self._entered: dict[str, Entry] = {}
        self._unsure: dict[str, float] = {}
        """Entries that we may have created without a response, with the time before the earliest possible creation."""

    def take(self) -> BoardClaim | None:
        """Create the lease's entry and return the claim; None if another server holds the lease."""
        sent = self._enter(self._name)
        return None if sent is None else BoardClaim(self._board, self._entered[self._name], sent)

    def ask(self) -> None:
        """Create the waiter's entry, or renew it if it is ours."""
        name = waiter_of(self._name)
        entry = self._entered.get(name)
        if entry is not None:
            if self._board.clock.now() - self._asked < self._pause:
                return
            entry = self._board.renew(entry) or self._board.read(name)
            if entry is not None and entry.owner.nonce == self._owner.nonce:
                self._entered[name], self._asked = entry, self._board.clock.now()
                return
            del self._entered[name]
        if self._enter(name) is not None:
            self._asked = self._board.clock.now()

    def withdraw(self) -> None:
        """Remove the waiter's entry if it is ours."""
        self._leave(waiter_of(self._name))

    def abandon(self) -> None:
        """Remove the waiter's entry and the lease's entry if they are ours."""
        self.withdraw()
        self._leave(self._name)

    def _enter(self, name: str) -> float | None:
        """Create our entry, in place of an expired one if needed. Return None if another server's entry is there.

        Otherwise return the clock's time just before the request that created it was sent.
        """
        for _ in range(TRIES):
            sent = self._board.clock.now()
            found = self._board.read(name) if name in self._taken else None
            if found is None:
                self._taken.discard(name)
                try:
                    entry = self._board.create(name, self._owner)
                except StorageUnavailableError:
                    self._unsure.setdefault(name, sent)
                    raise
                if entry is not None:
                    self._entered[name] = entry
                    return sent
                found = self._board.read(name)
            if name in self._unsure:
                if found is not None and found.owner.nonce == self._owner.nonce:
                    if found.version:
                        self._entered[name] = found
                        return self._unsure[name]
                    self._board.remove(found)
                    continue
                self._unsure[name] = sent
            if found is None:
                continue
            self._taken.add(name)
            if not self._board.is_dead(found):
                self.holder = found.owner if name == self._name else self.holder
                return None
            self._board.evict(found)
        return None

    def _leave(self, name: str) -> None:
        entry = self._entered.get(name)
        if entry is None and name in self._unsure:
            entry = self._board.read(name)
        if entry is not None and entry.owner.nonce == self._owner.nonce:
            self._board.remove(entry)
        self._entered.pop(name, None)
        self._unsure.pop(name, None)


class BoardClaim:
    """A lease whose entry on the board is ours."""

    def __init__(self, board: Board, entry: Entry, sent: float) -> None:
        self.token = entry.generation
        self.renewed = sent
        self._board = board
        self._entry = entry
        self._waiter: tuple[int, int] | None = None

    def renew(self) -> bool:
        """Renew the entry. Return True if another server waits. Raises LeaseLostError if the entry is not ours.

        If the response to a renewal was lost, the entry is ours but in another version: it is renewed from there.
        """
        for _ in range(TRIES):
            sent = self._board.clock.now()
            renewed = self._board.renew(self._entry)
            if renewed is not None:
                self._entry = renewed
                self.renewed = sent
                return self._somebody_waits()
            found = self._board.read(self._entry.name)
            if found is None:
                raise LeaseLostError(self._entry.name, "its entry was removed")
            if found.generation != self.token:
                raise LeaseLostError(self._entry.name, f"{found.owner} has it now")
            self._entry = found
        raise LeaseLostError(self._entry.name, "something else changes its entry")

    def end(self) -> None:
        """Remove the entry."""
        self._board.remove(self._entry)

    def _somebody_waits(self) -> bool:
        """Return True if the waiter renewed its entry since the last check; a crashed waiter does not."""
        found = self._board.read(waiter_of(self._entry.name))
        before = self._waiter
        self._waiter = (found.generation, found.version) if found else (0, 0)
        return found is not None and before is not None and self._waiter != before
