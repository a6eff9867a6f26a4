"""Run ``jupyter sandbox`` as the user of a server that a test started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def sandbox_command(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a command with the folders of ``servers.Server(folder)``. Return its exit status and all of its output."""
    folders = {"JUPYTER_DATA_DIR": folder / "data", "JUPYTER_RUNTIME_DIR": folder / "runtime"}
    env = {**os.environ, **{name: str(path) for name, path in folders.items()}}
    argv = [sys.executable, "-m", "sandbox_provisioner.cli", *arguments]
    done = subprocess.run(argv, env=env, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout
