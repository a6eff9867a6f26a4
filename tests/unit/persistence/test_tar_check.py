"""Test TarCheck: it accepts the archiver's tars, in pieces of any size, and refuses truncated and changed ones."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_provisioner.persistence import tar_check
from sandbox_provisioner.persistence.tar_check import BLOCK, LONGEST_PAX, TarCheck

KINDS = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
names = st.text("ab/é\udcff\n ", min_size=1, max_size=8) | st.just("long/" * 60)
members = st.lists(st.tuples(st.sampled_from(KINDS), names, names, st.binary(max_size=1500)), max_size=5)


def packed(contents: list[tuple[bytes, str, str, bytes]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(
        fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for kind, name, target, data in contents:
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, target
            header.size = len(data) if kind == tarfile.REGTYPE else 0
            tar.addfile(header, io.BytesIO(data))
    return stream.getvalue()


def problem(data: bytes, piece: int = 1 << 16) -> str:
    check = TarCheck()
    try:
        for start in range(0, len(data), piece):
            check.feed(data[start : start + piece])
        check.end()
    except ValueError as error:
        return str(error)
    return ""


@given(members, st.integers(1, 3000))
def test_tar_is_accepted_in_pieces_of_any_size(contents: list[tuple[bytes, str, str, bytes]], piece: int) -> None:
    assert problem(packed(contents), piece) == ""


@given(members, st.data())
def test_truncated_tar_is_refused(contents: list[tuple[bytes, str, str, bytes]], data: st.DataObject) -> None:
    whole = packed(contents)
    end = len(whole.rstrip(b"\0"))
    assert problem(whole[: data.draw(st.integers(0, end))])


@given(members, st.data())
def test_accepted_tar_can_be_unpacked(contents: list[tuple[bytes, str, str, bytes]], data: st.DataObject) -> None:
    changed = bytearray(packed(contents))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    if not problem(bytes(changed)):
        with tarfile.open(fileobj=io.BytesIO(changed), mode="r|", errors="surrogateescape") as tar:
            assert len([member.name for member in tar]) <= len(contents)


@given(st.binary(max_size=3 * BLOCK))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert problem(data) or not any(data)


def test_size_in_an_extended_header_is_used() -> None:
    header = tarfile.TarInfo("huge")
    header.size = 1 << 35
    beginning = header.tobuf(tarfile.PAX_FORMAT)
    check = TarCheck()
    check.feed(beginning)
    zeros = bytes(1 << 26)
    for _ in range(1 << 9):
        check.feed(zeros)
    with pytest.raises(ValueError, match="incomplete"):
        check.end()
    check.feed(bytes(2 * BLOCK))
    check.end()


WRONG = {
    "a device": (tarfile.CHRTYPE, 0),
    "a pipe": (tarfile.FIFOTYPE, 0),
    "a folder with contents": (tarfile.DIRTYPE, 5),
    "a sparse file": (tarfile.GNUTYPE_SPARSE, 0),
    "an endless extended header": (tarfile.XHDTYPE, 1 << 30),
    "an empty extended header": (tarfile.XHDTYPE, 0),
    "a global header": (tarfile.XGLTYPE, 20),
}


@pytest.mark.parametrize(("kind", "size"), WRONG.values(), ids=WRONG.keys())
def test_unexpected_member_type_is_refused(kind: bytes, size: int) -> None:
    header = tarfile.TarInfo("name")
    header.type, header.size = kind, size
    assert problem(header.tobuf() + bytes(4 * BLOCK))


@pytest.mark.parametrize(
    "records", [b"20 size=1\n", b"x size=1\n", b"10 size=-1\n", b"0 \n", b"7 size\n", b"9 size=x\n"]
)
def test_malformed_extended_header_is_refused(records: bytes) -> None:
    header = tarfile.TarInfo("name")
    header.type, header.size = tarfile.XHDTYPE, len(records)
    member = tarfile.TarInfo("member").tobuf()
    assert "extended header" in problem(header.tobuf() + records.ljust(BLOCK, b"\0") + member + bytes(2 * BLOCK))


def test_data_after_the_end_is_refused() -> None:
    whole = packed([])
    assert "follows the end marker" in problem(whole + tarfile.TarInfo("more").tobuf() + bytes(2 * BLOCK))
    assert "incomplete" in problem(whole + b"\0")


def test_extended_header_of_tiny_records_is_accepted() -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, LONGEST_PAX
    plain = tarfile.TarInfo("file")
    whole = header.tobuf() + b"4 =\n" * (LONGEST_PAX // 4) + plain.tobuf() + bytes(2 * BLOCK)
    assert problem(whole) == ""


def test_long_extended_header_is_refused() -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, LONGEST_PAX + 1
    assert problem(header.tobuf()) == "an extended header follows another one or has an invalid size"


def test_extended_header_is_parsed_in_linear_time() -> None:
    class Counted(bytes):
        copied = 0

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            Counted.copied += len(found)
            return Counted(found)

        def partition(self, sep: Any) -> Any:
            Counted.copied += len(self)
            return super().partition(sep)

    records = Counted(b"4 =\n" * 10_000)
    assert tar_check._pax_size(records) == 0
    assert Counted.copied < 10 * len(records)
