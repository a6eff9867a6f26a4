"""A start request says which sandbox it is for, and what that is to do by itself; the settings say what it does not."""

from __future__ import annotations

import os

import pytest
from jupyter_client.kernelspec import KernelSpec

from sandbox_provisioner.errors import ConfigurationError
from sandbox_provisioner.kernel import start_request
from sandbox_provisioner.provisioner import SandboxProvisioner

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


@pytest.mark.parametrize("case", WANTED)
def test_a_start_is_for_the_sandbox_that_is_asked_for_or_the_notebooks(case: str) -> None:
    env, given, expected = WANTED[case]
    wanted = start_request.wanted({**os.environ, **env}, settings(**given), "python3")
    assert (wanted and (wanted.sandbox_id, wanted.gcs)) == expected


def test_what_it_says_of_the_settings_goes_before_them_and_the_rest_stays() -> None:
    ours = settings(idle_timeout=7.0, enable_handoff=True)
    start_request.heed({**os.environ, "SANDBOX_ENABLE_CHECKPOINT_AT_IDLE": "1", "SANDBOX_ENABLE_HANDOFF": "0"}, ours)
    assert (ours.enable_checkpoint_at_idle, ours.enable_handoff, ours.idle_timeout) == (True, False, 7.0)
    start_request.heed({**os.environ, "SANDBOX_IDLE_TIMEOUT": "3"}, ours)
    assert ours.idle_timeout == 3.0


def test_what_it_names_as_its_own_goes_before_the_settings_though_the_server_has_just_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SANDBOX_IDLE_TIMEOUT", "600")
    ours = settings(idle_timeout=1800.0)
    start_request.heed(dict(os.environ), ours)
    assert ours.idle_timeout == 1800.0
    start_request.heed({**os.environ, start_request.ASKED: "SANDBOX_ID,SANDBOX_IDLE_TIMEOUT"}, ours)
    assert ours.idle_timeout == 600.0


def test_what_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="SANDBOX_IDLE_TIMEOUT is 'soon'"):
        start_request.heed({"SANDBOX_IDLE_TIMEOUT": "soon"}, settings())
