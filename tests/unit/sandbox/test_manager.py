"""Test SandboxManager with real sandboxes: find or create, refuse, hand over, save idle ones, close and delete."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gcs_faults import MUTATIONS
from gcs_server import GCS
from value_program import LONG, start_program, tell, until

from sandbox_provisioner.config import GCSConfig, Place
from sandbox_provisioner.errors import ConfigurationError, LeaseHeldError, SandboxNotFoundError, StateError
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.state import State
from sandbox_provisioner.sandbox import supervisor
from sandbox_provisioner.sandbox.handle import HandleObserver, SandboxHandle
from sandbox_provisioner.sandbox.manager import SandboxManager
from sandbox_provisioner.sandbox.registry import PersistentSandboxRegistry
from sandbox_provisioner.sandbox.start_request import Features, StartRequest
from sandbox_provisioner.sandbox.user_sandboxes import registry

Serve = Callable[..., SandboxManager]

LIMIT = 20

NOTEBOOK = StartRequest("python3-sandbox", "/work/a.ipynb", user="me")
MINE = StartRequest("python3-sandbox", "/work/a.ipynb", "mine", user="me")


class Observer(HandleObserver):
    """Reports the given busy state, and records the reasons passed to ``gone``."""

    def __init__(self, busy: Callable[[], bool] = lambda: False) -> None:
        self.is_busy = busy
        self.reasons: list[str] = []

    def busy(self) -> bool:
        return self.is_busy()

    def gone(self, reason: str) -> None:
        self.reasons.append(reason)


async def begin(
    manager: SandboxManager,
    spec: BundleSpec,
    name: str = "box",
    observer: HandleObserver | None = None,
    **features: object,
) -> SandboxHandle:
    handle = await manager.create(name, spec, features=Features(**features))  # type: ignore[arg-type]
    handle.observer = observer or HandleObserver()
    await manager.get(name).start()
    await start_program(handle)
    return handle


async def test_unsupported_features_are_refused_before_anything_is_stored(
    runsc: Runsc, spec: BundleSpec, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    places = {"metadata": Place("SANDBOX_METADATA", mount=shared), "locks": Place("SANDBOX_LOCK", mount=shared)}
    nowhere = GCSConfig(tmp_path / "own", **places)
    manager = SandboxManager(nowhere, runsc)
    with pytest.raises(ConfigurationError, match="SANDBOX_CHECKPOINT_BUCKET"):
        await manager.create("box", spec, features=Features(enable_handoff=True))
    with pytest.raises(ConfigurationError, match="SANDBOX_CHECKPOINT_BUCKET"):
        await manager.create("box", spec, features=Features(enable_checkpoint_at_idle=True))
    assert list(shared.iterdir()) == []


@pytest.mark.runsc
async def test_sandbox_without_checkpoint_storage(runsc: Runsc, spec: BundleSpec, tmp_path: Path) -> None:
    """Such a sandbox has a lease and a document. It ends with its server, because its memory cannot be saved."""
    shared = tmp_path / "shared"
    shared.mkdir()
    places = {"metadata": Place("SANDBOX_METADATA", mount=shared), "locks": Place("SANDBOX_LOCK", mount=shared)}
    manager, other = (SandboxManager(GCSConfig(tmp_path / "own", **places), runsc, name) for name in ("one", "two"))
    handle = await begin(manager, spec)
    assert handle.metadata.running and not handle.instance.spec.outlives
    with pytest.raises(LeaseHeldError):
        await other.attach("box", spec)
    with pytest.raises(ConfigurationError, match="SANDBOX_CHECKPOINT_BUCKET"):
        await manager.get("box").save()
    assert await tell(handle, "set 1") == await tell(handle, "get") == "1"
    await manager.close(handle, save=True)
    again = await other.attach("box", spec)
    assert not again.saved
    await other.get("box").start()
    await other.close(again, save=True)
    await other.delete("box")
    assert not list(shared.rglob("metadata.json"))


@pytest.mark.runsc
async def test_sandbox_with_checkpoint_is_refused_without_checkpoint_storage(
    runsc: Runsc, spec: BundleSpec, tmp_path: Path
) -> None:
    """A server that cannot read a sandbox's checkpoint does not start it empty."""
    stems = {"metadata": "SANDBOX_METADATA", "locks": "SANDBOX_LOCK", "checkpoints": "SANDBOX_CHECKPOINT"}
    places = {key: Place(stem, mount=tmp_path) for key, stem in stems.items()}
    manager = SandboxManager(GCSConfig(tmp_path / "own", **places), runsc)
    await begin(manager, spec)
    await manager.close(manager.get("box"), save=True)
    del places["checkpoints"]
    other = SandboxManager(GCSConfig(tmp_path / "own", **places), runsc)
    with pytest.raises(ConfigurationError, match="SANDBOX_CHECKPOINT_BUCKET"):
        await other.attach("box", spec)
    handle = await manager.attach("box", spec)
    assert handle.saved
    await manager.delete("box")


async def test_ephemeral_sandbox_with_only_snapshot_storage(runsc: Runsc, spec: BundleSpec, tmp_path: Path) -> None:
    config = GCSConfig(tmp_path / "own", snapshots=Place("FILESYSTEM_SNAPSHOT", mount=tmp_path))
    assert SandboxManager(config, runsc).create_ephemeral("box", spec).sandbox_id == "box"


@pytest.mark.parametrize("name", ["../box", "", "a/b"])
async def test_invalid_id_is_refused(serve: Serve, spec: BundleSpec, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid sandbox id"):
        await serve().create(name, spec)


async def test_get_of_unknown_id_is_refused(serve: Serve) -> None:
    with pytest.raises(SandboxNotFoundError, match="no sandbox box in first"):
        serve().get("box")


async def test_open_sandbox_is_not_attached_again(serve: Serve, spec: BundleSpec) -> None:
    manager = serve()
    await manager.create("box", spec)
    with pytest.raises(StateError):
        await manager.attach("box", spec)


@pytest.mark.runsc
async def test_saved_sandbox_is_attached_by_another_server(serve: Serve, spec: BundleSpec) -> None:
    first, second = serve("first"), serve("second")
    handle = await begin(first, spec)
    await tell(handle, "set 1")
    await first.get("box").save()
    with pytest.raises(LeaseHeldError, match="first"):
        await second.attach("box", spec)
    await first.close(first.get("box"), save=True)
    handle = await second.attach("box", spec)
    await second.get("box").restore()
    assert await tell(handle, "get") == "1"
    assert await second.delete("box") > 0
    with pytest.raises(SandboxNotFoundError):
        await second.attach("box", spec)


@pytest.mark.runsc
async def test_hand_off_to_another_server(serve: Serve, spec: BundleSpec) -> None:
    first, second = serve("first"), serve("second")
    observer = Observer()
    handle = await begin(first, spec, observer=observer, enable_handoff=True)
    await tell(handle, "set 1")
    handle = await second.attach("box", spec, patience=LONG)
    await second.get("box").restore()
    assert await tell(handle, "get") == "1"
    await until(lambda: bool(observer.reasons))
    assert observer.reasons == ["another server asked for it"]
    assert first.handles == {}


@pytest.mark.runsc
async def test_idle_sandbox_is_saved_and_busy_one_is_not(serve: Serve, spec: BundleSpec) -> None:
    manager = serve()
    busy = True
    handle = await begin(
        manager, spec, observer=Observer(lambda: busy), enable_checkpoint_at_idle=True, idle_timeout=0.3
    )
    await tell(handle, "set 1")
    await asyncio.sleep(0.6)
    assert handle.instance.state == State.RUNNING
    busy = False
    await until(lambda: handle.instance.state == State.CHECKPOINTED)
    await manager.get("box").restore()
    assert await tell(handle, "get") == "1"
    await until(lambda: handle.instance.state == State.CHECKPOINTED)


@pytest.mark.runsc
async def test_supervisor_continues_after_unexpected_errors(
    serve: Serve, spec: BundleSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "PAUSE", 0.1)
    manager, failures = serve(), [MemoryError("no memory"), OSError(errno.EMFILE, "too many open files")]

    def busy() -> bool:
        if failures:
            raise failures.pop()
        return False

    features = {"enable_handoff": True, "enable_checkpoint_at_idle": True, "idle_timeout": 0.2}
    handle = await begin(manager, spec, observer=Observer(busy), **features)
    await until(lambda: handle.instance.state == State.CHECKPOINTED)
    assert caplog.text.count("error in the idle timer") == 2
    other = serve("second")
    await other.attach("box", spec, patience=LONG)  # the hand-off still works


@pytest.mark.runsc
async def test_sandbox_stays_open_until_it_can_be_saved(serve: Serve, spec: BundleSpec) -> None:
    first = serve("first")
    for name in ("a", "b", "c"):
        await tell(await begin(first, spec, name), f"set {name}")
    broken = first.get("c")
    broken.instance._container._runsc = Runsc(Path("/nowhere"), "0")
    closing = {name: asyncio.create_task(first.close(first.get(name), save=True)) for name in ("a", "b", "c")}
    await asyncio.gather(closing["a"], closing["b"])
    assert list(first.handles) == ["c"] and not closing["c"].done()  # runsc is called again until it works
    broken.instance._container._runsc = first._runsc
    await asyncio.gather(closing["c"], return_exceptions=True)
    await first.close(broken, save=True)
    second = serve("second")
    for name in ("a", "b", "c"):
        handle = await second.attach(name, spec)
        await second.get(name).restore()
        assert await tell(handle, "get") == name


@pytest.mark.runsc
async def test_snapshot_is_loaded_into_another_sandbox(serve: Serve, spec: BundleSpec) -> None:
    manager = serve()
    one = manager.create_ephemeral("one", spec)
    await manager.get("one").start()
    process = await one.instance.execute(["/bin/sh", "-c", "echo kept > ~/kept"])
    assert await process.wait() == 0
    await manager.get("one").save_snapshot("mine")
    two = await begin(manager, spec, "two")
    await manager.get("two").load_snapshot("one", "mine")
    process = await two.instance.execute(["/bin/sh", "-c", "cat ~/kept"])
    assert (await process.read())[0] == b"kept\n"


# -- find or create -------------------------------------------------------------------------------------------------


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that simulates another machine: with another data folder, and so another registry."""

    def move(machine: str) -> None:
        monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / machine))

    monkeypatch.setenv("LOGNAME", "me")
    move("here")
    return move


@pytest.fixture
async def manager(runsc: Runsc, tmp_path: Path, move: Callable[[str], None]) -> AsyncIterator[SandboxManager]:
    """Return a manager; its sandboxes are closed after the test."""
    manager = SandboxManager.shared(GCSConfig(tmp_path / "storage"), runsc, "server")
    yield manager
    for handle in list(manager.handles.values()):
        await manager.close(handle, save=False)


async def open_once(manager: SandboxManager, request: StartRequest = NOTEBOOK) -> str:
    """Open a sandbox, close it and return its id."""
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


async def test_notebook_and_kernel_have_the_same_sandbox_on_every_machine(
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


async def test_open_sandbox_is_not_opened_again(manager: SandboxManager) -> None:
    handle = await manager.open(MINE)
    with pytest.raises(LeaseHeldError, match="in use by server"):
        await manager.open(MINE)
    assert manager.get("mine") is handle and not handle.closed


async def test_hand_off_between_kernels_of_one_server(manager: SandboxManager) -> None:
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


async def test_second_kernel_of_a_notebook_gets_and_keeps_a_new_sandbox(
    manager: SandboxManager,
) -> None:
    first = await manager.open(NOTEBOOK)
    second = await manager.open(NOTEBOOK)
    assert second.sandbox_id != first.sandbox_id
    await manager.delete(first.sandbox_id)
    await manager.close(second, save=False)
    assert await open_once(manager) == second.sandbox_id


async def test_renamed_notebook_keeps_its_sandbox(manager: SandboxManager, move: Callable[[str], None]) -> None:
    handle = await manager.open(NOTEBOOK)
    await handle.follow("/work/new.ipynb")
    await manager.close(handle, save=False)
    new = replace(NOTEBOOK, notebook_path="/work/new.ipynb")
    assert await open_once(manager, new) == handle.sandbox_id
    assert await open_once(manager) != handle.sandbox_id
    move("elsewhere")
    assert await open_once(manager) != handle.sandbox_id


async def test_requested_id_is_used(manager: SandboxManager) -> None:
    assert await open_once(manager, MINE) == "mine"


async def test_missing_gcs_settings_are_refused_before_anything_is_stored(
    manager: SandboxManager, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        await manager.open(StartRequest("python3-sandbox", "", "mine", gcs=True, user="me"))
    assert refusal.value.setting == "SANDBOX_LOCK_BUCKET"
    assert not (tmp_path / "storage").exists()
    assert registry().list().records == []


async def test_gcs_id_needs_only_lock_and_metadata_buckets(
    gcs: GCS, runsc: Runsc, tmp_path: Path, move: Callable[[str], None]
) -> None:
    """The lease of a new sandbox is acquired once: Google allows about one change of an object per second."""
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


async def test_concurrent_opens_get_different_sandboxes(manager: SandboxManager) -> None:
    first, second = await asyncio.gather(manager.open(NOTEBOOK), manager.open(NOTEBOOK))
    assert first.sandbox_id != second.sandbox_id
    assert [handle.lease.wanted.is_set() for handle in (first, second)] == [False, False]
