"""What storage has of sandboxes that are recorded, for those who list them: the command line and the REST API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime

from .errors import SandboxError, SandboxNotFoundError, StorageNotHereError
from .metadata import Stored, Summary
from .persistence import Persistence
from .records import SandboxRecord

AT_ONCE = 8
"""How many sandboxes are asked for at once, as one may be far away; on a local disk, threads would only wait."""


@dataclass(frozen=True)
class Sight:
    """A record, with what its storage has of the sandbox or with the reason why that is not known."""

    record: SandboxRecord
    summary: Summary | None = None
    snapshots: Mapping[str, Stored] = field(default_factory=dict)
    problem: SandboxError | None = None

    @property
    def state(self) -> str:
        """How it is, in a word."""
        if isinstance(self.problem, SandboxNotFoundError):
            return "gone"
        if isinstance(self.problem, StorageNotHereError):
            return "elsewhere"
        if self.summary is None:
            return "unknown"
        return "running" if self.summary.running else "saved" if self.summary.checkpoint else "empty"

    @property
    def last_used(self) -> datetime:
        """When it was used last, as far as that is known: what a killed server did not record, its checkpoint tells."""
        saved = self.summary.checkpoint if self.summary else None
        return max(self.record.last_used, datetime.fromisoformat(saved.created)) if saved else self.record.last_used

    @property
    def size(self) -> int | None:
        """The bytes of its checkpoints, savepoints and snapshots; None if they are not known."""
        return None if self.summary is None else sum(item.size for item in self.stored.values())

    @property
    def stored(self) -> dict[str, Stored]:
        """What is kept of it, by what a person calls it."""
        found: dict[str, Stored] = {}
        if self.summary and self.summary.checkpoint:
            found["checkpoint"] = self.summary.checkpoint
        if self.summary and self.summary.previous:
            found["previous checkpoint"] = self.summary.previous
        if self.summary:
            found |= {f"savepoint {name}": made for name, made in self.summary.savepoints.items()}
        return found | {f"snapshot {name}": snapshot for name, snapshot in self.snapshots.items()}


def look(sandboxes: Persistence, records: Iterable[SandboxRecord]) -> list[Sight]:
    """What storage has of each."""

    def sight(record: SandboxRecord) -> Sight:
        try:
            return Sight(record, sandboxes.summarise(record), sandboxes.snapshots(record))
        except SandboxError as error:
            return Sight(record, problem=error)

    if sandboxes.stores.kind == "local":
        return [sight(record) for record in records]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(sight, records))
