"""Describe a server's sandboxes and events for its clients, without absolute paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ..errors.redaction import without_paths
from ..events import Entry
from ..persistence.records import SandboxRecord
from ..sandbox.listing import StoredSandbox
from ..sandbox.model import Sandbox
from ..sandbox.visible import visible_files
from ..templates.warm_pool import Copy
from .kernels import Live

Relative = Callable[[str], str | None]
"""Converts a notebook's absolute path to one relative to the server's root folder; None if outside."""


@dataclass(frozen=True)
class Subject:
    """The sandbox to which an operation of the REST API applies, in whatever form this server has it.

    ``record``: set if it is persistent; ``live``: set if this server has its kernel open, running or hibernated;
    ``standby``: set only for a sandbox in the warm pool, which has neither of the others. At least one is set.
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


def describe(subject: Subject, stored: StoredSandbox | None, relative: Relative) -> Sandbox:
    """Return a sandbox in the form that clients get; ``stored`` is None for an ephemeral sandbox."""
    live = subject.live
    reasons = tuple(live.busy_reasons) if live else ()
    return replace(
        stored.sandbox if stored else _ephemeral(subject),
        state=state(subject, stored),
        busy=bool(reasons) and state(subject, stored) == "running",
        busy_reasons=reasons,
        files=visible_files(live.provisioner.sandbox.spec) if live and live.provisioner.sandbox else None,
        kernel_id=live.kernel_id if live else None,
        kernel_name=subject.kernel_name,
        notebook_path=relative(subject.notebook_path),
        created=subject.created.astimezone(UTC),
        last_used=subject.last_used.astimezone(UTC),
        problem=without_paths(stored.problem) if stored and stored.problem else None,
    )


def state(subject: Subject, stored: StoredSandbox | None) -> str:
    """Return a sandbox's state: that of its kernel on this server, or ``standby``, or else the state in storage."""
    if subject.live and subject.live.state:
        return subject.live.state
    if subject.standby:
        return "standby"
    assert stored is not None
    if subject.live and stored.sandbox.state == "running":  # the document does not tell that the kernel has ended
        return "saved" if stored.sandbox.checkpoint else "empty"
    return stored.sandbox.state


def _ephemeral(subject: Subject) -> Sandbox:
    """Return a sandbox of which nothing is stored."""
    return Sandbox(
        id=subject.id,
        sandbox_id=subject.sandbox_id,
        state="running",
        persistent=False,
        kernel_id=None,
        kernel_name=subject.kernel_name,
        notebook_path=None,
        created=subject.created,
        last_used=subject.last_used,
        size=None,
        checkpoint=None,
        previous=None,
        savepoints=(),
        snapshots=(),
        problem=None,
    )


def event(entry: Entry) -> dict[str, Any]:
    """Return the ``Event`` object for an entry of the event bus, without empty fields."""
    names = ("seconds", "size", "doing", "reason", "lost_since")
    known = {name: getattr(entry, name) for name in names}
    present = {name: value for name, value in known.items() if value not in (None, "")}
    return {"id": entry.sandbox_id, "what": str(entry.what), "time": entry.time, **present}
