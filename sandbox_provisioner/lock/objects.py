"""Leases in any ObjectStore: for a folder that several machines have mounted, and for memory.

Such a store has no clock to rely on, so nobody compares times: a newcomer watches, by its own clock, that a lease is
not renewed for the whole of its time. It remembers what it saw from one attempt to the next.

A lease is renewed in an object of its own, its beat, whose name has the lease's token: however late a renewal comes, it
meets no newer lease.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from ..errors import ConflictError, ObjectNotFoundError
from ..storage.base import NEW, ObjectStore
from .base import Owner
from .board import Board, BoardLeases, Entry, duration
from .keeping import Pace, now


class ObjectLeases(BoardLeases):
    """Leases in ``store``. A dead owner's is had by an attempt that is as patient, or comes again that much later.

    A lease lasts longer than a MountedStore needs to get over a writer that died in its turn.
    """

    def __init__(self, store: ObjectStore, lease_time: float = 90.0, renewal: float = 10.0, poll: float = 1.0) -> None:
        super().__init__(ObjectBoard(store, lease_time), Pace(lease_time, renewal, poll))


class ObjectBoard(Board):
    """See ``Board``. An entry's version is the generation of its beat, or NEW if that was not written yet."""

    def __init__(self, store: ObjectStore, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._watched: dict[str, tuple[int, int, float]] = {}

    def create(self, name: str, owner: Owner) -> Entry | None:
        """See ``Board``."""
        record = json.dumps({**asdict(owner), "seconds": self._seconds}).encode()
        try:
            made = self._store.write(name, record, NEW)
        except ConflictError:
            return None
        try:
            beat = self._store.write(_beat(name, made.generation), b"", NEW)
        except ConflictError:
            return None
        return Entry(name, made.generation, beat.generation, beat.updated, owner, self._seconds)

    def read(self, name: str) -> Entry | None:
        """See ``Board``."""
        try:
            record, found = self._store.read(name)
        except ObjectNotFoundError:
            return None
        try:
            version = self._store.info(_beat(name, found.generation)).generation
        except ObjectNotFoundError:
            version = NEW
        seconds = duration(_seconds(record), self._seconds)
        return Entry(name, found.generation, version, found.updated, Owner.from_json(record), seconds)

    def renew(self, entry: Entry) -> Entry | None:
        """See ``Board``. First the beat, then a look at the lease: who takes it over removes it after the beat."""
        if entry.version == NEW:
            return None
        try:
            written = self._store.write(_beat(entry.name, entry.generation), b"", entry.version)
            current = self._store.info(entry.name).generation
        except (ConflictError, ObjectNotFoundError):
            return None
        if current != entry.generation:
            return None
        return Entry(entry.name, entry.generation, written.generation, written.updated, entry.owner, entry.seconds)

    def remove(self, entry: Entry) -> None:
        """See ``Board``. The beat goes first: without the lease nobody would know its name."""
        self._store.delete(_beat(entry.name, entry.generation))
        self._delete(entry.name, entry.generation)

    def evict(self, entry: Entry) -> None:
        """See ``Board``."""
        if entry.version == NEW or self._delete(_beat(entry.name, entry.generation), entry.version):
            self._delete(entry.name, entry.generation)
        self._watched.pop(entry.name, None)

    def silence(self, entry: Entry) -> float:
        """See ``Board``."""
        generation, version, since = self._watched.get(entry.name, (0, 0, 0.0))
        if (generation, version) != (entry.generation, entry.version):
            since = now()
            self._watched[entry.name] = (entry.generation, entry.version, since)
        return now() - since

    def _delete(self, name: str, generation: int) -> bool:
        """Delete one object; False if there is another in its place."""
        try:
            self._store.delete(name, generation)
        except ConflictError:
            return False
        return True


def _seconds(record: bytes) -> object:
    """For how long an entry may be silent by its record, which anybody may have written."""
    try:
        fields = json.loads(record)
    except (ValueError, RecursionError):
        return None
    return fields.get("seconds") if isinstance(fields, dict) else None


def _beat(name: str, generation: int) -> str:
    return f"{name}.beat-{generation}"
