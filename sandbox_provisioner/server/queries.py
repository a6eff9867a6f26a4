"""Find and list a Jupyter Server's sandboxes: those of its kernels, the warm pool, and stored ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from ..config import GCSConfig
from ..errors import AmbiguousSandboxError, SandboxNotFoundError, UnknownSandboxError
from ..persistence.backends import Stores, share_stores
from ..persistence.records import SandboxRecord
from ..sandbox.listing import Sight, look
from ..sandbox.registry import Listing
from ..sandbox.user_sandboxes import Persistence, registry, settings
from ..templates.warm_pool import WARM_POOL
from . import models
from .kernels import ServerKernels
from .models import Subject

BATCH = 200
"""Number of sandboxes to look up in storage at a time when the list is filtered by state."""


class Inventory:
    """The sandboxes of one server. ``storage_dir`` is the configured folder, or empty. Server loop only."""

    def __init__(self, kernels: ServerKernels, storage_dir: str = "") -> None:
        self.kernels = kernels
        self._storage_dir = storage_dir
        self._stores: Stores | None = None

    @property
    def config(self) -> GCSConfig:
        """The storage settings of this server."""
        return settings(self._storage_dir)

    async def kept(self) -> Persistence:
        """Return the user's registry and this server's stores. Raises ConfigurationError if there are no stores."""
        stores = self._stores = await asyncio.to_thread(share_stores, self.config)  # shared while referenced
        return Persistence(stores, registry())

    async def find(self, wanted: str) -> Subject:
        """Return the sandbox with exactly this id or id in storage.

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
            record = await asyncio.to_thread(_recorded, await self.kept(), wanted)
        if record is None:
            raise SandboxNotFoundError(wanted, "this server's list")
        return Subject(record, None)

    async def sight(self, subject: Subject) -> Sight | None:
        """Return the stored state of a sandbox; None if ephemeral."""
        return (await self._look([subject]))[0]

    async def state(self, subject: Subject) -> str:
        """Return the state of a sandbox; storage is read only if its kernel is not on this server."""
        return models.state(subject, None if subject.live else await self.sight(subject))

    async def show(self, subject: Subject) -> dict[str, Any]:
        """Return the ``Sandbox`` object of openapi.yaml."""
        return models.sandbox(subject, await self.sight(subject), self.kernels.relative)

    async def page(
        self,
        limit: int,
        state: str | None = None,
        notebook: str | None = None,
        unused_for: float | None = None,
        after: str | None = None,
    ) -> dict[str, Any]:
        """Return a ``SandboxPage`` object of openapi.yaml, the last used sandboxes first."""
        subjects, unreadable = await self._all()
        if notebook is not None:
            subjects = [one for one in subjects if self.kernels.relative(one.notebook_path) == notebook]
        if unused_for is not None:
            since = datetime.now(UTC).timestamp() - unused_for
            subjects = [one for one in subjects if one.last_used.timestamp() <= since]
        subjects.sort(key=_place, reverse=True)
        if after is not None:
            subjects = [one for one in subjects if _place(one) < _parsed(after)]
        found: list[tuple[Subject, Sight | None]] = []
        step = BATCH if state else limit + 1
        for start in range(0, len(subjects), step):
            batch = subjects[start : start + step]
            seen = zip(batch, await self._look(batch), strict=True)
            found += [(one, sight) for one, sight in seen if state in (None, models.state(one, sight))]
            if len(found) > limit:
                break
        return {
            "items": [models.sandbox(one, sight, self.kernels.relative) for one, sight in found[:limit]],
            "next": _cursor(found[limit - 1][0]) if len(found) > limit else None,
            "unreadable": unreadable,
        }

    async def _all(self) -> tuple[list[Subject], int]:
        """Return all sandboxes, and the number of unreadable records."""
        lives = self.kernels.live()
        by_record = {live.record.id: live for live in lives if live.record}
        listing = Listing([], [])
        if self.config.can_persist():
            listing = await asyncio.to_thread((await self.kept()).registry.list)
        kept = [Subject(record, by_record.get(record.id)) for record in listing.records]
        others = [Subject(None, live) for live in lives if not live.record]
        others += [Subject(None, None, copy) for copy in WARM_POOL.copies]
        return [*kept, *others], len(listing.unreadable)

    async def _look(self, subjects: Sequence[Subject]) -> list[Sight | None]:
        records = [subject.record for subject in subjects if subject.record]
        if not records:
            return [None] * len(subjects)
        sights = {sight.record.id: sight for sight in await asyncio.to_thread(look, await self.kept(), records)}
        return [sights[subject.record.id] if subject.record else None for subject in subjects]


def _recorded(kept: Persistence, wanted: str) -> SandboxRecord | None:
    """Return the record with this id, or with this id in storage, preferably in this server's storage; or None. Blocks.

    Raises AmbiguousSandboxError if several match.
    """
    try:
        record = kept.registry.load(UUID(wanted))
        if str(record.id) == wanted:
            return record
    except (ValueError, UnknownSandboxError):
        pass
    found = [record for record in kept.registry.list().records if record.sandbox_id == wanted]
    here = [record for record in found if record.where == kept.stores.metadata.where]
    if len(found) > 1 and len(here) != 1:
        raise AmbiguousSandboxError(wanted, [str(record.id) for record in found])
    return next(iter(here or found), None)


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _place(subject: Subject) -> tuple[int, str]:
    """Return the sort key of the list: microseconds of the last use, and the id."""
    return (subject.last_used - EPOCH) // timedelta(microseconds=1), subject.id


def _cursor(last: Subject) -> str:
    used, identity = _place(last)
    return f"{used}-{identity}"


def _parsed(cursor: str) -> tuple[int, str]:
    used, _, identity = cursor.partition("-")
    return int(used), identity
