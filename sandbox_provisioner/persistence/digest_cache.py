"""Cache hashes of file contents between runs, so that a known file costs one fstat.

A file is identified by its device, inode, size, mtime and ctime. Users can set mtime but not ctime, so every write
changes the identity. The hash of a file that changed a moment ago is not cached, because its next change may have the
same times.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock

from .._text import json_object
from ..errors import SandboxError
from ..storage.base import DIGEST
from ..storage.local import LocalStore
from ..storage.parts import READ_SIZE

NAME = "fingerprints.json"
KEY = re.compile(r"[0-9]+(:-?[0-9]+){4}s?")
LARGE = 1 << 30
"""Bytes above which only the size and ``SAMPLES`` evenly spaced pieces of a file are hashed, not all of it."""
SAMPLES = 64
PIECE = 1 << 20
SAMPLE = 1 << 16
"""Bytes of each piece if the caller asks for samples; otherwise ``PIECE``."""
SETTLED = 3_000_000_000
"""Nanoseconds since the last change of a file after which its hash is cached."""
MOST_ENTRIES = 1 << 14
MOST_BYTES = MOST_ENTRIES * 200


class GivenUpError(Exception):
    """The caller no longer needs the hash."""


class DigestCache:
    """A cache of hashes in ``folder``, which is made on demand. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._store = LocalStore(folder)
        self._lock = Lock()
        self._known: dict[str, str] | None = None
        self._unsaved = False

    def of(self, descriptor: int, sampled: bool = False, wanted: Callable[[], bool] = lambda: True) -> str:
        """Return the SHA-256 of the regular file behind ``descriptor``, which may be an O_PATH descriptor.

        If ``sampled``, hash only its size and ``SAMPLES`` short pieces. Raises GivenUpError once ``wanted`` returns
        False, and OSError.
        """
        key = _key(descriptor) + ("s" if sampled else "")
        with self._lock:
            if self._known is None:
                self._known = _load(self._store)
            digest = self._known.pop(key, None)
            if digest:
                self._known[key] = digest  # move it to the end: ``save`` drops the least recently used
                return digest
        with open(f"/proc/self/fd/{descriptor}", "rb", buffering=0) as file:
            digest = _digest(file.fileno(), sampled, wanted)
        if _key(descriptor) == key.rstrip("s") and time.time_ns() - os.fstat(descriptor).st_ctime_ns > SETTLED:
            with self._lock:
                self._known[key] = digest
                self._unsaved = True
        return digest

    def save(self) -> None:
        """Write new hashes to disk. Errors of the disk are ignored: the cache only saves time."""
        with self._lock:
            if not self._unsaved or self._known is None:
                return
            self._unsaved = False
            while len(self._known) > MOST_ENTRIES:
                del self._known[next(iter(self._known))]
            text = json.dumps(self._known, indent=0)
        with suppress(SandboxError):
            self._store.write(NAME, text.encode())


def _key(descriptor: int) -> str:
    status = os.fstat(descriptor)
    parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(map(str, parts))


def _digest(descriptor: int, sampled: bool, wanted: Callable[[], bool]) -> str:
    """Return the SHA-256 of a file up to its present size: a growing file could otherwise be read without end."""
    size = os.fstat(descriptor).st_size
    hashing = hashlib.sha256()
    if size > LARGE or sampled:
        hashing.update(str(size).encode())
    for offset, end in _pieces(size, sampled):
        if not wanted():
            raise GivenUpError
        while offset < end and (data := os.pread(descriptor, min(READ_SIZE, end - offset), offset)):
            hashing.update(data)
            offset += len(data)
    return hashing.hexdigest()


def _pieces(size: int, sampled: bool) -> Iterator[tuple[int, int]]:
    """Yield the start and end offset of each piece to hash."""
    length = SAMPLE if sampled else PIECE
    if sampled or size > LARGE:
        starts = ((size - length) * sample // (SAMPLES - 1) for sample in range(SAMPLES))
        yield from ((max(start, 0), min(max(start, 0) + length, size)) for start in starts)
    else:
        yield from ((start, min(start + length, size)) for start in range(0, size, length))


def _load(store: LocalStore) -> dict[str, str]:
    """Return the stored hashes, without malformed entries; empty if they are unreadable or too large."""
    try:
        data = store.read(NAME)[0] if store.info(NAME).size <= MOST_BYTES else b""
    except SandboxError:
        return {}
    known = json_object(data)
    return {key: known[key] for key in known if KEY.fullmatch(key) and DIGEST.fullmatch(str(known[key]))}
