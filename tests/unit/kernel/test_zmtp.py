"""Where in its protocol a connection is: known after any bytes, however they are cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_provisioner.kernel.zmtp import (
    GREETING,
    GREETING_SIZE,
    MessageTooLargeError,
    Position,
    command,
    encode,
    ready,
)

BEGINNING = bytes(GREETING_SIZE) + b"\x04\x06\x05READY"
"""Of an ordinary connection."""
MESSAGES = st.lists(st.lists(st.binary(max_size=400), min_size=1, max_size=4), max_size=4)


@given(MESSAGES, st.lists(st.integers(1, 300), max_size=20))
def test_a_message_can_begin_after_whole_messages_however_they_came(
    messages: list[list[bytes]], cuts: list[int]
) -> None:
    data = BEGINNING + b"".join(map(encode, messages))
    position = Position()
    for cut in [*cuts, len(data)]:
        position.follow(data[:cut])
        data = data[cut:]
    assert position.between_messages


@given(MESSAGES, st.lists(st.binary(max_size=400), min_size=1, max_size=4), st.data())
def test_no_message_can_begin_within_one(messages: list[list[bytes]], last: list[bytes], data: st.DataObject) -> None:
    position = Position()
    position.follow(BEGINNING + b"".join(map(encode, messages)))
    encoded = encode(last)
    position.follow(encoded[: data.draw(st.integers(1, len(encoded) - 1))])
    assert not position.between_messages


@given(st.binary(max_size=300))
def test_any_bytes_can_be_followed(data: bytes) -> None:
    Position().follow(data)


def test_nothing_can_begin_before_the_handshake_is_over() -> None:
    position = Position()
    assert not position.between_messages
    for piece in (BEGINNING[: GREETING_SIZE - 1], BEGINNING[GREETING_SIZE - 1 : GREETING_SIZE]):
        position.follow(piece)
        assert not position.between_messages


@given(MESSAGES, st.integers(1, 300))
def test_messages_are_counted_and_what_a_connection_begins_with_is_none(
    messages: list[list[bytes]], piece: int
) -> None:
    data = BEGINNING + b"".join(map(encode, messages))
    position = Position()
    pieces = [data[place : place + piece] for place in range(0, len(data), piece)]
    assert sum(map(position.follow, pieces)) == len(messages)


def test_on_an_encrypted_connection_whatever_follows_the_handshake_is_a_message() -> None:
    position = Position()
    assert position.follow(bytes(GREETING_SIZE) + b"\x04\x08\x07WELCOME" + b"\x04\x06\x05READY") == 0
    assert position.follow(b"\x04\x08\x07MESSAGE") == 1


def test_a_command_between_the_frames_of_a_message_does_not_hide_their_size() -> None:
    position = Position(limit=10_000)
    position.follow(GREETING + command(ready("iopub")))
    with pytest.raises(MessageTooLargeError):
        for _ in range(11):
            position.follow(b"\x01\x01x" + command(b"\x04PING\x00\x00"))


@pytest.mark.parametrize("version", [0, 1, 2])
def test_an_old_version_of_the_protocol_is_refused_where_sizes_are_limited(version: int) -> None:
    with pytest.raises(MessageTooLargeError):
        Position(limit=10_000).follow(GREETING[:10] + bytes([version, 1, 0, 0]))
    for unversioned in (b"\x01" + GREETING[1:], GREETING[:9] + b"\x00" + GREETING[10:]):
        with pytest.raises(MessageTooLargeError):
            Position(limit=10_000).follow(unversioned)
