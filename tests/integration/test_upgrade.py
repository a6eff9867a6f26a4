"""Use the files of an older version: a checkpoint and a savepoint, the registry, a kernelspec and a template."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(240)]

BEFORE_THE_ROOMS = "50395ad7d6084720c92203f78c7d794db88c0486"
"""The last version whose modules were all in one folder."""
CHECKOUT = Path(__file__).parents[2]
PLAYER = CHECKOUT / "tests" / "support" / "upgrade_steps.py"

Play = Callable[..., str]


def install_older(place: Path) -> None:
    """Put the older version of the package into a folder of the module search path."""
    version = ["-c", "safe.directory=*", "-C", str(CHECKOUT), "archive", BEFORE_THE_ROOMS, "sandbox_provisioner"]
    packed = subprocess.run(["git", *version], check=False, capture_output=True)
    assert packed.returncode == 0, f"The older version is not in this checkout's history: {packed.stderr.decode()}"
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(place, filter="data")


def install_present(place: Path) -> None:
    """Replace the older version by the present one, as pip does."""
    shutil.rmtree(place / "sandbox_provisioner")
    shutil.copytree(CHECKOUT / "sandbox_provisioner", place / "sandbox_provisioner")


@pytest.fixture
def play(tmp_path: Path, runtime: Path) -> Play:
    """Run a Python program with the installed version of the package, in the folders of one user."""
    for name in ("home", "notebooks"):
        (tmp_path / name).mkdir()
    env = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "jupyter-runtime"),
        "SANDBOX_TEMPLATE": "use",
        "PYTHONPATH": str(tmp_path / "packages"),
    }

    def run(*words: str | Path) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path / "notebooks", env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def templates(play: Play) -> list[str]:
    """Return the kernels whose templates the installed version can read."""
    listed = json.loads(play("-m", "sandbox_provisioner.cli", "template", "list", "--json"))
    return [template["kernel_name"] for template in listed if template["size"]]


def test_older_state_is_used(play: Play, tmp_path: Path) -> None:
    packages, notebooks = tmp_path / "packages", tmp_path / "notebooks"
    install_older(packages)
    play("-m", "sandbox_provisioner.cli", "setup", "--kernel", "python3")
    assert templates(play) == ["python3-sandbox"]
    play(PLAYER, "save", notebooks)

    install_present(packages)
    (listed,) = json.loads(play("-m", "sandbox_provisioner.cli", "list", "--json"))["sandboxes"]
    assert listed["notebook_path"].endswith("a.ipynb")
    play(PLAYER, "reopen", notebooks)
    assert templates(play) == ["python3-sandbox"]
    play(PLAYER, "start", notebooks)
    play("-m", "sandbox_provisioner.cli", "delete", listed["id"])
