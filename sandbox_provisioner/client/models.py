"""Define the requests and the streamed responses of the REST API, and decode all responses.

The other responses are in ``sandbox.model``. Unknown fields of a newer server are ignored. A missing or invalid field
raises an AnswerError that names it.
"""

from __future__ import annotations

import base64
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import Any, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import AnswerError

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """A piece of a command's output; ``stream`` is ``stdout`` or ``stderr``."""

    stream: str
    data: bytes


@dataclass(frozen=True)
class Exit:
    """The exit status of a command; negative for a signal."""

    status: int


@dataclass(frozen=True)
class Event:
    """An event of a sandbox; ``id`` is its ``sandbox_id``."""

    id: str
    what: str
    time: datetime
    seconds: float | None = None
    size: int | None = None
    doing: str = ""
    reason: str = ""


class Reference(TypedDict):
    """A reference to a savepoint or file snapshot: the ``id`` of its sandbox and its ``name``."""

    id: str
    name: str


class CreateSandbox(TypedDict, total=False):
    """The properties of a new sandbox; all are optional."""

    kernel_name: str
    notebook_path: str
    sandbox_id: str
    gcs_sandbox_id: str
    enable_handoff: bool
    enable_checkpoint_at_idle: bool
    idle_timeout: float
    savepoint: Reference
    snapshot: Reference


def decode(kind: type[T], value: Any) -> T:
    """Return decoded JSON as an instance of the dataclass ``kind``. Raises AnswerError if it does not match."""
    try:
        made: T = _decode(kind, value)
    except (TypeError, ValueError, LookupError) as error:
        raise AnswerError(f"it does not match {kind.__name__}: {error}") from error
    return made


def _decode(kind: Any, value: Any) -> Any:
    if is_dataclass(kind):
        return _decode_fields(kind, value)
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (option for option in get_args(kind) if option is not type(None))
        return None if value is None else _decode(kind, value)
    if get_origin(kind) is tuple:
        return tuple(_decode(get_args(kind)[0], item) for item in _require_type(value, list))
    if kind is datetime:
        return datetime.fromisoformat(_require_type(value, str))
    if kind is bytes:
        return base64.b64decode(_require_type(value, str), validate=True)
    if kind is float:
        return float(_require_type(value, (int, float)))
    return _require_type(value, kind)


def _decode_fields(kind: Any, value: Any) -> Any:
    given, hints, made = _require_type(value, Mapping), _hints(kind), {}
    for field in fields(kind):
        if field.name in given:
            try:
                made[field.name] = _decode(hints[field.name], given[field.name])
            except TypeError as error:
                raise TypeError(f"{field.name} {error}") from None
    return kind(**made)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _require_type(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"is {str(value)[:50]!r}")
    return value
