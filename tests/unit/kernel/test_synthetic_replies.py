"""Test the replies to requests when the hibernated kernel cannot be woken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from sandbox_provisioner.kernel.synthetic_replies import (
    ENAME,
    NOT_REWOUND,
    Cell,
    end_cell,
    error_replies,
)
from sandbox_provisioner.kernel.zmtp import encode, messages


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(key=b"secret")


def request(session: Session, kind: str, **content: Any) -> tuple[dict[str, Any], bytes]:
    message = session.msg(kind, content)
    return message["header"], encode(session.serialize(message))


def decoded(session: Session, data: bytes) -> list[dict[str, Any]]:
    reader = Session(key=session.key)
    return [reader.deserialize(reader.feed_identities(frames)[1]) for frames in messages(data)]


def test_cell_ends_with_the_error_on_shell_and_iopub(session: Session) -> None:
    header, held = request(session, "execute_request", code="x" * 1000)
    private, public = error_replies(held, session, "It is damaged.")
    (reply,) = decoded(session, private)
    assert (reply["msg_type"], reply["parent_header"]["msg_id"]) == ("execute_reply", header["msg_id"])
    assert (reply["content"]["status"], reply["content"]["ename"]) == ("error", ENAME)
    assert "It is damaged." in reply["content"]["evalue"]
    news = decoded(session, public)
    assert [message["msg_type"] for message in news] == ["status", "error", "status"]
    assert {message["parent_header"]["msg_id"] for message in news} == {header["msg_id"]}
    assert [news[place]["content"]["execution_state"] for place in (0, 2)] == ["busy", "idle"]


def test_requests_are_answered_in_order_with_their_reply_types(session: Session) -> None:
    _, first = request(session, "kernel_info_request")
    _, second = request(session, "complete_request", code="zi")
    private, public = error_replies(first + second, session, "No.")
    assert [message["msg_type"] for message in decoded(session, private)] == ["kernel_info_reply", "complete_reply"]
    assert [message["msg_type"] for message in decoded(session, public)] == ["status"] * 4


def test_incomplete_or_unsigned_request_is_not_answered(session: Session) -> None:
    _, held = request(session, "execute_request", code="1")
    for strange in (held[:-1], held[1:], held + b"\x01", request(Session(key=b"other"), "execute_request")[1]):
        with pytest.raises(ValueError):
            error_replies(strange, session, "No.")


CELL = Cell({"msg_id": "a1", "msg_type": "execute_request", "session": "s"}, 7)


def test_cell_that_rewound_its_kernel_succeeds(session: Session) -> None:
    private, public = end_cell(CELL, session, "Rewound.")
    (reply,) = decoded(session, private)
    assert (reply["msg_type"], reply["parent_header"]["msg_id"]) == ("execute_reply", "a1")
    assert (reply["content"]["status"], reply["content"]["execution_count"]) == ("ok", 7)
    output, idle = decoded(session, public)
    assert output["content"] == {"name": "stdout", "text": "Rewound.\n"}
    assert idle["content"] == {"execution_state": "idle"}
    assert {message["parent_header"]["msg_id"] for message in (output, idle)} == {"a1"}


def test_cell_that_failed_to_rewind_its_kernel_shows_the_reason(session: Session) -> None:
    private, public = end_cell(CELL, session, "Rewound.", "It is damaged.")
    (reply,) = decoded(session, private)
    assert (reply["content"]["status"], reply["content"]["evalue"]) == ("error", "It is damaged.")
    output, idle = decoded(session, public)
    assert (output["msg_type"], output["content"]["ename"]) == ("error", NOT_REWOUND)
    assert idle["content"] == {"execution_state": "idle"}


@given(st.binary(max_size=300))
def test_any_bytes_raise_only_valueerror(data: bytes) -> None:
    try:
        error_replies(data, Session(key=b"secret"), "No.")
    except ValueError:
        pass


@given(st.lists(st.binary(max_size=600), min_size=1, max_size=6))
def test_encoded_frames_are_decoded_unchanged(frames: list[bytes]) -> None:
    assert list(messages(encode(frames))) == [frames]
