"""Test that frames are encoded and decoded, even if the bytes arrive in arbitrary pieces."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sandbox_provisioner.guest.frames import (
    AMOUNT,
    CONTROL,
    CREDIT,
    DATA,
    HEADER,
    MAX_PAYLOAD,
    OPEN,
    Decoder,
    FrameError,
    encode,
    encode_credit,
)

KINDS = range(OPEN, CONTROL + 1)
SEEDS = range(50)
Frame = tuple[int, int, bytes]


def decode(*pieces: bytes) -> list[Frame]:
    decoder = Decoder()
    return [frame for piece in pieces for frame in decoder.feed(piece)]


def some_frames(dice: random.Random) -> list[Frame]:
    return [
        (
            dice.choice(KINDS),
            dice.choice([0, 1, 2, dice.getrandbits(32), 2**32 - 1]),
            dice.randbytes(dice.choice([0, 1, 300])),
        )
        for _ in range(dice.randrange(20))
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_are_decoded_from_arbitrary_pieces(seed: int) -> None:
    dice = random.Random(seed)
    frames = some_frames(dice)
    stream = b"".join(encode(*frame) for frame in frames)
    cuts = sorted(dice.randint(0, len(stream)) for _ in range(dice.randrange(40)))
    assert decode(*(stream[begin:end] for begin, end in pairwise([0, *cuts, len(stream)]))) == frames
    assert decode(*(stream[i : i + 1] for i in range(len(stream)))) == frames


@pytest.mark.parametrize("seed", SEEDS)
def test_random_bytes_are_decoded_or_refused(seed: int) -> None:
    dice = random.Random(seed)
    noise = b"".join(HEADER.pack(dice.randrange(8), dice.randrange(4), dice.randrange(30)) for _ in range(20))
    try:
        for kind, _, payload in Decoder().feed(noise + dice.randbytes(2000)):
            assert kind in KINDS
            assert len(payload) <= MAX_PAYLOAD
    except FrameError:
        pass


def test_credit_amount() -> None:
    assert decode(encode_credit(7, 12345)) == [(CREDIT, 7, AMOUNT.pack(12345))]


def test_largest_payload() -> None:
    payload = bytes(MAX_PAYLOAD)
    assert decode(encode(DATA, 1, payload)) == [(DATA, 1, payload)]


@pytest.mark.parametrize("length", [MAX_PAYLOAD + 1, 2**31, 2**32 - 1])
def test_too_large_length_is_refused_before_payload_arrives(length: int) -> None:
    with pytest.raises(FrameError, match=str(length)):
        decode(HEADER.pack(DATA, 1, length))


@pytest.mark.parametrize("kind", [0, CONTROL + 1, 255])
def test_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(FrameError, match=f"kind {kind} "):
        decode(HEADER.pack(kind, 1, 0))


def test_frames_before_an_invalid_one_are_decoded() -> None:
    decoder = Decoder()
    seen = []
    with pytest.raises(FrameError):
        for frame in decoder.feed(encode(DATA, 1, b"good") + HEADER.pack(0, 0, 0)):
            seen.append(frame)  # noqa: PERF402
    assert seen == [(DATA, 1, b"good")]
