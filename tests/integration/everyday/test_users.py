"""Kernels start for the users that containers have, and `setup` works in the build of an image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.setup import kernelspecs

pytestmark = [pytest.mark.runsc, pytest.mark.user]

SUPPORT = Path(__file__).parents[2] / "support"
ANY_UID = ("unshare", "--user", "--map-user=12345", "--map-group=12345")
"""Run a command as a user that is not in the user database."""
DROP = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
"""Run a command without CAP_SYS_ADMIN."""
NO_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'


@pytest.fixture
def environment(tmp_path: Path, notebook_folder: Path, runtime: Path, runsc: Runsc) -> dict[str, str]:
    """The whole environment of a process with an own Jupyter, without HOME and USER."""
    (origin,) = kernelspecs.origins(["python3"])
    kernelspecs.install_twin(origin, tmp_path / "data" / "kernels")
    folders = {f"JUPYTER_{name}_DIR": str(tmp_path / name.lower()) for name in ("DATA", "RUNTIME", "CONFIG")}
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(SUPPORT),
        "SANDBOX_RUNTIME_DIR": str(runtime.parent),
        "SANDBOX_RUNSC": str(runsc.path),
        "SANDBOX_TEMPLATE": "none",
        **folders,
    }


def save_and_wake(prefix: tuple[str, ...], folder: Path, environment: dict[str, str]) -> dict[str, object]:
    """Start a kernel in another process, hibernate and wake it, and return what its cells printed."""
    argv = [*prefix, sys.executable, str(SUPPORT / "save_and_wake.py"), str(folder)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("home", [{}, {"HOME": "/"}], ids=["no HOME", "HOME=/"])
def test_user_without_a_name_and_a_home(
    home: dict[str, str], notebook_folder: Path, environment: dict[str, str]
) -> None:
    found = save_and_wake(ANY_UID, notebook_folder, {**environment, **home})
    assert found == {"uid": 12345, "user": "('/home/sandbox', 'user12345')", "slept": True, "answer": "42"}


@pytest.mark.root
def test_root_without_the_capability_of_an_administrator(notebook_folder: Path, environment: dict[str, str]) -> None:
    found = save_and_wake(DROP, notebook_folder, {**environment, "HOME": "/root"})
    assert found == {"uid": 0, "user": "('/root', 'root')", "slept": True, "answer": "42"}


def test_setup_in_the_build_of_an_image(tmp_path: Path, environment: dict[str, str]) -> None:
    kernelspecs.remove_twins(tmp_path / "data" / "kernels")
    namespace = ("unshare", "--user", "--map-root-user", "sh", "-c", NO_NAMESPACES, "sh", *DROP)
    argv = [*namespace, sys.executable, "-m", "sandbox_provisioner.cli", "setup", "--kernel", "python3"]
    done = subprocess.run(argv, env={**environment, "HOME": "/"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No sandbox can start here." in done.stdout and "the test is left to the first start" in done.stdout
    assert "Test of runsc" not in done.stdout and "Template" not in done.stdout
    assert (tmp_path / "data" / "kernels" / "python3-sandbox" / "kernel.json").exists()
