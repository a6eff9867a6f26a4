"""Ids of sandboxes, and the names of all objects that are kept of them: checked and built here, and nowhere else."""

from __future__ import annotations

import re

from .errors import ConfigurationError
from .storage.base import ObjectStore

SANDBOX_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def valid_id(sandbox_id: str) -> str:
    """``sandbox_id`` itself, if it can be one: it becomes part of paths and object names."""
    if not SANDBOX_ID.fullmatch(sandbox_id):
        raise ConfigurationError(
            "sandbox_id",
            f"{sandbox_id!r} cannot be a sandbox's id.",
            "An id has 1 to 128 letters, digits, hyphens and underscores, and begins with a letter or a digit.",
        )
    return sandbox_id


def prefix(sandbox_id: str) -> str:
    """Where everything of a sandbox is, in every store."""
    return f"sandboxes/{valid_id(sandbox_id)}/"


def metadata_name(sandbox_id: str) -> str:
    """The document that a persistent sandbox is."""
    return f"{prefix(sandbox_id)}metadata.json"


def doomed_name(sandbox_id: str) -> str:
    """What lies beside checkpoints that are garbage if there is no document."""
    return f"{prefix(sandbox_id)}doomed"


def lock_name(sandbox_id: str) -> str:
    """What the lease is of."""
    return f"{prefix(sandbox_id)}lock"


def checkpoints_prefix(sandbox_id: str) -> str:
    """Where a sandbox's checkpoints are, each below a name of its own."""
    return f"{prefix(sandbox_id)}checkpoints/"


def snapshot_prefix(sandbox_id: str, name: str) -> str:
    """Where the snapshot ``name`` of a sandbox is; a name is made like an id."""
    return f"{prefix(sandbox_id)}snapshots/{valid_id(name)}/"


def artifacts(store: ObjectStore, below: str) -> set[str]:
    """The prefixes of what is stored ``below`` a prefix: one for each checkpoint, or each snapshot. Blocks."""
    return {below + info.name.removeprefix(below).partition("/")[0] + "/" for info in store.list(below)}
