"""Track whether a kernel is busy: its unfinished requests, and how long it must be kept awake.

The idle timer, the culler, the REST API and the metrics all use ``KernelActivity``. It tracks requests by message id:
the relay reports requests and replies on the shell channel, ``ActivityWatch`` reports the statuses that the kernel
publishes on iopub. The status of a request on the control channel changes nothing.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from jupyter_client.session import Session

from ..errors import SandboxError
from .known_answers import OBSERVING

STATUS = b'"status"'
LARGEST_STATUS = 1 << 16
"""Maximum bytes of a message that is parsed as a status: a guest could block the server with larger ones."""
EXECUTE = "execute_request"
CONTROL_TYPES = frozenset(
    f"{name}_request"
    for name in ("shutdown", "interrupt", "debug", "usage", "create_subshell", "delete_subshell", "list_subshell")
)
MAX_REQUESTS = 4096
MAX_ON_CONTROL = 256
"""Maximum number of requests on the control channel whose ids are remembered."""
MAX_SAVED = 64
"""Maximum number of requests that are recorded with a checkpoint."""
MAX_ID = 200
MAX_HOLDS = 100
USER_HOLD = "notebook"
"""Name of the hold (a reason to keep awake) that ``%sandbox keep-awake``, the command line and the REST API set."""
OLD_USER_HOLD = "api"
"""Name of USER_HOLD in checkpoints of older versions."""


@dataclass(frozen=True)
class Request:
    """An unfinished request. ``inherited`` is True if it was recorded with the checkpoint that the kernel came from."""

    number: int
    msg_type: str
    subshell: str = ""
    since: float = 0.0
    inherited: bool = False


class KernelActivity:
    """The unfinished requests of one kernel, and the reasons to keep it awake. Changed in the I/O thread only."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._on_control: deque[str] = deque(maxlen=MAX_ON_CONTROL)
        self._holds: dict[str, float] = {}
        self._last = 0
        self.executions: set[object] = set()
        """Commands that currently run in the sandbox beside the kernel. Changed in Jupyter Server's loop."""

    # -- requests ----------------------------------------------------------------------------------------------------

    def requested(self, header: Mapping[str, Any]) -> None:
        """Record a request that a client sent on the shell channel; the kernel is busy from now on.

        Messages without a reply, such as those of widgets, count once the kernel publishes a busy status for them.
        """
        if str(header.get("msg_type", "")).endswith("_request"):
            self._add(header)

    def requested_on_control(self, header: Mapping[str, Any]) -> None:
        """Record a request that a client sent on the control channel: its statuses will change nothing."""
        self._on_control.append(str(header.get("msg_id", ""))[:MAX_ID])

    def replied(self, parent: Mapping[str, Any]) -> None:
        """Record the reply to a request on the shell channel."""
        self._end(parent)

    def published(self, state: str, parent: Mapping[str, Any]) -> None:
        """Record a status that the kernel published for the request ``parent``."""
        if state == "idle":
            self._end(parent)
        elif state == "busy" and not self._is_on_control(parent):
            self._add(parent)

    def reset(self, saved: Mapping[str, Any] | None = None) -> None:
        """Forget all requests and holds. Then load ``saved``, the ``record`` from a restored kernel's checkpoint."""
        self._requests.clear()
        self._holds.clear()
        if not saved:
            return
        pending = saved.get("pending")
        if pending is None and saved.get("busy"):  # a checkpoint of an older version, which lists no requests
            pending = [["unknown", EXECUTE, ""]]
        for msg_id, msg_type, subshell in _valid_requests(pending):
            self._last += 1
            self._requests[msg_id] = Request(self._last, msg_type, subshell, time.time(), inherited=True)
        holds = saved.get("keep_awake")
        for name, until in list(holds.items())[:MAX_HOLDS] if isinstance(holds, Mapping) else ():
            if isinstance(name, str) and (until is None or isinstance(until, int | float)):
                name, end = _hold_name(name), math.inf if until is None else float(until)
                self._hold(name, max(end, self._holds.get(name, 0.0)))

    def record(self) -> dict[str, Any]:
        """Return the state to store with a checkpoint, for the server that restores it."""
        holds = {name: None if until == math.inf else until for name, until in self._active_holds().items()}
        pending = [[name, one.msg_type, one.subshell] for name, one in list(self._requests.items())[:MAX_SAVED]]
        return {"busy": bool(self._requests), "pending": pending, "keep_awake": holds}

    def end_inherited(self) -> None:
        """Remove the inherited requests, except those of subshells: the kernel has answered a later request."""
        for name, one in list(self._requests.items()):
            if one.inherited and not one.subshell:
                del self._requests[name]

    def _add(self, header: Mapping[str, Any]) -> None:
        msg_id, msg_type, subshell = (header.get(name) for name in ("msg_id", "msg_type", "subshell_id"))
        if not isinstance(msg_id, str) or not isinstance(msg_type, str) or not msg_id:
            return
        if msg_id[:MAX_ID] in self._requests or len(self._requests) >= MAX_REQUESTS:
            return
        self._last += 1
        subshell = subshell[:MAX_ID] if isinstance(subshell, str) else ""
        self._requests[msg_id[:MAX_ID]] = Request(self._last, msg_type[:MAX_ID], subshell, time.time())

    def _is_on_control(self, parent: Mapping[str, Any]) -> bool:
        """Return True for a request on the control channel; on an encrypted connection, only its type is known."""
        return parent.get("msg_type") in CONTROL_TYPES or str(parent.get("msg_id", ""))[:MAX_ID] in self._on_control

    def _end(self, parent: Mapping[str, Any]) -> None:
        """Remove a request that has ended, and earlier requests of the same subshell, except cells.

        A kernel replies in order, so the replies to earlier requests were lost. Cells stay, because it is better to
        count an ended cell as running than to hibernate a running one.
        """
        ended = self._requests.pop(str(parent.get("msg_id", ""))[:MAX_ID], None)
        if ended is None:
            return
        for name, one in list(self._requests.items()):
            if one.number < ended.number and one.msg_type != EXECUTE and one.subshell == ended.subshell:
                del self._requests[name]

    # -- keeping awake -----------------------------------------------------------------------------------------------

    def keep_awake(self, name: str, seconds: float | None) -> None:
        """Keep the kernel awake for ``seconds`` on behalf of ``name``: None for no limit, 0 to stop.

        USER_HOLD is the hold that users turn on and off; all other names belong to calls of ``keep_awake()`` in the
        notebook. Raises SandboxError if MAX_HOLDS names already keep the kernel awake.
        """
        name = _hold_name(name)
        self._holds = self._active_holds()
        self._holds.pop(name, None)
        if seconds != 0:
            self._hold(name, math.inf if seconds is None else time.time() + seconds)

    def _hold(self, name: str, until: float) -> None:
        if len(self._holds) >= MAX_HOLDS:
            raise SandboxError(f"A kernel can be kept awake for at most {MAX_HOLDS} reasons at once.")
        self._holds[name] = until

    @property
    def kept_awake(self) -> bool:
        """True while the kernel must be kept awake."""
        return bool(self._active_holds())

    def awake_for(self) -> str:
        """Return how long the kernel is kept awake, as a sentence without a full stop; empty if not."""
        holds = self._active_holds()
        if not holds:
            return ""
        until = max(holds.values())
        span = "" if until == math.inf else f" for another {_duration_text(until - time.time())}"
        if USER_HOLD in holds:
            return f"It is kept awake{span}"
        return "It is still kept awake by keep_awake() in the notebook" + (f",{span}" if span else "")

    def _active_holds(self) -> dict[str, float]:
        now = time.time()
        return {name: until for name, until in list(self._holds.items()) if until > now}

    # -- queries -----------------------------------------------------------------------------------------------------

    @property
    def executing(self) -> bool:
        """True while a request is unfinished."""
        return bool(self._requests)

    @property
    def busy(self) -> bool:
        """True while a request is unfinished, the kernel must be kept awake, or a command runs beside it."""
        return self.executing or self.kept_awake or bool(self.executions)

    @property
    def has_cell(self) -> bool:
        """True while a cell is unfinished."""
        return any(one.msg_type == EXECUTE for one in list(self._requests.values()))

    def reasons(self, brief: bool = True) -> list[str]:
        """Return the reasons why the kernel is not idle, as sentences without a full stop.

        Without ``brief``, leave out requests other than cells, which usually end at once.
        """
        now, requests = time.time(), list(self._requests.values())
        cells = [one for one in requests if one.msg_type == EXECUTE]
        others = [one for one in requests if one.msg_type != EXECUTE and brief]
        found = []
        if cells:
            waiting = f", with {len(cells) - 1} more waiting" if len(cells) > 1 else ""
            found.append(f"A cell has been running for {_duration_text(now - cells[0].since)}{waiting}")
        if others:
            found.append(f"The kernel has worked on {others[0].msg_type!r} for {_duration_text(now - others[0].since)}")
        if awake := self.awake_for():
            found.append(awake)
        if commands := len(self.executions):
            found.append(f"{commands} commands run beside it" if commands > 1 else "A command runs beside it")
        return found


def _hold_name(name: str) -> str:
    """Return the name under which a hold is stored."""
    return USER_HOLD if name == OLD_USER_HOLD else name[:MAX_ID]


def _valid_requests(pending: Any) -> Sequence[tuple[str, str, str]]:
    """Return the id, type and subshell of each valid request that is recorded in ``pending``."""
    if not isinstance(pending, list):
        return []
    return [
        (one[0][:MAX_ID], one[1][:MAX_ID], one[2][:MAX_ID])
        for one in pending[:MAX_SAVED]
        if isinstance(one, list | tuple) and len(one) == 3 and all(isinstance(word, str) for word in one)
    ]


def _duration_text(seconds: float) -> str:
    """Return a duration as text, in the largest unit that gives at least 2."""
    whole = max(0, round(seconds))
    for length, unit in ((3600, "hours"), (60, "minutes")):
        if whole >= 2 * length:
            return f"{whole // length} {unit}"
    return f"{whole} seconds" if whole != 1 else "1 second"


class ActivityWatch:
    """A listener on a kernel's iopub channel. Owned by the provisioner; I/O thread only.

    ``activity`` gets each signed status. ``on_news`` is called for each message that counts as activity: all except the
    signed statuses of OBSERVING requests. ``largest`` must be at least the relay's limit for messages, because a frame
    of more bytes ends the connection for good.
    """

    def __init__(self, activity: KernelActivity, on_news: Callable[[], None], largest: int) -> None:
        self._activity = activity
        self._on_news = on_news
        self._largest = largest
        self._context = _join_context(self)
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    def listen(self, url: str, session: Session, curve: tuple[bytes, bytes] | None) -> None:
        """Start to receive from ``url``; ``curve`` is the public and the secret key of an encrypted connection."""
        iopub = self._open(zmq.SUB, curve)
        iopub.maxmsgsize = self._largest
        iopub.subscribe(b"")
        iopub.connect(url)
        self._tasks.append(asyncio.create_task(self._receive(iopub, session)))

    def probe(self, url: str, session: Session, curve: tuple[bytes, bytes] | None) -> None:
        """Send a request on the shell channel; its reply proves that the inherited requests have ended."""
        shell = self._open(zmq.DEALER, curve)
        shell.connect(url)
        self._tasks.append(asyncio.create_task(self._probe(shell, session)))

    def close(self) -> None:
        """Cancel the tasks and close the sockets."""
        for task in self._tasks:
            task.cancel()
        for socket in self._sockets:
            socket.close(linger=0)
        self._tasks.clear()
        self._sockets.clear()
        _leave_context(self)

    def _open(self, kind: int, curve: tuple[bytes, bytes] | None) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.linger = 0
        if curve:
            socket.curve_publickey, socket.curve_secretkey = curve
            socket.curve_serverkey = curve[0]
        return socket

    async def _receive(self, iopub: zmq.asyncio.Socket, session: Session) -> None:
        while True:
            frames = await iopub.recv_multipart()
            short = sum(map(len, frames)) <= LARGEST_STATUS
            if short and any(STATUS in frame for frame in frames[:4]) and self._status(session, frames):
                continue
            self._on_news()

    def _status(self, session: Session, frames: list[bytes]) -> bool:
        """Report a status if it is signed; return True if its request only observes the kernel."""
        try:
            message: dict[str, Any] = session.deserialize(session.feed_identities(frames)[1])
            state, parent = message["content"]["execution_state"], message["parent_header"]
            if not isinstance(state, str) or not isinstance(parent, dict):
                return False
        except (ValueError, TypeError, LookupError, RecursionError):
            return False
        self._activity.published(state, parent)
        return parent.get("msg_type") in OBSERVING

    async def _probe(self, shell: zmq.asyncio.Socket, session: Session) -> None:
        request = session.msg("kernel_info_request")
        await shell.send_multipart(session.serialize(request))
        while True:
            try:
                reply = session.deserialize(session.feed_identities(await shell.recv_multipart())[1])
                if reply["parent_header"]["msg_id"] == request["msg_id"]:
                    self._activity.end_inherited()
                    self._sockets.remove(shell)
                    shell.close()
                    return
            except (ValueError, TypeError, LookupError, RecursionError):
                continue


_watching: dict[int, tuple[zmq.asyncio.Context, set[ActivityWatch]]] = {}
"""The context and the watches that use it, by process id: a forked process cannot use its parent's context."""


def _join_context(watch: ActivityWatch) -> zmq.asyncio.Context:
    """Return the context that all watches of this process share, because each context has two threads."""
    if os.getpid() not in _watching:
        _watching[os.getpid()] = zmq.asyncio.Context(), set()
    context, users = _watching[os.getpid()]
    users.add(watch)
    return context


def _leave_context(watch: ActivityWatch) -> None:
    """Remove a watch from the shared context. End the context if this was its last watch."""
    context, users = _watching.get(os.getpid(), (None, set()))
    users.discard(watch)
    if context and not users:
        del _watching[os.getpid()]
        context.term()
