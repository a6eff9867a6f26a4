"""Simulate machines without runsc and Jupyter data, or with a runsc of a certain version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sandbox_provisioner.gvisor import runsc as runsc_module

NEW = "20260905-160fafc42237"
OLD = "0.0~20221219.0"


def script(path: Path, text: str) -> Path:
    """Create an executable shell script, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def stand_in(path: Path, version: str = NEW) -> Path:
    """Create a program that prints this version when it is called as ``runsc --version``, and return its path."""
    return script(path, f'echo "runsc version {version}"; echo "spec: 1.2.1"')


def empty_machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Use empty folders below ``folder`` for Jupyter, the home and runsc. Return Jupyter's data folder."""
    data = folder / "data"
    for name, value in (
        ("HOME", folder / "home"),
        ("JUPYTER_DATA_DIR", data),
        ("JUPYTER_CONFIG_DIR", folder / "config"),
        ("JUPYTER_RUNTIME_DIR", folder / "runtime"),
        ("IPYTHONDIR", folder / "ipython"),
        ("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin"),
    ):
        monkeypatch.setenv(name, str(value))
    for name in ("SANDBOX_RUNSC", "RUNSC_PATH", "JUPYTER_PATH", "SANDBOX_PLATFORM", "JUPYTER_DEFAULT_PROVISIONER_NAME"):
        monkeypatch.delenv(name, raising=False)
    (folder / "home").mkdir(parents=True)
    for shared in ("ENV_JUPYTER_PATH", "SYSTEM_JUPYTER_PATH"):
        monkeypatch.setattr(f"jupyter_core.paths.{shared}", [])
    monkeypatch.setattr(runsc_module, "bin_folders", lambda: [data / "sandbox" / "bin"])
    return data
