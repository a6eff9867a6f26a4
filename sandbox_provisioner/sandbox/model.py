"""Define what users see of sandboxes: in the REST API, the command line and the Python client.

The classes are named like the schemas in the server's openapi.yaml. This module needs the standard library only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

State = Literal["running", "hibernated", "saved", "empty", "gone", "elsewhere", "unknown", "standby"]
"""The states in this version. ``Sandbox.state`` is any text, because a newer server may send other states."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint; ``size`` is in bytes."""

    created: datetime
    size: int


@dataclass(frozen=True)
class NamedState:
    """A savepoint or a file snapshot; ``size`` is in bytes."""

    name: str
    created: datetime
    size: int


@dataclass(frozen=True)
class VisibleFiles:
    """The paths that a kernel sees, as it names them. All files that are in none of these lists are read-only too."""

    writable: tuple[str, ...]
    read_only: tuple[str, ...]
    in_memory: tuple[str, ...]


@dataclass(frozen=True)
class Sandbox:
    """A sandbox. ``size`` is in bytes; ``problem`` is the reason why its stored state is unknown.

    ``busy`` and ``busy_reasons`` report why its kernel is not idle, ``files`` which files it sees. ``lost_since`` is
    the time of its checkpoint if all later changes are lost, because it ended without being saved, and its user has not
    been told yet. Servers of older versions do not send these four.
    """

    id: str
    sandbox_id: str
    state: str
    persistent: bool
    kernel_id: str | None
    kernel_name: str
    notebook_path: str | None
    created: datetime
    last_used: datetime
    size: int | None
    checkpoint: Stored | None
    previous: Stored | None
    savepoints: tuple[NamedState, ...]
    snapshots: tuple[NamedState, ...]
    problem: str | None
    busy: bool = False
    busy_reasons: tuple[str, ...] = ()
    files: VisibleFiles | None = None
    lost_since: datetime | None = None


@dataclass(frozen=True)
class SandboxPage:
    """A page of the list. ``next`` is the next page's cursor or None; ``unreadable`` counts the unreadable records."""

    items: tuple[Sandbox, ...]
    next: str | None
    unreadable: int


@dataclass(frozen=True)
class NamedStates:
    """The savepoints or the file snapshots of a sandbox, the oldest first."""

    items: tuple[NamedState, ...]


@dataclass(frozen=True)
class Rewound:
    """A sandbox after a rewind; ``kept`` is the savepoint of its state before the rewind."""

    sandbox: Sandbox
    kept: str


@dataclass(frozen=True)
class Deleted:
    """The id of a deleted sandbox, and the bytes that were freed."""

    id: str
    freed: int


@dataclass(frozen=True)
class PlainNotebook:
    """A notebook that ran in a sandbox, and the kernel without a sandbox that the user allowed for it."""

    notebook_path: str
    kernel_name: str


@dataclass(frozen=True)
class PlainNotebooks:
    """The notebooks for which a kernel without a sandbox is allowed."""

    items: tuple[PlainNotebook, ...]


@dataclass(frozen=True)
class Capabilities:
    """A server's versions, kernels and storage abilities."""

    version: str
    runsc: str | None
    kernels: tuple[str, ...]
    storage: str | None
    persistent: bool
    checkpoints: bool
    snapshots: bool
    gcs: bool


@dataclass(frozen=True)
class EffectiveSetting:
    """The value of a setting, and the place that sets it; ``where`` names the variable, kernelspec or file."""

    name: str
    value: Any
    source: str
    where: str


@dataclass(frozen=True)
class EffectiveSettings:
    """The settings of a server and of a kernel; ``warnings`` are about settings that do not exist."""

    kernel_name: str | None
    notebook_path: str | None
    items: tuple[EffectiveSetting, ...]
    warnings: tuple[str, ...]


def encode(item: Any) -> dict[str, Any]:
    """Return an instance of one of these classes as a JSON object."""
    return asdict(item, dict_factory=lambda fields: {name: _json_value(value) for name, value in fields})


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return list(value) if isinstance(value, tuple) else value
