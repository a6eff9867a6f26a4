"""Check that a stream of bytes is a complete tar archive, without storing or unpacking it."""

from __future__ import annotations

BLOCK = 512
LONGEST_PAX = 1 << 16
"""Maximum bytes of an extended header: several times the length of two paths."""
FILES, EMPTY, PAX = (b"0", b"\0"), (b"1", b"2", b"5"), b"x"
"""Type flags of members: files; links and folders, which have no contents; extended headers."""


class TarCheck:
    """A parser that follows a tar of files, folders and links from header to header.

    Its methods raise ValueError with the reason if the tar is malformed.
    """

    def __init__(self) -> None:
        self._block = bytearray()
        self._body = 0
        self._pax = bytearray()
        self._pax_size = 0
        self._next_size: int | None = None
        self._empty_blocks = 0

    def feed(self, data: bytes) -> None:
        """Check the next bytes of the tar."""
        view = memoryview(data)
        while view:
            step = self._in_body(view) if self._body else self._in_header(view)
            view = view[step:]

    def end(self) -> None:
        """Check that the tar is complete; call it after the last ``feed``."""
        if self._empty_blocks < 2 or self._block:
            raise ValueError("it is incomplete")

    def _in_body(self, view: memoryview) -> int:
        step = min(self._body, len(view))
        self._body -= step
        if self._pax_size:
            self._pax += view[:step]
            if not self._body:
                self._next_size = _pax_size(bytes(self._pax[: self._pax_size]))
                self._pax.clear()
                self._pax_size = 0
        return step

    def _in_header(self, view: memoryview) -> int:
        step = min(BLOCK - len(self._block), len(view))
        self._block += view[:step]
        if len(self._block) == BLOCK:
            header = bytes(self._block)
            self._block.clear()
            self._header(header)
        return step

    def _header(self, header: bytes) -> None:
        if not any(header) and self._next_size is None:
            self._empty_blocks += 1
            return
        if self._empty_blocks:
            raise ValueError("data follows the end marker")
        if _octal(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            raise ValueError("a header's checksum is wrong")
        kind, size = header[156:157], _octal(header[124:136])
        if kind == PAX:
            if self._next_size is not None or not 0 < size <= LONGEST_PAX:
                raise ValueError("an extended header follows another one or has an invalid size")
            self._pax_size = size
        elif kind in FILES:
            size = self._next_size or size
        elif kind not in EMPTY or size:
            raise ValueError(f"a member has the type {kind!r} and the size {size}, which no snapshot contains")
        self._next_size = None
        self._body = -(-size // BLOCK) * BLOCK


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0")
    if not digits or digits.strip(b"01234567"):
        raise ValueError(f"a header has {field!r} instead of a number")
    return int(digits, 8)


def _pax_size(records: bytes) -> int:
    """Return the size that an extended header sets for the next member; 0 if it sets none. Takes linear time."""
    size = begin = 0
    while begin < len(records):
        space = records.find(b" ", begin, begin + 9)
        length = records[begin:space] if space > 0 else b""
        if not length.isdigit() or not len(length) < int(length) <= len(records) - begin:
            raise ValueError("an extended header has a record without a length")
        end = begin + int(length)
        name, equals, value = records[space + 1 : end].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise ValueError("an extended header has a malformed record")
        if name == b"size":
            if not value[:-1].isdigit() or len(value) > 20:
                raise ValueError("the size in an extended header is not a number")
            size = int(value)
        begin = end
    return size
