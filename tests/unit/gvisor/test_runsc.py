"""Test finding, checking and calling the runsc binary."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from machines import NEW, OLD, empty_machine, script, stand_in

from sandbox_provisioner.errors import (
    DiskFullError,
    RunscError,
    RunscNotFoundError,
    RunscTooOldError,
    UserNamespacesForbiddenError,
)
from sandbox_provisioner.gvisor import runsc

pytestmark = pytest.mark.user


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return empty_machine(monkeypatch, tmp_path)


def test_candidates_in_the_documented_order(data: Path, tmp_path: Path) -> None:
    stand_in(tmp_path / "on-path" / "runsc")
    stand_in(data / "sandbox" / "bin" / "runsc")
    environ = {"SANDBOX_RUNSC": "/b", "RUNSC_PATH": "/c", "PATH": str(tmp_path / "on-path")}
    assert list(runsc.candidates("/a", environ)) == [
        ("the runsc setting", Path("/a")),
        ("SANDBOX_RUNSC", Path("/b")),
        ("RUNSC_PATH", Path("/c")),
        ("PATH", tmp_path / "on-path" / "runsc"),
        ("jupyter sandbox setup", data / "sandbox" / "bin" / "runsc"),
    ]


def test_first_usable_candidate_is_found(data: Path, tmp_path: Path) -> None:
    named, on_path = stand_in(tmp_path / "named", "20260101-aaa"), stand_in(tmp_path / "p" / "runsc", "20260202-bbb")
    environ = {"SANDBOX_RUNSC": str(named), "PATH": str(on_path.parent)}
    assert runsc.find("", environ) == runsc.Runsc(named, "20260101-aaa")
    assert runsc.find(str(on_path), environ).version == "20260202-bbb"


def test_tilde_in_the_setting_is_expanded(data: Path, tmp_path: Path) -> None:
    stand_in(tmp_path / "home" / "my-runsc")
    assert runsc.find("~/my-runsc").path == tmp_path / "home" / "my-runsc"


def test_error_without_runsc_has_install_command(data: Path) -> None:
    with pytest.raises(RunscNotFoundError, match="jupyter sandbox setup"):
        runsc.find("", {"PATH": "/nowhere"})


@pytest.mark.parametrize("variable", ["SANDBOX_RUNSC", "RUNSC_PATH"])
def test_configured_runsc_that_is_missing_is_named(data: Path, tmp_path: Path, variable: str) -> None:
    stand_in(data / "sandbox" / "bin" / "runsc")
    with pytest.raises(RunscNotFoundError) as caught:
        runsc.find("", {variable: str(tmp_path / "missing"), "PATH": ""})
    assert variable in caught.value.problem
    assert str(tmp_path / "missing") in caught.value.problem
    assert f"unset {variable}" in caught.value.remedy


def test_configured_runsc_that_is_too_old_is_refused(data: Path, tmp_path: Path) -> None:
    stand_in(data / "sandbox" / "bin" / "runsc")
    old = stand_in(tmp_path / "old", OLD)
    with pytest.raises(RunscTooOldError, match="2024-07-29 or newer") as caught:
        runsc.find(str(old))
    assert (caught.value.path, caught.value.version) == (str(old), OLD)
    assert "the runsc setting" in caught.value.remedy


def test_runsc_on_path_that_is_too_old_is_skipped(data: Path, tmp_path: Path) -> None:
    stand_in(tmp_path / "p" / "runsc", OLD)
    good = stand_in(data / "sandbox" / "bin" / "runsc")
    assert runsc.find("", {"PATH": str(tmp_path / "p")}).path == good


def test_runsc_on_path_that_is_broken_is_skipped(data: Path, tmp_path: Path) -> None:
    script(tmp_path / "p" / "runsc", "exit 3")
    good = stand_in(data / "sandbox" / "bin" / "runsc")
    assert runsc.find("", {"PATH": str(tmp_path / "p")}).path == good


def test_error_if_the_only_runsc_is_too_old(data: Path, tmp_path: Path) -> None:
    stand_in(tmp_path / "p" / "runsc", OLD)
    with pytest.raises(RunscTooOldError, match="jupyter sandbox setup"):
        runsc.find("", {"PATH": str(tmp_path / "p")})


def test_not_executable(data: Path, tmp_path: Path) -> None:
    path = stand_in(tmp_path / "runsc")
    path.chmod(0o644)
    with pytest.raises(RunscNotFoundError, match="chmod \\+x"):
        runsc.find(str(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("#!/bin/sh\necho hello\n", "is not runsc: `.*--version` answered 'hello'"),
        ("#!/bin/sh\necho runsc version 20260101; echo broken >&2; exit 1\n", "'broken'"),
        ("#!/no/such/interpreter\n", "could not be run"),
        ("\x7fELF nonsense", "could not be run"),
    ],
)
def test_not_a_runsc(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "runsc"
    path.write_text(content)
    path.chmod(0o755)
    with pytest.raises(RunscNotFoundError, match=words):
        runsc.inspect(path)


def test_unreadable_folder_contains_no_runsc(data: Path) -> None:
    (data / "sandbox").mkdir(parents=True, mode=0)
    with pytest.raises(RunscNotFoundError, match="No runsc"):
        runsc.find("", {"PATH": ""})
    with pytest.raises(RunscNotFoundError, match="No runsc at"):
        runsc.find(str(data / "sandbox" / "bin" / "runsc"))


def test_folder_is_not_a_runsc(tmp_path: Path) -> None:
    with pytest.raises(RunscNotFoundError, match="No runsc at"):
        runsc.inspect(tmp_path)


def test_version_of_a_replaced_binary_is_read_again(tmp_path: Path) -> None:
    path = stand_in(tmp_path / "runsc", "20250101-aaa")
    assert runsc.inspect(path).version == "20250101-aaa"
    stand_in(path, "20260101-bbbb")
    assert runsc.inspect(path).version == "20260101-bbbb"


@pytest.mark.parametrize(
    ("version", "built"),
    [
        ("release-20260126.0", date(2026, 1, 26)),
        ("0.0~20240729.0", date(2024, 7, 29)),
        (NEW, date(2026, 9, 5)),
        ("release-20261399.0", None),
        ("VERSION_MISSING", None),
    ],
)
def test_date_in_a_version(version: str, built: date | None) -> None:
    assert runsc.Runsc(Path("/runsc"), version).built == built


@pytest.mark.parametrize("version", ["0.0~20240729.0", "release-20260126.0", "VERSION_MISSING"])
def test_new_enough(version: str) -> None:
    runsc.Runsc(Path("/runsc"), version).require_new_enough()


def test_real_runsc() -> None:
    found = runsc.find()
    assert found.built
    assert os.access(found.path, os.X_OK)


def test_ordinary_users_call_runsc_in_a_user_namespace() -> None:
    assert runsc.namespace_prefix(privileged=True) == []
    assert os.path.basename(runsc.namespace_prefix(privileged=False)[0]) == "unshare"
    argv = runsc.Runsc(Path("/bin/runsc"), NEW).command(Path("/state"), "list", settings=["--debug"])
    assert argv[-4:] == ["/bin/runsc", "--root=/state", "--debug", "list"]
    assert argv[:-4] == runsc.namespace_prefix(runsc.privileged())


@pytest.mark.root
def test_root_without_the_capability_is_not_privileged() -> None:
    ask = "from sandbox_provisioner.gvisor.runsc import *; print(privileged(), namespace_prefix(privileged())[1:])"
    dropped = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    answers = [
        subprocess.run([*prefix, sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
        for prefix in ([], dropped)
    ]
    assert answers == ["True []\n", "False ['--user', '--map-root-user']\n"]


def test_user_namespaces_are_allowed_on_this_machine() -> None:
    runsc.require_user_namespaces()


@pytest.mark.parametrize(
    ("setting", "value", "command"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
    ],
)
def test_remedy_names_the_sysctl_that_forbids_user_namespaces(
    tmp_path: Path, setting: str, value: str, command: str
) -> None:
    (tmp_path / setting).parent.mkdir()
    (tmp_path / setting).write_text(f"{value}\n")
    assert f"`sudo sysctl -w {command}`" in runsc.namespace_remedy(tmp_path)


def test_remedy_does_not_name_a_sysctl_that_allows_user_namespaces(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "max_user_namespaces").write_text("63424\n")
    assert "sysctl" not in runsc.namespace_remedy(tmp_path)


def test_error_of_a_failed_call_contains_its_output() -> None:
    with pytest.raises(RunscError, match="status 128: no such container") as caught:
        runsc.checked(["runsc", "state"], 128, b"W0101 00:00:00.000000 12 main.go:1] no such container\n")
    assert (caught.value.argv, caught.value.returncode) == (("runsc", "state"), 128)


def test_failed_start_is_explained() -> None:
    forbidden = runsc.explain(["unshare"], 1, "unshare: unshare failed: Operation not permitted")
    assert isinstance(forbidden, UserNamespacesForbiddenError)
    full = runsc.explain(["runsc"], 128, "mkdir /x: no space left on device")
    assert isinstance(full, DiskFullError)
    assert "disk is full" in full.problem
    assert isinstance(runsc.explain(["runsc"], 128, "something else"), RunscError)
