"""`make demo` with the installed configuration of Jupyter Server and no settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.user

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.runsc
def test_demo_succeeds_and_leaves_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, str(DEMO)], env=env, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Every claim held." in ended.stdout
    assert list(tmp_path.iterdir()) == []
    assert list(Path.home().glob(".sandbox-demo-*")) == []
