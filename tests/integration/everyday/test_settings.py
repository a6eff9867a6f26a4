"""A setting has an effect wherever it is set, and a mistyped one is reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from notebooks import Notebook, until
from servers import Server

from sandbox_provisioner.cli import main
from sandbox_provisioner.setup import kernelspecs as twins

pytestmark = pytest.mark.runsc

KERNEL = "python3-sandbox"
EXPECTED = {
    "idle_timeout": (700, "request", ""),
    "enable_checkpoint_at_idle": (True, "built-in", ""),
    "enable_handoff": (False, "built-in", ""),
    "standby": (0, "configuration", "the command line"),
    "handoff_timeout": (9, "configuration", "Jupyter's configuration files"),
    "on_shutdown": ("delete", "environment", "SANDBOX_ON_SHUTDOWN"),
    "reseed": (True, "kernelspec", KERNEL),
    "hook_timeout": (4, "kernelspec", KERNEL),
}


@pytest.fixture(autouse=True)
def twin(tmp_path: Path) -> None:
    """Install the kernelspec that `jupyter sandbox setup` installs."""
    (origin,) = twins.origins(["python3"])
    twins.install_twin(origin, tmp_path / "kernels")


def test_idle_timeout_of_the_command_line(serve: Callable[..., Server]) -> None:
    server = serve("--SandboxProvisioner.idle_timeout=1")
    notebook = Notebook(server, KERNEL)
    assert notebook.run("x = 5; x") == "5"
    until(lambda: server.ask("GET", "sandboxes")[1]["items"][0]["state"] == "hibernated")
    assert notebook.run("x") == "5"
    notebook.close()


def test_config_names_the_place_of_each_setting(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (origin,) = twins.origins(["python3"])
    twins.install_twin(origin, tmp_path / "kernels", {"reseed": True, "hook_timeout": 4.0})
    (tmp_path / "config").mkdir()
    files = "c.SandboxProvisioner.handoff_timeout = 9\nc.SandboxProvisioner.on_shutdown = 'checkpoint'\n"
    (tmp_path / "config" / "jupyter_server_config.py").write_text(files)
    monkeypatch.setenv("SANDBOX_ON_SHUTDOWN", "delete")
    monkeypatch.setenv("SANDBOX_HOOK_TIMEOUT", "3")
    server = serve("--SandboxProvisioner.idle_timeout=8", "--SandboxProvisioner.standby=0")
    body = {"kernel_name": KERNEL, "notebook_path": "a.ipynb", "idle_timeout": 700}
    assert server.ask("POST", "sandboxes", body)[0] == 201

    def config(*arguments: str) -> dict[str, tuple[object, str, str]]:
        assert main(["config", *arguments, "--server", server.url, "--token", "t", "--json"]) == 0
        items = json.loads(capsys.readouterr().out)["items"]
        return {item["name"]: (item["value"], item["source"], item["where"]) for item in items}

    found = config("a.ipynb")
    assert {name: found[f"SandboxProvisioner.{name}"] for name in EXPECTED} == EXPECTED
    assert found["SandboxKernelManager.hibernate_deadline"] == (60, "built-in", "")
    other = config("--kernel", KERNEL)
    assert other["SandboxProvisioner.idle_timeout"] == (8, "configuration", "the command line")
    assert config()["SandboxProvisioner.reseed"] == (False, "built-in", "")
    assert main(["config", "--kernel", "python3", "--server", server.url, "--token", "t"]) == 1
    assert "'python3' does not run in a sandbox" in capsys.readouterr().err


def test_unknown_setting_of_the_command_line_is_a_warning(serve: Callable[..., Server]) -> None:
    server = serve("--SandboxProvisioner.idle_timout=1")
    assert (
        "The server's configuration or command line contains 'idle_timout', which is not a setting of "
        "SandboxProvisioner and has no effect. The most similar setting is 'idle_timeout'"
    ) in server.log.read_text()
