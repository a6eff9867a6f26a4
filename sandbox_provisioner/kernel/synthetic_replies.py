"""Make replies on behalf of a kernel that cannot send them: it could not be woken, or its own cell rewound it.

Requests are bytes that were held for the kernel on established connections; the answers go out on the same ones.
Requests on encrypted connections cannot be answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jupyter_client.session import Session

from . import zmtp

ENAME = "KernelNotWoken"
NOT_REWOUND = "KernelNotRewound"


class Replies(NamedTuple):
    """Encoded messages for the client that sent the request, and for all clients on iopub."""

    private: bytes
    public: bytes


def error_replies(held: bytes, session: Session, reason: str) -> Replies:
    """Return error replies to all requests in ``held``. Raises ValueError unless they are whole, signed messages."""
    private, public = b"", b""
    for message in zmtp.messages(held):
        request = _header(message, session)
        error = {"ename": ENAME, "evalue": reason, "traceback": [f"{ENAME}: {reason}"]}
        kind = request["msg_type"]
        reply = session.msg(kind.replace("_request", "_reply"), {"status": "error", **error}, parent=request)
        private += zmtp.encode(session.serialize(reply))
        news: list[tuple[str, Any]] = [("status", {"execution_state": state}) for state in ("busy", "idle")]
        if kind == "execute_request":
            news.insert(1, ("error", error))
        for name, content in news:
            parts = session.serialize(session.msg(name, content, parent=request))
            public += zmtp.encode([f"kernel.{name}".encode(), *parts])
    return Replies(private, public)


class Cell(NamedTuple):
    """A running cell: the header of its request, and its execution count."""

    header: Mapping[str, str]
    number: int


def end_cell(cell: Cell, session: Session, text: str, problem: str = "") -> Replies:
    """Return the messages that end a cell that rewound its own kernel: the output ``text``, or the error ``problem``.

    The cell's connection is unknown, so the private part is for every client on shell; its parent header names the
    request.
    """
    end: dict[str, Any] = {"status": "ok", "payload": [], "user_expressions": {}}
    output: tuple[str, Any] = ("stream", {"name": "stdout", "text": f"{text}\n"})
    if problem:
        error = {"ename": NOT_REWOUND, "evalue": problem, "traceback": [f"{NOT_REWOUND}: {problem}"]}
        end, output = {"status": "error", **error}, ("error", error)
    reply = session.msg("execute_reply", {**end, "execution_count": cell.number}, parent=dict(cell.header))
    public = b""
    for kind, content in (output, ("status", {"execution_state": "idle"})):
        parts = session.serialize(session.msg(kind, content, parent=dict(cell.header)))
        public += zmtp.encode([f"kernel.{kind}".encode(), *parts])
    return Replies(zmtp.encode(session.serialize(reply)), public)


def _header(message: list[bytes], session: Session) -> dict[str, Any]:
    try:
        header: dict[str, Any] = session.deserialize(session.feed_identities(message)[1])["header"]
        if not all(isinstance(header[name], str) for name in ("msg_id", "msg_type")):
            raise ValueError("not a header")
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError("not a message of Jupyter's") from error
    return header
