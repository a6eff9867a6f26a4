"""What others say fits into one line."""

from __future__ import annotations

import pytest

from sandbox_provisioner.words import printable


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (b"", ""),
        (b"one\ntwo\n", "one | two"),
        (b"\x1b[31mred\x1b[0m", "?[31mred?[0m"),
        (b"a\rb", "a | b"),
        ("naïve 🙂".encode(), "naïve 🙂"),
        (b"\xff", "\ufffd"),
    ],
)
def test_what_somebody_said_fits_into_one_line_of_a_log(words: bytes, shown: str) -> None:
    assert printable(words) == shown
    assert printable(words.decode("utf-8", "replace")) == shown
