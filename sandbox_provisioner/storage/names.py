"""Validate object names, before they become part of a path or a request. No other module does."""

from __future__ import annotations

import re

from ..errors import StorageError

LONGEST = 512
SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
NAME = re.compile(rf"{SEGMENT}(?:/{SEGMENT})*")


def is_name(name: str) -> bool:
    """Return True if ``name`` is a valid object name. Objects with other names are not ours, and are ignored."""
    return len(name) <= LONGEST and NAME.fullmatch(name) is not None


def valid_name(where: str, name: str) -> str:
    """Return ``name``. Raises StorageError if it is not a valid object name."""
    if not is_name(name):
        raise StorageError(
            where,
            f"{name!r} is not a valid object name in {where}.",
            f"A name has up to {LONGEST} characters: segments of 1 to 255 letters, digits, '-', '_' and '.', "
            "joined by '/'. No segment begins with a dot.",
        )
    return name


def valid_prefix(where: str, prefix: str) -> str:
    """Return ``prefix``. Raises StorageError unless it is a valid object name followed by a slash."""
    if not prefix.endswith("/"):
        raise StorageError(where, f"{prefix!r} is not a valid prefix in {where}.", "A prefix ends in a slash.")
    valid_name(where, prefix[:-1])
    return prefix
