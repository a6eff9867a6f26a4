"""Asks: what a notebook may ask of its own sandbox with ``%sandbox``, and how it is answered.

What asks is the guest, which is taken for hostile: a request is checked here, and means nothing but the kernel's own
sandbox. An answer is a small JSON object; one that has a "problem" says in words why nothing was done.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

from .apology import Cell
from .discretion import public
from .errors import ConfigurationError, SandboxError
from .kernel import INTERNAL
from .link import GuestLink
from .metadata import Checkpoint
from .names import SANDBOX_ID

log = logging.getLogger(__name__)

MAX_ANSWER = 1 << 14
MAX_PROBLEM = 2000
MAX_FIELD = 200
MAX_AWAKE = 10_000_000
"""Seconds for which a kernel can be kept awake, unless that is without end."""
FIELDS = ("msg_id", "msg_type", "session", "username", "date", "version")
"""What a message's header has."""


@dataclass(frozen=True)
class Status:
    """What is this sandbox?"""


@dataclass(frozen=True)
class Savepoints:
    """Which savepoints are there?"""


@dataclass(frozen=True)
class Savepoint:
    """Keep the memory as it is now, as ``name``."""

    name: str


@dataclass(frozen=True)
class Rewind:
    """Go back to the savepoint ``name``; ``cell`` asks, and ends with the kernel that it runs in."""

    name: str
    cell: Cell | None


@dataclass(frozen=True)
class KeepAwake:
    """Do not hibernate the kernel for idleness for ``seconds``, on behalf of ``name``; None without end, 0 no more."""

    name: str
    seconds: float | None


Ask = Status | Savepoints | Savepoint | Rewind | KeepAwake


class Askable(Protocol):
    """A kernel, as its own notebook sees it. SandboxError is told to the notebook."""

    async def status(self) -> Mapping[str, Any]:
        """``sandbox_id``, ``state``, ``notebook``, ``idle_timeout`` (seconds; 0 for never), ``awake``, ``ephemeral``.

        ``awake`` says for how long it is kept awake, ``ephemeral`` why nothing of the sandbox is kept; empty if not so.
        """

    async def savepoints(self) -> Mapping[str, Checkpoint]:
        """By name."""

    async def savepoint(self, name: str) -> Checkpoint:
        """Make one."""

    async def rewind(self, name: str, cell: Cell | None) -> str:
        """Go back to one, and end ``cell`` with ``apology.conclude``; the name of the one that keeps the present."""

    async def keep_awake(self, name: str, seconds: float | None) -> str:
        """Keep the kernel awake for so long, and return a sentence that says until when."""


def attend(link: GuestLink, kernel: Askable) -> None:
    """Have ``kernel`` answer what is asked through ``link``, one ask after another. In the link's own loop."""
    turn = asyncio.Lock()
    serving: set[asyncio.Task[None]] = set()

    async def reply(number: int, request: Mapping[str, Any]) -> None:
        async with turn:
            if not link.error:  # the kernel that asked is still there
                link.asks.answer(number, await serve(request, kernel))

    def on_ask(number: int, request: Mapping[str, Any]) -> None:
        task = asyncio.create_task(reply(number, request))
        serving.add(task)
        task.add_done_callback(serving.discard)

    link.asks.attend(on_ask)


async def serve(request: Mapping[str, Any], kernel: Askable) -> dict[str, Any]:
    """Do what is asked, and answer; never raises."""
    try:
        return bounded(await _serve(parse(request), kernel))
    except SandboxError as error:
        return {"problem": public(error)[:MAX_PROBLEM]}
    except Exception:
        log.exception("What a notebook asked of its sandbox failed.")
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
    """The answer with as many of the savepoints, and the latest, as there is room for."""
    savepoints = kept = answer.get("savepoints", [])
    while len(json.dumps(answer)) > MAX_ANSWER and kept:
        kept = kept[len(kept) // 8 + 1 :]
        answer = {**answer, "savepoints": kept, "more": len(savepoints) - len(kept)}
    return answer


def parse(request: Mapping[str, Any]) -> Ask:
    """What is asked; ConfigurationError says what is wrong with it."""
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
    """``name`` itself, if a savepoint can be called that."""
    if not isinstance(name, str) or not SANDBOX_ID.fullmatch(name):
        raise ConfigurationError(
            "name",
            f"{name!r:.200} cannot be a savepoint's name.",
            "A name has 1 to 128 letters, digits, hyphens and underscores, and begins with a letter or a digit.",
        )
    return name


def _seconds(value: Any) -> float | None:
    """Return how long a kernel is to be kept awake; raises ConfigurationError."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_AWAKE):
        return value
    raise ConfigurationError(
        "seconds", f"A kernel cannot be kept awake for {value!r:.100} seconds.", f"Give 0 to {MAX_AWAKE}, or no end."
    )


def _cell(request: Mapping[str, Any]) -> Cell | None:
    """The cell that asks, if it says enough of itself to be answered in the kernel's name."""
    header, count = request.get("parent"), request.get("count")
    if not isinstance(header, dict) or not isinstance(header.get("msg_id"), str):
        return None
    known = {field: header[field] for field in FIELDS if isinstance(header.get(field), str)}
    if not all(len(value) <= MAX_FIELD and value.isprintable() for value in known.values()):
        return None
    return Cell({**known, "msg_type": "execute_request"}, count if type(count) is int and 0 <= count < 1 << 31 else 0)
