"""What may be told of an error to somebody who is not to know this machine: all but its paths.

The rule is the same for all: whatever looks like an absolute path, or is an attribute of the exception that begins like
one, is replaced by three dots. Of the files for which a kernel cannot be saved or brought back, the name is told.
"""

from __future__ import annotations

import re

from .errors import IncompatibleError, SandboxError, UnsaveableError

HIDDEN, QUOTES = "…", "\"'"
PATH = re.compile(
    r"""(?<![\w.~…/-])(?<!https:)(?<!http:)(?<!gs:)
    (?: (?P<quote>["'])/.*?(?P=quote) | (?:file:/*)?/[^\s"'`,;()]* (?:[ ][^\s"'`,;()]+/[^\s"'`,;()]*)* (?<![.:]) )""",
    re.VERBOSE,
)
"""An absolute path: all that is in quotes, or else a word and those that follow it with a slash in them, for the names
of folders can have spaces."""


def public(error: SandboxError) -> str:
    """All that an exception says, without paths."""
    return without_paths(error, str(error))


def without_paths(error: SandboxError, text: str) -> str:
    """A text of an exception's, without paths."""
    if isinstance(error, IncompatibleError | UnsaveableError):
        return PATH.sub(lambda found: f"{HIDDEN}/{found[0].strip(QUOTES).rpartition('/')[2]}", text)
    for name, value in vars(error).items():
        if name not in ("problem", "remedy") and isinstance(value, str) and value.startswith("/"):
            text = text.replace(value, HIDDEN)
    return PATH.sub(HIDDEN, text)
