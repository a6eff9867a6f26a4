"""Remove the host's paths from error texts for readers who must not learn about this machine.

Everything that looks like an absolute path, and every attribute of the exception that starts like one, is replaced by
an ellipsis. File names remain only in errors that list the files which prevent a save or a restore.
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
"""Matches an absolute path: all text in quotes, or a word and the following words with a slash, because names of
folders can contain spaces."""


def public(error: SandboxError) -> str:
    """Return the text of an exception without paths."""
    return without_paths(error, str(error))


def without_paths(error: SandboxError, text: str) -> str:
    """Return ``text``, which is about ``error``, without paths."""
    if isinstance(error, IncompatibleError | UnsaveableError):
        return PATH.sub(lambda found: f"{HIDDEN}/{found[0].strip(QUOTES).rpartition('/')[2]}", text)
    for name, value in vars(error).items():
        if name not in ("problem", "remedy") and isinstance(value, str) and value.startswith("/"):
            text = text.replace(value, HIDDEN)
    return PATH.sub(HIDDEN, text)
