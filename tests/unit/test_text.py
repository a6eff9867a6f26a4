"""Test that untrusted text is printed without line ends and escape sequences."""

from __future__ import annotations

import io

import pytest

from sandbox_provisioner._text import printable, titled
from sandbox_provisioner.errors import RunscError, SandboxError
from sandbox_provisioner.gvisor.runsc import clean_output
from sandbox_provisioner.setup.progress import Progress

FORGED = "[E 2026-11-18 12:00:00.000 ServerApp] forged"


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
def test_untrusted_text_is_printed_on_one_line(words: bytes, shown: str) -> None:
    assert printable(words) == shown
    assert printable(words.decode("utf-8", "replace")) == shown


@pytest.mark.parametrize(
    "error",
    [
        SandboxError(f"No file \x1b[2J\n{FORGED}", f"Remove \x07\r{FORGED}"),
        RunscError(["runsc"], 1, clean_output(f"W1118 10:00:00.0 1 x.go:1] \x1b[2J\n{FORGED}".encode())),
    ],
)
def test_untrusted_text_in_an_error_cannot_forge_a_line(error: SandboxError) -> None:
    for text in (str(error), error.problem, error.remedy):
        assert all(line.isprintable() for line in text.split("\n"))
        assert not any(line.startswith("[") for line in text.split("\n"))


def test_untrusted_text_in_progress_cannot_forge_a_line() -> None:
    stream = io.StringIO()
    Progress(stream).say(f"a file \x1b[2J\n{FORGED}")
    assert stream.getvalue() == f"a file ?[2J\n  {FORGED}\n"


def test_log_lines_name_the_notebook_in_printable_and_bounded_text() -> None:
    assert titled("1f", "") == "1f"
    assert titled("1f", "/home/me/work/a.ipynb") == "1f (work/a.ipynb)"
    assert titled("1f", "/n/\x1b[2J\n.ipynb") == "1f (n/?[2J?.ipynb)"
    assert len(titled("1f", "/n/" + "x" * 9999)) < 100
