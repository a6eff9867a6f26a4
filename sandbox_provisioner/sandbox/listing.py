"""Look up recorded sandboxes in storage, for lists in the command line and the REST API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime

from ..errors import SandboxError, SandboxNotFoundError, StorageNotHereError
from ..persistence.metadata import Stored, Summary
from ..persistence.records import SandboxRecord
from .user_sandboxes import Persistence

AT_ONCE = 8
"""Parallel lookups in remote storage. Local storage is read in one thread: more would only wait for the disk."""


@dataclass(frozen=True)
class Sight:
    """A record with the summary of its sandbox in storage, or with the error of the lookup."""

    record: SandboxRecord
    summary: Summary | None = None
    snapshots: Mapping[str, Stored] = field(default_factory=dict)
    problem: SandboxError | None = None

    @property
    def state(self) -> str:
        """State of the sandbox: gone, elsewhere, unknown, running, saved or empty."""
        if isinstance(self.problem, SandboxNotFoundError):
            return "gone"
        if isinstance(self.problem, StorageNotHereError):
            return "elsewhere"
        if self.summary is None:
            return "unknown"
        return "running" if self.summary.running else "saved" if self.summary.checkpoint else "empty"

    @property
    def last_used(self) -> datetime:
        """Time of the last known use. The checkpoint's time counts too: a killed server did not update the record."""
        saved = self.summary.checkpoint if self.summary else None
        return max(self.record.last_used, datetime.fromisoformat(saved.created)) if saved else self.record.last_used

    @property
    def size(self) -> int | None:
        """Bytes of its checkpoints, savepoints and snapshots; None if unknown."""
        return None if self.summary is None else sum(item.size for item in self.stored.values())

    @property
    def stored(self) -> dict[str, Stored]:
        """Its checkpoints, savepoints and snapshots by their display names."""
        found: dict[str, Stored] = {}
        if self.summary and self.summary.checkpoint:
            found["checkpoint"] = self.summary.checkpoint
        if self.summary and self.summary.previous:
            found["previous checkpoint"] = self.summary.previous
        if self.summary:
            found |= {f"savepoint {name}": made for name, made in self.summary.savepoints.items()}
        return found | {f"snapshot {name}": snapshot for name, snapshot in self.snapshots.items()}


def look(sandboxes: Persistence, records: Iterable[SandboxRecord]) -> list[Sight]:
    """Return the records with the state of their sandboxes in storage. Blocks."""

    def sight(record: SandboxRecord) -> Sight:
        try:
            return Sight(record, sandboxes.summarise(record), sandboxes.snapshots(record))
        except SandboxError as error:
            return Sight(record, problem=error)

    if sandboxes.stores.kind == "local":
        return [sight(record) for record in records]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(sight, records))
