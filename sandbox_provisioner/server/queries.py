"""Find and list a Jupyter Server's sandboxes: those of its kernels, the warm pool, and stored ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import UUID

from ..config import GCSConfig
from ..errors import SandboxNotFoundError, UnknownSandboxError
from ..persistence.backends import Stores, share_stores
from ..persistence.records import SandboxRecord
from ..sandbox.listing import StoredSandbox, look
from ..sandbox.lookup import look_up
from ..sandbox.model import Sandbox, SandboxPage
from ..sandbox.registry import Listing
from ..sandbox.user_sandboxes import Persistence, registry, settings
from ..templates.warm_pool import WARM_POOL
from . import models
from .drives import server_path
from .kernels import ServerKernels
from .models import Subject

BATCH = 200
"""Number of sandboxes to look up in storage at a time when the list is filtered by state."""


class Inventory:
    """Finds and lists one server's sandboxes. ``storage_dir`` is the configured folder, or empty. Server loop only."""

    def __init__(self, kernels: ServerKernels, storage_dir: str = "") -> None:
        self.kernels = kernels
        self._storage_dir = storage_dir
        self._stores: Stores | None = None

    @property
    def config(self) -> GCSConfig:
        """The storage settings of this server."""
        return settings(self._storage_dir)

    async def persistence(self) -> Persistence:
        """Return the user's registry and this server's stores. Raises ConfigurationError if there are no stores."""
        stores = self._stores = await asyncio.to_thread(share_stores, self.config)  # shared while referenced
        return Persistence(stores, registry())

    async def find(self, wanted: str) -> Subject:
        """Return the sandbox whose id, or id in storage, is ``wanted``; a prefix is not enough.

        Raises SandboxNotFoundError, or AmbiguousSandboxError if several match.
        """
        for live in self.kernels.live():
            known = (str(live.record.id), live.record.sandbox_id) if live.record else (live.kernel_id,)
            if wanted in known:
                return Subject(live.record, live)
        for copy in WARM_POOL.copies:
            if wanted == copy.sandbox.sandbox_id:
                return Subject(None, None, copy)
        record = None
        if self.config.can_persist():
            record = await asyncio.to_thread(_find_record, await self.persistence(), wanted)
        if record is None:
            raise SandboxNotFoundError(wanted, "this server's list")
        return Subject(record, None)

    async def stored(self, subject: Subject) -> StoredSandbox | None:
        """Return a sandbox's description from storage; None if ephemeral."""
        return (await self._read_storage([subject]))[0]

    async def state(self, subject: Subject) -> str:
        """Return the state of a sandbox; storage is read only if its kernel is not on this server."""
        return models.state(subject, None if subject.live and subject.live.state else await self.stored(subject))

    async def show(self, subject: Subject) -> Sandbox:
        """Return the model of a sandbox to send to clients."""
        return models.describe(subject, await self.stored(subject), self.kernels.relative)

    async def page(
        self,
        limit: int,
        state: str | None = None,
        notebook: str | None = None,
        unused_for: float | None = None,
        after: str | None = None,
    ) -> SandboxPage:
        """Return a page of the list, the last used sandboxes first."""
        subjects, unreadable = await self._list_all()
        if notebook is not None:
            subjects = [one for one in subjects if self.kernels.relative(one.notebook_path) == server_path(notebook)]
        if unused_for is not None:
            since = datetime.now(UTC).timestamp() - unused_for
            subjects = [one for one in subjects if one.last_used.timestamp() <= since]
        subjects.sort(key=_sort_key, reverse=True)
        if after is not None:
            subjects = [one for one in subjects if _sort_key(one) < _parse_cursor(after)]
        found: list[tuple[Subject, StoredSandbox | None]] = []
        step = BATCH if state else limit + 1
        for start in range(0, len(subjects), step):
            batch = subjects[start : start + step]
            pairs = zip(batch, await self._read_storage(batch), strict=True)
            found += [(one, stored) for one, stored in pairs if state in (None, models.state(one, stored))]
            if len(found) > limit:
                break
        return SandboxPage(
            items=tuple(models.describe(one, stored, self.kernels.relative) for one, stored in found[:limit]),
            next=_cursor(found[limit - 1][0]) if len(found) > limit else None,
            unreadable=unreadable,
        )

    async def _list_all(self) -> tuple[list[Subject], int]:
        """Return all sandboxes, and the number of unreadable records."""
        lives = self.kernels.live()
        by_record = {live.record.id: live for live in lives if live.record}
        listing = Listing([], [])
        if self.config.can_persist():
            listing = await asyncio.to_thread((await self.persistence()).registry.list)
        persistent = [Subject(record, by_record.get(record.id)) for record in listing.records]
        others = [Subject(None, live) for live in lives if not live.record]
        others += [Subject(None, None, copy) for copy in WARM_POOL.copies]
        return [*persistent, *others], len(listing.unreadable)

    async def _read_storage(self, subjects: Sequence[Subject]) -> list[StoredSandbox | None]:
        records = [subject.record for subject in subjects if subject.record]
        if not records:
            return [None] * len(subjects)
        listed = {
            stored.record.id: stored for stored in await asyncio.to_thread(look, await self.persistence(), records)
        }
        return [listed[subject.record.id] if subject.record else None for subject in subjects]


def _find_record(persistence: Persistence, wanted: str) -> SandboxRecord | None:
    """Return the record whose id, or id in storage, is ``wanted``, preferring this server's storage; or None. Blocks.

    Raises AmbiguousSandboxError if several match.
    """
    with suppress(ValueError, UnknownSandboxError):
        record = persistence.registry.load(UUID(wanted))
        if str(record.id) == wanted:
            return record
    records = persistence.registry.list().records
    for known in ([record for record in records if record.where == persistence.stores.metadata.where], records):
        with suppress(UnknownSandboxError):
            return look_up(wanted, known, whole_id=True)
    return None


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _sort_key(subject: Subject) -> tuple[int, str]:
    """Return the sort key of the list: microseconds of the last use, and the id."""
    return (subject.last_used - EPOCH) // timedelta(microseconds=1), subject.id


def _cursor(last: Subject) -> str:
    used, identity = _sort_key(last)
    return f"{used}-{identity}"


def _parse_cursor(cursor: str) -> tuple[int, str]:
    used, _, identity = cursor.partition("-")
    return int(used), identity
