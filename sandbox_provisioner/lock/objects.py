"""Keep leases in an ObjectStore, for a folder that several machines mount.

Such a store has no reliable clock, so its times are never compared. Instead, a server takes a lease only after it has
observed, by its own clock, a full lease time without a renewal. Observations are kept for the next attempt.

A lease is one object, its entry (see ``expiring``). A renewal writes a second object, the entry's beat, whose name
contains the generation of the entry. A late renewal therefore cannot affect a newer lease.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from .._text import json_object
from ..errors import ConflictError, ObjectNotFoundError
from ..storage.base import NEW, ObjectStore
from .base import CLOCK, Clock, Owner, Pace
from .expiring import Entry, EntryStore, ExpiringLeases, duration

PACE = Pace(lease_time=90.0, renewal=10.0, poll=1.0)
"""The lease time is longer than a MountedStore waits before it removes the lock of a crashed writer."""


class ObjectLeases(ExpiringLeases):
    """Leases in ``store``. A crashed owner's lease can be acquired when it was watched here for the whole lease time.

    The first attempt starts the watch. If that attempt is shorter, a second one succeeds after the lease time.
    """

    def __init__(self, store: ObjectStore, pace: Pace = PACE, clock: Clock = CLOCK) -> None:
        super().__init__(_ObjectEntries(store, pace.lease_time, clock), pace)


class _ObjectEntries(EntryStore):
    """Entries in an ObjectStore. The version is the generation of the entry's beat, or NEW if it has no beat yet."""

    def __init__(self, store: ObjectStore, seconds: float, clock: Clock) -> None:
        self.clock = clock
        self._store = store
        self._seconds = seconds
        self._watched: dict[str, tuple[int, int, float]] = {}

    def create(self, name: str, owner: Owner) -> Entry | None:
        record = json.dumps({**asdict(owner), "seconds": self._seconds}).encode()
        try:
            written = self._store.write(name, record, NEW)
            beat = self._store.write(_beat(name, written.generation), b"", NEW)
        except ConflictError:
            return None
        return Entry(name, written.generation, beat.generation, beat.updated, owner, self._seconds)

    def read(self, name: str) -> Entry | None:
        try:
            record, found = self._store.read(name)
        except ObjectNotFoundError:
            return None
        try:
            version = self._store.info(_beat(name, found.generation)).generation
        except ObjectNotFoundError:
            version = NEW
        seconds = duration(json_object(record).get("seconds"), self._seconds)
        return Entry(name, found.generation, version, found.updated, Owner.from_json(record), seconds)

    def renew(self, entry: Entry) -> Entry | None:
        """Write the beat, then check the lease. Return None if either has changed.

        The order matters: a server that takes the lease over removes the beat first and the lease second.
        """
        if entry.version == NEW:
            return None
        try:
            written = self._store.write(_beat(entry.name, entry.generation), b"", entry.version)
            current = self._store.info(entry.name).generation
        except (ConflictError, ObjectNotFoundError):
            return None
        if current != entry.generation:
            return None
        return replace(entry, version=written.generation, updated=written.updated)

    def remove(self, entry: Entry) -> None:
        """Remove the entry. The beat goes first: without the lease, its name would be unknown."""
        self._store.delete(_beat(entry.name, entry.generation))
        self._delete(entry.name, entry.generation)

    def evict(self, entry: Entry) -> None:
        if entry.version == NEW or self._delete(_beat(entry.name, entry.generation), entry.version):
            self._delete(entry.name, entry.generation)
        self._watched.pop(entry.name, None)

    def age(self, entry: Entry) -> float:
        """Return the seconds since this process first saw the entry in this version."""
        generation, version, since = self._watched.get(entry.name, (0, 0, 0.0))
        if (generation, version) != (entry.generation, entry.version):
            since = self.clock.now()
            self._watched[entry.name] = (entry.generation, entry.version, since)
        return self.clock.now() - since

    def _delete(self, name: str, generation: int) -> bool:
        """Delete one object. Return False if it was replaced: the name has another generation."""
        try:
            self._store.delete(name, generation)
        except ConflictError:
            return False
        return True


def _beat(name: str, generation: int) -> str:
    return f"{name}.beat-{generation}"
