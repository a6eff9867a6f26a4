"""Test MessageReader: it reports only the headers of signed messages, in whatever pieces the bytes arrive."""

from __future__ import annotations

import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from sandbox_provisioner.kernel.messages import MAX_CONTENT, MAX_HEADER, MessageReader
from sandbox_provisioner.kernel.zmtp import GREETING_SIZE, Position, encode

KEY = b"the kernel's key"
BEGINNING = bytes(GREETING_SIZE) + b"\x04\x06\x05READY"


class Seen:
    """A MessageReader, and the messages that it reported."""

    def __init__(self, key: bytes = KEY, scheme: str = "hmac-sha256") -> None:
        self.headers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        reader = MessageReader(key, scheme, lambda header, parent: self.headers.append((dict(header), dict(parent))))
        self.position = Position(sink=reader)
        self.position.follow(BEGINNING)

    @property
    def ids(self) -> list[str]:
        return [header["msg_id"] for header, _ in self.headers]


def wire(session: Session, kind: str = "execute_request", buffers: int = 0, **content: Any) -> tuple[str, bytes]:
    message = session.msg(kind, content)
    return message["msg_id"], encode([*session.serialize(message), *[b"buffer" * 1000] * buffers])


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(0, 3))
def test_signed_messages_are_read_in_any_pieces(cuts: list[int], buffers: int) -> None:
    session, seen = Session(key=KEY), Seen()
    messages = [wire(session, code="x" * 1000, buffers=buffers) for _ in range(3)]
    data = b"".join(encoded for _, encoded in messages)
    while data:
        for cut in cuts:
            seen.position.follow(data[:cut])
            data = data[cut:]
    assert seen.ids == [msg_id for msg_id, _ in messages]


def test_parent_header_is_read() -> None:
    session, seen = Session(key=KEY), Seen()
    reply = session.msg("execute_reply", {}, parent={"msg_id": "cell", "msg_type": "execute_request"})
    seen.position.follow(encode(session.serialize(reply)))
    assert [parent["msg_id"] for _, parent in seen.headers] == ["cell"]


def test_identities_before_the_delimiter_are_skipped() -> None:
    session, seen = Session(key=KEY), Seen()
    message = session.msg("execute_request", {})
    seen.position.follow(encode([b"router id", b"<IDS|MSG", *session.serialize(message)]))
    assert seen.ids == [message["msg_id"]]


@pytest.mark.parametrize("key", [b"another key", b""])
def test_messages_with_another_key_are_ignored(key: bytes) -> None:
    seen = Seen()
    seen.position.follow(wire(Session(key=key))[1])
    assert seen.headers == []


def test_without_a_key_all_messages_count() -> None:
    seen = Seen(key=b"")
    seen.position.follow(wire(Session(key=b""))[1])
    assert len(seen.headers) == 1


def test_other_signature_schemes_are_supported() -> None:
    seen = Seen(scheme="hmac-sha512")
    seen.position.follow(wire(Session(key=KEY, signature_scheme="hmac-sha512"))[1])
    assert len(seen.headers) == 1


def signed(*parts: bytes) -> bytes:
    checksum = hmac.new(KEY, b"".join(parts[:4]), "sha256").hexdigest().encode()
    return encode([b"<IDS|MSG>", checksum, *parts])


BAD = {
    "too few parts": signed(b"{}", b"{}", b"{}"),
    "no object": signed(b"[]", b"{}", b"{}", b"{}"),
    "no JSON": signed(b"{", b"{}", b"{}", b"{}"),
    "nested": signed(b"[" * 60_000, b"{}", b"{}", b"{}"),
    "large header": signed(json.dumps({"msg_id": "x" * MAX_HEADER}).encode(), b"{}", b"{}", b"{}"),
    "many identities": encode([b"x"] * 50),
    "nothing": encode([b""]),
    "long signature": encode([b"<IDS|MSG>", b"x" * 10_000, b"{}", b"{}", b"{}", b"{}"]),
}


@pytest.mark.parametrize("bad", BAD)
def test_invalid_messages_are_skipped(bad: str) -> None:
    seen, (msg_id, good) = Seen(), wire(Session(key=KEY))
    seen.position.follow(BAD[bad] + good)
    assert seen.ids == [msg_id]


def test_large_message_is_not_buffered() -> None:
    session, seen = Session(key=KEY), Seen()
    msg_id, data = wire(session, code="x" * 5_000_000)
    reader: Any = seen.position._sink
    for place in range(0, len(data), 10_000):
        seen.position.follow(data[place : place + 10_000])
        assert len(reader._kept) <= MAX_HEADER + 1
    assert seen.ids == [msg_id]


@given(st.binary(max_size=500))
def test_any_bytes_are_read_without_error(data: bytes) -> None:
    Seen().position.follow(data)


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_content_of_one_kind_of_message_is_reported_if_it_is_signed(cut: int) -> None:
    session, contents = Session(key=KEY), []
    reader = MessageReader(
        KEY,
        "hmac-sha256",
        lambda *_: None,
        ("comm_info_reply",),
        lambda header, parent, content: contents.append(content),
    )
    position = Position(sink=reader)
    position.follow(BEGINNING)
    data = wire(session, "execute_reply", code="comm_info_reply")[1]
    data += wire(Session(key=b"another"), "comm_info_reply", comms={"forged": {}})[1]
    data += wire(session, "comm_info_reply", buffers=1, comms={"one": {}})[1]
    data += wire(session, "comm_info_reply", comms={"x" * MAX_CONTENT: {}})[1]
    data += wire(session, "comm_info_reply", comms={"two": {}})[1]
    for start in range(0, len(data), cut):
        position.follow(data[start : start + cut])
    found = [content and json.loads(content) for content in contents]
    assert found == [{"comms": {"one": {}}}, None, {"comms": {"two": {}}}]
