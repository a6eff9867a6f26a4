"""`jupyter sandbox config` without a server reads the same files and variables as a new server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from machines import empty_machine

from sandbox_provisioner.cli import main
from sandbox_provisioner.sandbox.user_sandboxes import Persistence
from sandbox_provisioner.setup import kernelspecs


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a machine with a twin of python3 and a configuration file."""
    data = empty_machine(monkeypatch, tmp_path)
    (origin,) = kernelspecs.origins(["python3"])
    kernelspecs.install_twin(origin, data / "kernels", {"reseed": True, "resed": False})
    (tmp_path / "config").mkdir(exist_ok=True)
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "config"))
    lines = "c.SandboxProvisioner.idle_timeout = 8\nc.SandboxProvisioner.idle_timout = 9\n"
    (tmp_path / "config" / "jupyter_server_config.py").write_text(lines)


def test_changed_settings_of_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook, kept = str(tmp_path / "a.ipynb"), Persistence.open()
    kept.registry.allocate(kept.stores, kernel_name="python3-sandbox", notebook_path=notebook)
    assert main(["config", notebook, "--changed", "--no-server"]) == 0
    printed = capsys.readouterr()
    lines = {tuple(line.split(maxsplit=2)) for line in printed.out.splitlines()[4:]}
    assert {
        ("SandboxProvisioner.idle_timeout", "8", "Jupyter's configuration files"),
        ("SandboxProvisioner.reseed", "True", "kernelspec python3-sandbox"),
        ("SandboxProvisioner.template", "none", "environment SANDBOX_TEMPLATE"),
        ("SANDBOX_SIGNING_KEY", "(set)", "environment SANDBOX_SIGNING_KEY"),
    } <= lines
    assert not [line for line in lines if line[-1] == "built-in"]
    assert "contains 'idle_timout'" in printed.err
    assert "The kernelspec 'python3-sandbox' contains 'resed'" in printed.err


def test_idle_saving_is_off_if_the_storage_cannot_save_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def saves() -> bool:
        assert main(["config", "--json", "--no-server"]) == 0
        items = json.loads(capsys.readouterr().out)["items"]
        return bool(next(item["value"] for item in items if item["name"].endswith(".enable_checkpoint_at_idle")))

    assert saves()
    monkeypatch.setenv("SANDBOX_METADATA_BUCKET", "some-bucket")
    monkeypatch.setenv("SANDBOX_LOCK_BUCKET", "some-bucket")
    assert not saves()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere.ipynb"], "There is no notebook"),
        (["--kernel", "other"], "There is no kernel named 'other'"),
        (["--kernel", "python3"], "'python3' does not run in a sandbox"),
    ],
)
def test_unknown_names_are_errors(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *arguments, "--no-server"]) == 1
    assert problem in capsys.readouterr().err
