"""Make untrusted text safe: to print in a log, a terminal or an error, or to read as JSON."""

from __future__ import annotations

import json
from typing import Any


def printable(said: bytes | str) -> str:
    """Return the text on one line, without escape sequences; its lines are joined by " | "."""
    text = said if isinstance(said, str) else said.decode("utf-8", "replace")
    return " | ".join(map(one_line, text.strip().splitlines()))


def indented(text: str) -> str:
    """Return the text with printable lines; all but the first are indented, so that none looks like a new log line."""
    return text if text.isprintable() else "\n  ".join(map(one_line, text.splitlines()))


def one_line(said: bytes | str) -> str:
    """Return the text with a question mark for each unprintable character, such as a line end, and spaces for tabs."""
    text = said if isinstance(said, str) else said.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text.replace("\t", "    "))


def json_object(text: bytes | str) -> dict[str, Any]:
    """Return the JSON object in a text; an empty one if there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
