"""Validate, run and answer the requests that a notebook sends with ``%sandbox``.

Requests come from the guest, which is hostile by assumption: each is validated here and can only concern the kernel's
own sandbox. An answer is a small JSON object; its "problem", if it has one, explains why nothing was done.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

from ..errors import ConfigurationError, SandboxError
from ..errors.redaction import public
from ..mux.connection import GuestConnection
from ..persistence.metadata import Checkpoint
from ..persistence.names import SANDBOX_ID
from .kernel import INTERNAL
from .synthetic_replies import Cell

log = logging.getLogger(__name__)

MAX_ANSWER = 1 << 14
MAX_PROBLEM = 2000
MAX_FIELD = 200
MAX_AWAKE = 10_000_000
"""Longest time limit, in seconds, for keeping a kernel awake."""
FIELDS = ("msg_id", "msg_type", "session", "username", "date", "version")
"""Fields that are copied from a message's header."""


@dataclass(frozen=True)
class Status:
    """A request to describe the sandbox."""


@dataclass(frozen=True)
class Savepoints:
    """A request to list the savepoints."""


@dataclass(frozen=True)
class Savepoint:
    """A request to save the memory as savepoint ``name``."""

    name: str


@dataclass(frozen=True)
class Rewind:
    """A request of ``cell`` to restore savepoint ``name``. The cell ends with the kernel that it runs in."""

    name: str
    cell: Cell | None


@dataclass(frozen=True)
class KeepAwake:
    """A request to keep the kernel awake for ``seconds``, on behalf of ``name``: None for no limit, 0 to stop."""

    name: str
    seconds: float | None


Ask = Status | Savepoints | Savepoint | Rewind | KeepAwake


class Askable(Protocol):
    """The actions that a notebook can request for its kernel. A SandboxError is reported to the notebook."""

    async def status(self) -> Mapping[str, Any]:
        """Return ``sandbox_id``, ``state``, ``notebook``, ``idle_timeout`` (seconds; 0: off), ``awake``, ``ephemeral``.

        ``awake`` states how long the kernel is kept awake, ``ephemeral`` why the sandbox is not saved; empty if not so.
        """

    async def savepoints(self) -> Mapping[str, Checkpoint]:
        """Return the savepoints by name."""

    async def savepoint(self, name: str) -> Checkpoint:
        """Make a savepoint and return it."""

    async def rewind(self, name: str, cell: Cell | None) -> str:
        """Restore a savepoint and end ``cell`` with ``synthetic_replies.end_cell``.

        Return the name of the savepoint that has the state from before.
        """

    async def keep_awake(self, name: str, seconds: float | None) -> str:
        """Keep the kernel awake and return a sentence that states for how long."""


def attend(connection: GuestConnection, kernel: Askable) -> None:
    """Answer the requests that arrive on ``connection``, one at a time, by calling ``kernel``. I/O thread only."""
    turn = asyncio.Lock()
    serving: set[asyncio.Task[None]] = set()

    async def reply(number: int, request: Mapping[str, Any]) -> None:
        async with turn:
            if not connection.error:  # otherwise the guest that sent the request is gone
                connection.host_api.answer(number, await serve(request, kernel))

    def on_ask(number: int, request: Mapping[str, Any]) -> None:
        task = asyncio.create_task(reply(number, request))
        serving.add(task)
        task.add_done_callback(serving.discard)

    connection.host_api.listen(on_ask)


async def serve(request: Mapping[str, Any], kernel: Askable) -> dict[str, Any]:
    """Run a request and return its answer. Never raises: an error becomes the answer's "problem"."""
    try:
        return bounded(await _serve(parse(request), kernel))
    except SandboxError as error:
        return {"problem": public(error)[:MAX_PROBLEM]}
    except Exception:
        log.exception("A request of a notebook to its sandbox failed")
        return {"problem": INTERNAL}


async def _serve(ask: Ask, kernel: Askable) -> dict[str, Any]:
    match ask:
        case Status():
            status = dict(await kernel.status())
            return {"status": status} | ({} if status.get("ephemeral") else _listed(await kernel.savepoints()))
        case Savepoints():
            return _listed(await kernel.savepoints())
        case Savepoint(name):
            made = await kernel.savepoint(name)
            return {"size": made.size, "seconds": made.seconds}
        case Rewind(name, cell):
            return {"kept": await kernel.rewind(name, cell)}
        case KeepAwake(name, seconds):
            return {"awake": await kernel.keep_awake(name, seconds)}


def _listed(savepoints: Mapping[str, Checkpoint]) -> dict[str, Any]:
    found = [{"name": name, "created": one.created, "size": one.size} for name, one in savepoints.items()]
    return {"savepoints": sorted(found, key=itemgetter("created"))}


def bounded(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer with the latest savepoints that fit into MAX_ANSWER; "more" counts those left out."""
    savepoints = kept = answer.get("savepoints", [])
    while len(json.dumps(answer)) > MAX_ANSWER and kept:
        kept = kept[len(kept) // 8 + 1 :]
        answer = {**answer, "savepoints": kept, "more": len(savepoints) - len(kept)}
    return answer


def parse(request: Mapping[str, Any]) -> Ask:
    """Return the validated request. Raises ConfigurationError if it is invalid."""
    match request:
        case {"op": "status"}:
            return Status()
        case {"op": "savepoints"}:
            return Savepoints()
        case {"op": "savepoint", "name": name}:
            return Savepoint(valid_name(name))
        case {"op": "rewind", "name": name}:
            return Rewind(valid_name(name), _cell(request))
        case {"op": "keep-awake", "name": name, "seconds": seconds}:
            return KeepAwake(valid_name(name), _seconds(seconds))
    raise ConfigurationError(
        "op",
        f"A sandbox cannot be asked for {str(request.get('op'))!r:.100}.",
        "`%sandbox` says what it can be asked for.",
    )


def valid_name(name: Any) -> str:
    """Return ``name`` if a savepoint can have that name. Raises ConfigurationError otherwise."""
    if not isinstance(name, str) or not SANDBOX_ID.fullmatch(name):
        raise ConfigurationError(
            "name",
            f"{name!r:.200} cannot be a savepoint's name.",
            "A name has 1 to 128 letters, digits, hyphens and underscores, and begins with a letter or a digit.",
        )
    return name


def _seconds(value: Any) -> float | None:
    """Return how long to keep a kernel awake. Raises ConfigurationError if ``value`` is invalid."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_AWAKE):
        return value
    raise ConfigurationError(
        "seconds", f"A kernel cannot be kept awake for {value!r:.100} seconds.", f"Give 0 to {MAX_AWAKE}, or no end."
    )


def _cell(request: Mapping[str, Any]) -> Cell | None:
    """Return the cell that sent the request; None if its header is missing or invalid, so that no reply is possible."""
    header, count = request.get("parent"), request.get("count")
    if not isinstance(header, dict) or not isinstance(header.get("msg_id"), str):
        return None
    known = {field: header[field] for field in FIELDS if isinstance(header.get(field), str)}
    if not all(len(value) <= MAX_FIELD and value.isprintable() for value in known.values()):
        return None
    return Cell({**known, "msg_type": "execute_request"}, count if type(count) is int and 0 <= count < 1 << 31 else 0)
