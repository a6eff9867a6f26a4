"""Make untrusted text safe: to print in a log, a terminal or an error, or to read as JSON."""

from __future__ import annotations

import json
from typing import Any


def printable(text: bytes | str) -> str:
    """Return the text on one line, without escape sequences; its lines are joined by " | "."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return " | ".join(map(one_line, text.strip().splitlines()))


def indented(text: str) -> str:
    """Return the text with printable lines; all but the first are indented, so that none looks like a new log line."""
    return text if text.isprintable() else "\n  ".join(map(one_line, text.splitlines()))


def one_line(text: bytes | str) -> str:
    """Return the text with a question mark for each unprintable character, such as a line end, and spaces for tabs."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text.replace("\t", "    "))


def printable_lines(text: str) -> str:
    """Return the text with its line ends, and with a question mark for each other unprintable character."""
    return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))


def excerpt(error: Exception) -> str:
    """Return the beginning of an error's text, which may contain untrusted text of any size, on one line."""
    return one_line(f"{type(error).__name__}: {error}"[:200])


def json_object(text: bytes | str) -> dict[str, Any]:
    """Parse a text as a JSON object. Return an empty dict if it is anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
