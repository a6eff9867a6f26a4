"""Convert sandboxes and events to the schemas of openapi.yaml, without absolute paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from .._redaction import public
from ..events import Entry
from ..persistence.metadata import Stored
from ..persistence.records import SandboxRecord
from ..sandbox.listing import Sight
from ..templates.warm_pool import Copy
from .kernels import Live

Relative = Callable[[str], str | None]
"""Converts a notebook's absolute path to one relative to the server's root folder; None if outside."""


@dataclass(frozen=True)
class Subject:
    """A sandbox: its record unless it is ephemeral, and its kernel if this server has it open.

    A sandbox in the warm pool has neither.
    """

    record: SandboxRecord | None
    live: Live | None
    standby: Copy | None = None

    @property
    def id(self) -> str:
        """Id in the REST API: the record's, the kernel's if ephemeral, or the warm sandbox's."""
        if self.standby:
            return self.standby.sandbox.sandbox_id
        assert self.record or self.live
        return str(self.record.id) if self.record else self.live.kernel_id if self.live else ""

    @property
    def sandbox_id(self) -> str:
        """Id in storage; ``id`` if it is not stored."""
        return self.record.sandbox_id if self.record else self.id

    @property
    def kernel_name(self) -> str:
        """Name of its kernelspec."""
        if self.standby:
            return self.standby.kernel_name
        return self.live.kernel_name if self.live else self.record.kernel_name if self.record else ""

    @property
    def notebook_path(self) -> str:
        """Absolute path of its notebook; empty without one."""
        return self.record.notebook_path if self.record else ""

    @property
    def created(self) -> datetime:
        """Time of its creation."""
        if self.standby:
            return self.standby.created
        assert self.record or self.live
        return self.record.created if self.record else self.live.created if self.live else datetime.now(UTC)

    @property
    def last_used(self) -> datetime:
        """Time of its last known use."""
        known = [found.last_used for found in (self.record, self.live) if found]
        return max(known) if known else self.created


def sandbox(subject: Subject, sight: Sight | None, relative: Relative) -> dict[str, Any]:
    """Return the ``Sandbox`` object of openapi.yaml; ``sight`` is None for an ephemeral sandbox."""
    stored = sight.summary if sight else None
    reasons = subject.live.busy_reasons if subject.live else []
    return {
        "id": subject.id,
        "sandbox_id": subject.sandbox_id,
        "state": state(subject, sight),
        "persistent": subject.record is not None,
        "busy": bool(reasons),
        "busy_reasons": reasons,
        "kernel_id": subject.live.kernel_id if subject.live else None,
        "kernel_name": subject.kernel_name,
        "notebook_path": relative(subject.notebook_path),
        "created": _time(subject.created),
        "last_used": _time(subject.last_used),
        "size": sight.size if sight else None,
        "checkpoint": _stored(stored.checkpoint) if stored else None,
        "previous": _stored(stored.previous) if stored else None,
        "savepoints": named(stored.savepoints) if stored else [],
        "snapshots": named(sight.snapshots) if sight else [],
        "problem": public(sight.problem) if sight and sight.problem else None,
    }


def state(subject: Subject, sight: Sight | None) -> str:
    """Return the state of a sandbox: of its kernel if this server has it, else ``standby`` or that in storage."""
    if subject.live:
        return subject.live.state
    if subject.standby:
        return "standby"
    assert sight is not None
    return sight.state


def named(items: Mapping[str, Stored]) -> list[dict[str, Any]]:
    """Return a ``NamedState`` object for each item, the oldest first."""
    found = [{"name": name, "created": item.created, "size": item.size} for name, item in items.items()]
    return sorted(found, key=lambda one: (one["created"], one["name"]))


def event(entry: Entry) -> dict[str, Any]:
    """Return the ``Event`` object for an entry of the journal, without empty fields."""
    known = {"seconds": entry.seconds, "size": entry.size, "doing": entry.doing, "reason": entry.reason}
    told = {name: value for name, value in known.items() if value not in (None, "")}
    return {"id": entry.sandbox_id, "what": str(entry.what), "time": entry.time, **told}


def _stored(item: Stored | None) -> dict[str, Any] | None:
    return {"created": item.created, "size": item.size} if item else None


def _time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat()
