"""A kernel changes files of its project that programs on the host would execute, or tries to get a larger folder."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from kernels import run

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.gvisor.runsc import Runsc

pytestmark = [pytest.mark.runsc, pytest.mark.debian, pytest.mark.user]

Start = Callable[..., tuple[KernelManager, BlockingKernelClient]]
Sandboxed = Callable[..., str]

TOOLS = """
import json, os, shutil
def attempt(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        return os.strerror(error.errno)
    return "done"
def write(path):
    with open(path, "a") as file:
        file.write("echo attacked")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in the user's home, with an environment and settings of an editor."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "work" / "project"
    for name in ("notebooks", ".venv/bin", ".vscode"):
        (folder / name).mkdir(parents=True)
    for name in (".venv/pyvenv.cfg", ".venv/bin/python", ".vscode/tasks.json", "notebooks/.envrc"):
        (folder / name).write_text("original")
    subprocess.run(["git", "init", "-q", folder], check=True)
    return folder


def attempts(kc: BlockingKernelClient, *calls: str) -> list[str]:
    """Run each call in the kernel, and return the error of each, or "done"."""
    listed = ", ".join(f"attempt({call})" for call in calls)
    found: list[str] = json.loads(run(kc, f"{TOOLS}\nprint(json.dumps([{listed}]))"))
    return found


def test_files_that_the_host_executes_cannot_be_changed(
    start_kernel: Start, sandboxed: Sandboxed, project: Path
) -> None:
    _, kc = start_kernel(sandboxed(), cwd=str(project / "notebooks"))
    read_only = ("../.git/config", "../.git/hooks/pre-commit", "../.venv/bin/python", "../.vscode/tasks.json", ".envrc")
    assert attempts(kc, *(f"write, {path!r}" for path in read_only)) == ["Read-only file system"] * len(read_only)
    moves = ("../.git", "../.git/hooks", "../.git/config", "../.venv", "../.vscode", ".envrc")
    places = ("../moved", "../.git/moved", "moved")
    assert "done" not in attempts(kc, *(f"os.rename, {path!r}, {place!r}" for path in moves for place in places))
    assert "done" not in attempts(kc, *(f"shutil.rmtree, {path!r}" for path in moves[:5]), "os.unlink, '.envrc'")
    assert "done" not in attempts(kc, *(f"os.symlink, '/tmp', {path!r}" for path in moves))
    assert "attacked" not in (project / ".git" / "config").read_text()
    assert (project / ".venv" / "bin" / "python").read_text() == "original"
    assert not (project / ".git" / "hooks" / "pre-commit").exists()


def test_marker_gives_no_larger_folder(start_kernel: Start, sandboxed: Sandboxed, project: Path) -> None:
    beside = project.parent / "other"
    beside.mkdir()
    km, kc = start_kernel(sandboxed(), cwd=str(beside))
    markers = ("../pyproject.toml", f"{project.parent}/.jupyter-sandbox", "../.git")
    assert attempts(kc, *(f"write, {path!r}" for path in markers)) == ["Read-only file system"] * len(markers)
    assert attempts(kc, "write, 'pyproject.toml'", "os.symlink, '..', 'up'", "os.mkdir, 'up/x'")[:2] == ["done"] * 2
    km.shutdown_kernel(now=True)
    assert not (project.parent / "x").exists()
    _, kc = start_kernel(sandboxed(), cwd=str(beside))
    assert attempts(kc, "write, '../project/notebooks/.envrc'") == ["No such file or directory"]


def test_link_that_a_kernel_made_shows_no_other_folder(
    start_kernel: Start, sandboxed: Sandboxed, project: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id").write_text("secret")
    km, kc = start_kernel(sandboxed(), cwd=str(project / "notebooks"))
    links = ("../data", "../.idea", "../.jupyter", "../venv")
    calls = [f"os.symlink, {str(tmp_path / 'keys')!r}, {link!r}" for link in links]
    assert attempts(kc, *calls) == ["done"] * len(links)
    km.shutdown_kernel(now=True)
    _, kc = start_kernel(sandboxed(), cwd=str(project / "notebooks"))
    assert attempts(kc, *(f"os.listdir, {link!r}" for link in links)) == ["No such file or directory"] * len(links)


@pytest.mark.parametrize("name", [".idea", ".git"])
def test_protected_path_that_is_replaced_during_the_start(
    start_kernel: Start, sandboxed: Sandboxed, runsc: Runsc, project: Path, tmp_path: Path, name: str
) -> None:
    """Another kernel of the project made the folder, so it can replace it by a link just before runsc mounts it."""
    (tmp_path / "keys" / "hooks").mkdir(parents=True)
    (tmp_path / "keys" / "config").write_text("secret")
    (project / ".idea").mkdir()
    place = project / name
    swapping = tmp_path / "runsc"
    swap = f"mv {place} {place}-moved; ln -s {tmp_path / 'keys'} {place}"
    swapping.write_text(f'#!/bin/sh\ncase "$*" in *" run "*) {swap} ;; esac\nexec {runsc.path} "$@"\n')
    swapping.chmod(0o755)
    with pytest.raises(SandboxError):
        start_kernel(sandboxed(runsc=str(swapping)), cwd=str(project / "notebooks"))
    assert place.is_symlink()
    assert sorted(os.listdir(tmp_path / "keys")) == ["config", "hooks"]


@pytest.mark.parametrize("target", [".git", ".vscode", "../other"])
def test_restarted_kernel_does_not_follow_its_own_folder(
    start_kernel: Start, sandboxed: Sandboxed, project: Path, target: str
) -> None:
    (project.parent / "other").mkdir()
    (project / "notebooks" / ".envrc").unlink()  # a protected file would keep the folder from being renamed
    km, kc = start_kernel(sandboxed(), cwd=str(project / "notebooks"))
    run(kc, f"import os; os.rename('../notebooks', '../old'); os.symlink({target!r}, '../notebooks')")
    with pytest.raises(SandboxError, match=r"a kernel may have created it|programs on the host execute files"):
        km.restart_kernel(now=True)
