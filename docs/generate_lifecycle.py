"""Generate the table of a sandbox's transitions, from ``gvisor.state.TRANSITIONS``."""

from __future__ import annotations

from generate_settings import table

from sandbox_provisioner.gvisor.state import TRANSITIONS, Action, State

HAPPEN = (Action.EXIT, Action.FAIL)
"""Events, in contrast to actions that a caller requests."""


def markdown() -> str:
    """Return a table with a row for each action and a column for each state."""
    rows = []
    for action in Action:
        led = (TRANSITIONS.get((action, state)) for state in State)
        name = f"*it {action}s*" if action in HAPPEN else str(action)
        rows.append((name, *(str(state) if state else "" for state in led)))
    return "\n".join([*table(("", *(f"when {state}" for state in State)), rows), ""])
