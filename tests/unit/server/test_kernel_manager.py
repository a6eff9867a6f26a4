"""Test SandboxKernelManager after a cancelled start, after a hand-off to another server, and while a server stops."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_server.prometheus.metrics import KERNEL_CURRENTLY_RUNNING_TOTAL
from notebooks import Notebook, until
from servers import READY, Server

from sandbox_provisioner.io_thread import IO
from sandbox_provisioner.lock.base import Clock, Owner
from sandbox_provisioner.lock.local import LocalAttempt
from sandbox_provisioner.persistence.backends import LEASES
from sandbox_provisioner.persistence.names import lock_name
from sandbox_provisioner.server.kernel_manager import SandboxKernelManager, sandboxed_kernels
from sandbox_provisioner.storage.folder import GENERATION

pytestmark = pytest.mark.runsc

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


@pytest.fixture
def manager(kernelspecs: KernelSpecManager, notebook_folder: Path, data: Path) -> SandboxKernelManager:
    """The kernel manager of a server."""
    return SandboxKernelManager(root_dir=str(notebook_folder), kernel_spec_manager=kernelspecs)


def environment(notebook: Path) -> dict[str, str]:
    return {**os.environ, "JPY_SESSION_NAME": str(notebook)}


async def test_server_stops_after_cancelled_start(
    manager: SandboxKernelManager, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    name = sandboxed(on_shutdown="delete")
    starting = asyncio.create_task(manager.start_kernel(kernel_name=name, env=environment(notebook_folder / "a.ipynb")))
    while not manager._pending_kernels:
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert manager._pending_kernels == {}
    await manager.shutdown_all()


async def test_hand_off_closes_connections_to_the_kernel(
    manager: SandboxKernelManager, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    name = sandboxed()
    running = KERNEL_CURRENTLY_RUNNING_TOTAL.labels(type=name)
    before = running._value.get()
    kernel_id = await manager.start_kernel(kernel_name=name, env=environment(notebook_folder / "a.ipynb"))
    kernel = manager.get_kernel(kernel_id)
    channels = {channel: getattr(kernel, f"connect_{channel}")() for channel in ("shell", "control", "iopub", "stdin")}
    manager.start_buffering(kernel_id, "a tab that was closed", channels)
    control = kernel._control_socket
    provisioner: Any = kernel.provisioner
    await IO.run(provisioner._manager.close(provisioner.handle, save=True, reason="another server asked for it"))
    await manager._check_kernels()
    assert [channel for channel, stream in channels.items() if not stream.closed()] == []
    assert control.closed
    assert kernel_id not in manager
    assert running._value.get() == before
    await manager.shutdown_all()


async def test_kernels_are_listed_during_a_start(
    manager: SandboxKernelManager, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    env = environment(notebook_folder / "a.ipynb")
    starting = asyncio.create_task(manager.start_kernel(kernel_name=sandboxed(), env=env))
    while not starting.done():
        assert list(sandboxed_kernels(manager)) in ([], manager.list_kernel_ids())
        assert [model["id"] for model in manager.list_kernels()] == manager.list_kernel_ids()
        await asyncio.sleep(0)
    assert list(sandboxed_kernels(manager)) == [await starting]
    await manager.shutdown_all()


async def test_clients_do_not_wake_kernels_of_a_stopping_server(
    manager: SandboxKernelManager, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    env = environment(notebook_folder / "a.ipynb")
    kernel = manager.get_kernel(await manager.start_kernel(kernel_name=sandboxed(), env=env))
    provisioner: Any = kernel.provisioner
    client = kernel.client()
    client.start_channels()
    await client.wait_for_ready(timeout=READY)
    provisioner.keep_state()
    await provisioner.hibernate()
    client.kernel_info()
    while not provisioner._kernel.relay.called:
        await asyncio.sleep(0.01)
    assert provisioner._kernel._waking is None
    client.stop_channels()
    await manager.shutdown_all()


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a storage folder that the test can access, and return it."""
    monkeypatch.setenv("SANDBOX_STORAGE_DIR", str(tmp_path / "storage"))
    return tmp_path / "storage"


def test_start_does_not_wait_for_other_orphans(serve: Serve, sandboxed: Sandboxed, storage: Path) -> None:
    """Recovery cannot save the orphan while the test holds its lease, so recovery still runs during the start."""
    kernel = sandboxed()
    killed = serve()
    orphan = Notebook(killed, kernel, "orphan.ipynb")
    orphan.run("x = 5")
    orphan.close()
    (sandbox_id,) = [one["sandbox_id"] for one in killed.ask("GET", "sandboxes")[1]["items"]]
    killed.kill()
    lease = LocalAttempt(storage / LEASES, lock_name(sandbox_id), Owner.here("the test"), Clock())
    assert lease.take()
    try:
        server = serve()
        notebook = Notebook(server, kernel, "another.ipynb")
        assert notebook.run("1 + 1") == "2"
        notebook.close()
        assert "whose server was killed" not in server.log.read_text()
    finally:
        lease.abandon()
    back = Notebook(server, kernel, "orphan.ipynb")
    assert back.run("x") == "5"
    back.close()


@contextmanager
def locked_store(folder: Path) -> Iterator[None]:
    """Hold the lock of a local store, so that nothing else can write to it."""
    with (folder / GENERATION).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_stop_saves_kernels_while_a_rename_is_stored(serve: Serve, sandboxed: Sandboxed, storage: Path) -> None:
    kernel = sandboxed()
    server = serve()
    notebook = Notebook(server, kernel, "old.ipynb")
    notebook.run("x = 5")
    notebook.close()
    registry = server.runtime.parent / "data" / "sandbox" / "registry"
    with locked_store(registry):
        assert server.ask("PATCH", f"sessions/{notebook.session['id']}", {"path": "new.ipynb"})[0] == 200
        server.process.terminate()
        until(lambda: " hibernated in " in server.log.read_text())
        assert "was not stored" not in server.log.read_text()  # it is still being stored
    server.stop()
    back = Notebook(serve(), kernel, "new.ipynb")
    assert back.run("x") == "5"
    back.close()
