"""Test that programs for the host are used only from folders that no sandbox and no other user can write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox_provisioner.errors import ProgramNotFoundError
from sandbox_provisioner.gvisor import programs


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_writable", set())


def program(folder: Path, name: str = "tool") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_program_on_path(tmp_path: Path) -> None:
    tool = program(tmp_path / "bin")
    assert programs.trusted_program("tool", {"PATH": f"/nowhere:{tmp_path}/bin"}) == str(tool)
    assert programs.trusted_program("tool", {"PATH": "/nowhere"}, [str(tmp_path / "bin")]) == str(tool)


def test_missing_program_is_named() -> None:
    with pytest.raises(ProgramNotFoundError, match="no-such-tool"):
        programs.trusted_program("no-such-tool")


def test_relative_folders_are_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    for path in ("bin", "./bin", "", "."):
        with pytest.raises(ProgramNotFoundError):
            programs.trusted_program("tool", {"PATH": path})
    monkeypatch.chdir(tmp_path / "bin")
    with pytest.raises(ProgramNotFoundError):
        programs.trusted_program("tool", {"PATH": "."})


def test_next_program_is_used_if_the_first_is_refused(tmp_path: Path) -> None:
    refused, good = program(tmp_path / "notebooks" / "bin"), program(tmp_path / "bin")
    programs.note_writable(str(tmp_path / "notebooks"))
    path = {"PATH": f"{refused.parent}:{good.parent}"}
    assert programs.trusted_program("tool", path) == str(good)
    assert programs.trusted_path(path) == str(good.parent)


def test_refused_program_is_named_with_the_reason(tmp_path: Path) -> None:
    tool = program(tmp_path / "notebooks" / "bin")
    programs.note_writable(str(tmp_path / "notebooks"))
    with pytest.raises(ProgramNotFoundError) as refusal:
        programs.trusted_program("tool", {"PATH": str(tool.parent)})
    assert f"{tool} is not used" in str(refusal.value) and str(tmp_path / "notebooks") in str(refusal.value)


def test_link_to_a_program_that_kernels_can_write_to(tmp_path: Path) -> None:
    tool = program(tmp_path / "notebooks")
    programs.note_writable(str(tmp_path / "notebooks"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").symlink_to(tool)
    assert "sandboxes can write" in programs.reason_for_distrust(str(tmp_path / "bin" / "tool"))


def test_folder_of_this_process_is_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = program(tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    assert "sandboxes can write" in programs.reason_for_distrust(str(tool))


def test_working_directory_root_does_not_affect_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    programs.note_writable("/")
    assert programs.trusted_program("sh", {"PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_folder_that_everybody_can_write_to(tmp_path: Path, mode: int) -> None:
    tool = program(tmp_path / "open" / "bin")
    (tmp_path / "open").chmod(mode)
    assert f"everybody can write to {tmp_path / 'open'}" in programs.reason_for_distrust(str(tool))
    (tmp_path / "open").chmod(0o1777)
    assert programs.reason_for_distrust(str(tool)) == ""


def test_file_that_everybody_can_write_to(tmp_path: Path) -> None:
    tool = program(tmp_path)
    tool.chmod(0o777)
    assert "everybody can write" in programs.reason_for_distrust(str(tool))


@pytest.mark.root  # only root can give files to another user
def test_program_of_another_user(tmp_path: Path) -> None:
    tool = program(tmp_path)
    os.chown(tool, 1234, 1234)
    assert "belongs to another user (uid 1234)" in programs.reason_for_distrust(str(tool))
    os.chown(tool, os.geteuid(), os.getegid())
    os.chown(tmp_path, 1234, 1234)
    assert "belongs to another user" in programs.reason_for_distrust(str(tool))


@pytest.mark.root  # only root can give files to another user
def test_folder_that_another_group_can_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = program(tmp_path)
    os.chown(tmp_path, 1234, 1234)
    tmp_path.chmod(0o775)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: 999)
    assert "a group (gid 1234) can write" in programs.reason_for_distrust(str(tool))
