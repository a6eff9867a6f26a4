"""Process large files in parts: compute the CRC32C and SHA-256 of each, several in parallel, with bounded memory.

A file of any size is transferred, verified and resumed part by part, with a few megabytes of memory per thread.
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
"""Bytes of a part."""
PIECE = 1024 * 1024
"""Bytes of an object that are read at a time, or of a download that are buffered."""
READ_SIZE = 64 * 1024
"""Bytes that are read at a time: with larger reads, each thread keeps megabytes of freed memory (glibc's arenas)."""
THREADS = 4

OnPiece = Callable[[int, bytes], None]
"""Callback, from any thread, with the offset and the bytes of each piece of a file that was read."""

Result = TypeVar("Result")


class Span(NamedTuple):
    """The number, offset and length of a part in its file."""

    number: int
    offset: int
    length: int


def spans(size: int, part_size: int) -> list[Span]:
    """Return the parts of a file. An empty file has one empty part, so that its loss can be detected."""
    starts = range(0, max(size, 1), part_size)
    return [Span(number, start, min(part_size, size - start)) for number, start in enumerate(starts)]


def spans_of(where: str, name: str, record: FileRecord) -> list[Span]:
    """Return the parts of the file of ``record``. Raises CorruptObjectError if the record is inconsistent."""
    if record.problem:
        raise CorruptObjectError(where, name, record.problem)
    return spans(record.size, record.part_size)


class Sums:
    """The running CRC32C and SHA-256 of a sequence of pieces."""

    def __init__(self) -> None:
        self.crc = 0
        self._sha256 = hashlib.sha256()

    def add(self, piece: bytes) -> None:
        """Add further bytes."""
        self.crc = google_crc32c.extend(self.crc, piece)
        self._sha256.update(piece)

    @property
    def digest(self) -> str:
        """SHA-256 in hexadecimal digits."""
        return self._sha256.hexdigest()

    def match(self, record: FileRecord, number: int) -> bool:
        """Return True if the checksums match those of a part in ``record``, which may lack digests."""
        return self.crc == record.parts[number] and (not record.digests or self.digest == record.digests[number])


def checksum(file: int, span: Span, each: OnPiece) -> Sums:
    """Read a part, up to the end of the file, and return its checksums."""
    found, offset, end = Sums(), span.offset, span.offset + span.length
    while offset < end and (piece := os.pread(file, min(READ_SIZE, end - offset), offset)):
        found.add(piece)
        each(offset, piece)
        offset += len(piece)
    return found


def record_from_sums(size: int, sums: Sequence[Sums]) -> FileRecord:
    """Return the record of a file from the checksums of its parts."""
    return FileRecord(size, PART, tuple(part.crc for part in sums), tuple(part.digest for part in sums))


def in_parallel(tasks: Iterable[Callable[[], Result]]) -> list[Result]:
    """Run tasks in a few threads, and return their results.

    If one raises, cancel those that have not begun, wait for the others, and raise the error of the first failed task.
    """
    pool = Workers("sandbox-storage", THREADS)  # unlike ThreadPoolExecutor, does not delay a server's exit
    futures = [pool.submit(task) for task in tasks]
    wait(futures, return_when=FIRST_EXCEPTION)
    wait([future for future in futures if not future.cancel()])
    pool.retire()
    failed = [error for future in futures if not future.cancelled() and (error := future.exception())]
    if failed:
        raise failed[0]
    return [future.result() for future in futures]


def record_of(file: int, each: OnPiece, flush: bool = False) -> FileRecord:
    """Return the record of an open file. With ``flush``, its data is written to the disk at the same time."""
    size = os.fstat(file).st_size
    tasks: list[Callable[[], Sums | None]] = [partial(checksum, file, span, each) for span in spans(size, PART)]
    if flush:
        tasks.insert(0, partial(os.fsync, file))
    return record_from_sums(size, [sums for sums in in_parallel(tasks) if sums])


def verify(where: str, name: str, file: int, record: FileRecord, each: OnPiece) -> None:
    """Raise CorruptObjectError unless an open file matches ``record``."""
    expected = spans_of(where, name, record)
    size = os.fstat(file).st_size
    if size != record.size:
        raise CorruptObjectError(where, name, f"it has {size} bytes instead of {record.size}")

    def check(span: Span) -> None:
        if not checksum(file, span, each).match(record, span.number):
            raise wrong_checksum(where, name, span, record)

    in_parallel([partial(check, span) for span in expected])


def wrong_checksum(where: str, name: str, span: Span, record: FileRecord) -> CorruptObjectError:
    """Return the error for a part whose checksum does not match."""
    return CorruptObjectError(where, name, f"part {span.number + 1} of {len(record.parts)} has a wrong checksum")


def no_copy(offset: int, piece: bytes) -> None:
    """Do nothing: an ``OnPiece`` for callers that need only the checksums."""


def write_to(file: int, advance: Advance) -> OnPiece:
    """Return an ``OnPiece`` that copies into an open file and reports progress."""

    def each(offset: int, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            written = os.pwrite(file, view, offset)
            view, offset = view[written:], offset + written
        advance(len(piece))

    return each
