"""Look up recorded sandboxes in storage, for lists in the command line and the REST API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ..errors import MetadataError, SandboxError, SandboxNotFoundError, StorageNotHereError
from ..persistence import metadata
from ..persistence.metadata import Checkpoint, GCSSandboxMetadata, ListedCheckpoint, Summary
from ..persistence.records import SandboxRecord
from .model import NamedState, Sandbox, State, Stored
from .user_sandboxes import Persistence

AT_ONCE = 8
"""Threads for lookups in remote storage. For local storage, one thread is enough: the disk is the limit."""


@dataclass(frozen=True)
class StoredSandbox:
    """A record and its sandbox; ``problem`` is the error if the sandbox's data in storage could not be read."""

    record: SandboxRecord
    sandbox: Sandbox
    problem: SandboxError | None = None


def look(sandboxes: Persistence, records: Iterable[SandboxRecord]) -> list[StoredSandbox]:
    """Return the records and their sandboxes, with the data in storage. Blocks."""

    def one(record: SandboxRecord) -> StoredSandbox:
        try:
            found = describe(record, sandboxes.summarise(record), sandboxes.snapshots(record))
            return StoredSandbox(record, found)
        except SandboxError as error:
            return StoredSandbox(record, _undescribed(record, error), error)

    if sandboxes.stores.kind == "local":
        return [one(record) for record in records]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(one, records))


def describe(
    record: SandboxRecord, document: Summary | GCSSandboxMetadata, snapshots: Mapping[str, metadata.Stored]
) -> Sandbox:
    """Return the sandbox of a record; its state is running, saved or empty.

    The time of the checkpoint counts as a use: a killed server did not update the record. Raises MetadataError if a
    stored time is invalid.
    """
    try:
        checkpoint, previous = _stored(document.checkpoint), _stored(document.previous)
        savepoints, files = _named(document.savepoints), _named(snapshots)
        lost_since = _time(document.lost_since) if document.lost_since else None
    except ValueError as error:
        raise MetadataError(f"A time in the document of sandbox {record.sandbox_id} is invalid: {error}.") from error
    sizes = [item.size for item in (checkpoint, previous, *savepoints, *files) if item]
    return replace(
        _from_record(record, "running" if document.running else "saved" if checkpoint else "empty"),
        last_used=max(record.last_used, checkpoint.created) if checkpoint else record.last_used,
        size=sum(sizes),
        checkpoint=checkpoint,
        previous=previous,
        savepoints=savepoints,
        snapshots=files,
        lost_since=lost_since,
    )


def _undescribed(record: SandboxRecord, problem: SandboxError) -> Sandbox:
    """Return the sandbox of a record whose lookup failed; its state is gone, elsewhere or unknown."""
    if isinstance(problem, SandboxNotFoundError):
        state: State = "gone"
    else:
        state = "elsewhere" if isinstance(problem, StorageNotHereError) else "unknown"
    return replace(_from_record(record, state), problem=str(problem))


def _from_record(record: SandboxRecord, state: State) -> Sandbox:
    return Sandbox(
        id=str(record.id),
        sandbox_id=record.sandbox_id,
        state=state,
        persistent=True,
        kernel_id=None,
        kernel_name=record.kernel_name,
        notebook_path=record.notebook_path or None,
        created=record.created,
        last_used=record.last_used,
        size=None,
        checkpoint=None,
        previous=None,
        savepoints=(),
        snapshots=(),
        problem=None,
    )


def _named(states: Mapping[str, metadata.Stored | ListedCheckpoint | Checkpoint]) -> tuple[NamedState, ...]:
    """Return the savepoints or file snapshots with these names, the oldest first."""
    found = [NamedState(name, _time(each.created), each.size) for name, each in states.items()]
    return tuple(sorted(found, key=lambda state: state.created))


def _stored(item: ListedCheckpoint | Checkpoint | None) -> Stored | None:
    return Stored(_time(item.created), item.size) if item else None


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
