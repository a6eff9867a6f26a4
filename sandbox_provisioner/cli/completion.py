"""Complete ids and names for ``jupyter sandbox`` in a shell.

Only this user's records and storage are read: completion must not wait for a server.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import SandboxError
from ..persistence.metadata import Stored
from ..persistence.records import SandboxRecord
from ..sandbox.user_sandboxes import Persistence, registry

Offer = Callable[..., dict[str, str]]
Read = Callable[[Persistence, SandboxRecord], Mapping[str, Stored]]


def offer(action: argparse.Action, completer: Offer) -> None:
    """Register ``completer`` with argcomplete for an argument."""
    action.completer = completer  # type: ignore[attr-defined]


def ids(prefix: str, **_: Any) -> dict[str, str]:
    """Return the ids with this prefix, each with its kernel and notebook. Called by argcomplete."""
    return {
        str(record.id): f"{record.kernel_name} {record.notebook_path}".strip()
        for record in registry().list().records
        if str(record.id).startswith(prefix)
    }


def savepoints(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    """Return the savepoints of the sandbox on the command line that begin with ``prefix``. Called by argcomplete."""
    return _names(prefix, parsed_args, lambda storage, record: storage.summarise(record).savepoints)


def snapshots(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    """Return the sandbox's file snapshots that begin with ``prefix``. Called by argcomplete."""
    return _names(prefix, parsed_args, Persistence.snapshots)


def _names(prefix: str, parsed_args: argparse.Namespace, read: Read) -> dict[str, str]:
    try:
        storage: Persistence = parsed_args.open()
        stored = read(storage, storage.registry.find(parsed_args.ids[0]))
    except (SandboxError, OSError):
        return {}
    return {name: each.created for name, each in stored.items() if name.startswith(prefix)}
