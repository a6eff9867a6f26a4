"""A kernel's output becomes short lines of the log that cannot be mistaken for the server's own messages."""

from __future__ import annotations

import select

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_provisioner.kernel.output import (
    BURST,
    LINES_PER_SECOND,
    MAX_LINE,
    NOTICE_EVERY,
    PARTIAL,
    Budget,
    LogLines,
)

OWN = "output of sandbox s | "


def lines() -> LogLines:
    return LogLines("s", Budget(0.0))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo\rthree\n\n", ["one", "two", "three"]),
        (b"  indented\tby a tab\n", ["  indented    by a tab"]),
        (b"\x1b[2J\x1b]0;title\x07red\n", ["?[2J?]0;title?red"]),
        ("a\u2028b\x85c\u202ed\n".encode(), ["a?b?c?d"]),
        (b"\xff\n", ["\ufffd"]),
        (b"[E 2026-11-18 12:00:00.000 ServerApp] forged\n", ["[E 2026-11-18 12:00:00.000 ServerApp] forged"]),
    ],
)
def test_each_line_has_the_id_and_no_control_character(said: bytes, shown: list[str]) -> None:
    assert lines().feed(said, 0.0) == [f"{OWN}{text}\n".encode() for text in shown]


def test_line_in_pieces_is_one_line() -> None:
    log = lines()
    assert log.feed(b"on", 0.0) == []
    assert log.feed(b"e\nt", 0.1) == [f"{OWN}one\n".encode()]
    assert log.pending
    assert log.flush(0.2) == [f"{OWN}t\n".encode()]
    assert not log.pending


def test_slow_line_is_logged_before_its_end() -> None:
    log = lines()
    assert log.feed(b"a", 0.0) == []
    assert log.feed(b"b", PARTIAL + 0.1) == [f"{OWN}ab\n".encode()]


def test_long_line_is_cut_and_its_rest_is_counted() -> None:
    log = lines()
    for _ in range(100):
        assert log.feed(b"x" * 10_000, 0.0) == []
    (line,) = log.feed(b"\n", 0.0)
    assert line.decode() == f"{OWN}{'x' * MAX_LINE} ... ({1_000_000 - MAX_LINE} bytes more)\n"


def test_flood_is_dropped_and_counted() -> None:
    log = lines()
    shown = log.feed(b"flood\n" * 1000, 0.0)
    assert shown == [f"{OWN}flood\n".encode()] * BURST
    assert log.dropping
    later = NOTICE_EVERY + 0.1
    shown = log.feed(b"later\n" * 1000, later)
    first, *others = shown
    dropped = 1000 - BURST
    assert first.decode().startswith(f"output of sandbox s * dropped {dropped} lines ({dropped * 5} bytes)")
    assert 0 < len(others) <= LINES_PER_SECOND * later
    assert set(others) == {f"{OWN}later\n".encode()}
    (notice,) = log.flush(later)
    assert f"dropped {1000 - len(others)} lines".encode() in notice


def test_streams_share_a_budget() -> None:
    budget = Budget(0.0)
    first, second = LogLines("s", budget), LogLines("s", budget)
    assert len(first.feed(b"x\n" * BURST, 0.0)) == BURST
    assert second.feed(b"x\n", 0.0) == []


@given(st.lists(st.binary(max_size=2000), max_size=20))
def test_any_output_becomes_complete_short_printable_lines(pieces: list[bytes]) -> None:
    log = lines()
    shown = [line for piece in pieces for line in log.feed(piece, 0.0)] + log.flush(0.0)
    for line in shown:
        text = line.decode()
        assert text.startswith("output of sandbox s ") and text.endswith("\n")
        assert text[:-1].isprintable()
        assert len(line) < select.PIPE_BUF
