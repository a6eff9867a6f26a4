"""Test the trial of kernels that `jupyter sandbox setup` installs: real kernels, in real sandboxes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import empty_machine

from sandbox_provisioner.cli.app import main
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.setup import kernelspecs, trial

pytestmark = [pytest.mark.runsc, pytest.mark.user]

COMMAND = str(Path(sys.executable).parent / "jupyter-sandbox")
PYTHON = ["python", "-m", "xpython_launcher", "-f", "{connection_file}", "--raw"]
ONLY_TCP = """
import json, os, sys
if json.load(open(sys.argv[1]))["transport"] != "tcp":
    sys.exit("this kernel knows only tcp")
os.execv(sys.executable, [sys.executable, "-m", "xpython_launcher", "-f", sys.argv[1], "--raw"])
"""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runsc: Runsc) -> Iterator[Callable[..., Path]]:
    """Return a function that installs a kernel, and returns the path of its twin's kernel.json."""
    data = empty_machine(monkeypatch, tmp_path)
    monkeypatch.setenv("SANDBOX_RUNSC", str(runsc.path))
    handler = signal.getsignal(signal.SIGTERM)

    def add(argv: list[str], program: str = "") -> Path:
        place = data / "kernels" / "some"
        place.mkdir(parents=True, exist_ok=True)
        (place / "program.py").write_text(program)
        spec = {"argv": argv, "display_name": "Some", "language": "some"}
        (place / "kernel.json").write_text(json.dumps(spec))
        return data / "kernels" / "some-sandbox" / "kernel.json"

    yield add
    signal.signal(signal.SIGTERM, handler)


def settings(twin: Path) -> Any:
    return json.loads(twin.read_text())["metadata"]["kernel_provisioner"]["config"]


def test_transport_is_set_only_if_needed(install: Callable[..., Path]) -> None:
    twin = install(PYTHON)
    assert main(["setup", "--kernel", "some"]) == 0
    assert "guest_transport" not in settings(twin)
    install(["python", "{resource_dir}/program.py", "{connection_file}"], ONLY_TCP)
    assert main(["setup", "--kernel", "some"]) == 0
    assert settings(twin)["guest_transport"] == "tcp"
    install(PYTHON)
    assert main(["setup", "--kernel", "some"]) == 0
    assert settings(twin)["guest_transport"] == "tcp", "the transport that worked before is tried first"


def test_unusable_kernel_is_reported_and_not_installed(
    install: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    twin = install(["python", "{resource_dir}/program.py"], "import sys; sys.exit('no interpreter of this language')")
    assert main(["setup", "--no-test", "--kernel", "some"]) == 0
    assert twin.is_file()
    assert main(["setup", "--kernel", "some"]) == 1
    error = capsys.readouterr().err
    assert "Kernel some cannot be used in a sandbox: with ipc, it failed at the step 'start'" in error
    assert "no interpreter of this language" in error and "with tcp" in error
    assert not twin.exists(), "the picker does not offer it"
    assert main(["setup"]) == 0, "the other kernels can be used"
    assert "no interpreter of this language" in capsys.readouterr().err
    assert [path.name for path in twin.parent.parent.glob("*-sandbox")] == ["python3-sandbox"]


def test_changed_twin_of_unusable_kernel_is_kept(install: Callable[..., Path]) -> None:
    twin = install(["python", "{resource_dir}/program.py"], "raise SystemExit(1)")
    assert main(["setup", "--no-test", "--kernel", "some"]) == 0
    spec = json.loads(twin.read_text())
    spec["metadata"]["kernel_provisioner"]["config"]["network"] = "host"
    twin.write_text(json.dumps(spec))
    assert main(["setup", "--kernel", "some"]) == 1
    assert settings(twin)["network"] == "host"


def test_attempt_has_a_time_limit(install: Callable[..., Path], runsc: Runsc, monkeypatch: pytest.MonkeyPatch) -> None:
    install(["python", "{resource_dir}/program.py"], "import time; time.sleep(1000)")
    monkeypatch.setattr(trial, "ATTEMPT_SECONDS", 3.0)
    (origin,) = kernelspecs.origins(["some"])
    assert "took longer than 3 s" in trial.attempt(origin, {}, runsc, lambda step: None)


def test_interrupted_trial_leaves_nothing(install: Callable[..., Path], tmp_path: Path) -> None:
    twin = install(["python", "{resource_dir}/program.py"], "import time; time.sleep(1000)")
    workspaces = tmp_path / "workspaces"
    workspaces.mkdir()
    with subprocess.Popen(
        [COMMAND, "setup", "--kernel", "some"],
        env={**os.environ, "TMPDIR": str(workspaces)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as setup:
        while not list(workspaces.glob("jupyter-sandbox-trial-*/data")):
            assert setup.poll() is None
            time.sleep(0.05)
        setup.send_signal(signal.SIGINT)
        words = setup.communicate(timeout=60)[1]
    assert setup.returncode == 130
    assert b"Traceback" not in words
    assert list(workspaces.iterdir()) == []
    assert sorted(path.name for path in twin.parent.parent.iterdir()) == ["some"]
