"""Kernels start even if another user created the default runtime folder first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from kernels import run

from sandbox_provisioner.gvisor import runtime_dir

pytestmark = pytest.mark.debian

Start = Callable[..., tuple[KernelManager, BlockingKernelClient]]


if os.geteuid() == 0:  # only root can create a folder that another user owns

    @pytest.mark.runsc
    def test_squatted_folder(
        start_kernel: Start,
        sandboxed: Callable[..., str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        request: pytest.FixtureRequest,
    ) -> None:
        squatted = Path(f"/tmp/jupyter-sandbox-{os.geteuid()}")
        if squatted.exists():
            squatted = tmp_path / "squatted"
            monkeypatch.setattr(runtime_dir, "_fixed_root", lambda: squatted)
        squatted.mkdir()
        request.addfinalizer(lambda: shutil.rmtree(squatted))
        os.chown(squatted, 65534, 65534)
        monkeypatch.delenv("SANDBOX_RUNTIME_DIR")
        monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
        root = runtime_dir.runtime_root()
        request.addfinalizer(lambda: shutil.rmtree(root, ignore_errors=True))
        km, kc = start_kernel(sandboxed())
        assert run(kc, "1 + 1") == "2"
        assert root != squatted and len(list(root.iterdir())) == 1
        km.shutdown_kernel(now=True)
        assert list(squatted.iterdir()) == [] and list(root.iterdir()) == []
