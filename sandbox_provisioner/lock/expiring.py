"""Leases that run out, over anything that keeps entries with an owner: what ``objects`` and ``gcs`` share.

The lease is one entry of a board, the place of the one waiter another; both are kept alive by renewal, and both are
anybody's once they were silent for longer than they said they might be.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..errors import LeaseLostError, StorageUnavailableError
from .base import Owner
from .keeping import LONGEST_LEASE, KeptLeases, Pace, now

TRIES = 5
"""How often in a row to look again at what others change in the same moment."""


GRACE = 1.05
"""By how much the clocks of two machines may run at different speeds."""


@dataclass(frozen=True)
class Entry:
    """An entry as it was seen."""

    name: str
    generation: int
    """New for each entry ever."""
    version: int
    """New for each renewal; 0 if it was made so badly that it cannot be renewed."""
    updated: float
    """When it was last renewed, by the board's own clock."""
    owner: Owner
    seconds: float
    """For how long it may be silent."""


class Board(ABC):
    """Where the entries are. All methods block; StorageUnavailableError leaves open whether something happened."""

    @abstractmethod
    def create(self, name: str, owner: Owner) -> Entry | None:
        """A new entry; None if there is one."""

    @abstractmethod
    def read(self, name: str) -> Entry | None:
        """The entry there is."""

    @abstractmethod
    def renew(self, entry: Entry) -> Entry | None:
        """The entry, renewed; None if it is not there as it was."""

    @abstractmethod
    def remove(self, entry: Entry) -> None:
        """Remove the entry, renewed or not, but no other."""

    @abstractmethod
    def evict(self, entry: Entry) -> None:
        """Remove an entry that was silent for too long, unless it was renewed after all."""

    @abstractmethod
    def silence(self, entry: Entry) -> float:
        """For how many seconds, at least, it has not been renewed."""

    def is_dead(self, entry: Entry) -> bool:
        """Whether it was silent for too long."""
        return self.silence(entry) > entry.seconds * GRACE


def waiter_of(name: str) -> str:
    """The entry of the one that waits for a lease."""
    return f"{name}.waiter"


def duration(found: object, usual: float) -> float:
    """For how long an entry may be silent by its own words, if these make sense."""
    try:
        seconds = float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return usual
    return seconds if math.isfinite(seconds) and 0 < seconds <= LONGEST_LEASE else usual


class BoardLeases(KeptLeases):
    """The leases on a board."""

    def __init__(self, board: Board, pace: Pace) -> None:
        super().__init__(pace)
        self._board = board

    def _attempt(self, name: str, owner: Owner) -> BoardAttempt:
        return BoardAttempt(self._board, name, owner, self.pace.renewal / 2)

    def _holder(self, name: str) -> Owner | None:
        entry = self._board.read(name)
        return None if entry is None or self._board.is_dead(entry) else entry.owner


class BoardAttempt:
    """See ``Attempt``. The waiter's place is renewed every ``pause`` seconds, more often than the owner looks at it."""

    def __init__(self, board: Board, name: str, owner: Owner, pause: float) -> None:
        self.holder = Owner.from_json("")
        self._board = board
        self._name = name
        self._owner = owner
        self._pause = pause
        self._asked = -math.inf
        """``now()`` from when the waiter's place was last renewed."""
        self._taken: set[str] = set()
        """Entries that were there at the last look: these are read first, because storage limits changes."""
        self._entered: dict[str, Entry] = {}
        self._unsure: dict[str, float] = {}
        """Entries that we may have made without being told: ``now()`` from before that can have been."""

    def take(self) -> BoardClaim | None:
        """See ``Attempt``."""
        sent = self._enter(self._name)
        return None if sent is None else BoardClaim(self._board, self._entered[self._name], sent)

    def ask(self) -> None:
        """See ``Attempt``."""
        name = waiter_of(self._name)
        entry = self._entered.get(name)
        if entry is not None:
            if now() - self._asked < self._pause:
                return
            entry = self._board.renew(entry) or self._board.read(name)
            if entry is not None and entry.owner.nonce == self._owner.nonce:
                self._entered[name], self._asked = entry, now()
                return
            del self._entered[name]
        if self._enter(name) is not None:
            self._asked = now()

    def withdraw(self) -> None:
        """See ``Attempt``."""
        self._leave(waiter_of(self._name))

    def abandon(self) -> None:
        """See ``Attempt``."""
        self.withdraw()
        self._leave(self._name)

    def _enter(self, name: str) -> float | None:
        """Make an entry of ours, in the place of a dead one if need be; None if another's is there.

        Returns ``now()`` from before the request was sent that made it.
        """
        for _ in range(TRIES):
            sent = now()
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
    """See ``Claim``."""

    def __init__(self, board: Board, entry: Entry, sent: float) -> None:
        self.token = entry.generation
        self.renewed = sent
        self._board = board
        self._entry = entry
        self._waiter: tuple[int, int] | None = None

    def renew(self) -> bool:
        """See ``Claim``. A renewal whose answer was lost shows as an entry that is ours and not as it was."""
        for _ in range(TRIES):
            sent = now()
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
        """See ``Claim``."""
        self._board.remove(self._entry)

    def _somebody_waits(self) -> bool:
        """Whether the waiter renewed its place since the last look: a dead one's stays as it is."""
        found = self._board.read(waiter_of(self._entry.name))
        before = self._waiter
        self._waiter = (found.generation, found.version) if found else (0, 0)
        return found is not None and before is not None and self._waiter != before
