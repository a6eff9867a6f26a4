"""Test the decoding of untrusted JSON into typed objects, with errors that name the wrong member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from sandbox_provisioner.persistence.decoding import DecodingError, decode


class Point(NamedTuple):
    x: int
    name: str


@dataclass(frozen=True)
class Part:
    size: int
    ratio: float
    points: tuple[Point, ...]
    label: str = "none"

    @property
    def problem(self) -> str:
        return "it is negative" if self.size < 0 else ""


@dataclass(frozen=True)
class Whole:
    id: UUID
    made: datetime
    parts: Mapping[str, Part]
    extra: Mapping[str, Any]
    spare: Part | None


PART = {"size": 1, "ratio": 2, "points": [[1, "a"]], "label": "x"}
WHOLE = {"id": str(UUID(int=1)), "made": "2026-01-02T03:04:05+00:00", "parts": {"p": PART}, "extra": {"a": [1]}}
WHOLE |= {"spare": None}


def test_nested_objects() -> None:
    part = Part(1, 2.0, (Point(1, "a"),), "x")
    made = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert decode(Whole, WHOLE | {"unknown": 1}) == Whole(UUID(int=1), made, {"p": part}, {"a": [1]}, None)


def test_member_that_was_added_later_has_its_default() -> None:
    older = {name: value for name, value in PART.items() if name != "label"}
    assert decode(Part, older, added={"label"}).label == "none"
    with pytest.raises(DecodingError, match=r"^its label is missing$"):
        decode(Part, older)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"id": "x"}, "its id is not valid: badly formed hexadecimal UUID string"),
        ({"id": 5}, "its id has the wrong type: '5'"),
        ({"made": "2026-01-02T03:04:05"}, "its made is not valid: 2026-01-02T03:04:05 has no time zone"),
        ({"parts": []}, "its parts has the wrong type: '[]'"),
        ({"parts": {"p": PART | {"size": True}}}, "its parts.p.size has the wrong type: 'True'"),
        ({"parts": {"a\nb": PART | {"size": "1"}}}, r"its parts.'a\nb'.size has the wrong type: '1'"),
        ({"parts": {"p": PART | {"points": [[1]]}}}, "its parts.p.points.'0' has the wrong length: '[1]'"),
        ({"spare": PART | {"size": -1}}, "its spare is refused: it is negative"),
    ],
)
def test_error_names_the_member(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(DecodingError) as refusal:
        decode(Whole, WHOLE | changes)
    assert str(refusal.value) == problem


def test_value_that_is_no_object() -> None:
    with pytest.raises(DecodingError, match=r"^it has the wrong type: '5'$"):
        decode(Whole, 5)
