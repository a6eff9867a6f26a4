"""Test the list of files that a sandbox sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.sandbox.visible import visible_files

SPEC = BundleSpec("/usr/bin/python3", "/home/me", "me", read_only=True)


def test_protected_paths_come_first(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").touch()
    project, config = str(tmp_path), str(tmp_path / ".git" / "config")
    found = visible_files(
        replace(SPEC, mounts=(Mount("/opt", "/opt"), Mount(project, project, True), Mount(config, config)))
    )
    assert found.writable == (project,)
    assert found.read_only[0] == config
    assert {"/usr", "/opt"} <= {*found.read_only}
    assert {"/home/me", "/tmp", "/var/tmp"} <= {*found.in_memory}


def test_folder_of_a_template_copy_has_its_own_path() -> None:
    found = visible_files(replace(SPEC, carried=Mount("/host/project", "/project", True)))
    assert found.writable == ("/project",)
