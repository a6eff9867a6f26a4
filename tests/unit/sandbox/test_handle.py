"""Test SandboxHandle with real sandboxes: create, attach, save, restore, lose the lease, delete."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from documents import put_document
from hypothesis import given
from hypothesis import strategies as st
from value_program import LONG, local_stores, start_program, tell

from sandbox_provisioner.config import user_name
from sandbox_provisioner.errors import (
    ConfigurationError,
    ConflictError,
    CorruptObjectError,
    FencedError,
    IncompatibleError,
    LeaseHeldError,
    MetadataError,
    SandboxError,
    SandboxExistsError,
    SandboxNotFoundError,
    StorageUnavailableError,
)
from sandbox_provisioner.errors.signature import SignatureError
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.state import State
from sandbox_provisioner.lock.base import Lease, Owner
from sandbox_provisioner.persistence import names
from sandbox_provisioner.persistence.backends import Stores
from sandbox_provisioner.persistence.metadata import decode
from sandbox_provisioner.persistence.names import valid_id
from sandbox_provisioner.sandbox import detached
from sandbox_provisioner.sandbox.handle import Identity, SandboxHandle
from sandbox_provisioner.storage.base import ObjectInfo

GOOD = ["a", "0", "kernel-1", "A_b-C", "5f0c6b1e-8c8e-4a1c-9d3b-3d1f0a1b2c3d", "x" * 128]
Attach = Callable[..., Awaitable[SandboxHandle]]

BAD = ["", ".", "..", "../x", "a/b", "a\\b", "-a", "_a", "a b", "a\n", "a\0", "é", "x" * 129, "a.b", "٣"]


@pytest.mark.parametrize("sandbox_id", GOOD)
def test_valid_id_is_accepted(sandbox_id: str) -> None:
    assert valid_id(sandbox_id) == sandbox_id


@pytest.mark.parametrize("sandbox_id", BAD, ids=repr)
def test_invalid_id_is_refused(sandbox_id: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        valid_id(sandbox_id)
    assert refusal.value.setting == "sandbox_id"
    assert repr(sandbox_id) in str(refusal.value)


async def test_ephemeral_sandbox_is_not_started_yet(spec: BundleSpec, runtime: Path) -> None:
    handle = SandboxHandle.create_ephemeral("box-1", spec, Runsc(Path("/nowhere"), ""))
    assert handle.sandbox_id == handle.instance.sandbox_id == "box-1"
    assert handle.instance.state == State.INITIALIZED
    assert list(runtime.iterdir()) == []


async def test_factory_refuses_invalid_id(spec: BundleSpec) -> None:
    with pytest.raises(ConfigurationError):
        SandboxHandle.create_ephemeral("../box", spec, Runsc(Path("/nowhere"), ""))


async def test_start_before_mounts_are_planned_is_refused(create: Attach) -> None:
    handle = await create(spec=None)
    with pytest.raises(SandboxError, match="no start has defined its mounts"):
        await handle.start()
    assert not handle.metadata.running


@given(st.text(max_size=200))
def test_object_names_stay_below_their_prefix(name: str) -> None:
    try:
        built = [
            names.metadata_name(name),
            names.lock_name(name),
            names.checkpoints_prefix(name),
            names.snapshot_prefix("box", name),
        ]
    except ConfigurationError:
        return
    for made in built:
        assert os.path.normpath(made) == made.rstrip("/")
        assert made.startswith(("sandboxes/" + name + "/", "sandboxes/box/snapshots/" + name + "/"))


# -- a persistent sandbox ------------------------------------------------------------------------------------------


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return local_stores(tmp_path / "storage")


@pytest.fixture
async def create(spec: BundleSpec, runsc: Runsc, stores: Stores) -> AsyncIterator[Attach]:
    """Return a function that creates persistent sandboxes; they are released after the test."""
    made: list[SandboxHandle] = []

    async def create(name: str = "box", **given: Any) -> SandboxHandle:
        given = {"spec": spec} | given
        handle = await SandboxHandle.create_persistent(
            name, runsc=runsc, stores=stores, owner=Owner.here("first"), **given
        )
        made.append(handle)
        return handle

    yield create
    for handle in made:
        await handle.release()


@pytest.fixture
async def attach(spec: BundleSpec, runsc: Runsc, stores: Stores) -> AsyncIterator[Attach]:
    """Return a function that attaches to persistent sandboxes; they are released after the test."""
    made: list[SandboxHandle] = []

    async def attach(name: str = "box", **given: Any) -> SandboxHandle:
        given = {"spec": spec, "runsc": runsc} | given
        handle = await SandboxHandle.attach_persistent(name, stores=stores, owner=Owner.here("second"), **given)
        made.append(handle)
        return handle

    yield attach
    for handle in made:
        await handle.release()


@pytest.fixture
async def running(create: Attach) -> SandboxHandle:
    """Return a running persistent sandbox with the program of ``cell``."""
    handle = await create(identity=Identity("python3-sandbox", "a.ipynb", user_name(), {"colour": "blue"}))
    await handle.start()
    await start_program(handle)
    return handle


@pytest.fixture
async def saved(running: SandboxHandle) -> None:
    """Save a persistent sandbox with the value 1, and release it."""
    await tell(running, "set 1")
    await running.save()
    await running.release()


def files(stores: Stores) -> list[str]:
    return [info.name for info in stores.metadata.list("")]


@pytest.mark.runsc
async def test_another_handle_restores_a_checkpoint(saved: None, attach: Attach) -> None:
    handle = await attach()
    assert handle.metadata.kernel_name == "python3-sandbox"
    assert handle.metadata.settings == {"colour": "blue"}
    assert not handle.metadata.running
    await handle.restore()
    assert handle.metadata.running
    assert await tell(handle, "get") == "1"


@pytest.mark.runsc
async def test_repeated_saves_and_restores_lose_no_state(running: SandboxHandle, attach: Attach) -> None:
    handle = running
    for number in range(10):
        await tell(handle, f"set {number}")
        await handle.save()
        if number % 2:
            await handle.release()
            handle = await attach()
        await handle.restore()
        assert await tell(handle, "get") == str(number)


@pytest.mark.runsc
async def test_checkpoint_records_its_dependencies(saved: None, stores: Stores, runsc: Runsc) -> None:
    checkpoint = detached.describe_persistent(stores, "box").checkpoint
    assert checkpoint is not None
    assert (checkpoint.runsc_version, checkpoint.runsc_sha256) == (runsc.version, runsc.sha256)
    assert checkpoint.architecture == os.uname().machine
    assert checkpoint.contents == {"program": 1}
    assert any("libc.so" in path for path in checkpoint.files)
    assert set(checkpoint.artifact.files) == {"checkpoint.img", "pages.img", "pages_meta.img"}
    assert checkpoint.size > 1_000_000


@pytest.mark.runsc
async def test_stored_files_are_private(saved: None, tmp_path: Path) -> None:
    for path in (tmp_path / "storage").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.runsc
async def test_restore_deletes_the_previous_checkpoint(running: SandboxHandle, attach: Attach, stores: Stores) -> None:
    first = await running.save()
    await running.restore()
    second = await running.save()
    assert (running.metadata.checkpoint, running.metadata.previous) == (second, first)
    await running.restore()
    assert running.memory.stored.cleanup_task is not None
    await running.memory.stored.cleanup_task
    assert running.metadata.previous is None
    assert {name.rpartition("/")[0] + "/" for name in files(stores) if "pages" in name} == {second.artifact.name}


@pytest.mark.runsc
async def test_start_without_restore_keeps_the_checkpoint(saved: None, attach: Attach) -> None:
    handle = await attach()
    await handle.start()
    assert handle.metadata.checkpoint is not None
    assert handle.metadata.running


@pytest.mark.runsc
async def test_attach_and_start_without_checkpoint(create: Attach, attach: Attach) -> None:
    await (await create()).release()
    handle = await attach()
    with pytest.raises(SandboxError, match="no checkpoint"):
        await handle.restore()
    await handle.start()


# -- what is refused -----------------------------------------------------------------------------------------------


async def test_existing_id_is_not_created_again(create: Attach, stores: Stores) -> None:
    await (await create()).release()
    before = files(stores)
    with pytest.raises(SandboxExistsError, match="box"):
        await create()
    assert files(stores) == before


async def test_attach_to_unknown_id_stores_nothing(attach: Attach, stores: Stores) -> None:
    with pytest.raises(SandboxNotFoundError, match="no sandbox nobody"):
        await attach("nobody")
    assert files(stores) == []


async def test_lease_error_names_the_owner(create: Attach, attach: Attach) -> None:
    await create()
    with pytest.raises(LeaseHeldError, match=f"first .process {os.getpid()}"):
        await attach()
    with pytest.raises(LeaseHeldError):
        await create()


async def test_failed_creation_leaves_nothing(create: Attach, stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageUnavailableError("there", "The storage does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(stores.metadata, "write", fail)
        with pytest.raises(StorageUnavailableError):
            await create()
    assert files(stores) == []
    await create()


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelled_creation_leaves_nothing(
    create: Attach, stores: Stores, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    write, writing, go_on = stores.metadata.write, threading.Event(), threading.Event()

    def late(*given: Any) -> ObjectInfo:
        writing.set()
        assert go_on.wait(LONG)
        if fails:
            raise StorageUnavailableError("there", "The storage does not answer.")
        return write(*given)

    with monkeypatch.context() as patch:
        patch.setattr(stores.metadata, "write", late)
        creating = asyncio.create_task(create())
        await asyncio.to_thread(writing.wait, LONG)
        creating.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await creating
    assert files(stores) == []
    await create()


@pytest.mark.runsc
async def test_checkpoint_of_another_runsc_is_refused(saved: None, attach: Attach, runsc: Runsc) -> None:
    with pytest.raises(IncompatibleError, match=f"saved by runsc {runsc.version}, and this server has runsc 1.0"):
        await attach(runsc=replace(runsc, version="1.0"))
    handle = await attach()
    await handle.restore()


@pytest.mark.runsc
async def test_checkpoint_is_refused_if_a_library_changed(
    create: Attach, attach: Attach, spec: BundleSpec, tmp_path: Path
) -> None:
    library = tmp_path / "lib" / "thing.bin"
    library.parent.mkdir()
    library.write_bytes(b"old" * 5000)
    shown = replace(spec, mounts=(*spec.mounts, Mount(str(library.parent), "/lib-of-mine")))
    handle = await create(spec=shown)
    await handle.start()
    code = "import mmap,time; f=open('/lib-of-mine/thing.bin','rb'); m=mmap.mmap(f.fileno(),0,access=mmap.ACCESS_READ)"
    process = await handle.instance.execute([spec.python, "-c", f"{code}; print(m[:3], flush=True); time.sleep(1000)"])
    await anext(process.stream())
    await handle.save()
    await handle.release()

    (library.parent / "beside.bin").write_bytes(b"installed later")
    copy = library.read_bytes()
    library.unlink()
    library.write_bytes(copy)
    await (await attach(spec=shown)).release()

    library.write_bytes(b"new" * 5000)
    with pytest.raises(IncompatibleError, match=r"/lib-of-mine/thing\.bin has changed since"):
        await attach(spec=shown)
    library.unlink()
    with pytest.raises(IncompatibleError, match=r"/lib-of-mine/thing\.bin is not there"):
        await attach(spec=shown)
    shutil.rmtree(library.parent)
    with pytest.raises(IncompatibleError, match="which is mounted in it, is not there"):
        await attach(spec=shown)


@pytest.mark.runsc
async def test_checkpoint_is_refused_if_a_mount_is_missing(
    create: Attach, attach: Attach, spec: BundleSpec, tmp_path: Path
) -> None:
    shown = replace(spec, mounts=(*spec.mounts, Mount(str(tmp_path), "/extra")))
    handle = await create(spec=shown)
    await handle.start()
    await handle.save()
    await handle.release()
    with pytest.raises(IncompatibleError, match=r"/extra was mounted when .*the setting mounts can add it"):
        await attach()
    await (await attach(spec=shown)).restore()


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


DAMAGE = {
    "a flipped byte": flip_a_bit,
    "a truncated file": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a missing file": Path.unlink,
}


@pytest.mark.runsc
@pytest.mark.parametrize("damage", DAMAGE)
async def test_damaged_checkpoint_is_refused_and_can_be_reverted(
    damage: str, running: SandboxHandle, attach: Attach, stores: Stores, tmp_path: Path
) -> None:
    await tell(running, "set old")
    await running.save()
    await running.restore()
    await tell(running, "set new")
    second = await running.save()
    await running.release()
    DAMAGE[damage](tmp_path / "storage" / second.artifact.name / "pages.img")

    handle = await attach()
    with pytest.raises(CorruptObjectError, match=r"pages\.img.*jupyter sandbox revert ID") as refusal:
        await handle.restore()
    assert refusal.value.previous
    await handle.release()

    await detached.revert_persistent(stores, "box", Owner.here("owner"))
    handle = await attach()
    await handle.restore()
    assert await tell(handle, "get") == "old"


@pytest.mark.runsc
async def test_invalid_document_is_refused(saved: None, attach: Attach, stores: Stores) -> None:
    name = names.metadata_name("box")
    data, _ = stores.metadata.read(name)
    document = decode(data, "there", "box")
    assert document.checkpoint is not None
    for foreign in ("sandboxes/other/checkpoints/1/", "/etc/", "sandboxes/box/checkpoints/../../other/"):
        artifact = replace(document.checkpoint.artifact, name=foreign)
        put_document(stores, replace(document, checkpoint=replace(document.checkpoint, artifact=artifact)))
        handle = await attach()
        with pytest.raises(MetadataError, match="checkpoint has an invalid name or files"):
            await handle.restore()
        await handle.release()
    stores.metadata.write(name, stores.signer.sign(name, b"{}"))
    with pytest.raises(MetadataError, match=r"metadata\.json"):
        await attach()


# -- two servers ---------------------------------------------------------------------------------------------------


@pytest.mark.runsc
async def test_server_without_lease_cannot_save(running: SandboxHandle, attach: Attach, stores: Stores) -> None:
    await tell(running, "set 1")
    await running.save()
    await running.restore()
    await tell(running, "set never seen")
    await running.lease.release()  # simulate that the lease expired while this server was suspended

    other = await attach()
    await other.restore()
    assert await tell(other, "get") == "1"
    with pytest.raises(FencedError, match="second"):
        await running.save()
    assert await tell(running, "get") == "never seen"
    await tell(other, "set 2")
    await other.save()
    await other.restore()
    assert await tell(other, "get") == "2"


@pytest.mark.runsc
async def test_suspended_server_deletes_no_checkpoint_of_the_next_owner(
    running: SandboxHandle, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    awake, delete = asyncio.Event(), running._stored.delete

    async def delete_late(garbage: set[str]) -> None:
        await awake.wait()
        await delete(garbage)

    monkeypatch.setattr(running._stored, "delete", delete_late)
    checkpoint = asyncio.create_task(running.save())
    while running.instance.state == State.RUNNING:
        await asyncio.sleep(0.01)
    await running.lease.release()
    other = await attach()
    await other.restore()
    await tell(other, "set 2")
    await other.save()
    awake.set()
    await checkpoint
    await other.restore()
    assert await tell(other, "get") == "2"


async def test_suspended_deletion_keeps_a_sandbox_with_a_new_owner(
    create: Attach, attach: Attach, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await create()).release()
    leases: list[Lease] = []
    acquire, delete, loop = stores.leases.acquire, stores.metadata.delete, asyncio.get_running_loop()

    async def remember_lease(*given: Any) -> Lease:
        leases.append(await acquire(*given))
        return leases[-1]

    async def take_over() -> None:
        await leases[0].release()
        await attach()

    def late(*given: Any) -> bool:
        asyncio.run_coroutine_threadsafe(take_over(), loop).result()
        return delete(*given)

    monkeypatch.setattr(stores.leases, "acquire", remember_lease)
    monkeypatch.setattr(stores.metadata, "delete", late)
    with pytest.raises(ConflictError):
        await detached.destroy_persistent(stores, "box", Owner.here("cleaner"))
    assert detached.describe_persistent(stores, "box").sandbox_id == "box"


async def test_sandbox_with_damaged_document_can_be_deleted(create: Attach, attach: Attach, stores: Stores) -> None:
    await (await create()).release()
    name = names.metadata_name("box")
    for damaged, error in ((stores.signer.sign(name, b"{}"), MetadataError), (b"{}", SignatureError)):
        stores.metadata.write(name, damaged)
        with pytest.raises(error):
            await attach()
    await detached.destroy_persistent(stores, "box", Owner.here("cleaner"))
    assert files(stores) == []


async def test_revert_without_previous_checkpoint_is_refused(create: Attach, stores: Stores) -> None:
    await (await create()).release()
    with pytest.raises(SandboxError, match="has no previous checkpoint"):
        await detached.revert_persistent(stores, "box", Owner.here("owner"))


@pytest.mark.runsc
async def test_lost_lease_is_replaced_unless_sandbox_has_new_owner(running: SandboxHandle, attach: Attach) -> None:
    before = running.lease.token
    await running.memory.stored.replace_lease(Owner.here("first"))
    assert running.lease.token != before
    await running.save()
    await running.release()
    other = await attach()
    with pytest.raises((FencedError, LeaseHeldError)):
        await running.memory.stored.replace_lease(Owner.here("first"))
    await other.restore()


@pytest.mark.runsc
async def test_save_is_repeated_after_a_lost_response(
    running: SandboxHandle, attach: Attach, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = stores.metadata.write

    def write_without_response(*given: Any) -> None:
        write(*given)
        raise StorageUnavailableError("there", "The connection was lost.")

    await tell(running, "set 1")
    with monkeypatch.context() as patch:
        patch.setattr(stores.metadata, "write", write_without_response)
        with pytest.raises(StorageUnavailableError):
            await running.save()
    assert running.instance.state == State.RUNNING
    await tell(running, "set 2")
    await running.save()
    await running.release()
    handle = await attach()
    await handle.restore()
    assert await tell(handle, "get") == "2"


@pytest.mark.runsc
async def test_cancelled_save_is_completed(running: SandboxHandle) -> None:
    await tell(running, "set 1")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(running.save(), 0.05)
    await running.restore()
    assert await tell(running, "get") == "1"


# -- snapshots -----------------------------------------------------------------------------------------------------


@pytest.mark.runsc
async def test_file_snapshot_of_ephemeral_sandbox_is_loaded_into_another(
    spec: BundleSpec, runsc: Runsc, stores: Stores, running: SandboxHandle
) -> None:
    ephemeral = SandboxHandle.create_ephemeral("passing", spec, runsc, storage=stores.snapshot_storage)
    await ephemeral.instance.start()
    try:
        process = await ephemeral.instance.execute(["/bin/sh", "-c", "echo kept > ~/kept; echo lost > /dev/shm/lost"])
        assert await process.wait() == 0
        await ephemeral.save_snapshot("one")
        with pytest.raises(SandboxError, match=r"snapshot sandboxes/passing/snapshots/one/ .* already"):
            await ephemeral.save_snapshot("one")
    finally:
        await ephemeral.release()

    await running.load_snapshot("passing", "one")
    process = await running.instance.execute(["/bin/sh", "-c", "cat ~/kept; ls /dev/shm"])
    assert (await process.read())[0] == b"kept\n"
    with pytest.raises(SandboxError, match="no complete snapshot sandboxes/passing/snapshots/two in"):
        await running.load_snapshot("passing", "two")


async def test_snapshot_without_storage_is_refused(spec: BundleSpec, runsc: Runsc) -> None:
    handle = SandboxHandle.create_ephemeral("box", spec, runsc)
    with pytest.raises(ConfigurationError, match="FILESYSTEM_SNAPSHOT_BUCKET"):
        await handle.save_snapshot("one")


# -- the end -------------------------------------------------------------------------------------------------------


@pytest.mark.runsc
async def test_deletion_leaves_nothing(saved: None, stores: Stores, attach: Attach) -> None:
    freed = await detached.destroy_persistent(stores, "box", Owner.here("cleaner"))
    assert freed > 1_000_000
    assert files(stores) == []
    with pytest.raises(SandboxNotFoundError):
        await attach()


@pytest.mark.runsc
async def test_file_snapshots_are_not_deleted_with_an_empty_sandbox(running: SandboxHandle, stores: Stores) -> None:
    await running.save_snapshot("one")
    await running.release()
    with pytest.raises(SandboxExistsError):
        await detached.destroy_persistent(stores, "box", Owner.here("cleaner"), only_empty=True)
    assert any("snapshots/one" in str(name) for name in files(stores))


async def test_sandbox_in_use_is_not_deleted(create: Attach, stores: Stores) -> None:
    await create()
    with pytest.raises(LeaseHeldError, match="first"):
        await detached.destroy_persistent(stores, "box", Owner.here("cleaner"))
    assert detached.describe_persistent(stores, "box").sandbox_id == "box"
