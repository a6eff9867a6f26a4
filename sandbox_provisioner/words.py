"""What somebody says whom we do not trust, made fit for one line of a log or of an error."""

from __future__ import annotations


def printable(said: bytes | str) -> str:
    """The same on one line: no escape sequences, no lines that look like the log's own."""
    text = said if isinstance(said, str) else said.decode("utf-8", "replace")
    return " | ".join("".join(c if c.isprintable() else "?" for c in line) for line in text.strip().splitlines())
