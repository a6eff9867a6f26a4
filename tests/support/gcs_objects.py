"""Buckets and objects of the emulated Google Cloud Storage: generations, metagenerations, preconditions, checksums.

It follows Google's documentation. One lock protects everything, so that each request sees a consistent state.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import google_crc32c

SETTABLE = (
    "cacheControl",
    "contentDisposition",
    "contentEncoding",
    "contentLanguage",
    "contentType",
    "customTime",
    "metadata",
    "storageClass",
)
"""Properties of an object that a client can set."""

PAGE = 1000
NOT_MET = "At least one of the pre-conditions you specified did not hold."


class Refusal(Exception):
    """An error response, with Google's text."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        super().__init__(f"{status} {reason}: {message}")


def no_object(bucket: str, name: str) -> Refusal:
    return Refusal(404, "notFound", f"No such object: {bucket}/{name}")


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def crc32c_of(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def md5_of(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


@dataclass(frozen=True)
class StoredObject:
    """One generation of an object."""

    bucket: str
    name: str
    data: bytes
    generation: int
    created: float
    updated: float
    crc32c: str
    md5: str
    settings: dict[str, Any]
    metageneration: int = 1

    @property
    def etag(self) -> str:
        return base64.b64encode(f"{self.generation}/{self.metageneration}".encode()).decode()

    def resource(self, host: str) -> dict[str, Any]:
        """Return the JSON description of the object."""
        quoted = re.sub(r"[^A-Za-z0-9_.~-]", lambda char: "".join(f"%{b:02X}" for b in char[0].encode()), self.name)
        link = f"{host}/storage/v1/b/{self.bucket}/o/{quoted}"
        media = f"{host}/download/storage/v1/b/{self.bucket}/o/{quoted}?generation={self.generation}&alt=media"
        found = {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "selfLink": link,
            "mediaLink": media,
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "storageClass": "STANDARD",
            "size": str(len(self.data)),
            "crc32c": self.crc32c,
            "md5Hash": self.md5,
            "etag": self.etag,
            "timeCreated": timestamp(self.created),
            "updated": timestamp(self.updated),
            "timeStorageClassUpdated": timestamp(self.created),
            "timeFinalized": timestamp(self.created),
            **self.settings,
        }
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Conditions:
    """The preconditions of a request: generations and metagenerations that the object must have, or must not have."""

    generation: int | None = None
    not_generation: int | None = None
    metageneration: int | None = None
    not_metageneration: int | None = None

    @classmethod
    def parse(cls, query: Mapping[str, Any]) -> Conditions:
        keys = ("GenerationMatch", "GenerationNotMatch", "MetagenerationMatch", "MetagenerationNotMatch")
        return cls(*(integer(query, f"if{key}") for key in keys))

    def check(self, current: StoredObject | None) -> None:
        """Raise Refusal unless all preconditions hold. An object that does not exist has generation 0."""
        generation = current.generation if current else 0
        metageneration = current.metageneration if current else 0
        if self.generation not in (None, generation) or self.metageneration not in (None, metageneration):
            raise Refusal(412, "conditionNotMet", NOT_MET)
        if generation == self.not_generation or metageneration == self.not_metageneration:
            raise Refusal(304, "notModified", NOT_MET)


def integer(query: Mapping[str, Any], key: str) -> int | None:
    value = query.get(key)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise Refusal(400, "invalid", f"Invalid value for {key}: {value!r}") from None


@dataclass
class Bucket:
    name: str
    created: float
    objects: dict[str, StoredObject] = field(default_factory=dict)

    def resource(self, host: str) -> dict[str, Any]:
        return {
            "kind": "storage#bucket",
            "id": self.name,
            "selfLink": f"{host}/storage/v1/b/{self.name}",
            "name": self.name,
            "projectNumber": "1",
            "metageneration": "1",
            "location": "US",
            "locationType": "multi-region",
            "storageClass": "STANDARD",
            "etag": "CAE=",
            "timeCreated": timestamp(self.created),
            "updated": timestamp(self.created),
        }


@dataclass
class Upload:
    """A resumable upload. Its object appears when the last byte has arrived."""

    bucket: str
    name: str
    settings: dict[str, Any]
    conditions: Conditions
    data: bytearray = field(default_factory=bytearray)
    finished: StoredObject | None = None


class Cloud:
    """All buckets. ``offset`` is added to the time, in seconds."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.buckets: dict[str, Bucket] = {}
        self.uploads: dict[str, Upload] = {}
        self.offset = 0.0
        self._generation = 0

    def now(self) -> float:
        return time.time() + self.offset

    def _next_generation(self) -> int:
        self._generation = max(self._generation + 1, int(self.now() * 1e6))
        return self._generation

    def bucket(self, name: str) -> Bucket:
        if name not in self.buckets:
            raise Refusal(404, "notFound", "The specified bucket does not exist.")
        return self.buckets[name]

    def create_bucket(self, name: str) -> Bucket:
        with self.lock:
            if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", name):
                raise Refusal(400, "invalid", f"Invalid bucket name: '{name}'")
            if name in self.buckets:
                raise Refusal(409, "conflict", "Your previous request to create the named bucket succeeded.")
            self.buckets[name] = Bucket(name, self.now())
            return self.buckets[name]

    def delete_bucket(self, name: str) -> None:
        with self.lock:
            if self.bucket(name).objects:
                raise Refusal(409, "conflict", "The bucket you tried to delete is not empty.")
            del self.buckets[name]

    def get(self, bucket: str, name: str, generation: int | None, conditions: Conditions) -> StoredObject:
        """Return the current object. Raises Refusal if it has another generation or violates a precondition."""
        with self.lock:
            found = self.bucket(bucket).objects.get(name)
            if found is None or generation not in (None, found.generation):
                raise no_object(bucket, name)
            conditions.check(found)
            return found

    def insert(
        self, bucket: str, name: str, data: bytes, settings: Mapping[str, Any], conditions: Conditions
    ) -> StoredObject:
        """Store a new generation of ``name``. Raises Refusal if the client sent a checksum that does not match."""
        if not name or len(name.encode()) > 1024 or "\n" in name or "\r" in name or name in (".", ".."):
            raise Refusal(400, "invalid", "Invalid object name.")
        crc, md5 = crc32c_of(data), md5_of(data)
        for key, title, actual in (("crc32c", "CRC32C", crc), ("md5Hash", "MD5 hash", md5)):
            if settings.get(key) not in (None, actual):
                problem = f'Provided {title} "{settings[key]}" doesn\'t match calculated {title} "{actual}".'
                raise Refusal(400, "invalid", problem)
        with self.lock:
            objects = self.bucket(bucket).objects
            conditions.check(objects.get(name))
            now = self.now()
            objects[name] = StoredObject(
                bucket=bucket,
                name=name,
                data=data,
                generation=self._next_generation(),
                created=now,
                updated=now,
                crc32c=crc,
                md5=md5,
                settings={key: settings[key] for key in SETTABLE if settings.get(key) is not None},
            )
            return objects[name]

    def patch(
        self, bucket: str, name: str, generation: int | None, conditions: Conditions, change: Mapping[str, Any]
    ) -> StoredObject:
        """Change the settings of an object. A null removes a setting, or a key of its metadata."""
        with self.lock:
            found = self.get(bucket, name, generation, conditions)
            settings = {**found.settings, **{key: change[key] for key in SETTABLE if key in change}}
            if settings.get("metadata") is not None:
                merged = {**found.settings.get("metadata", {}), **settings["metadata"]}
                settings["metadata"] = {key: text for key, text in merged.items() if text is not None}
            patched = replace(
                found,
                settings={key: value for key, value in settings.items() if value not in (None, {})},
                metageneration=found.metageneration + 1,
                updated=self.now(),
            )
            self.buckets[bucket].objects[name] = patched
            return patched

    def delete(self, bucket: str, name: str, generation: int | None, conditions: Conditions) -> None:
        with self.lock:
            self.get(bucket, name, generation, conditions)
            del self.buckets[bucket].objects[name]

    def page(self, bucket: str, query: Mapping[str, str]) -> tuple[list[StoredObject], list[str], str | None]:
        """Return a page of objects, its common prefixes, and the token of the next page (None: this is the last)."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start, end = query.get("startOffset", ""), query.get("endOffset")
        limit = min(integer(query, "maxResults") or PAGE, PAGE)
        token = query.get("pageToken")
        after = base64.urlsafe_b64decode(token).decode() if token else ""
        items: list[StoredObject] = []
        prefixes: list[str] = []
        last = ""
        with self.lock:
            objects = sorted(self.bucket(bucket).objects.items())
        for name, found in objects:
            if not name.startswith(prefix) or name < start or (end and name >= end):
                continue
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            entry = name if cut < 0 else name[: cut + len(delimiter)]
            if entry <= after or entry == last:
                continue
            if len(items) + len(prefixes) == limit:
                return items, prefixes, base64.urlsafe_b64encode(last.encode()).decode()
            last = entry
            if cut < 0:
                items.append(found)
            else:
                prefixes.append(entry)
        return items, prefixes, None

    def finish(self, upload: Upload) -> StoredObject:
        """Create the object of a resumable upload that has all its bytes. Checks the preconditions."""
        stored = self.insert(upload.bucket, upload.name, bytes(upload.data), upload.settings, upload.conditions)
        upload.finished = stored
        upload.data = bytearray()
        return stored
