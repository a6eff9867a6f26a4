"""The examples, run as a reader of the README would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_provisioner.persistence import Persistence

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[0]


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Jupyter user who has nothing yet, with a runsc and no settings."""
    for name in [*os.environ]:
        if name.startswith(("SANDBOX_", "FILESYSTEM_")) and name not in ("SANDBOX_RUNTIME_DIR", "SANDBOX_RUNSC"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))


@pytest.mark.runsc
@pytest.mark.usefixtures("data")
def test_the_persistent_sandbox_knows_in_the_second_run_what_it_heard_in_the_first() -> None:
    assert run("persistent.py", "apple") == "Heard so far: apple"
    assert run("persistent.py", "pear") == "Heard so far: apple, pear"
    assert run("persistent.py", "plum") == "Heard so far: apple, pear, plum"
    kept = Persistence.open()
    (record,) = kept.registry.list().records
    document = kept.describe(record)
    assert document.checkpoint is not None
    assert not document.running
