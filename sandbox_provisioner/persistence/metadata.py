"""The contents of metadata.json, the document of a persistent sandbox: typed, versioned and validated.

A compare-and-swap replaces the document as a whole, so everything here is immutable: ``dataclasses.replace`` makes the
next version. A document with a newer schema is refused, an older one is migrated. Every defect raises MetadataError
with the document's location.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from .._text import titled
from ..errors import MetadataError, SavepointNotFoundError
from ..events import Entry, EventKind
from ..gvisor.bundle import BundleSpec
from ..storage.base import FileRecord
from . import decoding

SCHEMA = 3
"""Version of the document. 2 added savepoints, which programs for schema 1 would delete as garbage. 3 added the
signature: programs for schema 2 would write unsigned documents, which others refuse."""

ADDED = frozenset({"shared_with", "digests", "carried", "inner", "read_only", "lost_since"})
"""Members that documents of earlier versions do not have."""


@dataclass(frozen=True)
class GCSArtifact:
    """The immutable files of a checkpoint or a file snapshot, stored below the prefix ``name``."""

    name: str
    created: str
    files: Mapping[str, FileRecord]

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(record.size for record in self.files.values())


@dataclass(frozen=True)
class Checkpoint:
    """A sandbox's memory at one moment, with everything that a server needs to restore it."""

    artifact: GCSArtifact
    runsc_version: str
    runsc_sha256: str
    platform: str
    architecture: str
    cpu_features: tuple[str, ...]
    spec: BundleSpec
    files: Mapping[str, Any]
    """Host files that the sandbox's processes had mapped or open, as JSON of ``compatibility.FilePrint``."""
    contents: Mapping[str, Any]
    """Description of the processes inside, from the code that started them: the kernel's process and its endpoints."""
    seconds: float

    @property
    def created(self) -> str:
        """Time of the checkpoint, as ISO 8601."""
        return self.artifact.created

    @property
    def size(self) -> int:
        """Size of the image in bytes."""
        return self.artifact.size


@dataclass(frozen=True)
class Tenancy:
    """The server that owns the sandbox and the token of its lease.

    ``running`` is True while the sandbox's state is newer than any checkpoint.
    """

    token: int
    owner: str
    running: bool


@dataclass(frozen=True)
class GCSSandboxMetadata:
    """The document of one sandbox.

    ``previous`` is kept until ``checkpoint`` has been restored once, and is offered if that fails. ``savepoints`` are
    kept by name until the user deletes them.
    """

    sandbox_id: str
    created: str
    last_used: str
    kernel_name: str = ""
    notebook_path: str = ""
    user: str = ""
    shared_with: tuple[str, ...] = ()
    """Names of other users with the same rights as ``user``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    tenancy: Tenancy | None = None
    checkpoint: Checkpoint | None = None
    previous: Checkpoint | None = None
    savepoints: Mapping[str, Checkpoint] = field(default_factory=dict)
    lost_since: str = ""
    """Time of the checkpoint, as ISO 8601, if the sandbox ran after it and ended without being saved; else empty. The
    user is told so after the restore, and then it is empty again."""

    @property
    def title(self) -> str:
        """The sandbox's id and its notebook, for the log."""
        return titled(self.sandbox_id, self.notebook_path)

    def entry(self, kind: EventKind) -> Entry:
        """Return an event of this ``kind`` about the sandbox."""
        return Entry(self.sandbox_id, kind, kernel_name=self.kernel_name, user=self.user, notebook=self.notebook_path)

    @property
    def kept(self) -> set[str]:
        """Names of the artifacts of all its checkpoints and savepoints."""
        checkpoints = (self.checkpoint, self.previous, *self.savepoints.values())
        return {checkpoint.artifact.name for checkpoint in checkpoints if checkpoint}

    @property
    def last(self) -> str:
        """Name of the current checkpoint's artifact; empty without a checkpoint."""
        return self.checkpoint.artifact.name if self.checkpoint else ""

    @property
    def running(self) -> bool:
        """True if the document says that the sandbox runs on a server."""
        return self.tenancy is not None and self.tenancy.running

    def saved(self, checkpoint: Checkpoint, time: str) -> GCSSandboxMetadata:
        """Return the document after a save: ``checkpoint`` is the current one, and the old one is ``previous``."""
        return replace(self._runs(False), checkpoint=checkpoint, previous=self.checkpoint, last_used=time)

    def started(self, checkpoint: Checkpoint | None, previous: Checkpoint | None, time: str) -> GCSSandboxMetadata:
        """Return the document after a start or a restore, with these two checkpoints instead of the recorded ones."""
        return replace(self._runs(True), checkpoint=checkpoint, previous=previous, last_used=time)

    def savepoint(self, name: str) -> Checkpoint:
        """Return the savepoint ``name``. Raises SavepointNotFoundError."""
        if name not in self.savepoints:
            raise SavepointNotFoundError(self.sandbox_id, name, list(self.savepoints))
        return self.savepoints[name]

    def with_savepoint(self, name: str, checkpoint: Checkpoint) -> GCSSandboxMetadata:
        """Return the document with a savepoint ``name`` added."""
        return replace(self, savepoints={**self.savepoints, name: checkpoint})

    def without_savepoint(self, name: str) -> GCSSandboxMetadata:
        """Return the document without the savepoint ``name``."""
        return replace(
            self, savepoints={other: checkpoint for other, checkpoint in self.savepoints.items() if other != name}
        )

    def reverted(self, name: str) -> GCSSandboxMetadata:
        """Return the document with the previous checkpoint as the latest, and the latest as the savepoint ``name``."""
        kept = self.with_savepoint(name, self.checkpoint) if self.checkpoint else self
        return replace(kept, checkpoint=self.previous, previous=None, lost_since="")

    def told(self) -> GCSSandboxMetadata:
        """Return the document after the user was told that the present state is older, or has chosen another state."""
        return replace(self, lost_since="")

    def reset(self, name: str) -> GCSSandboxMetadata:
        """Return the document without a checkpoint to restore; the latest is kept as the savepoint ``name``."""
        kept = self.with_savepoint(name, self.checkpoint) if self.checkpoint else self
        return replace(kept.given_up(), checkpoint=None)

    def left_running(self) -> GCSSandboxMetadata:
        """Return the document of a sandbox that runs without a server."""
        return self._runs(True)

    def stopped(self) -> GCSSandboxMetadata:
        """Return the document of the sandbox after it has ended without being saved."""
        if not self.running:
            return self
        return replace(self._runs(False), lost_since=self.checkpoint.created if self.checkpoint else "")

    def given_up(self) -> GCSSandboxMetadata:
        """Return the document of the sandbox after it has ended without being saved, and its user knows that."""
        return replace(self._runs(False), lost_since="")

    def taken_over(self, token: int, owner: str, runs_on: bool) -> GCSSandboxMetadata:
        """Return the document for the holder of a new lease; the sandbox has ended, unless it ``runs_on``."""
        before = self if runs_on else self.stopped()
        return replace(before, tenancy=Tenancy(token, owner, before.running))

    def _runs(self, running: bool) -> GCSSandboxMetadata:
        assert self.tenancy is not None
        return replace(self, tenancy=replace(self.tenancy, running=running))


class Stored(NamedTuple):
    """A snapshot in a list. ``created`` is ISO 8601, ``size`` is in bytes."""

    created: str
    size: int


@dataclass(frozen=True)
class ListedFile:
    """The part of a FileRecord that a list shows."""

    size: int


@dataclass(frozen=True)
class ListedArtifact:
    """The part of a GCSArtifact that a list shows."""

    created: str
    files: Mapping[str, ListedFile]


@dataclass(frozen=True)
class ListedCheckpoint:
    """The part of a Checkpoint that a list shows."""

    artifact: ListedArtifact

    @property
    def created(self) -> str:
        """Time of the checkpoint, as ISO 8601."""
        return self.artifact.created

    @property
    def size(self) -> int:
        """Size of the image in bytes."""
        return sum(file.size for file in self.artifact.files.values())


@dataclass(frozen=True)
class Summary:
    """The part of a document that a list shows; decoded in a fraction of the time of the whole."""

    tenancy: Tenancy | None
    checkpoint: ListedCheckpoint | None
    previous: ListedCheckpoint | None
    savepoints: Mapping[str, ListedCheckpoint]
    user: str
    shared_with: tuple[str, ...] = ()
    lost_since: str = ""

    @property
    def running(self) -> bool:
        """True if the document says that the sandbox runs on a server."""
        return self.tenancy is not None and self.tenancy.running


@dataclass(frozen=True)
class Note:
    """The rescue note in a running sandbox's runtime folder, for its recovery after its server was killed.

    ``token`` is its server's lease token; ``checkpoint`` is the document's ``last`` when the note was written.
    """

    sandbox_id: str
    where: str
    spec: BundleSpec
    platform: str
    contents: Mapping[str, Any]
    token: int | None = None
    checkpoint: str = ""
    container_id: str = ""

    def outdated(self, document: GCSSandboxMetadata) -> bool:
        """Return True if another server has since opened the sandbox and changed its latest checkpoint."""
        theirs = document.tenancy is not None and document.tenancy.token != self.token
        return self.token is not None and theirs and document.last != self.checkpoint


def encode(metadata: GCSSandboxMetadata) -> bytes:
    """Return the document as bytes, unsigned."""
    return json.dumps({"schema": SCHEMA, **asdict(metadata)}, indent=1).encode()


def decode(data: bytes, where: str, sandbox_id: str) -> GCSSandboxMetadata:
    """Return the document in ``data``. Raises MetadataError, with ``where``, if it is invalid or another sandbox's."""
    with _metadata_errors(where):
        return decoding.decode(GCSSandboxMetadata, _document_of(sandbox_id, data, where), ADDED)


def summarise(data: bytes, where: str, sandbox_id: str) -> Summary:
    """Return the summary of a document. Raises MetadataError as ``decode`` does, but checks only part of it."""
    with _metadata_errors(where):
        return decoding.decode(Summary, _document_of(sandbox_id, _without_files(data), where), ADDED)


def encode_artifact(artifact: GCSArtifact) -> bytes:
    """Return the manifest of a snapshot, which contains its artifact, as bytes, unsigned."""
    return json.dumps({"schema": SCHEMA, **asdict(artifact)}).encode()


def decode_artifact(data: bytes, where: str) -> GCSArtifact:
    """Return the artifact in a snapshot's manifest. Raises MetadataError as ``decode`` does."""
    with _metadata_errors(where):
        return decoding.decode(GCSArtifact, _document(data, where), ADDED)


def decode_note(value: dict[str, Any], where: str) -> Note:
    """Return the note in a JSON object. Raises MetadataError as ``decode`` does."""
    with _metadata_errors(where):
        return decoding.decode(Note, value, ADDED | {"token", "checkpoint"})


@contextmanager
def _metadata_errors(where: str) -> Iterator[None]:
    try:
        yield
    except decoding.FAILURES as error:
        raise MetadataError(f"{where} cannot be understood: {str(error)[:200]}.") from error


@dataclass(frozen=True)
class _Heading:
    schema: int


def _document(data: bytes, where: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(data)
    schema = decoding.decode(_Heading, document).schema
    if schema > SCHEMA:
        problem = f"{where} has schema {schema}, and this version reads up to {SCHEMA}."
        raise MetadataError(problem, "Upgrade sandbox-provisioner on this server.")
    return {**document, "savepoints": {}} if schema < 2 else document


def _document_of(sandbox_id: str, data: bytes, where: str) -> dict[str, Any]:
    document = _document(data, where)
    if document.get("sandbox_id") != sandbox_id:
        raise ValueError(f"it is the document of sandbox {str(document.get('sandbox_id'))[:200]!r}")
    return document


def _without_files(data: bytes) -> bytes:
    """Return a document without the ``files`` of its checkpoints, which are most of its length.

    Relies on the indentation that ``encode`` writes. A JSON string contains no line break, so the markers match only
    the structure.
    """
    head, mark, savepoints = data.partition(b'\n "savepoints": {\n')
    return _cut(head, b"\n  ") + mark + _cut(savepoints, b"\n   ")


def _cut(data: bytes, indent: bytes) -> bytes:
    first, *others = data.split(indent + b'"files": {\n')
    return first + b"".join(indent + b'"files": {' + other[other.index(indent + b"}") :] for other in others)
