"""Test the service of the REST API with stored sandboxes, without kernels and HTTP."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from documents import put_document
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from jupyter_server.services.sessions.sessionmanager import SessionManager
from machines import empty_machine

from sandbox_provisioner.errors import (
    BadRequestError,
    ConfigurationError,
    SandboxNotFoundError,
    StateError,
    StorageNotHereError,
)
from sandbox_provisioner.persistence import records
from sandbox_provisioner.persistence.metadata import GCSSandboxMetadata, Tenancy
from sandbox_provisioner.persistence.records import SandboxRecord
from sandbox_provisioner.sandbox.model import Deleted, encode
from sandbox_provisioner.sandbox.user_sandboxes import Persistence, registry
from sandbox_provisioner.server import openapi
from sandbox_provisioner.server.kernel_manager import SandboxKernelManager
from sandbox_provisioner.server.kernels import ServerKernels
from sandbox_provisioner.server.problem_details import describe
from sandbox_provisioner.server.queries import Inventory
from sandbox_provisioner.server.service import Sandboxes
from sandbox_provisioner.storage.local import LocalStore

Keep = Callable[..., SandboxRecord]
BAD_BUCKET = ("SANDBOX_METADATA_BUCKET", "gs://bucket")


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the data folder of a machine without settings and stored sandboxes."""
    for name in [*os.environ]:
        if name.startswith(("SANDBOX_", "FILESYSTEM_")) and name != "SANDBOX_RUNTIME_DIR":
            monkeypatch.delenv(name)
    return empty_machine(monkeypatch, tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the server's root folder."""
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def kernels(root: Path) -> ServerKernels:
    """Return the kernels of a server that has started none."""
    manager = SandboxKernelManager(root_dir=str(root), kernel_spec_manager=KernelSpecManager())
    contents = AsyncLargeFileManager(root_dir=str(root))
    sessions = SessionManager(kernel_manager=manager, contents_manager=contents)
    return ServerKernels(manager, sessions, contents, str(root))


@pytest.fixture
def sandboxes(kernels: ServerKernels) -> Sandboxes:
    return Sandboxes(kernels)


@pytest.fixture
def keep(data: Path) -> Keep:
    """Return a function that records a sandbox without saved state."""

    def make(days: float = 0, running: bool = False, **facts: Any) -> SandboxRecord:
        kept = Persistence.open()
        record = kept.registry.allocate(kept.stores, **facts)
        record = replace(record, last_used=datetime.now(UTC) - timedelta(days=days))
        write(data, record)
        document = GCSSandboxMetadata(
            sandbox_id=record.sandbox_id,
            created=record.created.isoformat(),
            last_used=record.last_used.isoformat(),
            tenancy=Tenancy(1, "a server", running),
        )
        put_document(kept.stores, document)
        return record

    return make


def write(data: Path, record: SandboxRecord) -> None:
    LocalStore(data / "sandbox" / "registry").write(f"{record.id}.json", records.encode(record))


async def pages(sandboxes: Sandboxes, **query: Any) -> list[list[str]]:
    """Return the ids of all pages."""
    found, after = [], {}
    while True:
        page = await sandboxes.list_sandboxes(**{"limit": 2, **query, **after})
        openapi.check({"$ref": "#/components/schemas/SandboxPage"}, encode(page), "page")
        found.append([one.id for one in page.items])
        if page.next is None:
            return found
        openapi.check({"$ref": "#/components/schemas/Cursor"}, page.next, "next")
        after = {"after": page.next}


async def test_pages_are_sorted_by_last_use(sandboxes: Sandboxes, keep: Keep) -> None:
    ids = [str(keep(days=days).id) for days in (3, 1, 5, 2, 4)]
    in_order = [ids[number] for number in (1, 3, 0, 4, 2)]
    assert await pages(sandboxes) == [in_order[:2], in_order[2:4], in_order[4:]]


async def test_full_last_page_has_no_next_page(sandboxes: Sandboxes, keep: Keep) -> None:
    for days in range(4):
        keep(days=days)
    assert [len(page) for page in await pages(sandboxes)] == [2, 2]


async def test_empty_list_is_one_empty_page(sandboxes: Sandboxes) -> None:
    assert await pages(sandboxes) == [[]]


async def test_next_page_after_deletion(sandboxes: Sandboxes, keep: Keep) -> None:
    kept = [keep(days=days) for days in range(4)]
    first = await sandboxes.list_sandboxes(limit=2)
    await sandboxes.delete_sandbox(str(kept[1].id))
    second = await sandboxes.list_sandboxes(limit=2, after=first.next)
    assert [one.id for one in second.items] == [str(record.id) for record in kept[2:]]


async def test_list_by_state(sandboxes: Sandboxes, keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_provisioner.server.queries.BATCH", 2)
    ids = [str(keep(days=days, running=days % 3 == 0).id) for days in range(10)]
    assert await pages(sandboxes, state="running") == [[ids[0], ids[3]], [ids[6], ids[9]]]
    assert await pages(sandboxes, state="saved") == [[]]


async def test_list_by_unused_time(sandboxes: Sandboxes, keep: Keep) -> None:
    ids = [str(keep(days=days).id) for days in range(4)]
    assert await pages(sandboxes, unused_for=1.5 * 86400) == [ids[2:]]


async def test_list_by_relative_notebook_path(sandboxes: Sandboxes, keep: Keep, root: Path) -> None:
    mine = keep(notebook_path=str(root / "f" / "a.ipynb"))
    keep(notebook_path="/elsewhere/f/a.ipynb")
    assert await pages(sandboxes, notebook="f/a.ipynb") == [[str(mine.id)]]


async def test_absolute_paths_are_hidden(sandboxes: Sandboxes, keep: Keep, root: Path, data: Path) -> None:
    inside, outside = keep(notebook_path=str(root / "a.ipynb")), keep(notebook_path="/home/me/b.ipynb")
    shown = [await sandboxes.show_sandbox(str(record.id)) for record in (inside, outside)]
    assert [one.notebook_path for one in shown] == ["a.ipynb", None]
    assert not [one for one in shown if "/home" in str(encode(one)) or str(data) in str(encode(one))]


async def test_only_a_complete_id_is_accepted(sandboxes: Sandboxes, keep: Keep, data: Path) -> None:
    record = replace(keep(), sandbox_id="mine")
    write(data, record)
    for known in (str(record.id), "mine"):
        assert (await sandboxes.show_sandbox(known)).id == str(record.id)
    for unknown in (str(record.id)[:8], "min", "other"):
        with pytest.raises(SandboxNotFoundError):
            await sandboxes.show_sandbox(unknown)


async def test_sandbox_missing_in_storage_is_gone(sandboxes: Sandboxes) -> None:
    kept = Persistence.open()
    record = kept.registry.allocate(kept.stores)
    assert (await sandboxes.show_sandbox(str(record.id))).state == "gone"
    with pytest.raises(SandboxNotFoundError):
        await sandboxes.wake_sandbox(str(record.id))
    assert await sandboxes.delete_sandbox(str(record.id)) == Deleted(str(record.id), 0)
    assert registry().list().records == []


async def test_sandbox_in_other_storage_is_elsewhere(sandboxes: Sandboxes, keep: Keep, data: Path) -> None:
    record = replace(keep(), where="/mnt/other storage")
    write(data, record)
    shown = await sandboxes.show_sandbox(str(record.id))
    assert shown.state == "elsewhere"
    assert shown.problem and "/mnt" not in shown.problem
    for action in (sandboxes.wake_sandbox, sandboxes.delete_sandbox):
        with pytest.raises(StorageNotHereError):
            await action(str(record.id))


async def test_unreadable_records_are_counted(sandboxes: Sandboxes, keep: Keep, data: Path) -> None:
    record = keep()
    LocalStore(data / "sandbox" / "registry").write("0f8a6e0e-8a54-4e0c-9d0a-3f2f2d1b7c11.json", b"nonsense")
    page = await sandboxes.list_sandboxes(limit=10)
    assert ([one.id for one in page.items], page.unreadable) == ([str(record.id)], 1)


async def test_actions_that_need_a_kernel_are_refused_without_one(sandboxes: Sandboxes, keep: Keep) -> None:
    empty, busy = str(keep().id), str(keep(running=True).id)
    with pytest.raises(StateError, match="empty, and not open on this server"):
        await sandboxes.hibernate_sandbox(empty)
    with pytest.raises(StateError, match="it runs on another server"):
        await sandboxes.restart_sandbox(busy)


async def test_server_without_storage_lists_no_stored_sandboxes(
    sandboxes: Sandboxes, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = keep()
    monkeypatch.setenv("FILESYSTEM_SNAPSHOT_BUCKET", "bucket")
    assert await pages(sandboxes) == [[]]
    with pytest.raises(SandboxNotFoundError):
        await sandboxes.show_sandbox(str(record.id))
    able = await sandboxes.get_capabilities()
    assert (able.storage, able.persistent, able.checkpoints, able.snapshots) == (None, False, False, True)


@pytest.mark.parametrize(
    ("variable", "value"), [("SANDBOX_STORAGE_DIR", "relative"), ("SANDBOX_STORAGE_DIR", "/proc/none"), BAD_BUCKET]
)
async def test_unusable_setting_is_named(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    for asked in (sandboxes.list_sandboxes(limit=1), sandboxes.show_sandbox("any"), sandboxes.delete_sandbox("any")):
        with pytest.raises(ConfigurationError) as raised:
            await asked
        assert raised.value.setting == variable


async def test_stores_are_opened_once(kernels: ServerKernels) -> None:
    inventory = Inventory(kernels)
    opened = ref((await inventory.persistence()).stores)
    gc.collect()
    assert (await inventory.persistence()).stores is opened()


async def test_missing_kernelspec_prevents_start(sandboxes: Sandboxes, keep: Keep) -> None:
    identity = str(keep(kernel_name="no-such").id)
    for asked in (
        sandboxes.wake_sandbox(identity),
        sandboxes.fork_sandbox(identity),
        sandboxes.create_sandbox(sandbox_id=identity),
    ):
        with pytest.raises(StateError, match="its kernel 'no-such' is not installed on this server"):
            await asked


async def test_repeated_start_keeps_time_of_creation(root: Path) -> None:
    manager = SandboxKernelManager(root_dir=str(root), kernel_spec_manager=KernelSpecManager())
    try:
        kernel_id = await manager.start_kernel(kernel_name="python3")
        created = vars(manager.get_kernel(kernel_id))["created"]
        assert await manager.start_kernel(kernel_id=kernel_id) == kernel_id
        assert vars(manager.get_kernel(kernel_id))["created"] == created
    finally:
        await manager.shutdown_all(now=True)


@pytest.mark.parametrize(
    "path",
    ["/a.ipynb", "../a.ipynb", "f/../a.ipynb", "./a.ipynb", "f//a.ipynb", ".f/a.ipynb", "none/a.ipynb", "x" * 300],
)
def test_invalid_notebook_paths_are_refused(kernels: ServerKernels, root: Path, path: str) -> None:
    (root / ".f").mkdir()
    (root / "f").mkdir()
    assert kernels.notebook("f/a.ipynb").absolute == str(root / "f" / "a.ipynb")
    with pytest.raises(BadRequestError):
        kernels.notebook(path)


@pytest.mark.parametrize(
    ("has", "asked", "missing"),
    [
        ("", {"gcs_sandbox_id": "a"}, "SANDBOX_LOCK_BUCKET"),
        ("SANDBOX_LOCK", {"gcs_sandbox_id": "a"}, "SANDBOX_METADATA_BUCKET"),
        ("SANDBOX_METADATA", {"gcs_sandbox_id": "a"}, "SANDBOX_LOCK_BUCKET"),
        (
            "SANDBOX_LOCK SANDBOX_METADATA",
            {"gcs_sandbox_id": "a", "enable_handoff": True},
            "SANDBOX_CHECKPOINT_BUCKET",
        ),
        (
            "SANDBOX_LOCK SANDBOX_METADATA",
            {"gcs_sandbox_id": "a", "enable_checkpoint_at_idle": True},
            "SANDBOX_CHECKPOINT_BUCKET",
        ),
        ("SANDBOX_METADATA", {"sandbox_id": "a"}, "SANDBOX_LOCK_BUCKET"),
        ("SANDBOX_METADATA", {"notebook_path": "a.ipynb", "enable_handoff": True}, "SANDBOX_LOCK_BUCKET"),
    ],
)
async def test_missing_setting_is_named(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch, has: str, asked: dict[str, Any], missing: str
) -> None:
    for place in has.split():
        monkeypatch.setenv(f"{place}_BUCKET", "bucket")
    with pytest.raises(ConfigurationError) as raised:
        await sandboxes.create_sandbox(**asked)
    assert describe(raised.value)["variable"] == missing
    assert describe(raised.value)["status"] == 400
