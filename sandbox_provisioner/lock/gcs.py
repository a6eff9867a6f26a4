"""Leases in a Google Cloud Storage bucket, by its conditional requests and its clock.

An entry is an empty object with its owner in the custom metadata. Its generation is the token, a renewal is a change
of the metadata with both preconditions, and ``updated`` is the time of that change by the server's clock. The current
time is the server's too: every response has it in its ``Date`` header.

Google allows about one change of an object per second. A request above that rate is refused, and the caller sends it
again later; a lease that is held is watched only by reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import RateLimitedError
from ..storage.gcs_requests import NotMet, NotThere, Requests
from ..storage.names import valid_name
from .base import CLOCK, Clock, Owner, Pace
from .expiring import Board, BoardLeases, Entry, duration

LONGEST_REQUEST = 10.0
CLOCK_TRUSTED = 60.0
"""Seconds after which the offset to the server's clock is replaced even by a smaller one, because of drift."""


class GCSLeases(BoardLeases):
    """Leases in a bucket, in objects whose names begin with ``prefix``."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        lease_time: float = 30.0,
        renewal: float = 5.0,
        poll: float = 1.0,
        clock: Clock = CLOCK,
    ) -> None:
        super().__init__(GCSBoard(bucket, prefix, lease_time, clock), Pace(lease_time, renewal, poll))


class GCSBoard(Board):
    """Board in a bucket. An entry's version is its metageneration. Each request is sent once; the caller retries."""

    def __init__(self, bucket: str, prefix: str, seconds: float, clock: Clock) -> None:
        self.clock = clock
        self._requests = Requests(bucket, patience=0.0, on_time=self._hear)
        self._prefix = f"{valid_name(bucket, prefix)}/" if prefix else ""
        self._seconds = seconds
        self._timeout = min(LONGEST_REQUEST, seconds / 3)
        self._ahead: tuple[float, float] | None = None
        """Seconds by which the server's clock is at least ahead of ours, and our time when that was recorded."""

    def create(self, name: str, owner: Owner) -> Entry | None:
        """Create an entry. Return None if one exists."""
        blob = self._blob(name)
        blob.metadata = {"owner": owner.to_json(), "seconds": str(self._seconds)}
        try:
            self._write(blob, if_generation_match=0)
        except NotMet:
            return None
        except RateLimitedError:
            if self.read(name) is None:
                raise
            return None
        return self._written(name, blob)

    def read(self, name: str) -> Entry | None:
        """Return the entry, or None."""
        blob = self._blob(name)
        try:
            self._ask(blob.reload)
        except NotThere:
            return None
        return self._entry(name, blob)

    def renew(self, entry: Entry) -> Entry | None:
        """Renew the entry. Return None if it was changed or removed."""
        blob = self._blob(entry.name)
        blob.metadata = {"owner": entry.owner.to_json(), "seconds": str(entry.seconds), "renewal": str(entry.version)}
        try:
            self._ask(blob.patch, if_generation_match=entry.generation, if_metageneration_match=entry.version)
        except (NotThere, NotMet):
            return None
        return self._written(entry.name, blob)

    def remove(self, entry: Entry) -> None:
        """Remove the entry in any version, but no newer entry of that name."""
        self._delete(entry.name, if_generation_match=entry.generation)

    def evict(self, entry: Entry) -> None:
        """Remove an expired entry, unless it was renewed meanwhile."""
        self._delete(entry.name, if_generation_match=entry.generation, if_metageneration_match=entry.version)

    def silence(self, entry: Entry) -> float:
        """Return the seconds since the last renewal by the server's clock, or zero while that is unknown."""
        return 0.0 if self._ahead is None else self._ahead[0] + self.clock.now() - entry.updated

    def _hear(self, time: float) -> None:
        """Record the server's time. Called for every response.

        A time is slightly old when it arrives, so the one furthest ahead of our clock is the most accurate.
        """
        here, known = self.clock.now(), self._ahead
        ahead = time - here
        if known is None or ahead >= known[0] or here - known[1] > CLOCK_TRUSTED:
            self._ahead = (ahead, here)

    def _written(self, name: str, blob: Any) -> Entry:
        """Return the entry that our request has just created or changed, and record its time."""
        entry = self._entry(name, blob)
        self._hear(entry.updated)
        return entry

    def _entry(self, name: str, blob: Any) -> Entry:
        record = blob.metadata or {}
        owner = Owner.from_json(record.get("owner", ""))
        seconds = duration(record.get("seconds"), self._seconds)
        return Entry(name, blob.generation, blob.metageneration, blob.updated.timestamp(), owner, seconds)

    def _blob(self, name: str) -> Any:
        return self._requests.bucket().blob(self._prefix + name)

    def _write(self, blob: Any, **conditions: int) -> None:
        try:
            self._ask(blob.upload_from_string, data=b"", **conditions)
        except NotThere as error:
            raise self._requests.no_bucket() from error

    def _delete(self, name: str, **conditions: int) -> None:
        try:
            self._ask(self._blob(name).delete, **conditions)
        except (NotThere, NotMet):
            pass

    def _ask(self, request: Callable[..., object], **arguments: Any) -> None:
        """Send one request, without retries."""
        self._requests.ask(partial(request, **arguments, timeout=self._timeout, retry=None))
