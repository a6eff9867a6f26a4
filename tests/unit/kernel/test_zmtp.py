"""Test that the protocol state of a connection is known after any bytes, in any pieces."""

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
"""All bytes of an ordinary connection."""
MESSAGES = st.lists(st.lists(st.binary(max_size=400), min_size=1, max_size=4), max_size=4)


@given(MESSAGES, st.lists(st.integers(1, 300), max_size=20))
def test_message_can_begin_after_whole_messages_in_any_pieces(messages: list[list[bytes]], cuts: list[int]) -> None:
    data = BEGINNING + b"".join(map(encode, messages))
    position = Position()
    for cut in [*cuts, len(data)]:
        position.follow(data[:cut])
        data = data[cut:]
    assert position.between_messages


@given(MESSAGES, st.lists(st.binary(max_size=400), min_size=1, max_size=4), st.data())
def test_message_cannot_begin_within_another(
    messages: list[list[bytes]], last: list[bytes], data: st.DataObject
) -> None:
    position = Position()
    position.follow(BEGINNING + b"".join(map(encode, messages)))
    encoded = encode(last)
    position.follow(encoded[: data.draw(st.integers(1, len(encoded) - 1))])
    assert not position.between_messages


@given(st.binary(max_size=300))
def test_any_bytes_are_followed_without_error(data: bytes) -> None:
    Position().follow(data)


def test_message_cannot_begin_before_the_end_of_the_handshake() -> None:
    position = Position()
    assert not position.between_messages
    for piece in (BEGINNING[: GREETING_SIZE - 1], BEGINNING[GREETING_SIZE - 1 : GREETING_SIZE]):
        position.follow(piece)
        assert not position.between_messages


@given(MESSAGES, st.integers(1, 300))
def test_only_messages_are_counted_and_not_the_handshake(messages: list[list[bytes]], piece: int) -> None:
    data = BEGINNING + b"".join(map(encode, messages))
    position = Position()
    pieces = [data[place : place + piece] for place in range(0, len(data), piece)]
    assert sum(map(position.follow, pieces)) == len(messages)


def test_commands_after_an_encrypted_handshake_count_as_messages() -> None:
    position = Position()
    assert position.follow(bytes(GREETING_SIZE) + b"\x04\x08\x07WELCOME" + b"\x04\x06\x05READY") == 0
    assert position.follow(b"\x04\x08\x07MESSAGE") == 1


def test_command_within_a_message_does_not_reset_its_size() -> None:
    position = Position(limit=10_000)
    position.follow(GREETING + command(ready("iopub")))
    with pytest.raises(MessageTooLargeError):
        for _ in range(11):
            position.follow(b"\x01\x01x" + command(b"\x04PING\x00\x00"))


@pytest.mark.parametrize("version", [0, 1, 2])
def test_old_protocol_version_is_refused_if_sizes_are_limited(version: int) -> None:
    with pytest.raises(MessageTooLargeError):
        Position(limit=10_000).follow(GREETING[:10] + bytes([version, 1, 0, 0]))
    for unversioned in (b"\x01" + GREETING[1:], GREETING[:9] + b"\x00" + GREETING[10:]):
        with pytest.raises(MessageTooLargeError):
            Position(limit=10_000).follow(unversioned)
