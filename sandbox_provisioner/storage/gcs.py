"""GCSStore: objects in a bucket of Google Cloud Storage, through Google's own client.

A request is retried after a temporary failure, although the failed attempt may have succeeded on the server. Each write
therefore stores a unique id in the object's metadata, which shows after a retry that an earlier attempt succeeded. If
another write has replaced the object in the meantime, the retry is a conflict.

A file is stored in parts: the objects ``<name>/00000``, ``<name>/00001`` and so on.
"""

from __future__ import annotations

import base64
import io
import os
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c

from ..errors import ConflictError, CorruptObjectError, ObjectNotFoundError
from .base import NEW, Advance, FileRecord, ObjectInfo, ObjectStore, nothing, require_readable
from .disk import READ, closing, disk_errors, replacing
from .gcs_requests import TIMEOUT, MissingError, PreconditionError, Requests
from .names import is_name, valid_name, valid_prefix
from .parts import (
    PART,
    PIECE,
    Span,
    Sums,
    checksum,
    in_parallel,
    no_copy,
    record_from_sums,
    spans,
    spans_of,
    write_to,
    wrong_checksum,
)

WRITE = "write"
"""Key in an object's metadata for the unique id of the write that created the object."""


CHUNK = 4 * 1024 * 1024
"""Bytes of a part that are sent at a time and held in memory."""


class GCSStore(ObjectStore):
    """A store in a bucket, below a prefix. Temporary failures are retried for ``patience`` seconds."""

    kind = "gcs"

    def __init__(self, bucket: str, prefix: str = "", patience: float = 60.0) -> None:
        self.where = f"gs://{bucket}/{prefix}".rstrip("/")
        self._prefix = f"{valid_name(self.where, prefix)}/" if prefix else ""
        self._requests = Requests(bucket, patience)

    def read(self, name: str) -> tuple[bytes, ObjectInfo]:
        """Return an object's bytes and its properties."""
        while True:
            blob = self._get(name)
            require_readable(self.where, name, blob.size or 0)
            try:
                data = self._requests.ask(partial(_download, blob))
            except (PreconditionError, MissingError):
                continue  # it was replaced or deleted between the two requests
            return data, self._info(blob)

    def info(self, name: str) -> ObjectInfo:
        """Return an object's properties."""
        return self._info(self._get(name))

    def write(self, name: str, data: bytes, generation: int | None = None) -> ObjectInfo:
        """Write an object in one atomic request."""
        blob = self._blob(name)
        blob.metadata = {WRITE: uuid.uuid4().hex}
        blob.crc32c = _encode(google_crc32c.value(data))
        send = partial(blob.upload_from_string, data, "application/octet-stream", checksum=None)
        retried: list[Exception] = []
        try:
            request = partial(send, if_generation_match=generation, timeout=TIMEOUT, retry=None)
            self._requests.ask_bucket(request, retried)
        except PreconditionError:
            ours = self._written(name, blob.metadata) if retried else None
            if ours is None:
                raise ConflictError(self.where, name, generation or NEW) from None
            return ours
        return self._info(blob)

    def delete(self, name: str, generation: int | None = None) -> bool:
        """Delete an object."""
        try:
            return self._remove(self._blob(name), generation)
        except PreconditionError:
            raise ConflictError(self.where, name, generation or NEW) from None

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return the objects below ``prefix``, sorted by name."""
        if prefix:
            valid_prefix(self.where, prefix)
        infos = map(self._info, self._blobs(prefix))
        return sorted(info for info in infos if is_name(info.name))

    def upload(self, source: Path, name: str, advance: Advance = nothing) -> FileRecord:
        """Store a file in parts, several in parallel. Parts that are already in the bucket are not sent again."""
        valid_name(self.where, _part(name, 0))
        with disk_errors(self.where, f"store {source}"), closing(os.open(source, READ)) as file:
            size = os.fstat(file).st_size
            expected = spans(size, PART)
            existing = {blob.name: blob for blob in self._blobs(f"{name}/")}
            if set(existing) - {self._prefix + _part(name, span.number) for span in expected}:
                raise ConflictError(self.where, name, NEW)
            send = partial(self._send, file, name, existing, advance)
            return record_from_sums(size, in_parallel([partial(send, span) for span in expected]))

    def download(self, name: str, record: FileRecord, target: Path, advance: Advance = nothing) -> None:
        """Fetch the parts of a file, several in parallel, except those that an interrupted download completed."""
        expected = self._compare(name, record)
        with disk_errors(self.where, f"copy {name} to {target}"), replacing(target, record.size) as file:
            resumed = os.fstat(file).st_blocks > 0
            fetch = partial(self._fetch, file, name, record, resumed, advance)
            in_parallel([partial(fetch, span) for span in expected])

    def delete_all(self, prefix: str) -> int:
        """Delete all objects below ``prefix``, several in parallel."""
        found = self._blobs(valid_prefix(self.where, prefix))
        in_parallel([partial(self._remove, blob) for blob in found])
        return sum(_size(blob) for blob in found)

    def _blob(self, name: str) -> Any:
        return self._requests.bucket().blob(self._prefix + valid_name(self.where, name))

    def _get(self, name: str) -> Any:
        """Return the Blob of an object with its properties loaded. Raises ObjectNotFoundError."""
        blob = self._blob(name)
        try:
            self._requests.ask(partial(blob.reload, timeout=TIMEOUT, retry=None))
        except MissingError:
            raise ObjectNotFoundError(self.where, name) from None
        return blob

    def _blobs(self, prefix: str) -> Sequence[Any]:
        """Return all Blobs below ``prefix``."""
        bucket = self._requests.bucket()

        def request() -> Sequence[Any]:
            return list(bucket.list_blobs(prefix=self._prefix + prefix, timeout=TIMEOUT, retry=self._requests.retry()))

        return self._requests.ask_bucket(request)

    def _info(self, blob: Any) -> ObjectInfo:
        name = blob.name.removeprefix(self._prefix)
        return ObjectInfo(name, blob.generation, _size(blob), blob.updated.timestamp())

    def _written(self, name: str, metadata: dict[str, str]) -> ObjectInfo | None:
        """Return the properties of an object if the write with this metadata created it; else None."""
        try:
            blob = self._get(name)
        except ObjectNotFoundError:
            return None
        return self._info(blob) if (blob.metadata or {}).get(WRITE) == metadata[WRITE] else None

    def _send(self, file: int, name: str, existing: dict[str, Any], advance: Advance, span: Span) -> Sums:
        """Upload a part, unless the bucket has it, and return its checksums. Raises ConflictError if they differ."""
        found = checksum(file, span, no_copy)
        meter = Meter(advance)
        blob = self._blob(_part(name, span.number))
        if blob.name in existing:
            blob = existing[blob.name]
        else:
            blob.chunk_size = CHUNK
            blob.crc32c = _encode(found.crc)
            try:
                self._requests.ask_bucket(partial(self._send_blob, blob, file, span, meter))
            except PreconditionError:
                blob = self._get(_part(name, span.number))
        if (_size(blob), blob.crc32c) != (span.length, _encode(found.crc)):
            raise ConflictError(self.where, name, NEW)
        meter.reach(span.length)
        return found

    def _send_blob(self, blob: Any, file: int, span: Span, meter: Meter) -> None:
        blob.upload_from_file(
            PartReader(file, span, meter),
            size=span.length,
            content_type="application/octet-stream",
            if_generation_match=NEW,
            checksum=None,
            timeout=TIMEOUT,
            retry=self._requests.retry(),
        )

    def _compare(self, name: str, record: FileRecord) -> Sequence[Span]:
        """Compare the bucket's sizes and checksums of a file with its record, and return the spans of its parts.

        Raises ObjectNotFoundError if no part exists, CorruptObjectError if one is missing or differs.
        """
        expected = spans_of(self.where, name, record)
        existing = {blob.name: blob for blob in self._blobs(f"{valid_name(self.where, name)}/")}
        if not existing:
            raise ObjectNotFoundError(self.where, name)
        for span in expected:
            blob = existing.get(self._prefix + _part(name, span.number))
            if blob is None:
                problem = f"part {span.number + 1} of {len(record.parts)} is missing"
                raise CorruptObjectError(self.where, name, problem)
            if (_size(blob), blob.crc32c) != (span.length, _encode(record.parts[span.number])):
                raise wrong_checksum(self.where, name, span, record)
        return expected

    def _fetch(self, file: int, name: str, record: FileRecord, resumed: bool, advance: Advance, span: Span) -> None:
        """Download a part into ``file``, unless an interrupted download completed it."""
        meter = Meter(advance)
        if not resumed or not checksum(file, span, no_copy).match(record, span.number):
            try:
                self._requests.ask(partial(self._fetch_blob, name, record, file, span, meter))
            except MissingError:
                problem = f"part {span.number + 1} of {len(record.parts)} is missing"
                raise CorruptObjectError(self.where, name, problem) from None
        meter.reach(span.length)

    def _fetch_blob(self, name: str, record: FileRecord, file: int, span: Span, meter: Meter) -> None:
        writer = PartWriter(file, span, meter)
        blob = self._blob(_part(name, span.number))
        blob.download_to_file(writer, raw_download=True, checksum=None, timeout=TIMEOUT, retry=self._requests.retry())
        if writer.finish() != (span.length, record.parts[span.number]):
            raise ConnectionError(f"{blob.name} was damaged in transit")
        if not writer.sums.match(record, span.number):
            raise wrong_checksum(self.where, name, span, record)

    def _remove(self, blob: Any, generation: int | None = None) -> bool:
        """Delete a Blob. Return False if it did not exist, unless a failed attempt may have deleted it."""
        retried: list[Exception] = []
        try:
            self._requests.ask(
                partial(blob.delete, if_generation_match=generation, timeout=TIMEOUT, retry=None), retried
            )
        except MissingError:
            return bool(retried)
        return True


def _download(blob: Any) -> bytes:
    """Return the bytes of this generation of an object. Raises ConnectionError if size or checksum are wrong."""
    data: bytes = blob.download_as_bytes(
        raw_download=True, checksum=None, timeout=TIMEOUT, retry=None, if_generation_match=blob.generation
    )
    if len(data) != _size(blob) or _encode(google_crc32c.value(data)) != blob.crc32c:
        raise ConnectionError(f"{blob.name} was damaged in transit")
    return data


def _size(blob: Any) -> int:
    """Return an object's size, which a response may omit if it is 0."""
    return blob.size or 0


def _part(name: str, number: int) -> str:
    return f"{name}/{number:05d}"


def _encode(crc: int) -> str:
    """Return a CRC32C in Google's encoding."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


class Meter:
    """Reports the progress of a part. Bytes are reported once, even if the part is transferred again."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._reached = 0

    def reach(self, position: int) -> None:
        """Report that the part is done up to ``position``."""
        if position > self._reached:
            self._advance(position - self._reached)
            self._reached = position


class PartReader(io.RawIOBase):
    """A readable stream over one part of an open file, for an upload."""

    def __init__(self, file: int, span: Span, meter: Meter) -> None:
        self._file = file
        self._span = span
        self._meter = meter
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        """Return ``size`` bytes, or fewer at the end of the part. Raises OSError if the file became shorter."""
        left = self._span.length - self._position
        wanted = left if size < 0 else min(size, left)
        self._meter.reach(self._position)
        data = os.pread(self._file, wanted, self._span.offset + self._position)
        if len(data) < wanted:
            raise OSError("the file became shorter while it was being read")
        self._position += len(data)
        return data

    def tell(self) -> int:
        """Return the position in the part."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position in the part, and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._span.length}[whence]
        self._position = start + offset
        return self._position


class PartWriter(io.RawIOBase):
    """A writable stream into one part of an open file, for a download. Small writes are buffered."""

    def __init__(self, file: int, span: Span, meter: Meter) -> None:
        self._span = span
        self._meter = meter
        self._write = write_to(file, nothing)
        self._waiting = bytearray()
        self._position = 0
        self.sums = Sums()

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Append bytes to the part."""
        self._waiting += data
        if len(self._waiting) >= PIECE:
            self._put()
        return len(data)

    def finish(self) -> tuple[int, int]:
        """Write the buffer. Return how many bytes were received, also beyond the part's end, and their CRC32C."""
        self._put()
        return self._position, self.sums.crc

    def _put(self) -> None:
        piece = bytes(self._waiting)
        self._waiting.clear()
        self.sums.add(piece)
        if self._position + len(piece) <= self._span.length:
            self._write(self._span.offset + self._position, piece)
            self._meter.reach(self._position + len(piece))
        self._position += len(piece)
