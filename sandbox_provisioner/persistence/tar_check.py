"""TarCheck: whether bytes that pass by are a whole tar, without keeping them and without a look at what is in it."""

from __future__ import annotations

BLOCK = 512
LONGEST_PAX = 1 << 20
FILES, EMPTY, PAX = (b"0", b"\0"), (b"1", b"2", b"5"), b"x"
"""Types of members: with contents; without, as links and folders are; and what precedes those of longer headers."""


class TarCheck:
    """Follows a tar of files, folders and links from header to header. ValueError says what is wrong with it."""

    def __init__(self) -> None:
        self._block = bytearray()
        self._body = 0
        self._pax = bytearray()
        self._pax_size = 0
        self._next_size: int | None = None
        self._empty_blocks = 0

    def feed(self, data: bytes) -> None:
        """The next bytes of it."""
        view = memoryview(data)
        while view:
            step = self._in_body(view) if self._body else self._in_header(view)
            view = view[step:]

    def end(self) -> None:
        """There are no more."""
        if self._empty_blocks < 2 or self._block:
            raise ValueError("it is cut off")

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
            raise ValueError("it goes on after its end")
        if _octal(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            raise ValueError("a header's checksum is wrong")
        kind, size = header[156:157], _octal(header[124:136])
        if kind == PAX:
            if self._next_size is not None or not 0 < size <= LONGEST_PAX:
                raise ValueError("an extended header is out of place")
            self._pax_size = size
        elif kind in FILES:
            size = self._next_size or size
        elif kind not in EMPTY or size:
            raise ValueError(f"a member is of type {kind!r} and size {size}")
        self._next_size = None
        self._body = -(-size // BLOCK) * BLOCK


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0")
    if not digits or digits.strip(b"01234567"):
        raise ValueError(f"a header has {field!r} where a number should be")
    return int(digits, 8)


def _pax_size(records: bytes) -> int:
    """The size that an extended header gives to the next member; 0 if it gives none."""
    size = 0
    while records:
        length, _, _ = records.partition(b" ")
        if not length.isdigit() or len(length) > 8 or not 0 < int(length) <= len(records):
            raise ValueError("an extended header has a record without a length")
        record, records = records[len(length) + 1 : int(length)], records[int(length) :]
        name, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise ValueError("an extended header has a record that is none")
        if name == b"size":
            if not value[:-1].isdigit() or len(value) > 20:
                raise ValueError("an extended header has a size that is none")
            size = int(value)
    return size
