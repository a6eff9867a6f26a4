"""SandboxManager: what it refuses before anything exists, and what it does by itself, on real runsc."""

from __future__ import annotations

import asyncio
import errno
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from recover_sandbox import in_child, recover
from value_program import LONG, close_all, start_program, tell

from sandbox_provisioner.config import GCSConfig, Place
from sandbox_provisioner.errors import (
    ConfigurationError,
    LeaseHeldError,
    SandboxError,
    SandboxNotFoundError,
    StateError,
)
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.runtime_dir import kill_processes, read_note, runtime_root, scan
from sandbox_provisioner.gvisor.state import State
from sandbox_provisioner.sandbox import supervisor
from sandbox_provisioner.sandbox.handle import HandleObserver, SandboxHandle
from sandbox_provisioner.sandbox.manager import SandboxManager
from sandbox_provisioner.sandbox.start_request import Features

Serve = Callable[..., SandboxManager]


@pytest.fixture
async def serve(runsc: Runsc, tmp_path: Path) -> AsyncIterator[Serve]:
    """Makes managers, each of a server of its own, over the same storage."""
    made: list[SandboxManager] = []

    def serve(name: str = "first") -> SandboxManager:
        made.append(SandboxManager(GCSConfig(folder=tmp_path / "storage"), runsc, name))
        return made[-1]

    yield serve
    for manager in made:
        await close_all(manager)


class Observer(HandleObserver):
    """Answers that a sandbox is busy, and remembers why it is gone."""

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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.02)


async def test_what_the_server_cannot_do_is_refused_before_anything_exists(
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
async def test_sandbox_without_place_for_checkpoints(runsc: Runsc, spec: BundleSpec, tmp_path: Path) -> None:
    """It has a lease and a document, runs, and ends with its server; its memory cannot be saved."""
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
async def test_checkpoint_is_not_ignored_without_place_for_checkpoints(
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


STAGING = """
import asyncio, sys
from pathlib import Path
from sandbox_provisioner.persistence.staging import staging

async def main():
    async with staging(Path(sys.argv[1])) as folder:
        (folder / "image").mkdir()
        (folder / "image" / "pages.img").write_bytes(b"x" * 5000)
        print(folder, flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""


def stage(folder: Path) -> subprocess.Popen[str]:
    """Start a process that stages an image in ``folder``."""
    command = [sys.executable, "-c", STAGING, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_recovery_removes_staged_images_of_killed_servers(serve: Serve) -> None:
    manager = serve()
    servers = [stage(manager.stores.staging) for _ in range(2)]
    try:
        folders = [Path(server.stdout.readline().strip()) for server in servers if server.stdout]
        servers[0].kill()
        servers[0].wait()
        assert all((folder / "image" / "pages.img").exists() for folder in folders)
        await manager.recover()
        assert [folder.exists() for folder in folders] == [False, True]
    finally:
        for server in servers:
            server.communicate()


async def test_a_server_that_can_only_keep_snapshots_has_ephemeral_sandboxes(
    runsc: Runsc, spec: BundleSpec, tmp_path: Path
) -> None:
    config = GCSConfig(tmp_path / "own", snapshots=Place("FILESYSTEM_SNAPSHOT", mount=tmp_path))
    assert SandboxManager(config, runsc).create_ephemeral("box", spec).sandbox_id == "box"


@pytest.mark.parametrize("name", ["../box", "", "a/b"])
async def test_a_bad_id_is_refused(serve: Serve, spec: BundleSpec, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid sandbox id"):
        await serve().create(name, spec)


async def test_one_that_it_does_not_have_is_an_error(serve: Serve) -> None:
    with pytest.raises(SandboxNotFoundError, match="no sandbox box in first"):
        serve().get("box")


async def test_one_that_it_has_is_not_attached_twice(serve: Serve, spec: BundleSpec) -> None:
    manager = serve()
    await manager.create("box", spec)
    with pytest.raises(StateError):
        await manager.attach("box", spec)


@pytest.mark.runsc
async def test_a_sandbox_is_created_saved_and_attached_by_another_server(serve: Serve, spec: BundleSpec) -> None:
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
async def test_one_is_handed_over_to_the_server_that_asks(serve: Serve, spec: BundleSpec) -> None:
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
async def test_an_idle_one_is_saved_and_a_busy_one_is_not(serve: Serve, spec: BundleSpec) -> None:
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
async def test_watch_survives_unexpected_error(
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
    assert caplog.text.count("background task failed") == 2
    other = serve("second")
    await other.attach("box", spec, patience=LONG)  # hand-off works, too


@pytest.mark.runsc
async def test_a_sandbox_that_cannot_be_saved_stays_open_until_it_can(serve: Serve, spec: BundleSpec) -> None:
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
async def test_files_pass_from_one_sandbox_to_another(serve: Serve, spec: BundleSpec) -> None:
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


# -- servers that were killed ----------------------------------------------------------------------------------------

VICTIM = """
    import asyncio, os, pickle, sys
    sys.path.insert(0, {tests!r})
    from cell import start_program, tell
    from sandbox_provisioner.config import GCSConfig
    from sandbox_provisioner.sandbox.manager import SandboxManager

    async def main():
        spec, runsc, folder = pickle.loads(bytes.fromhex(sys.argv[1]))
        manager = SandboxManager(GCSConfig(folder=folder), runsc, "victim")
        for name in sys.argv[2:]:
            handle = await manager.create(name, spec)
            await manager.get(name).start()
            await start_program(handle)
            await tell(handle, "set " + name)
        os.kill(os.getpid(), 9)

    asyncio.run(main())
"""


def fall_victim(spec: BundleSpec, runsc: Runsc, storage: Path, *names: str) -> None:
    """Let a server start sandboxes and be killed."""
    code = textwrap.dedent(VICTIM).format(tests=str(Path(__file__).parents[2] / "support"))
    given = pickle.dumps((spec, runsc, storage)).hex()
    ended = subprocess.run([sys.executable, "-c", code, given, *names], capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr


@pytest.mark.runsc
async def test_a_killed_servers_sandboxes_are_found_saved_and_restored_as_they_were(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, runtime: Path
) -> None:
    fall_victim(spec, runsc, tmp_path / "storage", "a", "b")
    manager = serve()
    recovered = await manager.recover()
    assert {(one.sandbox_id, one.saved, one.problem) for one in recovered} == {("a", True, ""), ("b", True, "")}
    assert list(runtime.iterdir()) == []
    for name in ("a", "b"):
        handle = await manager.attach(name, spec)
        assert handle.metadata.checkpoint is not None
        assert handle.metadata.checkpoint.files
        await manager.get(name).restore()
        assert await tell(handle, "get") == name


@pytest.mark.runsc
async def test_attaching_to_one_saves_it_first(serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path) -> None:
    fall_victim(spec, runsc, tmp_path / "storage", "a")
    manager = serve()
    handle = await manager.attach("a", spec)
    await manager.get("a").restore()
    assert await tell(handle, "get") == "a"


@pytest.mark.runsc
async def test_attach_sees_an_orphan_that_another_scan_looks_at(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path
) -> None:
    fall_victim(spec, runsc, tmp_path / "storage", "a")
    manager, looking, go_on = serve(), threading.Event(), threading.Event()

    def look(note: object) -> bool:
        looking.set()
        return not go_on.wait(LONG)

    other = asyncio.create_task(asyncio.to_thread(scan, look))
    await asyncio.to_thread(looking.wait, LONG)
    attaching = asyncio.create_task(manager.attach("a", spec))
    await asyncio.wait({attaching}, timeout=1)
    go_on.set()
    handle = await attaching
    assert await other == ([], [])
    await manager.get("a").restore()
    assert await tell(handle, "get") == "a"


@pytest.mark.runsc
async def test_attach_waits_for_a_rescue_by_another(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path
) -> None:
    """Another thread of this process, as a server has it, or another process."""
    fall_victim(spec, runsc, tmp_path / "storage", "a", "b")
    for name, rescuer in (("a", asyncio.to_thread), ("b", in_child)):
        manager = serve()
        recovering = asyncio.create_task(rescuer(recover, runsc, tmp_path / "storage", name))  # type: ignore[operator]
        (runtime,) = (path for path in runtime_root().iterdir() if (read_note(path) or {}).get("sandbox_id") == name)
        await until(lambda marker=runtime / "rescued": marker.exists())  # type: ignore[misc]
        handle = await manager.attach(name, spec, patience=LONG)
        await manager.get(name).restore()
        assert await tell(handle, "get") == name
        await recovering


@pytest.mark.runsc
async def test_one_that_another_server_went_on_without_becomes_a_savepoint(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fall_victim(spec, runsc, tmp_path / "storage", "a")
    with monkeypatch.context() as on_another_machine:
        on_another_machine.setenv("SANDBOX_RUNTIME_DIR", str(tmp_path / "other"))
        elsewhere = serve("other")
        handle = await elsewhere.attach("a", spec)
        await elsewhere.get("a").start()
        await start_program(handle)
        await tell(handle, "set newer")
        await elsewhere.get("a").save()
        await elsewhere.close(elsewhere.get("a"), save=False)
    manager = serve()
    (one,) = await manager.recover()
    assert one.saved and list(runtime.iterdir()) == []
    handle = await manager.attach("a", spec)
    await manager.get("a").restore()
    assert await tell(handle, "get") == "newer"
    (name,) = handle.metadata.savepoints
    await manager.get("a").rewind(name)
    assert await tell(handle, "get") == "a"


@pytest.mark.runsc
async def test_one_that_cannot_be_saved_runs_on_until_it_can(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, runtime: Path
) -> None:
    fall_victim(spec, runsc, tmp_path / "storage", "a")
    checkpoints = tmp_path / "storage" / "sandboxes" / "a" / "checkpoints"
    checkpoints.write_text("in the way")
    manager = serve()
    (one,) = await manager.recover()
    assert (one.sandbox_id, one.saved, one.runs_on) == ("a", False, True)
    with pytest.raises(SandboxError, match="runs on since its server was killed, and was not saved"):
        await manager.attach("a", spec)
    assert len(list(runtime.iterdir())) == 1
    checkpoints.unlink()
    handle = await manager.attach("a", spec)
    await manager.get("a").restore()
    assert await tell(handle, "get") == "a"


async def test_only_what_was_doomed_by_those_who_keep_their_metadata_here_is_garbage(serve: Serve) -> None:
    manager = serve()
    store = manager.stores.required_checkpoints()
    for name, doomed in {"a": manager.stores.metadata.where, "b": "gs://elsewhere/", "c": ""}.items():
        store.write(f"sandboxes/{name}/checkpoints/one/file", b"left")
        if doomed:
            store.write(f"sandboxes/{name}/doomed", doomed.encode())
    await manager.recover()
    left = {info.name.split("/")[1] for info in store.list("sandboxes/")}
    assert left == {"b", "c"}


async def test_what_has_a_document_by_now_is_no_garbage(serve: Serve, spec: BundleSpec) -> None:
    manager = serve()
    await manager.create("a", spec)
    await manager.close(manager.get("a"), save=False)
    store = manager.stores.required_checkpoints()
    store.write("sandboxes/a/checkpoints/one/file", b"kept")
    store.write("sandboxes/a/doomed", manager.stores.metadata.where.encode())
    await manager.recover()
    left = {info.name for info in store.list("sandboxes/a/")} - {"sandboxes/a/lock"}
    assert left == {"sandboxes/a/checkpoints/one/file", "sandboxes/a/metadata.json"}


@pytest.mark.runsc
async def test_one_that_died_with_its_server_is_marked(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, runtime: Path
) -> None:
    fall_victim(spec, runsc, tmp_path / "storage", "a")
    for folder in runtime.iterdir():
        kill_processes(folder / "runsc")
    manager = serve()
    (one,) = await manager.recover()
    assert (one.sandbox_id, one.saved) == ("a", False)
    handle = await manager.attach("a", spec)
    assert not handle.metadata.running
    assert list(runtime.iterdir()) == []


@pytest.mark.runsc
async def test_another_storages_sandboxes_are_left_alone(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, runtime: Path
) -> None:
    fall_victim(spec, runsc, tmp_path / "elsewhere", "a")
    assert await serve().recover() == []
    elsewhere = SandboxManager(GCSConfig(folder=tmp_path / "elsewhere"), runsc)
    (one,) = await elsewhere.recover()
    assert one.saved
