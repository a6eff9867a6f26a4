"""Make untrusted text safe: to print in a log, a terminal or an error, or to read as JSON."""

from __future__ import annotations

import json
from typing import Any

MAX_NAME = 80
"""Characters of a notebook's name in a log line."""


def printable(text: bytes | str) -> str:
    """Return the text on one line, its lines joined by " | ", with a question mark for each unprintable character."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return " | ".join(map(one_line, text.strip().splitlines()))


def indented(text: str) -> str:
    """Return the text with printable lines. All but the first are indented, so that none looks like a new log line."""
    return text if text.isprintable() else "\n  ".join(map(one_line, text.splitlines()))


def one_line(text: bytes | str) -> str:
    """Return the text with a question mark for each unprintable character, line ends included, and spaces for tabs."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text.replace("\t", "    "))


def printable_lines(text: str) -> str:
    """Return the text with a question mark for each unprintable character, except line ends."""
    return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))


def titled(identity: str, notebook: str) -> str:
    """Return the id of a sandbox or kernel for a log line, with its notebook's folder and file name, if it has one."""
    name = one_line("/".join(notebook.split("/")[-2:]))
    shown = name if len(name) <= MAX_NAME else f"...{name[-MAX_NAME:]}"
    return f"{identity} ({shown})" if name else identity


def excerpt(error: Exception) -> str:
    """Return the type and the first characters of an error's text, which may be untrusted and long, on one line."""
    return one_line(f"{type(error).__name__}: {error}"[:200])


def json_object(text: bytes | str) -> dict[str, Any]:
    """Parse a text as a JSON object. Return an empty dict if it is anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN or Infinity, which Python's JSON parser accepts; for its ``parse_constant``."""
    raise ValueError(f"{name} is not a number")
