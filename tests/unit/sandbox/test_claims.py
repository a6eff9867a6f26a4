"""SandboxManager.open: the sandbox that a start belongs to, here and on a server that shares only the storage."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gcs_faults import MUTATIONS
from gcs_server import GCS

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.errors import ConfigurationError, LeaseHeldError
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.sandbox.handle import HandleObserver, SandboxHandle
from sandbox_provisioner.sandbox.manager import SandboxManager
from sandbox_provisioner.sandbox.registry import PersistentSandboxRegistry
from sandbox_provisioner.sandbox.start_request import StartRequest
from sandbox_provisioner.sandbox.user_sandboxes import registry

LIMIT = 20
Open = Callable[..., Awaitable[SandboxHandle]]

NOTEBOOK = StartRequest("python3-sandbox", "/work/a.ipynb", user="me")
MINE = StartRequest("python3-sandbox", "/work/a.ipynb", "mine", user="me")


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Goes to another machine: another data folder, and so another registry."""

    def move(machine: str) -> None:
        monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / machine))

    monkeypatch.setenv("LOGNAME", "me")
    move("here")
    return move


@pytest.fixture
async def manager(runsc: Runsc, tmp_path: Path, move: Callable[[str], None]) -> AsyncIterator[SandboxManager]:
    """The manager of a process; its sandboxes are closed after the test."""
    manager = SandboxManager.shared(GCSConfig(tmp_path / "storage"), runsc, "server")
    yield manager
    for handle in list(manager.handles.values()):
        await manager.close(handle, save=False)


async def open_once(manager: SandboxManager, request: StartRequest = NOTEBOOK) -> str:
    """The id of the sandbox that is opened, and closed again."""
    handle = await manager.open(request)
    await manager.close(handle, save=False)
    return handle.sandbox_id


async def test_one_manager_per_loop_and_configuration(manager: SandboxManager, runsc: Runsc, tmp_path: Path) -> None:
    config = GCSConfig(tmp_path / "storage")
    assert SandboxManager.shared(config, runsc, "server") is manager
    assert SandboxManager.shared(GCSConfig(tmp_path / "other"), runsc, "server") is not manager

    async def elsewhere() -> SandboxManager:
        return SandboxManager.shared(config, runsc, "server")

    assert await asyncio.to_thread(lambda: asyncio.run(elsewhere())) is not manager


async def test_a_notebook_and_kernel_have_one_sandbox_on_every_machine(
    manager: SandboxManager, move: Callable[[str], None]
) -> None:
    first = await open_once(manager)
    assert await open_once(manager) == first
    move("elsewhere")
    assert await open_once(manager) == first
    assert await open_once(manager, replace(NOTEBOOK, kernel_name="ir-sandbox")) != first
    assert await open_once(manager, replace(NOTEBOOK, notebook_path="/work/b.ipynb")) != first
    move("yours")
    assert await open_once(manager, replace(NOTEBOOK, user="you")) != first


async def test_one_in_use_is_refused_with_its_owner(manager: SandboxManager) -> None:
    handle = await manager.open(MINE)
    with pytest.raises(LeaseHeldError, match="in use by server"):
        await manager.open(MINE)
    assert manager.get("mine") is handle and not handle.closed


async def test_another_kernel_of_this_server_takes_it_over_if_hand_off_is_enabled(manager: SandboxManager) -> None:
    class Observer(HandleObserver):
        reasons: tuple[str, ...] = ()

        def gone(self, reason: str) -> None:
            self.reasons += (reason,)

    polite, observer = replace(MINE, enable_handoff=True, patience=LIMIT), Observer()
    first = await manager.open(polite)
    first.observer = observer
    second = await manager.open(polite)
    assert first.closed and observer.reasons == ("another server asked for it",)
    assert manager.get("mine") is second


async def test_failed_open_releases_the_lease(manager: SandboxManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(PersistentSandboxRegistry, "record", fail)
        await manager.open(NOTEBOOK)
    assert manager.handles == {}
    await manager.open(NOTEBOOK)


async def test_cancelled_open_releases_the_lease(manager: SandboxManager, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(*args: object, **kwargs: object) -> None:
        reached.set()
        go_on.wait(LIMIT)

    with monkeypatch.context() as slow:
        slow.setattr(PersistentSandboxRegistry, "record", wait)
        opening = asyncio.create_task(manager.open(NOTEBOOK))
        await asyncio.to_thread(reached.wait, LIMIT)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        go_on.set()
    assert manager.handles == {}
    await manager.open(NOTEBOOK)


async def test_a_notebook_that_changes_its_kernel_for_the_same_gets_a_new_sandbox_and_keeps_that(
    manager: SandboxManager,
) -> None:
    first = await manager.open(NOTEBOOK)
    second = await manager.open(NOTEBOOK)
    assert second.sandbox_id != first.sandbox_id
    await manager.delete(first.sandbox_id)
    await manager.close(second, save=False)
    assert await open_once(manager) == second.sandbox_id


async def test_a_renamed_notebook_takes_its_sandbox_along(manager: SandboxManager, move: Callable[[str], None]) -> None:
    handle = await manager.open(NOTEBOOK)
    await handle.follow("/work/new.ipynb")
    await manager.close(handle, save=False)
    new = replace(NOTEBOOK, notebook_path="/work/new.ipynb")
    assert await open_once(manager, new) == handle.sandbox_id
    assert await open_once(manager) != handle.sandbox_id
    move("elsewhere")
    assert await open_once(manager) != handle.sandbox_id


async def test_an_id_of_the_users_own_wins(manager: SandboxManager) -> None:
    assert await open_once(manager, MINE) == "mine"


async def test_gcs_is_demanded_before_anything_is_made(manager: SandboxManager, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        await manager.open(StartRequest("python3-sandbox", "", "mine", gcs=True, user="me"))
    assert refusal.value.setting == "SANDBOX_LOCK_BUCKET"
    assert not (tmp_path / "storage").exists()
    assert registry().list().records == []


async def test_gcs_id_needs_only_lock_and_metadata_buckets(
    gcs: GCS, runsc: Runsc, tmp_path: Path, move: Callable[[str], None]
) -> None:
    """The lease of a new sandbox is taken once: Google allows about one change of an object per second."""
    buckets = {"SANDBOX_LOCK_BUCKET": gcs.bucket, "SANDBOX_METADATA_BUCKET": gcs.bucket}
    manager = SandboxManager(GCSConfig.from_environment(tmp_path / "own", buckets), runsc, "server")
    request = StartRequest("python3-sandbox", "", "mine", gcs=True, user="me")
    for feature in ("enable_handoff", "enable_checkpoint_at_idle"):
        with pytest.raises(ConfigurationError) as refusal:
            await manager.open(replace(request, **{feature: True}))
        assert refusal.value.setting == "SANDBOX_CHECKPOINT_BUCKET"
    assert [name for _, name in gcs.requests() if name] == []
    await manager.open(request)
    changes = [name for operation, name in gcs.requests() if operation in MUTATIONS]
    assert sorted(changes) == ["sandboxes/mine/lock", "sandboxes/mine/metadata.json"]
    await manager.delete("mine")


async def test_deletion_also_deletes_the_record(manager: SandboxManager) -> None:
    handle = await manager.open(NOTEBOOK)
    assert [record.sandbox_id for record in registry().list().records] == [handle.sandbox_id]
    await manager.delete(handle.sandbox_id)
    assert registry().list().records == []
    assert [info.name for info in manager.stores.metadata.list("sandboxes/")] == []


async def test_two_opens_at_once_do_not_take_the_sandbox_from_each_other(manager: SandboxManager) -> None:
    first, second = await asyncio.gather(manager.open(NOTEBOOK), manager.open(NOTEBOOK))
    assert first.sandbox_id != second.sandbox_id
    assert [handle.lease.wanted.is_set() for handle in (first, second)] == [False, False]
