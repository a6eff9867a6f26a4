"""Fingerprints: hashes of files' contents, remembered between runs, so that to ask again costs a look at the inode.

A file is known by its device, inode, size and both times. Its user can set the one (mtime) and not the other (ctime),
so a file that was written to is another file here. One that was changed just now is not remembered, because its next
change may carry the same times.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from uuid import uuid4

from .storage.base import DIGEST
from .storage.parts import READ_SIZE

NAME = "fingerprints.json"
KEY = re.compile(r"[0-9]+(:-?[0-9]+){4}")
LARGE = 1 << 30
"""Of a file larger than this, ``SAMPLES`` pieces at even distances are hashed, with its size."""
SAMPLES = 64
PIECE = 1 << 20
SETTLED = 3_000_000_000
"""Nanoseconds for which a file must have been left alone."""
MOST_ENTRIES = 1 << 14
MOST_BYTES = MOST_ENTRIES * 200


class Fingerprints:
    """The hashes that are remembered in ``folder``, which is made on demand. For use from any number of threads."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._lock = Lock()
        self._known: dict[str, str] | None = None
        self._unsaved = False

    def of(self, descriptor: int) -> str:
        """The SHA-256 of the regular file behind ``descriptor``, which may be one of O_PATH; OSError as it happens."""
        key = _key(descriptor)
        with self._lock:
            if self._known is None:
                self._known = _load(self._path)
            digest = self._known.pop(key, None)
            if digest:
                self._known[key] = digest  # the last used is the last to be forgotten
                return digest
        with open(f"/proc/self/fd/{descriptor}", "rb", buffering=0) as file:
            digest = _digest(file.fileno())
        if _key(descriptor) == key and time.time_ns() - os.fstat(descriptor).st_ctime_ns > SETTLED:
            with self._lock:
                self._known[key] = digest
                self._unsaved = True
        return digest

    def save(self) -> None:
        """Remember what is new. That this fails is no reason for anything else to fail."""
        with self._lock:
            if not self._unsaved or self._known is None:
                return
            self._unsaved = False
            while len(self._known) > MOST_ENTRIES:
                del self._known[next(iter(self._known))]
            text = json.dumps(self._known, indent=0)
        partial = self._path.with_name(f".{NAME}.{uuid4().hex[:8]}")
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(text)
                partial.rename(self._path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise


def _key(descriptor: int) -> str:
    status = os.fstat(descriptor)
    parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(map(str, parts))


def _digest(descriptor: int) -> str:
    """As many bytes as the file has now: one that grows as fast as it is read does not keep us for ever."""
    size = os.fstat(descriptor).st_size
    hashing = hashlib.sha256()
    if size > LARGE:
        hashing.update(str(size).encode())
    for offset in _offsets(size):
        end = min(offset + PIECE, size)
        while offset < end and (data := os.pread(descriptor, min(READ_SIZE, end - offset), offset)):
            hashing.update(data)
            offset += len(data)
    return hashing.hexdigest()


def _offsets(size: int) -> Iterator[int]:
    if size <= LARGE:
        yield from range(0, size, PIECE)
    else:
        yield from ((size - PIECE) * sample // (SAMPLES - 1) for sample in range(SAMPLES))


def _load(path: Path) -> dict[str, str]:
    """What is remembered there; nothing, if that is not what save() wrote."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        known = json.loads(data) if len(data) <= MOST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: value for key, value in known.items() if _sound(key, value)}


def _sound(key: str, value: object) -> bool:
    return bool(KEY.fullmatch(key)) and isinstance(value, str) and bool(DIGEST.fullmatch(value))
