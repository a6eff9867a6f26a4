"""A start request names the sandbox and sets its policy; the kernel's settings complete it."""

from __future__ import annotations

import os

import pytest
from jupyter_client.kernelspec import KernelSpec

from sandbox_provisioner.errors import ConfigurationError
from sandbox_provisioner.kernel.start_request import KEYWORD, from_environment, requested
from sandbox_provisioner.provisioner import SandboxProvisioner
from sandbox_provisioner.sandbox.start_request import Features, StartRequest

WANTED = {
    "a console": ({}, {}, None),
    "a notebook": ({"JPY_SESSION_NAME": "/w/a.ipynb"}, {}, ("", False)),
    "a notebook that is not to be kept": ({"JPY_SESSION_NAME": "/w/a.ipynb"}, {"persistent": False}, None),
    "an id in the settings": ({}, {"sandbox_id": "mine"}, ("mine", False)),
    "a bucket's id in the settings": ({}, {"gcs_sandbox_id": "ours", "sandbox_id": "mine"}, ("ours", True)),
    "an id in the request": ({"SANDBOX_ID": "asked"}, {"gcs_sandbox_id": "ours"}, ("asked", False)),
    "a bucket's id in the request": ({"GCS_SANDBOX_ID": "asked"}, {"sandbox_id": "mine"}, ("asked", True)),
}


def settings(**given: object) -> SandboxProvisioner:
    return SandboxProvisioner(kernel_id="id", kernel_spec=KernelSpec(), **given)


def features(env: dict[str, str], ours: SandboxProvisioner, **given: object) -> Features:
    """Return the policy of a start for a notebook with these variables and keyword arguments."""
    env = {**os.environ, "JPY_SESSION_NAME": "/w/a.ipynb", **env}
    found = requested({"env": env, **given}, ours, "python3")
    assert found is not None
    return found.features(can_checkpoint=True)


@pytest.mark.parametrize("case", WANTED)
def test_request_takes_precedence_over_the_settings(case: str) -> None:
    env, given, expected = WANTED[case]
    found = requested({"env": {**os.environ, **env}}, settings(**given), "python3")
    assert (found and (found.sandbox_id, found.gcs)) == expected


def test_policy_of_the_request_takes_precedence_over_the_settings() -> None:
    ours = settings(idle_timeout=7.0, enable_handoff=True)
    found = features({"SANDBOX_ENABLE_CHECKPOINT_AT_IDLE": "1", "SANDBOX_ENABLE_HANDOFF": "0"}, ours)
    assert (found.enable_checkpoint_at_idle, found.enable_handoff, found.idle_timeout) == (True, False, 7.0)
    assert features({"SANDBOX_IDLE_TIMEOUT": "3"}, ours).idle_timeout == 3.0


def test_default_of_idle_saving_depends_on_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    def saves(ours: SandboxProvisioner, **given: StartRequest) -> tuple[bool, bool]:
        request = requested({"env": {"JPY_SESSION_NAME": "/w/a.ipynb"}, **given}, ours, "python3")
        assert request
        return request.features(True).enable_checkpoint_at_idle, request.features(False).enable_checkpoint_at_idle

    assert saves(settings()) == (True, False)
    assert saves(settings(enable_checkpoint_at_idle=True)) == (True, True)
    assert saves(settings(enable_checkpoint_at_idle=False)) == (False, False)
    assert saves(settings(), **{KEYWORD: StartRequest(enable_checkpoint_at_idle=True)}) == (True, True)
    monkeypatch.setenv("SANDBOX_ENABLE_CHECKPOINT_AT_IDLE", "1")
    assert saves(settings()) == (True, True)


def test_typed_request_may_repeat_a_variable_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_IDLE_TIMEOUT", "600")
    ours = settings(idle_timeout=1800.0)
    assert features({}, ours).idle_timeout == 1800.0
    assert features({}, ours, **{KEYWORD: StartRequest(idle_timeout=600.0)}).idle_timeout == 600.0


def test_only_a_start_with_hand_off_waits_for_another_server() -> None:
    request = {"env": {"JPY_SESSION_NAME": "/w/a.ipynb"}}
    for handoff, patience in ((True, 5.0), (False, 0.0)):
        found = requested(request, settings(enable_handoff=handoff, handoff_timeout=5.0), "python3")
        assert found and found.patience == patience


def test_invalid_variable_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="SANDBOX_IDLE_TIMEOUT is 'soon'"):
        from_environment({"SANDBOX_IDLE_TIMEOUT": "soon"})
