"""SandboxHandle: an id is checked once, here, because it becomes part of paths and object names."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_provisioner.bundle import BundleSpec
from sandbox_provisioner.errors import ConfigurationError
from sandbox_provisioner.handle import SandboxHandle, valid_id
from sandbox_provisioner.runsc import Runsc
from sandbox_provisioner.states import State

GOOD = ["a", "0", "kernel-1", "A_b-C", "5f0c6b1e-8c8e-4a1c-9d3b-3d1f0a1b2c3d", "x" * 128]
BAD = ["", ".", "..", "../x", "a/b", "a\\b", "-a", "_a", "a b", "a\n", "a\0", "é", "x" * 129, "a.b", "٣"]


@pytest.mark.parametrize("sandbox_id", GOOD)
def test_a_good_id_is_itself(sandbox_id: str) -> None:
    assert valid_id(sandbox_id) == sandbox_id


@pytest.mark.parametrize("sandbox_id", BAD, ids=repr)
def test_an_id_that_could_leave_its_folder_is_refused(sandbox_id: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        valid_id(sandbox_id)
    assert refusal.value.setting == "sandbox_id"
    assert repr(sandbox_id) in str(refusal.value)


async def test_an_ephemeral_handle_has_a_sandbox_that_is_not_started(spec: BundleSpec, runtime: Path) -> None:
    handle = SandboxHandle.create_ephemeral("box-1", spec, Runsc(Path("/nowhere"), ""))
    assert handle.sandbox_id == handle.instance.sandbox_id == "box-1"
    assert handle.instance.state == State.INITIALIZED
    assert list(runtime.iterdir()) == []


async def test_the_factory_refuses_a_bad_id(spec: BundleSpec) -> None:
    with pytest.raises(ConfigurationError):
        SandboxHandle.create_ephemeral("../box", spec, Runsc(Path("/nowhere"), ""))
