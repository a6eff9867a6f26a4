"""The life of a sandbox as data: which action is legal in which state, and where it leads."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from .errors import StateError


class State(StrEnum):
    """Where a sandbox is in its life."""

    INITIALIZED = "initialized"
    RUNNING = "running"
    CHECKPOINTED = "checkpointed"
    STOPPED = "stopped"
    FAILED = "failed"


class Action(StrEnum):
    """What can be done to a sandbox, or (EXIT, FAIL) happen to it."""

    START = "start"
    EXECUTE = "execute in"
    CHECKPOINT = "checkpoint"
    COPY = "copy"
    RESTORE = "restore"
    DELETE = "delete"
    EXIT = "exit"
    FAIL = "fail"


TRANSITIONS: Mapping[tuple[Action, State], State] = MappingProxyType(
    {
        (Action.START, State.INITIALIZED): State.RUNNING,
        (Action.EXECUTE, State.RUNNING): State.RUNNING,
        (Action.CHECKPOINT, State.RUNNING): State.CHECKPOINTED,
        (Action.COPY, State.RUNNING): State.RUNNING,
        (Action.RESTORE, State.INITIALIZED): State.RUNNING,
        (Action.RESTORE, State.CHECKPOINTED): State.RUNNING,
        (Action.EXIT, State.RUNNING): State.STOPPED,
        (Action.FAIL, State.INITIALIZED): State.FAILED,
        (Action.FAIL, State.RUNNING): State.FAILED,
        **{(Action.DELETE, state): State.STOPPED for state in State},
    }
)
"""A restore that fails is no transition: the image is as good as before, and the sandbox stays where it was."""


def after(sandbox_id: str, action: Action, state: State) -> State:
    """The state that ``action`` leads to; StateError, naming both, if it is not legal in ``state``."""
    try:
        return TRANSITIONS[action, state]
    except KeyError:
        raise StateError(sandbox_id, action, state) from None
