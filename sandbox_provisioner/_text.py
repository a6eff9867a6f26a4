"""Make untrusted text fit for one line of a log, a terminal or an error."""

from __future__ import annotations


def printable(said: bytes | str) -> str:
    """Return the text on one line, without escape sequences; its lines are joined by " | "."""
    text = said if isinstance(said, str) else said.decode("utf-8", "replace")
    return " | ".join(map(one_line, text.strip().splitlines()))


def indented(text: str) -> str:
    """Return the text with its lines made printable; all but the first are indented, unlike lines of a log."""
    return text if text.isprintable() else "\n  ".join(map(one_line, text.splitlines()))


def one_line(said: bytes | str) -> str:
    """Return the text with a question mark for each character that is not printable, such as a line end."""
    text = said if isinstance(said, str) else said.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text.replace("\t", "    "))
