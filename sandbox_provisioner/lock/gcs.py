"""Leases in a Google Cloud Storage bucket, by its conditional requests and its clock.

An entry is an empty object with its owner in the custom metadata. The object's generation is the token. A renewal
changes the metadata, with preconditions for both of the object's versions. ``updated`` is the time of that change by
the server's clock. The current time is the server's too: every response has it in its ``Date`` header.

Google allows about one change of an object per second. A request above that rate is refused, and the caller sends it
again later; a lease that is held is watched only by reads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import RateLimitedError
from ..storage.gcs_requests import MissingError, PreconditionError, Requests
from ..storage.names import valid_name
from .base import CLOCK, Clock, Owner, Pace
from .expiring import Entry, EntryStore, ExpiringLeases, duration

PACE = Pace(lease_time=30.0, renewal=5.0, poll=1.0)
LONGEST_REQUEST = 10.0
CLOCK_TRUSTED = 60.0
"""Seconds after which the offset to the server's clock is replaced even by a smaller one, because of drift."""


class GCSLeases(ExpiringLeases):
    """Leases in a bucket, in objects whose names begin with ``prefix``."""

    def __init__(self, bucket: str, prefix: str = "", pace: Pace = PACE, clock: Clock = CLOCK) -> None:
        super().__init__(_GCSEntries(bucket, prefix, pace.lease_time, clock), pace)


class _GCSEntries(EntryStore):
    """Entries in a bucket. The version is the metageneration. Each request is sent once; the caller retries."""

    def __init__(self, bucket: str, prefix: str, seconds: float, clock: Clock) -> None:
        self.clock = clock
        self._requests = Requests(bucket, patience=0.0, on_time=self._record_time)
        self._prefix = f"{valid_name(bucket, prefix)}/" if prefix else ""
        self._seconds = seconds
        self._timeout = min(LONGEST_REQUEST, seconds / 3)
        self._offset: tuple[float, float] | None = None
        """Lower bound of the seconds by which the server's clock is ahead of ours, and our time when it was found."""

    def create(self, name: str, owner: Owner) -> Entry | None:
        blob = self._blob(name)
        blob.metadata = {"owner": owner.to_json(), "seconds": str(self._seconds)}
        try:
            self._requests.ask_bucket(self._request(blob.upload_from_string, data=b"", if_generation_match=0))
        except PreconditionError:
            return None
        except RateLimitedError:
            if self.read(name) is None:
                raise
            return None
        return self._written(name, blob)

    def read(self, name: str) -> Entry | None:
        blob = self._blob(name)
        try:
            self._ask(blob.reload)
        except MissingError:
            return None
        return self._entry(name, blob)

    def renew(self, entry: Entry) -> Entry | None:
        blob = self._blob(entry.name)
        blob.metadata = {"owner": entry.owner.to_json(), "seconds": str(entry.seconds), "renewal": str(entry.version)}
        try:
            self._ask(blob.patch, if_generation_match=entry.generation, if_metageneration_match=entry.version)
        except (MissingError, PreconditionError):
            return None
        return self._written(entry.name, blob)

    def remove(self, entry: Entry) -> None:
        self._delete(entry.name, if_generation_match=entry.generation)

    def evict(self, entry: Entry) -> None:
        self._delete(entry.name, if_generation_match=entry.generation, if_metageneration_match=entry.version)

    def age(self, entry: Entry) -> float:
        """Return the seconds since the last renewal by the server's clock, or zero while its clock is unknown."""
        return 0.0 if self._offset is None else self._offset[0] + self.clock.now() - entry.updated

    def _record_time(self, time: float) -> None:
        """Record the server's time. Called for every response.

        A time is slightly old when it arrives, so the one furthest ahead of our clock is the most accurate.
        """
        here, known = self.clock.now(), self._offset
        ahead = time - here
        if known is None or ahead >= known[0] or here - known[1] > CLOCK_TRUSTED:
            self._offset = (ahead, here)

    def _written(self, name: str, blob: Any) -> Entry:
        """Return the entry that our request has just created or changed, and record its time."""
        entry = self._entry(name, blob)
        self._record_time(entry.updated)
        return entry

    def _entry(self, name: str, blob: Any) -> Entry:
        record = blob.metadata or {}
        owner = Owner.from_json(record.get("owner", ""))
        seconds = duration(record.get("seconds"), self._seconds)
        return Entry(name, blob.generation, blob.metageneration, blob.updated.timestamp(), owner, seconds)

    def _blob(self, name: str) -> Any:
        return self._requests.bucket().blob(self._prefix + name)

    def _delete(self, name: str, **conditions: int) -> None:
        with suppress(MissingError, PreconditionError):
            self._ask(self._blob(name).delete, **conditions)

    def _ask(self, request: Callable[..., object], **arguments: Any) -> None:
        self._requests.ask(self._request(request, **arguments))

    def _request(self, request: Callable[..., object], **arguments: Any) -> Callable[[], object]:
        """Return a request that is sent once, without retries."""
        return partial(request, **arguments, timeout=self._timeout, retry=None)
