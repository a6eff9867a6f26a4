"""Define the requests and the streamed responses of the REST API, and decode all responses.

The other responses are in ``sandbox.model``. Unknown fields of a newer server are ignored. A missing or invalid field
raises an AnswerError that names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict, TypeVar

from ..persistence import decoding
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
    """An event of a sandbox; ``id`` is its ``sandbox_id``. ``lost_since`` is explained at ``Sandbox``."""

    id: str
    what: str
    time: datetime
    seconds: float | None = None
    size: int | None = None
    doing: str = ""
    reason: str = ""
    lost_since: datetime | None = None


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
        return decoding.decode(kind, value, added=None)
    except decoding.FAILURES as error:
        raise AnswerError(f"it does not match {kind.__name__}: {error}") from error
