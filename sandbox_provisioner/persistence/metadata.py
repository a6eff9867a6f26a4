"""The contents of metadata.json, the document of a persistent sandbox: typed, versioned and validated.

A compare-and-swap replaces the document as a whole, so everything here is immutable: ``dataclasses.replace`` makes the
next version. A document with a newer schema is refused, an older one is migrated. Every defect raises MetadataError
with the document's location.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from ..errors import MetadataError, SavepointNotFoundError
from ..gvisor.bundle import BundleSpec, Mount
from ..storage.base import FileRecord

SCHEMA = 3
"""Version of the document. 2 added savepoints: programs that know only 1 would delete them as garbage. 3 added the
signature: programs that know only 2 would write unsigned documents, which others refuse."""

T = TypeVar("T")


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

    @property
    def kept(self) -> set[str]:
        """Names of the artifacts that its checkpoints and savepoints need."""
        checkpoints = (self.checkpoint, self.previous, *self.savepoints.values())
        return {checkpoint.artifact.name for checkpoint in checkpoints if checkpoint}

    @property
    def last(self) -> str:
        """Name of its checkpoint's artifact; empty without a checkpoint."""
        return self.checkpoint.artifact.name if self.checkpoint else ""

    @property
    def running(self) -> bool:
        """True if it runs on a server, as last recorded."""
        return self.tenancy is not None and self.tenancy.running

    def saved(self, made: Checkpoint, time: str) -> GCSSandboxMetadata:
        """Return the document after a checkpoint; the one before is kept as ``previous``."""
        return replace(self.stopped(), checkpoint=made, previous=self.checkpoint, last_used=time)

    def started(self, checkpoint: Checkpoint | None, previous: Checkpoint | None, time: str) -> GCSSandboxMetadata:
        """Return the document after a start or a restore, with the checkpoints that are still kept."""
        return replace(self._runs(True), checkpoint=checkpoint, previous=previous, last_used=time)

    def savepoint(self, name: str) -> Checkpoint:
        """Return the savepoint ``name``. Raises SavepointNotFoundError."""
        if name not in self.savepoints:
            raise SavepointNotFoundError(self.sandbox_id, name, list(self.savepoints))
        return self.savepoints[name]

    def with_savepoint(self, name: str, made: Checkpoint) -> GCSSandboxMetadata:
        """Return the document with a savepoint ``name`` added."""
        return replace(self, savepoints={**self.savepoints, name: made})

    def without_savepoint(self, name: str) -> GCSSandboxMetadata:
        """Return the document without the savepoint ``name``."""
        return replace(self, savepoints={known: made for known, made in self.savepoints.items() if known != name})

    def reverted(self, name: str) -> GCSSandboxMetadata:
        """Return the document with the previous checkpoint as the latest, and the latest as the savepoint ``name``."""
        kept = self.with_savepoint(name, self.checkpoint) if self.checkpoint else self
        return replace(kept, checkpoint=self.previous, previous=None)

    def stopped(self) -> GCSSandboxMetadata:
        """Return the document of the sandbox after it has ended."""
        return self._runs(False)

    def _runs(self, running: bool) -> GCSSandboxMetadata:
        assert self.tenancy is not None
        return replace(self, tenancy=replace(self.tenancy, running=running))


class Stored(NamedTuple):
    """A checkpoint, savepoint or snapshot in a list. ``created`` is ISO 8601, ``size`` is in bytes."""

    created: str
    size: int


@dataclass(frozen=True)
class Summary:
    """The part of a document that a list shows; decoded in a fraction of the time of the whole."""

    running: bool
    checkpoint: Stored | None
    previous: Stored | None
    savepoints: Mapping[str, Stored]
    user: str = ""
    shared_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class Note:
    """A note in a running sandbox's runtime folder, for its recovery after its server was killed.

    ``token`` is the lease token of its server in the document, ``checkpoint`` the name of the latest artifact then.
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
    """Return the document in ``data``. Raises MetadataError, with ``where``, if it is not that of ``sandbox_id``."""
    with _understood(where):
        return _metadata(_document_of(sandbox_id, data, where))


def summarise(data: bytes, where: str, sandbox_id: str) -> Summary:
    """Return the summary of a document. Raises MetadataError as ``decode`` does, but checks only part of it."""
    with _understood(where):
        document = _document_of(sandbox_id, _without_prints(data), where)
        tenancy = _optional(document, "tenancy", _tenancy)
        return Summary(
            running=tenancy is not None and tenancy.running,
            checkpoint=_optional(document, "checkpoint", _stored),
            previous=_optional(document, "previous", _stored),
            savepoints=_savepoints(document, _stored),
            user=_get(document, "user", str),
            shared_with=_names(document, "shared_with"),
        )


def encode_artifact(artifact: GCSArtifact) -> bytes:
    """Return an artifact as a document of its own: the manifest of a snapshot."""
    return json.dumps({"schema": SCHEMA, **asdict(artifact)}).encode()


def decode_artifact(data: bytes, where: str) -> GCSArtifact:
    """Return the artifact in such a document. Raises MetadataError as ``decode`` does."""
    with _understood(where):
        return _artifact(_document(data, where))


def decode_note(value: dict[str, Any], where: str) -> Note:
    """Return the note in a JSON object. Raises MetadataError as ``decode`` does."""
    with _understood(where):
        return Note(
            sandbox_id=_get(value, "sandbox_id", str),
            where=_get(value, "where", str),
            spec=spec_from_json(_get(value, "spec", dict)),
            platform=_get(value, "platform", str),
            contents=_get(value, "contents", dict),
            token=_get(value, "token", int) if value.get("token") is not None else None,
            checkpoint=_get(value, "checkpoint", str) if "checkpoint" in value else "",
            container_id=_get(value, "container_id", str),
        )


@contextmanager
def _understood(where: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, LookupError, RecursionError, OverflowError) as error:
        raise MetadataError(f"{where} cannot be understood: {str(error)[:200]}.") from error


def _document(data: bytes, where: str) -> dict[str, Any]:
    document = _object(json.loads(data))
    schema = _get(document, "schema", int)
    if schema > SCHEMA:
        problem = f"{where} has schema {schema}, and this version knows {SCHEMA}."
        raise MetadataError(problem, "Upgrade sandbox-provisioner on this server.")
    return document


def _document_of(sandbox_id: str, data: bytes, where: str) -> dict[str, Any]:
    document = _document(data, where)
    found = _get(document, "sandbox_id", str)
    if found != sandbox_id:
        raise ValueError(f"it is of sandbox {found[:200]!r}")
    return document


def _without_prints(data: bytes) -> bytes:
    """Return a document without its checkpoints' files in use, which are most of its length.

    Relies on the indentation that ``encode`` writes. A JSON string contains no line break, so the markers match only
    the structure.
    """
    head, mark, savepoints = data.partition(b'\n "savepoints": {\n')
    return _cut(head, b"\n  ") + mark + _cut(savepoints, b"\n   ")


def _cut(data: bytes, indent: bytes) -> bytes:
    first, *others = data.split(indent + b'"files": {\n')
    return first + b"".join(indent + b'"files": {' + other[other.index(indent + b"}") :] for other in others)


def _metadata(document: dict[str, Any]) -> GCSSandboxMetadata:
    return GCSSandboxMetadata(
        sandbox_id=_get(document, "sandbox_id", str),
        created=_get(document, "created", str),
        last_used=_get(document, "last_used", str),
        kernel_name=_get(document, "kernel_name", str),
        notebook_path=_get(document, "notebook_path", str),
        user=_get(document, "user", str),
        shared_with=_names(document, "shared_with"),
        settings=_get(document, "settings", dict),
        tenancy=_optional(document, "tenancy", _tenancy),
        checkpoint=_optional(document, "checkpoint", _checkpoint),
        previous=_optional(document, "previous", _checkpoint),
        savepoints=_savepoints(document, _checkpoint),
    )


def _savepoints(document: dict[str, Any], make: Callable[[dict[str, Any]], T]) -> dict[str, T]:
    found = _get(document, "savepoints", dict) if document["schema"] > 1 else {}
    return {name: make(_object(value)) for name, value in found.items()}


def _names(document: dict[str, Any], name: str) -> tuple[str, ...]:
    return tuple(_is(user, str) for user in _get(document, name, list)) if name in document else ()


def _tenancy(value: dict[str, Any]) -> Tenancy:
    return Tenancy(_get(value, "token", int), _get(value, "owner", str), _get(value, "running", bool))


def _checkpoint(value: dict[str, Any]) -> Checkpoint:
    return Checkpoint(
        artifact=_artifact(_get(value, "artifact", dict)),
        runsc_version=_get(value, "runsc_version", str),
        runsc_sha256=_get(value, "runsc_sha256", str),
        platform=_get(value, "platform", str),
        architecture=_get(value, "architecture", str),
        cpu_features=tuple(_is(feature, str) for feature in _get(value, "cpu_features", list)),
        spec=spec_from_json(_get(value, "spec", dict)),
        files=_get(value, "files", dict),
        contents=_get(value, "contents", dict),
        seconds=float(_is(value["seconds"], (int, float))),
    )


def _stored(value: dict[str, Any]) -> Stored:
    artifact = _get(value, "artifact", dict)
    sizes = [_get(_object(record), "size", int) for record in _get(artifact, "files", dict).values()]
    return Stored(_get(artifact, "created", str), sum(sizes))


def _artifact(value: dict[str, Any]) -> GCSArtifact:
    files = {name: _file(_object(record)) for name, record in _get(value, "files", dict).items()}
    return GCSArtifact(_get(value, "name", str), _get(value, "created", str), files)


def _file(value: dict[str, Any]) -> FileRecord:
    parts = tuple(_is(part, int) for part in _get(value, "parts", list))
    digests = tuple(_is(digest, str) for digest in _get(value, "digests", list)) if "digests" in value else ()
    record = FileRecord(_get(value, "size", int), _get(value, "part_size", int), parts, digests)
    if record.problem:
        raise ValueError(f"of a file, {record.problem}")
    return record


def spec_from_json(value: dict[str, Any]) -> BundleSpec:
    """Return the BundleSpec in the JSON form of ``dataclasses.asdict``."""
    environment = {name: _is(text, str) for name, text in _get(value, "environment", dict).items()}
    return BundleSpec(
        python=_get(value, "python", str),
        home=_get(value, "home", str),
        user=_get(value, "user", str),
        mounts=tuple(map(_mount, _get(value, "mounts", list))),
        network=_get(value, "network", str),
        environment=environment,
        outlives=_get(value, "outlives", bool),
        carried=_mount(value["carried"]) if value.get("carried") else None,
    )


def _mount(value: Any) -> Mount:
    source, destination, writable = value
    return Mount(_is(source, str), _is(destination, str), _is(writable, bool))


def _optional(document: dict[str, Any], name: str, make: Callable[[dict[str, Any]], T]) -> T | None:
    return None if document[name] is None else make(_get(document, name, dict))


def _get(document: dict[str, Any], name: str, kind: type[T]) -> T:
    if name not in document:
        raise LookupError(f"it has no {name!r}")
    try:
        return _is(document[name], kind)
    except TypeError as error:
        raise TypeError(f"{name!r} {error}") from None


def _object(value: Any) -> dict[str, Any]:
    return _is(value, dict)


def _is(value: Any, kind: type[T] | tuple[type[T], ...]) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"is {str(value)[:50]!r}")
    return value
