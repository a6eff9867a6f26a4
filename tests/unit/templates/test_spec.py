"""Two starts share a template if all data that the template depends on is equal, and their folders permit it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox_provisioner.errors import MetadataError
from sandbox_provisioner.guest.capabilities import CARRIED
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount, all_mounts, config
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.kernel.kernel import Start
from sandbox_provisioner.templates.spec import CONNECTION_FILE, Recipe, frozen_part, recipe

INSIDE = "/run/jupyter/kernel-1.json"
ARGV = ["/usr/bin/python3", "/.sandbox/entrypoint.py", "ipykernel_launcher", "-f", INSIDE]
ENV = {"HOME": "/home/ada", "LANG": "C.UTF-8", "SECRET": "x", "PATH": "/bin", "PYTHONPATH": "/lib"}
INFO = {"transport": "ipc", "ip": "/run/jupyter/kernel", "shell_port": 1, "key": "a key", "signature_scheme": "hmac"}


@pytest.fixture
def binary(tmp_path: Path) -> Runsc:
    path = tmp_path / "runsc"
    path.write_bytes(b"one build")
    return Runsc(path, "20260101")


@pytest.fixture
def bare() -> BundleSpec:
    return BundleSpec(python="/usr/bin/python3", home="/home/ada", user="ada", environment={"PATH": "/bin"})


def start(**changes: Any) -> Start:
    given: dict[str, Any] = {"argv": ARGV, "env": ENV, "cwd": "/w", "connection_file": INSIDE}
    return Start(**(given | {"files": {INSIDE: json.dumps(INFO)}} | changes))


def made(bare: BundleSpec, binary: Runsc, begun: Start | None = None, **changes: Any) -> Recipe:
    given: dict[str, Any] = {"kernel_name": "k", "platform": "systrap", "preload": (), "kernelspec_env": {}}
    found = recipe(start=begun or start(), bare=bare, runsc=binary, **(given | changes))
    assert found is not None
    return found


def test_only_variables_read_at_start_are_frozen() -> None:
    assert frozen_part(ENV | {"OMP_NUM_THREADS": "2", "AWS_KEY": "x", "JPY_SESSION_NAME": "n"}) == {
        "HOME": "/home/ada",
        "LANG": "C.UTF-8",
        "PYTHONPATH": "/lib",
        "OMP_NUM_THREADS": "2",
    }


def test_recipe_contains_no_key_secret_or_connection_file(bare: BundleSpec, binary: Runsc) -> None:
    found = made(bare, binary)
    text = json.dumps(found.to_json())
    assert "a key" not in text and "SECRET" not in text and "kernel-1" not in text and CONNECTION_FILE in text
    assert found.connection["key"] == ""


def test_values_given_to_each_copy_do_not_change_the_key(bare: BundleSpec, binary: Runsc) -> None:
    other = start(
        env=ENV | {"SECRET": "y", "PATH": "/usr/bin"},
        cwd="/elsewhere",
        files={INSIDE: json.dumps(INFO | {"key": "another"})},
    )
    assert made(bare, binary).key == made(bare, binary, other).key


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel_name": "other"},
        {"platform": "ptrace"},
        {"preload": ("numpy",)},
        {"kernelspec_env": {"A": "b"}},
        {"begun": start(argv=[*ARGV, "--quiet"])},
        {"begun": start(env=ENV | {"LANG": "C"})},
        {"begun": start(files={INSIDE: json.dumps(INFO | {"transport": "tcp"})})},
    ],
    ids=str,
)
def test_frozen_values_change_the_key(bare: BundleSpec, binary: Runsc, changes: dict[str, Any]) -> None:
    assert made(bare, binary).key != made(bare, binary, **changes).key


def test_mounts_and_runsc_build_change_the_key(bare: BundleSpec, binary: Runsc) -> None:
    before = made(bare, binary).key
    assert made(replace(bare, mounts=(Mount("/opt", "/opt"),)), binary).key != before
    binary.path.write_bytes(b"another build")
    assert made(bare, binary).key != before


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": ["/usr/bin/R", "-f", INSIDE]},
        {"argv": [*ARGV, "--profile=mine"]},
        {"files": {INSIDE: json.dumps(INFO | {"curve_secretkey": "x"})}},
    ],
    ids=["not Python's", "a profile", "encrypted"],
)
def test_unfreezable_kernel_has_no_recipe(bare: BundleSpec, binary: Runsc, changes: dict[str, Any]) -> None:
    assert recipe("k", start(**changes), bare, "systrap", binary, (), {}) is None


def test_kernel_with_user_profile_has_no_recipe(bare: BundleSpec, binary: Runsc) -> None:
    seen = replace(bare, mounts=(Mount("/srv/ada/.ipython", "/home/ada/.ipython", True),))
    assert recipe("k", start(), seen, "systrap", binary, (), {}) is None


def test_recipe_survives_json(bare: BundleSpec, binary: Runsc) -> None:
    found = made(bare, binary, preload=("numpy",))
    again = Recipe.from_json(json.loads(json.dumps(found.to_json())))
    assert (again, again.key) == (found, found.key)


@pytest.mark.parametrize("value", [{}, {"runsc": 1}, {"runsc": ["a", "b"], "argv": [], "preload": [], "spec": {}}])
def test_invalid_recipe_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(MetadataError, match="Invalid recipe"):
        Recipe.from_json(value)


def test_carried_folder_is_mounted_at_the_place_for_all_copies(bare: BundleSpec) -> None:
    folder = Mount("/srv/w", "/w", True)
    spec = replace(bare, carried=folder)
    assert Mount("/srv/w", CARRIED, True) in all_mounts(spec) and folder not in all_mounts(spec)
    process = config(spec)["process"]
    assert process["args"][-1] == "template"
    assert set(process["capabilities"]["bounding"]) == {"CAP_SYS_ADMIN", "CAP_SETPCAP"}
    assert config(replace(spec, outlives=True)) == config(spec)
    assert config(bare)["process"]["capabilities"]["bounding"] == []
