"""Validate, run and answer the requests that a notebook sends with ``%sandbox``. I/O thread only.

Requests come from the guest, which is hostile by assumption: each is validated here and can only concern the kernel's
own sandbox. An answer is a small JSON object; its "problem", if it has one, explains why nothing was done.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from jupyter_client.session import Session

from ..errors import ConfigurationError, SandboxError
from ..errors.redaction import without_paths
from ..gvisor.bundle import BundleSpec
from ..mux.connection import GuestConnection
from ..persistence.metadata import Checkpoint
from ..persistence.names import SANDBOX_ID
from ..sandbox.handle import SandboxHandle
from ..sandbox.visible import visible_files
from .home import RESET
from .kernel import INTERNAL, SandboxedKernel
from .synthetic_replies import Cell, end_cell

log = logging.getLogger(__name__)

MAX_ANSWER = 1 << 14
MOST_PATHS = 20
"""Paths of each kind that ``%sandbox status`` lists at most; each has MAX_PATH characters at most."""
MAX_PATH = 200
MAX_PROBLEM = 2000
MAX_FIELD = 200
MAX_AWAKE = 10_000_000
"""Longest time limit, in seconds, for keeping a kernel awake."""
FIELDS = ("msg_id", "msg_type", "session", "username", "date", "version")
"""Fields that are copied from a message's header."""
EPHEMERAL = (
    "This kernel's state is not saved: it has neither a notebook nor a sandbox_id, or the setting persistent is off."
)


class NotebookActions:
    """The actions that a notebook can request for its own kernel. ``session`` signs messages as the kernel.

    A SandboxError is reported to the notebook.
    """

    def __init__(self, kernel: SandboxedKernel, session: Callable[[], Session]) -> None:
        self._kernel = kernel
        self._session = session

    async def status(self) -> dict[str, Any]:
        """Return the fields that ``%sandbox status`` shows; ``idle_timeout`` is in seconds, 0 without hibernation.

        ``awake`` states how long the kernel is kept awake, and is empty if it is not kept awake. ``ephemeral`` states
        why the kernel's state is not saved, and is empty if it is saved. ``files`` has the paths that the kernel sees.
        """
        assert self._kernel.handle is not None
        handle = self._kernel.handle
        return {
            "sandbox_id": handle.sandbox_id,
            "state": str(handle.instance.state),
            "notebook": handle.metadata.notebook_path if handle.persistent else "",
            "idle_timeout": handle.idle_timeout or 0.0,
            "awake": self._kernel.activity.awake_for(),
            "ephemeral": "" if handle.persistent else EPHEMERAL,
            "files": _files(handle.instance.spec),
        }

    async def savepoints(self) -> Mapping[str, Checkpoint]:
        """Return the savepoints by name."""
        return self._require_persistent().metadata.savepoints

    async def savepoint(self, name: str) -> Checkpoint:
        """Make a savepoint and return it."""
        self._require_persistent()
        return await self._kernel.savepoint(name)

    async def rewind(self, name: str, cell: Cell | None) -> str:
        """Restore a savepoint and return the name of the one that has the state from before.

        ``cell`` requested the rewind. It is ended on the kernel's behalf, because the restored kernel does not have it.
        Raises SandboxError if the kernel's connections are encrypted, because the cell could not be ended.
        """
        if "curve_publickey" in self._require_persistent().contents.get("connection", {}):
            raise SandboxError(
                "A cell cannot rewind this kernel: its connections are encrypted, so the cell could not be ended.",
                "Rewind it from outside: `jupyter sandbox rewind`.",
            )

        def last_messages(kept: str, problem: SandboxError | None) -> tuple[bytes, bytes]:
            text = f"Rewound to {name}; the state before is kept as savepoint {kept}."
            details = without_paths(problem) if problem else ""
            return end_cell(cell, self._session(), text, details) if cell else (b"", b"")

        return await self._kernel.rewind(name, last_messages)

    async def keep_awake(self, name: str, seconds: float | None) -> str:
        """Prevent hibernation for idleness; return a sentence that states for how long."""
        return await self._kernel.keep_awake(name, seconds)

    async def reset_home(self) -> None:
        """Let the next restart of the kernel empty its home folder."""
        handle = self._require_persistent()
        handle.describe({**handle.contents, RESET: True})

    def _require_persistent(self) -> SandboxHandle:
        handle = self._kernel.handle
        if handle is None or not handle.persistent:
            raise SandboxError(EPHEMERAL)
        return handle


def _files(spec: BundleSpec) -> dict[str, list[str]]:
    """Return the first paths of each kind that a sandbox with this spec sees."""
    kinds = vars(visible_files(spec))
    return {kind: [path[:MAX_PATH] for path in paths[:MOST_PATHS]] for kind, paths in kinds.items()}


def attend(connection: GuestConnection, actions: NotebookActions) -> None:
    """Run the requests that arrive on ``connection``, one at a time, and answer each."""
    turn = asyncio.Lock()
    serving: set[asyncio.Task[None]] = set()

    async def reply(number: int, request: Mapping[str, Any]) -> None:
        async with turn:
            if not connection.error:  # otherwise the guest that sent the request is gone
                connection.host_api.answer(number, await serve(request, actions))

    def on_ask(number: int, request: Mapping[str, Any]) -> None:
        task = asyncio.create_task(reply(number, request))
        serving.add(task)
        task.add_done_callback(serving.discard)

    connection.host_api.listen(on_ask)


async def serve(request: Mapping[str, Any], actions: NotebookActions) -> dict[str, Any]:
    """Run a request and return its answer. Never raises: an error becomes the answer's "problem"."""
    try:
        return _bounded(await _run(request, actions))
    except SandboxError as error:
        return {"problem": without_paths(error)[:MAX_PROBLEM]}
    except Exception:
        log.exception("A request of a notebook to its sandbox failed")
        return {"problem": INTERNAL}


async def _run(request: Mapping[str, Any], actions: NotebookActions) -> dict[str, Any]:
    """Validate a request, then run it and return its answer. Raises ConfigurationError if the request is invalid."""
    match request:
        case {"op": "status"}:
            status = await actions.status()
            return {"status": status} | ({} if status["ephemeral"] else _listed(await actions.savepoints()))
        case {"op": "savepoints"}:
            return _listed(await actions.savepoints())
        case {"op": "savepoint", "name": name}:
            saved = await actions.savepoint(_valid_name(name))
            return {"size": saved.size, "seconds": saved.seconds}
        case {"op": "rewind", "name": name}:
            return {"kept": await actions.rewind(_valid_name(name), _cell(request))}
        case {"op": "keep-awake", "name": name, "seconds": seconds}:
            return {"awake": await actions.keep_awake(_valid_name(name), _valid_seconds(seconds))}
        case {"op": "reset-home"}:
            await actions.reset_home()
            return {}
    raise ConfigurationError(
        "op", f"{str(request.get('op'))!r:.100} is not an operation on a sandbox.", "`%sandbox` lists the operations."
    )


def _listed(savepoints: Mapping[str, Checkpoint]) -> dict[str, Any]:
    found = [{"name": name, "created": one.created, "size": one.size} for name, one in savepoints.items()]
    return {"savepoints": sorted(found, key=itemgetter("created"))}


def _bounded(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer with the latest savepoints that fit into MAX_ANSWER; "more" counts those left out."""
    savepoints = kept = answer.get("savepoints", [])
    while len(json.dumps(answer)) > MAX_ANSWER and kept:
        kept = kept[len(kept) // 8 + 1 :]
        answer = {**answer, "savepoints": kept, "more": len(savepoints) - len(kept)}
    return answer


def _valid_name(name: Any) -> str:
    """Return the name of a savepoint or of a reason to keep the kernel awake. Raises ConfigurationError."""
    if not isinstance(name, str) or not SANDBOX_ID.fullmatch(name):
        raise ConfigurationError(
            "name",
            f"{name!r:.200} is not a valid name.",
            "A name has 1 to 128 letters, digits, hyphens and underscores, and begins with a letter or a digit.",
        )
    return name


def _valid_seconds(value: Any) -> float | None:
    """Return how long to keep a kernel awake; None means without limit. Raises ConfigurationError."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_AWAKE):
        return value
    raise ConfigurationError(
        "seconds",
        f"A kernel cannot be kept awake for {value!r:.100} seconds.",
        f"Use a number from 0 to {MAX_AWAKE}, or no limit.",
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
