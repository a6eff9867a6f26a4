"""What a server knows of its sandboxes: those that are kept, in pages, by exact ids, and without any path."""

from __future__ import annotations

import gc
import json
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

from sandbox_provisioner.errors import ConfigurationError, SandboxNotFoundError, StateError, StorageNotHereError
from sandbox_provisioner.persistence import records
from sandbox_provisioner.persistence.metadata import GCSSandboxMetadata, Tenancy
from sandbox_provisioner.persistence.records import SandboxRecord
from sandbox_provisioner.sandbox.user_sandboxes import Persistence, registry
from sandbox_provisioner.server import openapi
from sandbox_provisioner.server.kernel_manager import SandboxKernelManager
from sandbox_provisioner.server.kernels import ServerKernels
from sandbox_provisioner.server.openapi import BadRequestError
from sandbox_provisioner.server.problem_details import describe
from sandbox_provisioner.server.queries import Inventory
from sandbox_provisioner.server.service import Sandboxes
from sandbox_provisioner.storage.local import LocalStore

Keep = Callable[..., SandboxRecord]
BAD_BUCKET = ("SANDBOX_METADATA_BUCKET", "gs://bucket")


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine where nothing is set and nothing is kept."""
    for name in [*os.environ]:
        if name.startswith(("SANDBOX_", "FILESYSTEM_")) and name != "SANDBOX_RUNTIME_DIR":
            monkeypatch.delenv(name)
    return empty_machine(monkeypatch, tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The server's root folder."""
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def kernels(root: Path) -> ServerKernels:
    """A server's kernels, of which there are none."""
    manager = SandboxKernelManager(root_dir=str(root), kernel_spec_manager=KernelSpecManager())
    contents = AsyncLargeFileManager(root_dir=str(root))
    sessions = SessionManager(kernel_manager=manager, contents_manager=contents)
    return ServerKernels(manager, sessions, contents, str(root))


@pytest.fixture
def sandboxes(kernels: ServerKernels) -> Sandboxes:
    return Sandboxes(kernels)


@pytest.fixture
def keep(data: Path) -> Keep:
    """Keeps a sandbox as a server would have left it that never saved it."""

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
    """The ids of all pages."""
    found, after = [], {}
    while True:
        page = await sandboxes.list({"limit": 2, **query, **after})
        openapi.check({"$ref": "#/components/schemas/SandboxPage"}, page, "page")
        found.append([one["id"] for one in page["items"]])
        if page["next"] is None:
            return found
        openapi.check({"$ref": "#/components/schemas/Cursor"}, page["next"], "next")
        after = {"after": page["next"]}


async def test_pages_have_those_that_were_used_last_first(sandboxes: Sandboxes, keep: Keep) -> None:
    ids = [str(keep(days=days).id) for days in (3, 1, 5, 2, 4)]
    in_order = [ids[number] for number in (1, 3, 0, 4, 2)]
    assert await pages(sandboxes) == [in_order[:2], in_order[2:4], in_order[4:]]


async def test_the_last_page_is_the_last_also_if_it_is_full(sandboxes: Sandboxes, keep: Keep) -> None:
    for days in range(4):
        keep(days=days)
    assert [len(page) for page in await pages(sandboxes)] == [2, 2]


async def test_where_nothing_is_kept_there_is_one_empty_page(sandboxes: Sandboxes) -> None:
    assert await pages(sandboxes) == [[]]


async def test_a_page_goes_on_though_the_last_one_of_the_page_before_is_gone(sandboxes: Sandboxes, keep: Keep) -> None:
    kept = [keep(days=days) for days in range(4)]
    first = await sandboxes.list({"limit": 2})
    await sandboxes.delete(str(kept[1].id))
    second = await sandboxes.list({"limit": 2, "after": first["next"]})
    assert [one["id"] for one in second["items"]] == [str(record.id) for record in kept[2:]]


async def test_those_in_a_state_are_found_in_pages(
    sandboxes: Sandboxes, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox_provisioner.server.queries.BATCH", 2)
    ids = [str(keep(days=days, running=days % 3 == 0).id) for days in range(10)]
    assert await pages(sandboxes, state="running") == [[ids[0], ids[3]], [ids[6], ids[9]]]
    assert await pages(sandboxes, state="saved") == [[]]


async def test_those_that_nobody_used_are_found(sandboxes: Sandboxes, keep: Keep) -> None:
    ids = [str(keep(days=days).id) for days in range(4)]
    assert await pages(sandboxes, unused_for=1.5 * 86400) == [ids[2:]]


async def test_those_of_a_notebook_are_found_by_its_path_below_the_root(
    sandboxes: Sandboxes, keep: Keep, root: Path
) -> None:
    mine = keep(notebook_path=str(root / "f" / "a.ipynb"))
    keep(notebook_path="/elsewhere/f/a.ipynb")
    assert await pages(sandboxes, notebook="f/a.ipynb") == [[str(mine.id)]]


async def test_no_path_of_the_machine_is_shown(sandboxes: Sandboxes, keep: Keep, root: Path, data: Path) -> None:
    inside, outside = keep(notebook_path=str(root / "a.ipynb")), keep(notebook_path="/home/me/b.ipynb")
    shown = [await sandboxes.show(str(record.id)) for record in (inside, outside)]
    assert [one["notebook_path"] for one in shown] == ["a.ipynb", None]
    assert not [one for one in shown if "/home" in json.dumps(one) or str(data) in json.dumps(one)]


async def test_a_sandbox_is_known_by_its_whole_id_only(sandboxes: Sandboxes, keep: Keep, data: Path) -> None:
    record = replace(keep(), sandbox_id="mine")
    write(data, record)
    for known in (str(record.id), "mine"):
        assert (await sandboxes.show(known))["id"] == str(record.id)
    for unknown in (str(record.id)[:8], "min", "other"):
        with pytest.raises(SandboxNotFoundError):
            await sandboxes.show(unknown)


async def test_one_that_storage_has_no_more_is_gone(sandboxes: Sandboxes) -> None:
    kept = Persistence.open()
    record = kept.registry.allocate(kept.stores)
    assert (await sandboxes.show(str(record.id)))["state"] == "gone"
    with pytest.raises(SandboxNotFoundError):
        await sandboxes.wake(str(record.id))
    assert await sandboxes.delete(str(record.id)) == {"id": str(record.id), "freed": 0}
    assert registry().list().records == []


async def test_one_that_is_kept_in_another_storage_is_elsewhere(sandboxes: Sandboxes, keep: Keep, data: Path) -> None:
    record = replace(keep(), where="/mnt/other storage")
    write(data, record)
    shown = await sandboxes.show(str(record.id))
    assert shown["state"] == "elsewhere"
    assert "/mnt" not in shown["problem"]
    for action in (sandboxes.wake, sandboxes.delete):
        with pytest.raises(StorageNotHereError):
            await action(str(record.id))


async def test_a_record_that_cannot_be_read_is_counted(sandboxes: Sandboxes, keep: Keep, data: Path) -> None:
    record = keep()
    LocalStore(data / "sandbox" / "registry").write("0f8a6e0e-8a54-4e0c-9d0a-3f2f2d1b7c11.json", b"nonsense")
    page = await sandboxes.list({"limit": 10})
    assert ([one["id"] for one in page["items"]], page["unreadable"]) == ([str(record.id)], 1)


async def test_what_needs_a_kernel_is_refused_where_there_is_none(sandboxes: Sandboxes, keep: Keep) -> None:
    empty, busy = str(keep().id), str(keep(running=True).id)
    with pytest.raises(StateError, match="empty, and not open on this server"):
        await sandboxes.hibernate(empty)
    with pytest.raises(StateError, match="running on another server"):
        await sandboxes.restart(busy)


async def test_a_server_that_can_keep_nothing_has_no_kept_ones(
    sandboxes: Sandboxes, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = keep()
    monkeypatch.setenv("FILESYSTEM_SNAPSHOT_BUCKET", "bucket")
    assert await pages(sandboxes) == [[]]
    with pytest.raises(SandboxNotFoundError):
        await sandboxes.show(str(record.id))
    able = await sandboxes.capabilities()
    assert (able["storage"], able["persistent"], able["checkpoints"], able["snapshots"]) == (None, False, False, True)


@pytest.mark.parametrize(
    ("variable", "value"), [("SANDBOX_STORAGE_DIR", "relative"), ("SANDBOX_STORAGE_DIR", "/proc/none"), BAD_BUCKET]
)
async def test_settings_that_cannot_be_used_are_told_by_the_variable(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    for asked in (sandboxes.list({"limit": 1}), sandboxes.show("any"), sandboxes.delete("any")):
        with pytest.raises(ConfigurationError) as raised:
            await asked
        assert raised.value.setting == variable


async def test_stores_are_opened_once(kernels: ServerKernels) -> None:
    inventory = Inventory(kernels)
    opened = ref((await inventory.kept()).stores)
    gc.collect()
    assert (await inventory.kept()).stores is opened()


async def test_one_whose_kernelspec_is_gone_cannot_be_started(sandboxes: Sandboxes, keep: Keep) -> None:
    identity = str(keep(kernel_name="no-such").id)
    for asked in (sandboxes.wake(identity), sandboxes.fork(identity, {}), sandboxes.create({"sandbox_id": identity})):
        with pytest.raises(StateError, match="of kernel 'no-such', which this server has not"):
            await asked


async def test_a_kernel_that_is_asked_for_again_is_as_old_as_it_is(root: Path) -> None:
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
def test_a_notebook_lies_in_a_folder_below_the_root(kernels: ServerKernels, root: Path, path: str) -> None:
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
async def test_what_a_server_is_not_set_up_for_is_refused_by_the_name_of_the_variable(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch, has: str, asked: dict[str, Any], missing: str
) -> None:
    for place in has.split():
        monkeypatch.setenv(f"{place}_BUCKET", "bucket")
    with pytest.raises(ConfigurationError) as raised:
        await sandboxes.create(asked)
    assert describe(raised.value)["variable"] == missing
    assert describe(raised.value)["status"] == 400
