"""Make replies on behalf of a kernel that cannot send them: it could not be woken, or its own cell rewound it.

Requests are bytes that were held for the kernel on established connections; the answers go out on the same ones.
Requests on encrypted connections cannot be answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jupyter_client.session import Session

from .zmtp import COMMAND, LONG, MORE

ENAME = "KernelNotWoken"
NOT_REWOUND = "KernelNotRewound"


class Answers(NamedTuple):
    """Encoded messages for the client that sent the request, and for all clients on iopub."""

    private: bytes
    public: bytes


def refuse_all(held: bytes, session: Session, reason: str) -> Answers:
    """Return error replies to all requests in ``held``. Raises ValueError unless they are whole, signed messages."""
    private, public = b"", b""
    for message in _messages(held):
        request = _header(message, session)
        error = {"ename": ENAME, "evalue": reason, "traceback": [f"{ENAME}: {reason}"]}
        kind = request["msg_type"]
        reply = session.msg(kind.replace("_request", "_reply"), {"status": "error", **error}, parent=request)
        private += _encode(session.serialize(reply))
        news: list[tuple[str, Any]] = [("status", {"execution_state": state}) for state in ("busy", "idle")]
        if kind == "execute_request":
            news.insert(1, ("error", error))
        for name, content in news:
            parts = session.serialize(session.msg(name, content, parent=request))
            public += _encode([f"kernel.{name}".encode(), *parts])
    return Answers(private, public)


class Cell(NamedTuple):
    """A running cell: the header of its request, and its execution count."""

    header: Mapping[str, str]
    number: int


def conclude(cell: Cell, session: Session, said: str, problem: str = "") -> Answers:
    """Return the messages that end a cell that rewound its own kernel: the output ``said``, or the error ``problem``.

    The cell's connection is unknown, so the private part is for every client on shell; its parent header names the
    request.
    """
    end: dict[str, Any] = {"status": "ok", "payload": [], "user_expressions": {}}
    output: tuple[str, Any] = ("stream", {"name": "stdout", "text": f"{said}\n"})
    if problem:
        error = {"ename": NOT_REWOUND, "evalue": problem, "traceback": [f"{NOT_REWOUND}: {problem}"]}
        end, output = {"status": "error", **error}, ("error", error)
    reply = session.msg("execute_reply", {**end, "execution_count": cell.number}, parent=dict(cell.header))
    public = b""
    for kind, content in (output, ("status", {"execution_state": "idle"})):
        parts = session.serialize(session.msg(kind, content, parent=dict(cell.header)))
        public += _encode([f"kernel.{kind}".encode(), *parts])
    return Answers(_encode(session.serialize(reply)), public)


def _header(message: list[bytes], session: Session) -> dict[str, Any]:
    try:
        header: dict[str, Any] = session.deserialize(session.feed_identities(message)[1])["header"]
        if not all(isinstance(header[name], str) for name in ("msg_id", "msg_type")):
            raise ValueError("not a header")
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError("not a message of Jupyter's") from error
    return header


def _messages(held: bytes) -> Iterator[list[bytes]]:
    """Yield the multipart messages in a piece of a ZMTP connection. Raises ValueError if one is incomplete."""
    message: list[bytes] = []
    begin = 0
    while begin < len(held):
        flags = held[begin]
        head = begin + (9 if flags & LONG else 2)
        end = head + int.from_bytes(held[begin + 1 : head], "big")
        if flags & ~(MORE | LONG | COMMAND) or len(held) < max(head, end):
            raise ValueError("not whole frames")
        if not flags & COMMAND:
            message.append(held[head:end])
            if not flags & MORE:
                yield message
                message = []
        begin = end
    if message:
        raise ValueError("not a whole message")


def _encode(frames: Sequence[bytes]) -> bytes:
    encoded = b""
    for place, frame in enumerate(frames, 1):
        flags = (MORE if place < len(frames) else 0) | (LONG if len(frame) > 0xFF else 0)
        encoded += bytes([flags]) + len(frame).to_bytes(8 if flags & LONG else 1, "big") + frame
    return encoded
