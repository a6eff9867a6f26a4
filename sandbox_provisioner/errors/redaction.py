"""Remove the host's paths from error texts for readers who must not learn about this machine.

Everything that looks like an absolute path, and every value of an attribute of the exception that begins with a slash,
is replaced by an ellipsis. File names remain only in errors that list the files which prevent a save or a restore.
"""

from __future__ import annotations

import re

from . import IncompatibleError, SandboxError, UnsaveableError

HIDDEN, QUOTES = "…", "\"'"
PATH = re.compile(
    r"""(?<![\w.~…/-])(?<!https:)(?<!http:)(?<!gs:)
    (?: (?P<quote>["'])/.*?(?P=quote) | (?:file:/*)?/[^\s"'`,;()]* (?:[ ][^\s"'`,;()]+/[^\s"'`,;()]*)* (?<![.:]) )""",
    re.VERBOSE,
)
"""Matches an absolute path. In quotes, that is the whole quoted text. Elsewhere it is a word and the following words
that contain a slash, because names of folders can contain spaces."""


def without_paths(error: SandboxError, part: str | None = None) -> str:
    """Return the message of ``error``, or only the given ``part`` of it, without the host's paths."""
    text = str(error) if part is None else part
    if isinstance(error, IncompatibleError | UnsaveableError):
        return PATH.sub(lambda found: f"{HIDDEN}/{found[0].strip(QUOTES).rpartition('/')[2]}", text)
    for name, value in vars(error).items():
        if name not in ("problem", "remedy") and isinstance(value, str) and value.startswith("/"):
            text = text.replace(value, HIDDEN)
    return PATH.sub(HIDDEN, text)
