"""What a shell offers for an argument of ``jupyter sandbox``: the ids and names that there are.

Only this user's records and storage are asked: a shell does not wait for a server.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from .errors import SandboxError
from .metadata import Stored
from .persistence import Persistence, registry
from .records import SandboxRecord

Offer = Callable[..., dict[str, str]]
Read = Callable[[Persistence, SandboxRecord], Mapping[str, Stored]]


def offer(action: argparse.Action, completer: Offer) -> None:
    """Have argcomplete ask ``completer`` for the values of an argument."""
    action.completer = completer  # type: ignore[attr-defined]


def ids(prefix: str, **_: Any) -> dict[str, str]:
    """The ids that begin so, with what a person knows them by."""
    return {
        str(record.id): f"{record.kernel_name} {record.notebook_path}".strip()
        for record in registry().list().records
        if str(record.id).startswith(prefix)
    }


def savepoints(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    """The savepoints of the sandbox that was named before."""
    return _names(prefix, parsed_args, lambda storage, record: storage.summarise(record).savepoints)


def snapshots(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    """The snapshots of the sandbox that was named before."""
    return _names(prefix, parsed_args, Persistence.snapshots)


def _names(prefix: str, parsed_args: argparse.Namespace, read: Read) -> dict[str, str]:
    try:
        storage: Persistence = parsed_args.open()
        stored = read(storage, storage.registry.find(parsed_args.ids[0]))
    except (SandboxError, OSError):
        return {}
    return {name: each.created for name, each in stored.items() if name.startswith(prefix)}
