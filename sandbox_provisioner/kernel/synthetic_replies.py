"""Make messages on behalf of a kernel: replies to requests that it cannot answer, and notices in a cell's output.

It is hibernated and was only observed, it could not be woken, or its own cell rewound it.

The requests are bytes that were held for the kernel; the replies are sent on the same connections. Requests on
encrypted connections cannot be answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jupyter_client.session import Session

from . import zmtp
from .known_answers import KnownAnswers

ENAME = "KernelNotWoken"
CONTENT = 4
"""Index of the content among the frames after the identities."""
NOT_REWOUND = "KernelNotRewound"
HEADER = frozenset({"msg_id", "msg_type", "session", "username", "date", "version"})


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
        public += _published(session, "status", {"execution_state": "busy"}, request)
        if kind == "execute_request":
            public += _published(session, "error", error, request)
        public += _published(session, "status", {"execution_state": "idle"}, request)
    return Replies(private, public)


def observer_replies(held: bytes, session: Session, known: KnownAnswers) -> Replies | None:
    """Return the replies to the requests in ``held`` that only observe the kernel; None if one is not known.

    Raises ValueError unless ``held`` has whole, signed messages.
    """
    private, public = b"", b""
    for message in zmtp.messages(held):
        request = _header(message, session)
        content = known.answer(request["msg_type"], session.unpack(session.feed_identities(message)[1][CONTENT]))
        if content is None:
            return None
        reply = session.msg(request["msg_type"].replace("_request", "_reply"), dict(content), parent=request)
        private += zmtp.encode(session.serialize(reply))
        for state in ("busy", "idle"):
            public += _published(session, "status", {"execution_state": state}, request)
    return Replies(private, public)


def notice(text: str, session: Session, request: Mapping[str, Any]) -> bytes:
    """Return a message for all clients on iopub that adds ``text`` to the output of the cell with this header."""
    header = {name: value for name, value in request.items() if name in HEADER and isinstance(value, str)}
    return _published(session, "stream", {"name": "stderr", "text": f"{text}\n"}, header)


class Cell(NamedTuple):
    """A running cell: the header of its request, and its execution count."""

    header: Mapping[str, str]
    number: int


def end_cell(cell: Cell, session: Session, text: str, problem: str = "") -> Replies:
    """Return the messages that end a cell that rewound its own kernel: the output ``text``, or the error ``problem``.

    The cell's connection is unknown, so the private part is sent to every client on shell; its parent header identifies
    the request.
    """
    end: dict[str, Any] = {"status": "ok", "payload": [], "user_expressions": {}}
    output = _published(session, "stream", {"name": "stdout", "text": f"{text}\n"}, cell.header)
    if problem:
        error = {"ename": NOT_REWOUND, "evalue": problem, "traceback": [f"{NOT_REWOUND}: {problem}"]}
        end, output = {"status": "error", **error}, _published(session, "error", error, cell.header)
    reply = session.msg("execute_reply", {**end, "execution_count": cell.number}, parent=dict(cell.header))
    idle = _published(session, "status", {"execution_state": "idle"}, cell.header)
    return Replies(zmtp.encode(session.serialize(reply)), output + idle)


def _published(session: Session, kind: str, content: Mapping[str, Any], request: Mapping[str, Any]) -> bytes:
    """Encode a message on iopub that belongs to ``request``."""
    parts = session.serialize(session.msg(kind, dict(content), parent=dict(request)))
    return zmtp.encode([f"kernel.{kind}".encode(), *parts])


def _header(message: list[bytes], session: Session) -> dict[str, Any]:
    """Return the header of a signed message. Raises ValueError if the message has no valid header."""
    try:
        header: dict[str, Any] = session.deserialize(session.feed_identities(message)[1])["header"]
        if not all(isinstance(header[name], str) for name in ("msg_id", "msg_type")):
            raise ValueError("not a header")
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError("not a Jupyter message") from error
    return header
