"""Test every action in every state of a sandbox, against a table."""

from __future__ import annotations

import pytest

from sandbox_provisioner.errors import SandboxError, StateError
from sandbox_provisioner.gvisor.state import TRANSITIONS, Action, State, after

LEGAL = {
    Action.START: {State.INITIALIZED: State.RUNNING},
    Action.EXECUTE: {State.RUNNING: State.RUNNING},
    Action.CHECKPOINT: {State.RUNNING: State.CHECKPOINTED},
    Action.COPY: {State.RUNNING: State.RUNNING},
    Action.RESTORE: {State.INITIALIZED: State.RUNNING, State.CHECKPOINTED: State.RUNNING},
    Action.EXIT: {State.RUNNING: State.STOPPED},
    Action.FAIL: {State.INITIALIZED: State.FAILED, State.RUNNING: State.FAILED},
    Action.DELETE: dict.fromkeys(State, State.STOPPED),
}
PAIRS = [(action, state) for action in Action for state in State]
ILLEGAL = [(action, state) for action, state in PAIRS if state not in LEGAL[action]]


def named(value: object) -> str:
    return str(value).replace(" ", "-")


def test_table_covers_every_action() -> None:
    assert set(LEGAL) == set(Action)


@pytest.mark.parametrize(("action", "state"), [pair for pair in PAIRS if pair not in ILLEGAL], ids=named)
def test_legal_action_changes_the_state(action: Action, state: State) -> None:
    assert after("box", action, state) == LEGAL[action][state]


@pytest.mark.parametrize(("action", "state"), ILLEGAL, ids=named)
def test_illegal_action_is_refused_by_name(action: Action, state: State) -> None:
    with pytest.raises(StateError) as refusal:
        after("box-7", action, state)
    assert str(refusal.value) == f"Cannot {action} sandbox box-7: it is {state}."
    assert (refusal.value.sandbox_id, refusal.value.action, refusal.value.reason) == (
        "box-7",
        action,
        f"it is {state}",
    )
    assert isinstance(refusal.value, SandboxError)


@pytest.mark.parametrize("state", State, ids=named)
def test_delete_is_legal_in_every_state_and_final(state: State) -> None:
    assert after("box", Action.DELETE, state) == State.STOPPED
    assert not any(origin == State.STOPPED and action != Action.DELETE for action, origin in TRANSITIONS)


def test_table_is_read_only() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[Action.START, State.STOPPED] = State.RUNNING  # type: ignore[index]
