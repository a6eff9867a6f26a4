"""Leases that expire unless they are renewed, over any storage for entries: the common part of ``objects`` and ``gcs``.

A lease is one entry. The server that waits for it has a second one, with the suffix ``.waiter``. Both are renewed by
their servers. Any server may replace an entry that was not renewed within its lease time.
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
    """Time of the last renewal, by the storage's own clock."""
    owner: Owner
    seconds: float
    """Lease time: the entry expires if it is not renewed for longer."""


class EntryStore(ABC):
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
    def age(self, entry: Entry) -> float:
        """Return the seconds since the last renewal of the entry, or fewer if that is not known exactly."""

    def has_expired(self, entry: Entry) -> bool:
        """Return True if the entry was not renewed within its lease time."""
        return self.age(entry) > entry.seconds * GRACE


def waiter_of(name: str) -> str:
    """Return the name of the entry of the server that waits for the lease ``name``."""
    return f"{name}.waiter"


def duration(found: object, default: float) -> float:
    """Return the lease time that an entry states, or ``default`` if that is not a valid number."""
    try:
        seconds = float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return default
    return seconds if math.isfinite(seconds) and 0 < seconds <= LONGEST_LEASE else default


class ExpiringLeases(Leases):
    """The leases in an EntryStore."""

    def __init__(self, entries: EntryStore, pace: Pace) -> None:
        super().__init__(pace, entries.clock)
        self._entries = entries

    def _attempt(self, name: str, owner: Owner) -> _ExpiringAttempt:
        return _ExpiringAttempt(self._entries, name, owner, self.pace.renewal / 2)

    def _holder(self, name: str) -> Owner | None:
        entry = self._entries.read(name)
        return None if entry is None or self._entries.has_expired(entry) else entry.owner


class _ExpiringAttempt:
    """Attempt to acquire a lease.

    The waiter's entry is renewed every ``pause`` seconds, more often than the owner checks it.
    """

    def __init__(self, entries: EntryStore, name: str, owner: Owner, pause: float) -> None:
        self.holder = Owner.from_json("")
        self._entries = entries
        self._name = name
        self._owner = owner
        self._pause = pause
        self._waiter_renewed = -math.inf
        """The clock's time when the waiter's entry was last renewed."""
        self._existing: set[str] = set()
        """Names of entries that existed when last checked: they are read before a write, as writes are rate-limited."""
        self._ours: dict[str, Entry] = {}
        """Entries that this attempt created, by name."""
        self._unconfirmed: dict[str, float] = {}
        """Names of entries that this attempt may have created without a response, with the time before the request."""

    def take(self) -> _ExpiringClaim | None:
        """Create the lease's entry and return the claim; None if another server holds the lease."""
        sent = self._create(self._name)
        return None if sent is None else _ExpiringClaim(self._entries, self._ours[self._name], sent)

    def ask(self) -> None:
        """Create the waiter's entry, or renew it if it is ours."""
        name = waiter_of(self._name)
        entry = self._ours.get(name)
        if entry is not None:
            if self._entries.clock.now() - self._waiter_renewed < self._pause:
                return
            entry = self._entries.renew(entry) or self._entries.read(name)
            if entry is not None and entry.owner.nonce == self._owner.nonce:
                self._ours[name], self._waiter_renewed = entry, self._entries.clock.now()
                return
            del self._ours[name]
        if self._create(name) is not None:
            self._waiter_renewed = self._entries.clock.now()

    def withdraw(self) -> None:
        """Remove the waiter's entry if it is ours."""
        self._remove(waiter_of(self._name))

    def abandon(self) -> None:
        """Remove the waiter's entry and the lease's entry if they are ours."""
        self.withdraw()
        self._remove(self._name)

    def _create(self, name: str) -> float | None:
        """Create our entry, in place of an expired one if needed. Return None if another server's entry is there.

        Otherwise return the clock's time just before the request that created it was sent.
        """
        for _ in range(TRIES):
            sent = self._entries.clock.now()
            found = self._entries.read(name) if name in self._existing else None
            if found is None:
                self._existing.discard(name)
                try:
                    entry = self._entries.create(name, self._owner)
                except StorageUnavailableError:
                    self._unconfirmed.setdefault(name, sent)
                    raise
                if entry is not None:
                    self._ours[name] = entry
                    return sent
                found = self._entries.read(name)
            if name in self._unconfirmed:
                if found is not None and found.owner.nonce == self._owner.nonce:
                    if found.version:
                        self._ours[name] = found
                        return self._unconfirmed[name]
                    self._entries.remove(found)
                    continue
                self._unconfirmed[name] = sent
            if found is None:
                continue
            self._existing.add(name)
            if not self._entries.has_expired(found):
                self.holder = found.owner if name == self._name else self.holder
                return None
            self._entries.evict(found)
        return None

    def _remove(self, name: str) -> None:
        entry = self._ours.get(name)
        if entry is None and name in self._unconfirmed:
            entry = self._entries.read(name)
        if entry is not None and entry.owner.nonce == self._owner.nonce:
            self._entries.remove(entry)
        self._ours.pop(name, None)
        self._unconfirmed.pop(name, None)


class _ExpiringClaim:
    """A lease of this process, and the entry that it renews."""

    def __init__(self, entries: EntryStore, entry: Entry, sent: float) -> None:
        self.token = entry.generation
        self.renewed = sent
        self._entries = entries
        self._entry = entry
        self._waiter: tuple[int, int] | None = None
        """Generation and version of the waiter's entry when last checked; zeros if there was none."""

    def renew(self) -> bool:
        """Renew the entry. Return True if another server waits. Raises LeaseLostError if the entry is not ours.

        If the response to a renewal was lost, our entry has another version: it is read, and renewed in that version.
        """
        for _ in range(TRIES):
            sent = self._entries.clock.now()
            renewed = self._entries.renew(self._entry)
            if renewed is not None:
                self._entry = renewed
                self.renewed = sent
                return self._has_waiter()
            found = self._entries.read(self._entry.name)
            if found is None:
                raise LeaseLostError(self._entry.name, "its entry was removed")
            if found.generation != self.token:
                raise LeaseLostError(self._entry.name, f"{found.owner} has it now")
            self._entry = found
        raise LeaseLostError(self._entry.name, "another program changes its entry")

    def end(self) -> None:
        self._entries.remove(self._entry)

    def _has_waiter(self) -> bool:
        """Return True if a waiter has renewed its entry since the last check. A crashed waiter does not."""
        found = self._entries.read(waiter_of(self._entry.name))
        before = self._waiter
        self._waiter = (found.generation, found.version) if found else (0, 0)
        return found is not None and before is not None and self._waiter != before
