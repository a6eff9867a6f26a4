"""Validate sandbox ids and build the names of all stored objects. No other module does this."""

from __future__ import annotations

import re

from ..errors import ConfigurationError
from ..storage.base import ObjectStore

SANDBOX_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def valid_id(sandbox_id: str) -> str:
    """Return ``sandbox_id``, which becomes part of paths and object names. Raises ConfigurationError if invalid."""
    if not SANDBOX_ID.fullmatch(sandbox_id):
        raise ConfigurationError(
            "sandbox_id",
            f"{sandbox_id!r} is not a valid sandbox id.",
            "An id has 1 to 128 letters, digits, hyphens and underscores, and begins with a letter or a digit.",
        )
    return sandbox_id


def prefix(sandbox_id: str) -> str:
    """Return the prefix of all objects of a sandbox, in every store."""
    return f"sandboxes/{valid_id(sandbox_id)}/"


def metadata_name(sandbox_id: str) -> str:
    """Return the name of a sandbox's document."""
    return f"{prefix(sandbox_id)}metadata.json"


def tombstone_name(sandbox_id: str) -> str:
    """Return the name of the tombstone, which marks a sandbox's checkpoints as garbage if it has no document."""
    return f"{prefix(sandbox_id)}doomed"


def lock_name(sandbox_id: str) -> str:
    """Return the name of a sandbox's lease."""
    return f"{prefix(sandbox_id)}lock"


def checkpoints_prefix(sandbox_id: str) -> str:
    """Return the prefix of a sandbox's checkpoints; each has its own name below it."""
    return f"{prefix(sandbox_id)}checkpoints/"


def snapshot_prefix(sandbox_id: str, name: str) -> str:
    """Return the prefix of the file snapshot ``name``. Raises ConfigurationError unless ``name`` is valid as an id."""
    return f"{prefix(sandbox_id)}snapshots/{valid_id(name)}/"


def artifacts(store: ObjectStore, below: str) -> set[str]:
    """Return the prefix of each checkpoint or snapshot that is stored ``below`` a prefix. Blocks."""
    return {below + info.name.removeprefix(below).partition("/")[0] + "/" for info in store.list(below)}
