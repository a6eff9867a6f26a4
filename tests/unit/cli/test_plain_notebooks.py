"""Test ``jupyter sandbox allow-plain``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sandbox_provisioner.cli import main
from sandbox_provisioner.errors.kinds import ExitStatus
from sandbox_provisioner.sandbox.sandboxed_notebooks import SandboxedNotebooks


@pytest.fixture
def notebooks(data: Path) -> SandboxedNotebooks:
    """Return the record, with the notebooks /nb/a.ipynb, whose kernel python3 was refused, and /nb/b/c.ipynb."""
    notebooks = SandboxedNotebooks()
    notebooks.record(["/nb/a.ipynb", "/nb/b/c.ipynb"])
    assert notebooks.refused("/nb/a.ipynb", "python3")
    return notebooks


def test_refused_kernel_is_allowed_and_revoked(
    notebooks: SandboxedNotebooks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["allow-plain", "/nb/a.ipynb"]) == 0
    assert "python3" in capsys.readouterr().out
    assert not notebooks.refused("/nb/a.ipynb", "python3")
    assert main(["allow-plain", "--json"]) == 0
    item = {"notebook_path": "/nb/a.ipynb", "kernel_name": "python3"}
    assert json.loads(capsys.readouterr().out) == {"items": [item]}
    assert main(["allow-plain", "/nb/a.ipynb", "--revoke"]) == 0
    assert notebooks.refused("/nb/a.ipynb", "python3")
    assert main(["allow-plain"]) == 0
    assert "No permissions" in capsys.readouterr().out


def test_named_kernel_is_allowed(notebooks: SandboxedNotebooks) -> None:
    assert main(["allow-plain", "b/c.ipynb"]) == ExitStatus.FAILED  # none was refused
    assert main(["allow-plain", "b/c.ipynb", "--kernel", "R", "--json"]) == 0
    assert not notebooks.refused("/nb/b/c.ipynb", "r")


def test_link_to_another_notebook_is_not_allowed(
    notebooks: SandboxedNotebooks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebooks.record([str(tmp_path / "evil.ipynb")])
    (tmp_path / "innocent.ipynb").symlink_to("evil.ipynb")
    command = ["allow-plain", str(tmp_path / "innocent.ipynb"), "--kernel", "python3"]
    assert main(command) == ExitStatus.FAILED
    assert f"it is {tmp_path / 'evil.ipynb'}" in capsys.readouterr().err
    assert notebooks.refused(str(tmp_path / "evil.ipynb"), "python3")
    assert main([*command, "--revoke"]) == 0


def test_unknown_and_ambiguous_notebooks(notebooks: SandboxedNotebooks, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["allow-plain", "x.ipynb"]) == ExitStatus.MISSING
    notebooks.record(["/other/a.ipynb"])
    assert main(["allow-plain", "a.ipynb"]) == ExitStatus.MISSING
    assert "/nb/a.ipynb, /other/a.ipynb" in capsys.readouterr().err
