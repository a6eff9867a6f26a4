"""Jupyter's restarter starts no new kernel in place of one whose state still exists."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full_disks import use_full_disk
from jupyter_client.kernelspec import KernelSpecManager
from kernels import run
from notebooks import Notebook
from servers import Server
from traitlets.config import Config

from sandbox_provisioner.io_thread import IO
from sandbox_provisioner.server.kernel_manager import SandboxKernelManager

pytestmark = pytest.mark.runsc

OFTEN = 0.02
"""Seconds between two checks of the restarter: it checks the kernels all the time."""
POLLING = f"--AsyncIOLoopKernelRestarter.time_to_dead={OFTEN}"
STUBBORN = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print('begun'); time.sleep(600)"
"""Makes a plain kernel ignore its shutdown, so that the server's stop takes seconds."""

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; while it exists, checkpoints fail as on a full disk."""
    return use_full_disk(tmp_path, monkeypatch)


def test_kernel_that_was_left_running_is_not_restarted(serve: Serve, sandboxed: Sandboxed, full_disk: Path) -> None:
    kernel = sandboxed()
    server = serve(POLLING)
    notebook = Notebook(server, kernel)
    notebook.run("x = 42")
    plain = server.client(server.open_notebook("python3", "plain.ipynb")[1]["kernel"]["id"])
    plain.wait_for_ready(timeout=60)
    plain.execute(STUBBORN)
    while plain.get_iopub_msg(timeout=60)["msg_type"] != "stream":
        pass
    notebook.close()
    plain.stop_channels()
    full_disk.touch()
    server.stop()
    log = server.log.read_text()
    assert "keeps running; the next server saves it" in log
    assert "restarting kernel" not in log
    full_disk.unlink()
    reopened = Notebook(serve(POLLING), kernel)
    assert run(reopened.kc, "x") == "42"
    reopened.close()


async def test_kernel_is_not_restarted_during_a_hand_off(
    kernelspecs: KernelSpecManager, notebook_folder: Path, data: Path, sandboxed: Sandboxed
) -> None:
    manager = SandboxKernelManager(
        root_dir=str(notebook_folder),
        kernel_spec_manager=kernelspecs,
        config=Config({"AsyncIOLoopKernelRestarter": {"time_to_dead": OFTEN}}),
    )
    env = {**os.environ, "JPY_SESSION_NAME": str(notebook_folder / "a.ipynb")}
    name = sandboxed()
    kernel_id = await manager.start_kernel(kernel_name=name, env=env)
    provisioner: Any = manager.get_kernel(kernel_id).provisioner
    handle = provisioner.handle
    release = handle.lease.release

    async def release_slowly() -> None:
        await release()
        await asyncio.sleep(3)

    handle.lease.release = release_slowly
    await IO.run(provisioner._manager.close(handle, save=True, reason="another server asked for it"))
    assert provisioner.moved
    assert handle.sandbox_id not in provisioner._manager.handles
    assert not handle.metadata.running
    await manager._check_kernels()
    assert kernel_id not in manager
    await manager.shutdown_all()
