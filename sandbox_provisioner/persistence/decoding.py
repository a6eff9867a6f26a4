"""Decode JSON that others wrote into typed objects: the only place that checks the types of a document's members."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints
from uuid import UUID

T = TypeVar("T")
FAILURES = (TypeError, ValueError, LookupError, OverflowError, RecursionError)
"""The exceptions that ``decode`` and ``json.loads`` raise for invalid input."""


class DecodingError(ValueError):
    """A member of a document is missing or has a wrong value. The message names the member."""

    def __init__(self, problem: str, path: tuple[str, ...] = ()) -> None:
        name = ".".join(part if part.isidentifier() else repr(part[:100]) for part in path)
        super().__init__(f"its {name} {problem}" if path else f"it {problem}")
        self.problem = problem
        self.path = path


def decode(kind: type[T], value: object, added: Collection[str] | None = ()) -> T:
    """Convert a JSON value to an object of type ``kind``. Raises DecodingError, which names the wrong member.

    ``kind`` is a dataclass. Its fields can be of JSON's types, Any, UUID, datetime, bytes (as base64), dataclasses,
    named tuples (as lists), and tuples, mappings and optional values of these. Each field must be in ``value`` and its
    nested objects, except the fields in ``added``, which then get their defaults; if that is None, all fields with a
    default. Members that are not fields are ignored. An object whose attribute ``problem`` contains a text is refused.
    """
    return cast(T, _decode(kind, value, None if added is None else frozenset(added)))


def _decode(kind: Any, value: Any, added: frozenset[str] | None) -> Any:
    arguments = get_args(kind)
    origin = get_origin(kind)
    if kind is Any:
        return value
    if type(None) in arguments:
        return None if value is None else _decode(arguments[0], value, added)
    if origin is tuple:
        return tuple(_member(str(place), arguments[0], each, added) for place, each in enumerate(_require(value, list)))
    if origin is Mapping:
        found = _require(value, dict)
        if arguments[1] is Any:
            return found
        return {name: _member(name, arguments[1], each, added) for name, each in found.items()}
    if is_dataclass(kind):
        return _object(kind, _require(value, dict), added)
    if issubclass(kind, tuple):
        kinds = _kinds(kind)
        if len(_require(value, list)) != len(kinds):
            raise DecodingError(f"has the wrong length: {str(value)[:50]!r}")
        return kind(*(_member(name, kinds[name], each, added) for name, each in zip(kinds, value, strict=True)))
    if kind is datetime:
        return _time(_require(value, str))
    if kind is UUID:
        return UUID(_require(value, str))
    if kind is bytes:
        return b64decode(_require(value, str), validate=True)
    return float(_require(value, int, float)) if kind is float else _require(value, kind)


def _object(kind: Any, value: dict[str, Any], added: frozenset[str] | None) -> Any:
    kinds = _kinds(kind)
    for name in kinds:
        if name not in value and name not in (_optional(kind) if added is None else added):
            raise DecodingError("is missing", (name,))
    members = {name: _member(name, kinds[name], value[name], added) for name in kinds if name in value}
    found = kind(**members)
    if problem := getattr(found, "problem", ""):
        raise DecodingError(f"is refused: {problem}")
    return found


def _member(name: str, kind: Any, value: Any, added: frozenset[str] | None) -> Any:
    try:
        return _decode(kind, value, added)
    except DecodingError as error:
        raise DecodingError(error.problem, (name, *error.path)) from None
    except (ValueError, OverflowError) as error:
        raise DecodingError(f"is not valid: {error}", (name,)) from error


@cache
def _kinds(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _optional(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind) if field.default is not MISSING)


def _require(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise DecodingError(f"has the wrong type: {str(value)[:100]!r}")
    return value


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return time.astimezone(UTC)
