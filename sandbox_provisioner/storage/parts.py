"""Large files in parts: each with its CRC32C and SHA-256, several at a time, a piece of each in memory.

A file of any size is moved, proven and taken up again part by part, with as many megabytes of memory as there are
threads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import partial
from typing import NamedTuple, TypeVar

import google_crc32c

from ..errors import CorruptObjectError
from ..workers import Workers
from .base import Advance, FileRecord

PART = 32 * 1024 * 1024
PIECE = 1024 * 1024
READ_SIZE = 64 * 1024
"""Bytes that are read at once: each thread that frees larger ones keeps megabytes of them (glibc's arenas)."""
THREADS = 4

Each = Callable[[int, bytes], None]
"""Given each piece of a file that was read, with its offset, from any thread."""

Result = TypeVar("Result")


class Span(NamedTuple):
    """Where a part is in its file."""

    number: int
    offset: int
    length: int


def spans(size: int, part_size: int) -> list[Span]:
    """The parts of a file; an empty one has one, too, so that there is something to be found missing."""
    starts = range(0, max(size, 1), part_size)
    return [Span(number, start, min(part_size, size - start)) for number, start in enumerate(starts)]


def spans_of(where: str, name: str, record: FileRecord) -> list[Span]:
    """The parts that ``record`` speaks of; CorruptObjectError if it contradicts itself."""
    if record.problem:
        raise CorruptObjectError(where, name, record.problem)
    return spans(record.size, record.part_size)


class Sums:
    """The CRC32C and, unless ``digested`` is false, the SHA-256 of bytes that come piece by piece."""

    def __init__(self, digested: bool = True) -> None:
        self.crc = 0
        self._sha256 = hashlib.sha256() if digested else None

    def add(self, piece: bytes) -> None:
        """Count further bytes in."""
        self.crc = google_crc32c.extend(self.crc, piece)
        if self._sha256:
            self._sha256.update(piece)

    @property
    def digest(self) -> str:
        """The SHA-256 in hexadecimal digits; empty if it was not asked for."""
        return self._sha256.hexdigest() if self._sha256 else ""

    def match(self, record: FileRecord, number: int) -> bool:
        """Return whether the bytes are those of a part of ``record``, as far as that can tell."""
        return self.crc == record.parts[number] and (not record.digests or self.digest == record.digests[number])


def checksum(file: int, span: Span, each: Each, digested: bool = True) -> Sums:
    """Read a part and return its sums; those of a shorter one if the file is shorter."""
    found, offset, end = Sums(digested), span.offset, span.offset + span.length
    while offset < end and (piece := os.pread(file, min(READ_SIZE, end - offset), offset)):
        found.add(piece)
        each(offset, piece)
        offset += len(piece)
    return found


def recorded(size: int, sums: Sequence[Sums]) -> FileRecord:
    """Return the record of a file from the sums of its parts."""
    return FileRecord(size, PART, tuple(part.crc for part in sums), tuple(part.digest for part in sums))


def at_once(tasks: Iterable[Callable[[], Result]]) -> list[Result]:
    """Run tasks in a few threads; what the first to fail raised, when those under way have ended."""
    pool = Workers("sandbox-storage", THREADS)  # which, unlike ThreadPoolExecutor's, do not delay a server's exit
    futures = [pool.submit(task) for task in tasks]
    wait(futures, return_when=FIRST_EXCEPTION)
    wait([future for future in futures if not future.cancel()])
    pool.retire()
    failed = [error for future in futures if not future.cancelled() and (error := future.exception())]
    if failed:
        raise failed[0]
    return [future.result() for future in futures]


def record_of(file: int, each: Each) -> FileRecord:
    """The record of an open file."""
    size = os.fstat(file).st_size
    return recorded(size, at_once([partial(checksum, file, span, each) for span in spans(size, PART)]))


def prove(where: str, name: str, file: int, record: FileRecord, each: Each) -> None:
    """CorruptObjectError unless an open file is what ``record`` says."""
    expected = spans_of(where, name, record)
    size = os.fstat(file).st_size
    if size != record.size:
        raise CorruptObjectError(where, name, f"it has {size} bytes instead of {record.size}")

    def check(span: Span) -> None:
        if not checksum(file, span, each, bool(record.digests)).match(record, span.number):
            raise wrong_part(where, name, span, record)

    at_once([partial(check, span) for span in expected])


def wrong_part(where: str, name: str, span: Span, record: FileRecord) -> CorruptObjectError:
    """The error for a part whose bytes are not those that were stored."""
    return CorruptObjectError(where, name, f"part {span.number + 1} of {len(record.parts)} has a wrong checksum")


def ignore(offset: int, piece: bytes) -> None:
    """An ``Each`` for those who want the checksums alone."""


def write_to(file: int, advance: Advance) -> Each:
    """An ``Each`` that copies into an open file and tells of the progress."""

    def each(offset: int, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            written = os.pwrite(file, view, offset)
            view, offset = view[written:], offset + written
        advance(len(piece))

    return each
