"""The state machine of a sandbox: the actions that are legal in each state, and the state that follows."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from ..errors import StateError


class State(StrEnum):
    """The state of a sandbox."""

    INITIALIZED = "initialized"
    RUNNING = "running"
    CHECKPOINTED = "checkpointed"
    STOPPED = "stopped"
    FAILED = "failed"


class Action(StrEnum):
    """An action on a sandbox, or an event (EXIT, FAIL)."""

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
"""The legal actions. A restore that fails does not change the state, because the image is unchanged."""


def after(sandbox_id: str, action: Action, state: State) -> State:
    """Return the state that follows ``action``. Raises StateError if the action is not legal in ``state``."""
    try:
        return TRANSITIONS[action, state]
    except KeyError:
        raise StateError(sandbox_id, action, f"it is {state}") from None
