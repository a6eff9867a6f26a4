"""The examples work as their README files describe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from gcs_server import GCS
from notebooks import Notebook
from servers import Server
from traitlets.config import Config

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.sandbox.user_sandboxes import Persistence

EXAMPLES = Path(__file__).parents[2] / "examples"

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


def run(script: str, *arguments: str) -> str:
    """Run an example, which must succeed. Return its first line of output."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[0]


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use an empty data folder, without settings from the environment except those for runsc."""
    for name in [*os.environ]:
        if name.startswith(("SANDBOX_", "FILESYSTEM_")) and name not in ("SANDBOX_RUNTIME_DIR", "SANDBOX_RUNSC"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))


@pytest.mark.runsc
@pytest.mark.usefixtures("data")
def test_persistent_example_keeps_state_between_runs() -> None:
    assert run("persistent.py", "apple") == "Heard so far: apple"
    assert run("persistent.py", "pear") == "Heard so far: apple, pear"
    assert run("persistent.py", "plum") == "Heard so far: apple, pear, plum"
    kept = Persistence.open()
    (record,) = kept.registry.list().records
    document = kept.describe(record)
    assert document.checkpoint is not None
    assert not document.running


@pytest.mark.slow
@pytest.mark.runsc
@pytest.mark.usefixtures("data")
def test_single_user_example_offers_only_persistent_sandboxes(
    serve: Serve, sandboxed: Sandboxed, runtime: Path
) -> None:
    kernel = sandboxed()
    config = f"--config={EXAMPLES / 'single-user' / 'jupyter_server_config.py'}"
    server = serve(config)
    specs = server.ask("GET", "kernelspecs")[1]
    assert (specs["default"], list(specs["kernelspecs"])) == (kernel, [kernel])
    notebook = Notebook(server, "python3", "plain.ipynb")
    assert len([*runtime.iterdir()]) == 1
    notebook.close()
    notebook = Notebook(server, kernel)
    notebook.run("x = 1")
    notebook.close()
    server.stop()
    notebook = Notebook(serve(config), kernel)
    assert notebook.run("x") == "1"
    notebook.close()


@pytest.mark.slow
@pytest.mark.runsc
@pytest.mark.usefixtures("data")
def test_gcs_example_continues_on_another_server(
    serve: Serve, sandboxed: Sandboxed, gcs: GCS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX_SIGNING_KEY", "k" * 32)
    shell = ["sh", "-c", f"BUCKET={gcs.bucket}; . '{EXAMPLES / 'gcs' / 'env.sh'}'; env -0"]
    for line in subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split("\0"):
        name, _, value = line.partition("=")
        if name.startswith(("SANDBOX_", "FILESYSTEM_")):
            monkeypatch.setenv(name, value)
    kernel = sandboxed()
    notebook = Notebook(serve(name="one"), kernel)
    notebook.run("x = 1")
    elsewhere = Notebook(serve(name="two"), kernel)
    assert elsewhere.run("x") == "1"
    notebook.close()
    elsewhere.close()
    prefix = os.environ["SANDBOX_OBJECT_PREFIX"]
    assert {name.startswith(f"{prefix}/") for _, name in gcs.requests() if name} == {True}


def hub_config(example: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the configuration of a hub from an example."""
    config = Config()
    if example == "kubernetes":
        monkeypatch.setenv("SANDBOX_HUB_SECRET", "s" * 64)
        values = yaml.safe_load((EXAMPLES / "kubernetes" / "values.yaml").read_text())
        (code,) = values["hub"]["extraConfig"].values()
    else:
        code = (EXAMPLES / "jupyterhub" / "jupyterhub_config.py").read_text()
    exec(compile(code, example, "exec"), {"c": config, "get_config": lambda: config})
    return config


@pytest.mark.parametrize("example", ["jupyterhub", "kubernetes"])
def test_hub_examples_give_each_user_key_and_prefix(
    example: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, list[dict[str, str]]] = {}
    for _ in ("first start of the hub", "second start"):
        config = hub_config(example, monkeypatch)
        for name in ("alice", "bob", "b-b", "b@b"):
            spawner = SimpleNamespace(
                user=SimpleNamespace(name=name), home_dir=str(tmp_path / name), environment={"OTHER": "1"}
            )
            config.Spawner.pre_spawn_hook(spawner)
            assert spawner.environment["OTHER"] == "1"
            assert GCSConfig.from_environment(tmp_path, spawner.environment).signing_key
            found.setdefault(name, []).append(spawner.environment)
    assert all(first == second for first, second in found.values())
    for variable in ("SANDBOX_SIGNING_KEY", *(["SANDBOX_OBJECT_PREFIX"] if example == "jupyterhub" else [])):
        assert len({first[variable] for first, _ in found.values()}) == len(found)
