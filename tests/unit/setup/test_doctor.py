"""Test the table of preconditions: the findings, their remedies, and whether a kernel could start."""

from __future__ import annotations

import io
import os
import platform
import resource
import sys
from datetime import date
from pathlib import Path

import pytest
from machines import OLD, empty_machine, stand_in

from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.setup import doctor
from sandbox_provisioner.setup.doctor import Check
from sandbox_provisioner.setup.kernelspecs import Kernel, twin_spec

pytestmark = pytest.mark.user


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return empty_machine(monkeypatch, tmp_path)


def sandboxed(argv: list[str], **config: str) -> Kernel:
    stanza = {"provisioner_name": "sandbox-provisioner", "config": config}
    return Kernel("some", Path("/bin"), {"argv": argv, "metadata": {"kernel_provisioner": stanza}})


def uname(system: str = "Linux", release: str = "6.1.0-35-amd64", machine: str = "x86_64") -> platform.uname_result:
    return platform.uname_result(system, "host", release, "#1", machine)


def test_empty_machine(data: Path) -> None:
    checks = doctor.examine()
    assert not doctor.can_start(checks)
    bad = {check.name: check.remedy for check in checks if not check.ok}
    assert "jupyter sandbox setup" in bad["runsc"]
    assert "jupyter sandbox setup" in bad["kernels"]


def test_ready_machine(data: Path) -> None:
    stand_in(data / "sandbox" / "bin" / "runsc")
    (data / "kernels" / "some-sandbox").mkdir(parents=True)
    (data / "kernels" / "some-sandbox" / "kernel.json").write_text(
        '{"argv": ["python"], "metadata": {"kernel_provisioner": {"provisioner_name": "sandbox-provisioner"}}}'
    )
    checks = doctor.examine()
    assert [check for check in checks if check.required and not check.ok] == []
    assert doctor.can_start(checks)
    assert "kernel some-sandbox" in [check.name for check in checks]


def test_finding_names_runsc_and_its_origin(data: Path, tmp_path: Path) -> None:
    named = stand_in(tmp_path / "named", "20260101-aaa")
    (found, age) = doctor.check_runsc("", {"SANDBOX_RUNSC": str(named), "PATH": ""})
    assert (found.ok, age.ok) == (True, True)
    assert found.finding == f"20260101-aaa at {named} (from SANDBOX_RUNSC)"


def test_runsc_that_is_too_old(data: Path, tmp_path: Path) -> None:
    stand_in(tmp_path / "p" / "runsc", OLD)
    found, age = doctor.check_runsc("", {"PATH": str(tmp_path / "p")})
    assert found.ok
    assert not age.ok
    assert age.required
    assert OLD in age.finding
    assert "jupyter sandbox setup" in age.remedy


def test_configured_runsc_is_missing(data: Path) -> None:
    (found,) = doctor.check_runsc("/not/there", {"PATH": ""})
    assert not found.ok
    assert "/not/there" in found.finding


@pytest.mark.parametrize(
    ("version", "ok", "words"),
    [
        ("20260905-160fafc42237", True, "10 days ago"),
        ("release-20260126.0", True, "7 months ago"),
        ("0.0~20240729.0", False, "2.1 years ago"),
        ("VERSION_MISSING", True, "no date"),
    ],
)
def test_age_is_advice(version: str, ok: bool, words: str) -> None:
    check = doctor.check_age(Runsc(Path("/runsc"), version), date(2026, 9, 15))
    assert (check.ok, words in check.finding) == (ok, True)
    assert doctor.can_start([check])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_supported_platforms(machine: str) -> None:
    assert doctor.check_platform(uname(machine=machine), "systrap").ok


@pytest.mark.parametrize(
    ("system", "chosen", "words"),
    [
        (uname("Darwin", "24.1.0", "arm64"), "systrap", "Linux only"),
        (uname(machine="riscv64"), "systrap", "x86_64 and arm64"),
        (uname(release="3.10.0-1160.el7.x86_64"), "systrap", "4.14.77"),
        (uname(), "magic", "'magic'"),
    ],
)
def test_unsupported_platforms(system: platform.uname_result, chosen: str, words: str) -> None:
    check = doctor.check_platform(system, chosen)
    assert not check.ok
    assert words in check.finding
    assert check.remedy


def test_this_machine_is_supported() -> None:
    assert doctor.check_platform(platform.uname(), "systrap").ok
    assert doctor.check_namespaces().ok


def test_user_is_reported(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor.check_user()
    assert check.ok
    assert ("root" if os.geteuid() == 0 else f"uid {os.geteuid()}") in check.finding
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    check = doctor.check_user()
    assert (check.ok, check.required) == (False, False)
    assert "HOME" in check.remedy


@pytest.mark.parametrize(("most", "ok"), [(1024, False), (4096, True), (resource.RLIM_INFINITY, True)])
def test_limit_of_open_files_that_is_too_low(most: int, ok: bool) -> None:
    check = doctor.check_open_files(most)
    assert check.ok is ok
    assert ("LimitNOFILE" in check.remedy) is not ok


def test_folder_with_enough_space(tmp_path: Path) -> None:
    check = doctor.check_folder("x", tmp_path / "not" / "yet", 1, "X")
    assert check.ok
    assert "free" in check.finding


def test_folder_without_enough_space(tmp_path: Path) -> None:
    check = doctor.check_folder("x", tmp_path, 1 << 40, "SOME_DIR")
    assert not check.ok
    assert "SOME_DIR" in check.remedy


def test_read_only_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check = doctor.check_folder("x", tmp_path / "file" / "folder", 1, "SOME_DIR")
    assert not check.ok
    assert "SOME_DIR" in check.remedy


def test_home_of_another_user(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    for name in ("HOME", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(closed / "theirs"))
    by_name = {check.name: check for check in doctor.examine()}
    assert by_name["data folder"].ok == (os.geteuid() == 0)


def test_runtime_folder_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv("SANDBOX_RUNTIME_DIR", str(tmp_path / "shared"))
    check = doctor.check_runtime_root()
    assert not check.ok
    assert "SANDBOX_RUNTIME_DIR" in check.remedy


def test_runtime_folder_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SANDBOX_RUNTIME_DIR", str(tmp_path / "file" / "folder"))
    check = doctor.check_runtime_root()
    assert not check.ok
    assert "SANDBOX_RUNTIME_DIR" in check.remedy


@pytest.mark.parametrize("program", ["python", "python3", sys.executable, "sh", "{resource_dir}/sh"])
def test_kernel_with_its_program(program: str) -> None:
    (check,) = doctor.check_kernels([sandboxed([program])], {})
    assert check.ok


@pytest.mark.parametrize("argv", [["/no/such/python"], ["no-such-command"], []])
def test_kernel_without_its_program(argv: list[str]) -> None:
    (check,) = doctor.check_kernels([sandboxed(argv)], {})
    assert not check.ok
    assert check.remedy == "Install the kernel again, or remove it with `jupyter kernelspec remove some`."


def test_kernel_with_its_own_runsc(tmp_path: Path) -> None:
    (check,) = doctor.check_kernels([sandboxed(["sh"], runsc=str(stand_in(tmp_path / "new")))], {})
    assert check.ok
    (check,) = doctor.check_kernels([sandboxed(["sh"], runsc=str(stand_in(tmp_path / "old", OLD)))], {})
    assert not check.ok


def test_no_twin_is_needed_if_all_kernels_are_sandboxed() -> None:
    plain = Kernel("plain", Path("/kernels/plain"), {"argv": ["sh"]})
    (check,) = doctor.check_kernels([plain], {"JUPYTER_DEFAULT_PROVISIONER_NAME": "sandbox-provisioner"})
    assert check.ok
    (check,) = doctor.check_kernels([plain], {})
    assert not check.ok


def test_kernels_without_a_twin_are_advice() -> None:
    new = Kernel("new", Path("/kernels/new"), {"argv": ["sh"]})
    old = Kernel("old", Path("/kernels/old"), {"argv": ["sh"]})
    twin = Kernel("old-sandbox", Path("/kernels/old-sandbox"), twin_spec(old, {}))
    *_, check = doctor.check_kernels([new, old, twin], {})
    assert (check.ok, check.required, check.finding) == (False, False, "without a sandboxed twin: new")
    assert "`jupyter sandbox setup`" in check.remedy
    assert all(check.ok for check in doctor.check_kernels([old, twin], {}))


def table(encoding: str) -> list[str]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    checks = [
        Check("runsc", True, "good"),
        Check("age", False, "old", "`do this`", required=False),
        Check("disk", False, "word " * 60, "`a command " + "x" * 200 + "`"),
    ]
    doctor.print_table(checks, stream)
    stream.flush()
    return raw.getvalue().decode(encoding).splitlines()


def test_table_is_aligned_and_remedies_are_not_wrapped() -> None:
    lines = table("utf-8")
    assert lines[:3] == ["✓  runsc  good", "!  age    old", "          `do this`"]
    assert lines[3].startswith("✗  disk   word word")
    assert any(line.endswith("x`") and line.startswith("          `a command") for line in lines)
    assert lines[-1].startswith("A sandboxed kernel cannot start")


def test_table_in_ascii() -> None:
    lines = table("ascii")
    assert lines[0] == "ok runsc  good"
    assert lines[3].startswith("NO disk   word")


def test_own_folders_that_kernels_cannot_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert [check.ok for check in doctor.check_own_folders({})] == [True]


def test_storage_in_current_folder_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    storage = tmp_path / "notebooks" / ".storage"
    (check,) = doctor.check_own_folders({"SANDBOX_STORAGE_DIR": str(storage)})
    assert not check.ok and not check.required
    assert str(storage) in check.finding and "SANDBOX_STORAGE_DIR" in check.remedy


@pytest.mark.parametrize("variable", ["SANDBOX_MOUNTS", "SANDBOX_WORKING_FOLDER"])
def test_writable_storage_is_refused(variable: str, tmp_path: Path) -> None:
    mode = ":rw" if variable == "SANDBOX_MOUNTS" else ""
    (check,) = doctor.check_own_folders({"SANDBOX_STORAGE_DIR": str(tmp_path), variable: f"{tmp_path}{mode}"})
    assert not check.ok and check.required
    assert str(tmp_path) in check.finding and "SANDBOX_STORAGE_DIR" in check.finding


def test_refused_runsc_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = stand_in(tmp_path / "notebooks" / "runsc")
    monkeypatch.chdir(refused.parent)
    (check,) = [check for check in doctor.check_refused({"PATH": str(refused.parent)}) if str(refused) in check.finding]
    assert not check.required and "sandboxes can write" in check.finding
