"""Test the recovery of sandboxes and files of killed servers, with real sandboxes."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from recover_sandbox import in_child, recover
from value_program import LONG, start_program, tell, until

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.runtime_dir import kill_processes, read_note, runtime_root, scan
from sandbox_provisioner.sandbox.manager import SandboxManager

Serve = Callable[..., SandboxManager]

VICTIM = """
    import asyncio, os, pickle, sys
    sys.path.insert(0, {tests!r})
    from value_program import start_program, tell
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


def kill_server_with(spec: BundleSpec, runsc: Runsc, storage: Path, *names: str) -> None:
    """Start sandboxes in a process that then kills itself with SIGKILL."""
    code = textwrap.dedent(VICTIM).format(tests=str(Path(__file__).parents[2] / "support"))
    given = pickle.dumps((spec, runsc, storage)).hex()
    ended = subprocess.run([sys.executable, "-c", code, given, *names], capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr


@pytest.mark.runsc
async def test_sandboxes_of_killed_server_are_saved(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, runtime: Path
) -> None:
    kill_server_with(spec, runsc, tmp_path / "storage", "a", "b")
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
async def test_attach_saves_an_orphan_first(serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path) -> None:
    kill_server_with(spec, runsc, tmp_path / "storage", "a")
    manager = serve()
    handle = await manager.attach("a", spec)
    await manager.get("a").restore()
    assert await tell(handle, "get") == "a"


@pytest.mark.runsc
async def test_orphan_is_not_restored_into_a_folder_that_became_a_link(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    elsewhere.mkdir()
    spec = replace(spec, mounts=(*spec.mounts, Mount(str(shared), "/shared", True)))
    kill_server_with(spec, runsc, tmp_path / "storage", "a")
    shared.rename(tmp_path / "moved")
    shared.symlink_to(elsewhere)
    (recovered,) = await serve().recover()
    assert recovered.saved
    assert f"a link now leads to {elsewhere}" in caplog.text


@pytest.mark.runsc
async def test_attach_waits_for_a_scan_by_another_thread(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path
) -> None:
    kill_server_with(spec, runsc, tmp_path / "storage", "a")
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
async def test_attach_waits_for_a_rescue_by_another_thread_or_process(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path
) -> None:
    kill_server_with(spec, runsc, tmp_path / "storage", "a", "b")
    for name, run in (("a", asyncio.to_thread), ("b", in_child)):
        manager = serve()
        recovering = asyncio.create_task(run(recover, runsc, tmp_path / "storage", name))  # type: ignore[operator]
        (runtime,) = (path for path in runtime_root().iterdir() if (read_note(path) or {}).get("sandbox_id") == name)
        await until(lambda marker=runtime / "rescued": marker.exists())  # type: ignore[misc]
        handle = await manager.attach(name, spec, patience=LONG)
        await manager.get(name).restore()
        assert await tell(handle, "get") == name
        await recovering


@pytest.mark.runsc
async def test_outdated_orphan_becomes_a_savepoint(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_server_with(spec, runsc, tmp_path / "storage", "a")
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
    async with manager.get("a").exclusive():
        await manager.get("a").rewind_locked(name)
    assert await tell(handle, "get") == "a"


@pytest.mark.runsc
async def test_orphan_runs_until_it_can_be_saved(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, runtime: Path
) -> None:
    kill_server_with(spec, runsc, tmp_path / "storage", "a")
    checkpoints = tmp_path / "storage" / "sandboxes" / "a" / "checkpoints"
    checkpoints.write_text("in the way")
    manager = serve()
    (one,) = await manager.recover()
    assert (one.sandbox_id, one.saved, one.runs_on) == ("a", False, True)
    with pytest.raises(SandboxError, match="still runs, although its server has ended"):
        await manager.attach("a", spec)
    assert len(list(runtime.iterdir())) == 1
    checkpoints.unlink()
    handle = await manager.attach("a", spec)
    await manager.get("a").restore()
    assert await tell(handle, "get") == "a"


async def test_only_tombstones_of_this_metadata_store_are_collected(serve: Serve) -> None:
    manager = serve()
    store = manager.stores.required_checkpoints()
    for name, doomed in {"a": manager.stores.metadata.where, "b": "gs://elsewhere/", "c": ""}.items():
        store.write(f"sandboxes/{name}/checkpoints/one/file", b"left")
        if doomed:
            store.write(f"sandboxes/{name}/doomed", doomed.encode())
    await manager.recover()
    left = {info.name.split("/")[1] for info in store.list("sandboxes/")}
    assert left == {"b", "c"}


async def test_tombstone_of_existing_sandbox_is_ignored(serve: Serve, spec: BundleSpec) -> None:
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
async def test_sandbox_that_ended_with_its_server_is_recorded_as_stopped(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, runtime: Path
) -> None:
    kill_server_with(spec, runsc, tmp_path / "storage", "a")
    for folder in runtime.iterdir():
        kill_processes(folder / "runsc")
    manager = serve()
    (one,) = await manager.recover()
    assert (one.sandbox_id, one.saved) == ("a", False)
    handle = await manager.attach("a", spec)
    assert not handle.metadata.running
    assert list(runtime.iterdir()) == []


@pytest.mark.runsc
async def test_orphans_of_another_storage_are_left_alone(
    serve: Serve, spec: BundleSpec, runsc: Runsc, tmp_path: Path, runtime: Path
) -> None:
    kill_server_with(spec, runsc, tmp_path / "elsewhere", "a")
    assert await serve().recover() == []
    elsewhere = SandboxManager(GCSConfig(folder=tmp_path / "elsewhere"), runsc)
    (one,) = await elsewhere.recover()
    assert one.saved


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
