"""Apology: what clients hear when a kernel cannot be woken: each of their requests is answered with the reason.

The requests are bytes that were held for the kernel, on connections that are up; the answers go out on the same ones,
in the kernel's name. Encrypted connections cannot be answered for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jupyter_client.session import Session

from .zmtp import COMMAND, LONG, MORE

ENAME = "KernelNotWoken"


class Answers(NamedTuple):
    """Bytes for the client that asked, and for all that listen on iopub."""

    private: bytes
    public: bytes


def apologise(held: bytes, session: Session, reason: str) -> Answers:
    """The answers to all requests in ``held``; ValueError if that is not whole messages of our clients."""
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


def _header(message: list[bytes], session: Session) -> dict[str, Any]:
    try:
        header: dict[str, Any] = session.deserialize(session.feed_identities(message)[1])["header"]
        if not all(isinstance(header[name], str) for name in ("msg_id", "msg_type")):
            raise ValueError("not a header")
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError("not a message of Jupyter's") from error
    return header


def _messages(held: bytes) -> Iterator[list[bytes]]:
    """The multipart messages in a piece of a ZMTP connection."""
    message: list[bytes] = []
    while held:
        flags, head = held[0], 9 if held[0] & LONG else 2
        end = head + int.from_bytes(held[1:head], "big")
        if flags & ~(MORE | LONG | COMMAND) or len(held) < max(head, end):
            raise ValueError("not whole frames")
        if not flags & COMMAND:
            message.append(held[head:end])
            if not flags & MORE:
                yield message
                message = []
        held = held[end:]
    if message:
        raise ValueError("not a whole message")


def _encode(frames: Sequence[bytes]) -> bytes:
    encoded = b""
    for place, frame in enumerate(frames, 1):
        flags = (MORE if place < len(frames) else 0) | (LONG if len(frame) > 0xFF else 0)
        encoded += bytes([flags]) + len(frame).to_bytes(8 if flags & LONG else 1, "big") + frame
    return encoded
