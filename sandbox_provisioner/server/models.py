"""What the REST API shows of a sandbox: its record, its storage and its kernel as one object, without any path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from .discretion import public
from .journal import Entry
from .metadata import Stored
from .records import SandboxRecord
from .serverkernels import Live
from .sights import Sight
from .standby import Copy

Relative = Callable[[str], str | None]
"""Makes a notebook's path one below the server's root folder."""


@dataclass(frozen=True)
class Subject:
    """A sandbox that was asked for: its record unless it is ephemeral, its kernel on this server if it has one.

    A copy of a template that stands by has neither.
    """

    record: SandboxRecord | None
    live: Live | None
    standby: Copy | None = None

    @property
    def id(self) -> str:
        """What it is known by."""
        if self.standby:
            return self.standby.sandbox.sandbox_id
        assert self.record or self.live
        return str(self.record.id) if self.record else self.live.kernel_id if self.live else ""

    @property
    def sandbox_id(self) -> str:
        """What storage knows it by."""
        return self.record.sandbox_id if self.record else self.id

    @property
    def kernel_name(self) -> str:
        """The kernel that runs in it."""
        if self.standby:
            return self.standby.kernel_name
        return self.live.kernel_name if self.live else self.record.kernel_name if self.record else ""

    @property
    def notebook_path(self) -> str:
        """The absolute path of its notebook; empty if it has none."""
        return self.record.notebook_path if self.record else ""

    @property
    def created(self) -> datetime:
        """When it was first made."""
        if self.standby:
            return self.standby.created
        assert self.record or self.live
        return self.record.created if self.record else self.live.created if self.live else datetime.now(UTC)

    @property
    def last_used(self) -> datetime:
        """When it was last used, as far as is known."""
        known = [found.last_used for found in (self.record, self.live) if found]
        return max(known) if known else self.created


def sandbox(subject: Subject, sight: Sight | None, relative: Relative) -> dict[str, Any]:
    """``Sandbox`` of the contract; ``sight`` is None for an ephemeral one."""
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
    """How a sandbox is, in a word: what this server's kernel does goes before what storage says."""
    if subject.live:
        return subject.live.state
    if subject.standby:
        return "standby"
    assert sight is not None
    return sight.state


def named(items: Mapping[str, Stored]) -> list[dict[str, Any]]:
    """``NamedState`` of each, the oldest first."""
    found = [{"name": name, "created": item.created, "size": item.size} for name, item in items.items()]
    return sorted(found, key=lambda one: (one["created"], one["name"]))


def event(entry: Entry) -> dict[str, Any]:
    """``Event`` of the contract: what the journal has, as far as it is known."""
    known = {"seconds": entry.seconds, "size": entry.size, "doing": entry.doing, "reason": entry.reason}
    told = {name: value for name, value in known.items() if value not in (None, "")}
    return {"id": entry.sandbox_id, "what": str(entry.what), "time": entry.time, **told}


def _stored(item: Stored | None) -> dict[str, Any] | None:
    return {"created": item.created, "size": item.size} if item else None


def _time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat()
