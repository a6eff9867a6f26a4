"""metadata.json: all that is known of a persistent sandbox, as a typed, versioned and validated document.

The document is what a compare-and-swap replaces as a whole, so everything here is immutable: ``dataclasses.replace``
makes the next one. A document of a newer schema is refused, an older one is migrated; whatever is wrong with one is
a MetadataError that says where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from .bundle import BundleSpec, Mount
from .errors import MetadataError, SavepointNotFoundError
from .storage.base import FileRecord

SCHEMA = 3
"""1 has no savepoints: a program that does not know them would collect them as garbage. 2 is not signed: a program that
does not sign would write what others refuse."""

T = TypeVar("T")


@dataclass(frozen=True)
class GCSArtifact:
    """Files that were stored together under the prefix ``name``, never to be changed: a checkpoint or a snapshot."""

    name: str
    created: str
    files: Mapping[str, FileRecord]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(record.size for record in self.files.values())


@dataclass(frozen=True)
class Checkpoint:
    """A sandbox's memory at one moment, with all that a server must have to bring it back."""

    artifact: GCSArtifact
    runsc_version: str
    runsc_sha256: str
    platform: str
    architecture: str
    cpu_features: tuple[str, ...]
    spec: BundleSpec
    files: Mapping[str, Any]
    """The host's files that the sandbox's processes had mapped or open; see environment.py."""
    contents: Mapping[str, Any]
    """What runs inside, for those who started it: the kernel's process and its endpoints."""
    seconds: float

    @property
    def created(self) -> str:
        """When, as ISO 8601."""
        return self.artifact.created

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.artifact.size


@dataclass(frozen=True)
class Tenancy:
    """Which server has the sandbox, and by which lease; ``running`` while its state is newer than any checkpoint."""

    token: int
    owner: str
    running: bool


@dataclass(frozen=True)
class GCSSandboxMetadata:
    """One sandbox. ``previous`` is kept until ``checkpoint`` has been restored from, and is offered if that fails;
    ``savepoints`` are kept by their names until somebody deletes them.
    """

    sandbox_id: str
    created: str
    last_used: str
    kernel_name: str = ""
    notebook_path: str = ""
    user: str = ""
    shared_with: tuple[str, ...] = ()
    """The names of other users who may do with it what ``user`` may."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    tenancy: Tenancy | None = None
    checkpoint: Checkpoint | None = None
    previous: Checkpoint | None = None
    savepoints: Mapping[str, Checkpoint] = field(default_factory=dict)

    @property
    def kept(self) -> set[str]:
        """The artifacts that it needs."""
        checkpoints = (self.checkpoint, self.previous, *self.savepoints.values())
        return {checkpoint.artifact.name for checkpoint in checkpoints if checkpoint}

    @property
    def last(self) -> str:
        """The artifact of its checkpoint; empty if there is none."""
        return self.checkpoint.artifact.name if self.checkpoint else ""

    @property
    def running(self) -> bool:
        """Whether it runs somewhere, or did when it was last heard of."""
        return self.tenancy is not None and self.tenancy.running

    def saved(self, made: Checkpoint, time: str) -> GCSSandboxMetadata:
        """After a checkpoint: the one before is kept until this one has been restored from."""
        return replace(self.stopped(), checkpoint=made, previous=self.checkpoint, last_used=time)

    def started(self, checkpoint: Checkpoint | None, previous: Checkpoint | None, time: str) -> GCSSandboxMetadata:
        """After a start or a restore, with the checkpoints that are worth keeping then."""
        return replace(self._runs(True), checkpoint=checkpoint, previous=previous, last_used=time)

    def savepoint(self, name: str) -> Checkpoint:
        """The savepoint of that name; SavepointNotFoundError."""
        if name not in self.savepoints:
            raise SavepointNotFoundError(self.sandbox_id, name, list(self.savepoints))
        return self.savepoints[name]

    def with_savepoint(self, name: str, made: Checkpoint) -> GCSSandboxMetadata:
        """With a savepoint of that name."""
        return replace(self, savepoints={**self.savepoints, name: made})

    def without_savepoint(self, name: str) -> GCSSandboxMetadata:
        """Without it."""
        return replace(self, savepoints={known: made for known, made in self.savepoints.items() if known != name})

    def reverted(self, name: str) -> GCSSandboxMetadata:
        """With the checkpoint before the last as the last, and that as a savepoint."""
        kept = self.with_savepoint(name, self.checkpoint) if self.checkpoint else self
        return replace(kept, checkpoint=self.previous, previous=None)

    def stopped(self) -> GCSSandboxMetadata:
        """When it runs no more."""
        return self._runs(False)

    def _runs(self, running: bool) -> GCSSandboxMetadata:
        assert self.tenancy is not None
        return replace(self, tenancy=replace(self.tenancy, running=running))


class Stored(NamedTuple):
    """A checkpoint, a savepoint or a snapshot as a list shows it; ``created`` is ISO 8601, ``size`` in bytes."""

    created: str
    size: int


@dataclass(frozen=True)
class Summary:
    """What a list shows of one sandbox, which is found out in a fraction of the time."""

    running: bool
    checkpoint: Stored | None
    previous: Stored | None
    savepoints: Mapping[str, Stored]
    user: str = ""
    shared_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class Note:
    """What is left with a running sandbox, for those who find it after its server was killed.

    ``token`` is its server's in the document, and ``checkpoint`` the artifact that was the last then.
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
        """Whether another server has gone on without it, and saved what came of that."""
        theirs = document.tenancy is not None and document.tenancy.token != self.token
        return self.token is not None and theirs and document.last != self.checkpoint


def encode(metadata: GCSSandboxMetadata) -> bytes:
    """The document as bytes."""
    return json.dumps({"schema": SCHEMA, **asdict(metadata)}, indent=1).encode()


def decode(data: bytes, where: str, sandbox_id: str) -> GCSSandboxMetadata:
    """The document of ``sandbox_id`` from bytes; MetadataError, naming ``where``, if that is not what they are."""
    with _understood(where):
        return _metadata(_document_of(sandbox_id, data, where))


def summarise(data: bytes, where: str, sandbox_id: str) -> Summary:
    """What a list shows of such a document; MetadataError as for ``decode``, though not all of it is looked at."""
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
    """An artifact's own document, where no sandbox's has it."""
    return json.dumps({"schema": SCHEMA, **asdict(artifact)}).encode()


def decode_artifact(data: bytes, where: str) -> GCSArtifact:
    """An artifact from its own document; MetadataError as for ``decode``."""
    with _understood(where):
        return _artifact(_document(data, where))


def decode_note(value: dict[str, Any], where: str) -> Note:
    """A note from what JSON made of it; MetadataError as for ``decode``."""
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
    """A document less the files in use of its checkpoints, most of its length, as far as ``encode`` indented it.

    No string of JSON's has a line break in it, so the marks are those of the structure.
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
    """A BundleSpec from what ``dataclasses.asdict`` and JSON made of one."""
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
