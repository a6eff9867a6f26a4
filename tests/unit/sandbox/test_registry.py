"""Test PersistentSandboxRegistry, also with concurrent and killed processes and damaged files."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.errors import (
    AmbiguousSandboxError,
    LeaseHeldError,
    SandboxError,
    SandboxNotFoundError,
    StorageNotHereError,
    UnknownSandboxError,
    UnreadableRecordError,
)
from sandbox_provisioner.persistence import records
from sandbox_provisioner.persistence.backends import Stores, open_stores
from sandbox_provisioner.persistence.records import SandboxRecord
from sandbox_provisioner.sandbox.registry import PersistentSandboxRegistry
from sandbox_provisioner.storage.local import LocalStore

FORK = multiprocessing.get_context("fork")
MONTH = timedelta(days=30)
ID = UUID("5f0c6b1e-8c8e-4a1c-9d3b-3d1f0a1b2c3d")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "registry"


@pytest.fixture
def registry(folder: Path) -> PersistentSandboxRegistry:
    return PersistentSandboxRegistry(folder)


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return open_stores(GCSConfig(folder=tmp_path / "storage"))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Stores:
    return open_stores(GCSConfig(folder=tmp_path / "other storage"))


@pytest.fixture
def old(folder: Path, registry: PersistentSandboxRegistry, stores: Stores) -> Callable[..., SandboxRecord]:
    """Return a function that makes a record which was last used some days ago."""

    def make(days: float, **facts: Any) -> SandboxRecord:
        record = replace(registry.allocate(stores, **facts), last_used=datetime.now(UTC) - timedelta(days=days))
        LocalStore(folder).write(f"{record.id}.json", records.encode(record))
        return record

    return make


class Storage:
    """Records the destroyed sandboxes instead of destroying them."""

    def __init__(self, errors: dict[UUID, SandboxError] | None = None) -> None:
        self.destroyed: list[UUID] = []
        self._errors = errors or {}

    def destroy(self, record: SandboxRecord) -> int:
        if record.id in self._errors:
            raise self._errors[record.id]
        self.destroyed.append(record.id)
        return 1000


def test_allocate_writes_the_record(folder: Path, registry: PersistentSandboxRegistry, stores: Stores) -> None:
    facts = {"kernel_name": "python3-sandbox", "settings": {"network": "none"}, "notebook_path": "/home/a/n.ipynb"}
    record = registry.allocate(stores, **facts)  # type: ignore[arg-type]
    assert PersistentSandboxRegistry(folder).load(record.id) == record
    assert (record.storage, record.where) == ("local", stores.metadata.where)
    assert record.sandbox_id == str(record.id)
    assert {name: getattr(record, name) for name in facts} == facts
    assert record.created == record.last_used
    assert registry.allocate(stores).id != record.id


def test_records_are_private(folder: Path, registry: PersistentSandboxRegistry, stores: Stores) -> None:
    mask = os.umask(0)
    try:
        record = registry.allocate(stores)
        registry.touch(record.id)
    finally:
        os.umask(mask)
    modes = {path: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}
    assert set(modes.values()) <= {0o700, 0o600}
    assert modes[folder] == 0o700


def test_missing_folder_is_an_empty_registry(folder: Path, registry: PersistentSandboxRegistry) -> None:
    assert registry.list() == ([], [])
    assert registry.find_notebook("/n.ipynb", "python3") == []
    assert registry.prune(MONTH, Storage().destroy) == []


def test_ensure_does_not_change_an_existing_record(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    first = registry.ensure(ID, stores, kernel_name="python3")
    assert first.id == ID and first.kernel_name == "python3"
    assert registry.ensure(ID, stores, kernel_name="other") == first


def test_record_has_one_identity_per_storage(
    registry: PersistentSandboxRegistry, stores: Stores, elsewhere: Stores
) -> None:
    first = registry.record("box", stores, kernel_name="python3", notebook_path="/a.ipynb")
    again = registry.record("box", stores, notebook_path="/b.ipynb")
    assert again.id == first.id
    assert (again.sandbox_id, again.kernel_name, again.notebook_path) == ("box", "python3", "/b.ipynb")
    assert again.created == first.created and again.last_used > first.last_used
    assert registry.record("box", elsewhere).id != first.id
    assert registry.record("other", stores).id != first.id
    assert len(registry.list().records) == 3


def test_record_keeps_an_allocated_identity(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    allocated = registry.allocate(stores)
    assert registry.record(allocated.sandbox_id, stores, kernel_name="python3").id == allocated.id
    assert registry.load(allocated.id).kernel_name == "python3"


def test_invalid_settings_leave_no_record(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    with pytest.raises(SandboxError, match="settings"):
        registry.allocate(stores, settings={"x": object()})
    assert registry.list() == ([], [])


def test_unknown_id_error_lists_known_ids(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    known = [str(registry.allocate(stores).id) for _ in range(2)]
    for ask in (
        lambda: registry.load(uuid4()),
        lambda: registry.touch(uuid4()),
        lambda: registry.find("no-such-box"),
        lambda: registry.reattach(str(uuid4()), stores),
        lambda: registry.delete(uuid4(), Storage().destroy),
    ):
        with pytest.raises(UnknownSandboxError) as refusal:
            ask()
        assert set(refusal.value.known) == set(known)
        assert all(identity in str(refusal.value) for identity in known)
    assert len(registry.list().records) == 2


def test_find_by_id_or_prefix(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    record = registry.ensure(ID, stores)
    registry.ensure(UUID("5f0c6b1f-8c8e-4a1c-9d3b-3d1f0a1b2c3d"), stores)
    for wanted in (str(ID), str(ID).upper(), ID.hex, "5f0c6b1e", "5f0c6b1e-8", "5F0C6B1E8C"):
        assert registry.find(wanted) == record


def test_find_by_id_in_storage(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    record = registry.record("my-box", stores)
    registry.allocate(stores)
    assert registry.find("my-box") == record


@pytest.mark.parametrize("wanted", ["5f0c6b1", "box"])
def test_ambiguous_id_error_lists_matches(
    wanted: str, registry: PersistentSandboxRegistry, stores: Stores, elsewhere: Stores
) -> None:
    registry.ensure(ID, stores)
    registry.ensure(UUID("5f0c6b1f-8c8e-4a1c-9d3b-3d1f0a1b2c3d"), stores)
    boxes = [registry.record("box", stores), registry.record("box", elsewhere)]
    with pytest.raises(AmbiguousSandboxError) as refusal:
        registry.find(wanted)
    assert len(refusal.value.matching) == 2
    assert wanted != "box" or set(refusal.value.matching) == {str(box.id) for box in boxes}


@given(wanted=st.text(st.characters()) | st.text("0123456789abcdef-{}/.", max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_find_never_raises_other_errors(wanted: str, registry: PersistentSandboxRegistry, stores: Stores) -> None:
    registry.ensure(ID, stores)
    try:
        assert registry.find(wanted).id.hex.startswith(wanted.lower().replace("-", ""))
    except UnknownSandboxError as error:
        assert error.wanted == wanted


def test_find_notebook_sorts_by_last_use(
    registry: PersistentSandboxRegistry, stores: Stores, old: Callable[..., SandboxRecord]
) -> None:
    asked = {"notebook_path": "/a.ipynb", "kernel_name": "python3"}
    longer_ago, lately = old(5, **asked), old(2, **asked)
    registry.allocate(stores, notebook_path="/a.ipynb", kernel_name="bash")
    registry.allocate(stores, notebook_path="/b.ipynb", kernel_name="python3")
    assert registry.find_notebook(**asked) == [lately, longer_ago]


def test_touch_changes_only_the_time(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    record = registry.allocate(stores, kernel_name="python3", settings={"a": [1]})
    touched = registry.touch(record.id)
    assert touched.last_used > record.last_used
    assert replace(touched, last_used=record.last_used) == record
    assert registry.load(record.id) == touched


@pytest.mark.parametrize("slash", ["", "/"])
def test_rename_updates_records(slash: str, registry: PersistentSandboxRegistry, stores: Stores) -> None:
    paths = ["/home/a/n.ipynb", "/home/a/sub/n.ipynb", "/home/ab/n.ipynb", "/home/a", ""]
    made = {path: registry.allocate(stores, notebook_path=path).id for path in paths}
    assert registry.rename("", "/home/new") == []
    assert len(registry.rename(f"/home/a{slash}", "/home/new")) == (2 if slash else 3)
    assert [registry.load(identity).notebook_path for identity in made.values()] == [
        "/home/new/n.ipynb",
        "/home/new/sub/n.ipynb",
        "/home/ab/n.ipynb",
        "/home/a" if slash else "/home/new",
        "",
    ]
    assert registry.rename("/not/there.ipynb", "/x.ipynb") == []


@given(path=st.text(st.characters(), min_size=1), other=st.text(st.characters(), min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_notebook_paths_are_stored_unchanged(
    path: str, other: str, registry: PersistentSandboxRegistry, stores: Stores
) -> None:
    made = registry.record("box", stores, notebook_path=path)
    assert registry.find_notebook(path, "") == [made]
    registry.rename(path, other)
    assert [record.id for record in registry.find_notebook(other, "")] == [made.id]


def test_unreadable_record_does_not_affect_others(
    folder: Path, registry: PersistentSandboxRegistry, stores: Stores
) -> None:
    good = registry.allocate(stores)
    store = LocalStore(folder)
    bad = {
        f"{UUID(int=1)}.json": b"",
        f"{UUID(int=2)}.json": b'{"version": 99}',
        f"{UUID(int=3)}.json": records.encode(good),
        "not-an-id.json": records.encode(good),
        f"{str(good.id).upper()}.json": records.encode(good),
        "stray": b"hello",
    }
    for name, data in bad.items():
        store.write(name, data)
    link, pipe, box, odd = f"{UUID(int=4)}.json", f"{UUID(int=5)}.json", f"{UUID(int=6)}.json", "no name \n"
    (folder / link).symlink_to(folder / f"{good.id}.json")
    os.mkfifo(folder / pipe)
    (folder / box).mkdir()
    (folder / odd).touch()
    names = {*bad, link, pipe, box, odd}
    found, unreadable = registry.list()
    assert found == [good]
    assert {report.path for report in unreadable} == {str(folder / name) for name in names}
    assert {path.name for path in folder.iterdir()} >= names
    assert registry.touch(good.id).id == good.id
    assert registry.prune(timedelta(0), Storage().destroy)[0].record.id == good.id


def test_unreadable_record_is_not_reported_as_missing(
    folder: Path, registry: PersistentSandboxRegistry, stores: Stores
) -> None:
    LocalStore(folder).write(f"{ID}.json", b"{")
    storage = Storage()
    for ask in (
        lambda: registry.load(ID),
        lambda: registry.touch(ID),
        lambda: registry.find(str(ID)),
        lambda: registry.find("5f0c"),
        lambda: registry.ensure(ID, stores),
        lambda: registry.reattach(str(ID), stores),
        lambda: registry.delete(ID, storage.destroy),
    ):
        with pytest.raises(UnreadableRecordError) as refusal:
            ask()
        assert refusal.value.path == str(folder / f"{ID}.json")
    assert storage.destroyed == []


def test_reattach_updates_last_use(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    record = registry.allocate(stores)
    found = registry.reattach(str(record.id)[:13], stores)
    assert found.id == record.id and found.last_used > record.last_used
    assert registry.load(record.id) == found


def test_reattach_refuses_other_storage(registry: PersistentSandboxRegistry, stores: Stores, elsewhere: Stores) -> None:
    record = registry.allocate(elsewhere)
    with pytest.raises(StorageNotHereError) as refusal:
        registry.reattach(str(record.id), stores)
    assert (refusal.value.storage, refusal.value.where) == ("local", elsewhere.metadata.where)
    assert elsewhere.metadata.where in refusal.value.problem
    assert registry.list().records == [record]


def test_delete_destroys_sandbox_and_record(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    record, other = registry.allocate(stores), registry.allocate(stores)
    storage = Storage()
    assert registry.delete(record.id, storage.destroy) == 1000
    assert storage.destroyed == [record.id]
    assert registry.list().records == [other]


def test_failed_delete_keeps_the_record(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    record = registry.allocate(stores)
    with pytest.raises(LeaseHeldError):
        registry.delete(record.id, Storage({record.id: LeaseHeldError("box", "another server")}).destroy)
    assert registry.load(record.id) == record


def test_interrupted_delete_can_be_repeated(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    record = registry.allocate(stores)
    gone = Storage({record.id: SandboxNotFoundError(record.sandbox_id, record.where)})
    assert registry.delete(record.id, gone.destroy) == 0
    assert registry.list() == ([], [])


def test_record_used_during_delete_is_kept(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    record = registry.allocate(stores)
    registry.delete(record.id, lambda dying: len(registry.touch(dying.id).sandbox_id))
    assert registry.load(record.id).sandbox_id == record.sandbox_id


def test_forget(registry: PersistentSandboxRegistry, stores: Stores) -> None:
    record = registry.allocate(stores)
    assert registry.forget(record.id) is True
    assert registry.forget(record.id) is False
    assert registry.list() == ([], [])


def test_prune_uses_only_the_last_use(
    folder: Path, registry: PersistentSandboxRegistry, stores: Stores, old: Callable[..., SandboxRecord]
) -> None:
    stale, fresh = old(31), old(29)
    os.utime(folder / f"{fresh.id}.json", (1, 1))
    os.utime(folder, (1, 1))
    storage = Storage()
    assert [(removal.record, removal.freed) for removal in registry.prune(MONTH, storage.destroy)] == [(stale, 1000)]
    assert storage.destroyed == [stale.id]
    assert registry.list().records == [fresh]


def test_prune_among_given_records(registry: PersistentSandboxRegistry, old: Callable[..., SandboxRecord]) -> None:
    first, second, fresh = old(40), old(41), old(1)
    removals = registry.prune(MONTH, Storage().destroy, {second.id, fresh.id})
    assert [removal.record for removal in removals] == [second]
    assert {record.id for record in registry.list().records} == {first.id, fresh.id}


def test_prune_continues_after_an_error(registry: PersistentSandboxRegistry, old: Callable[..., SandboxRecord]) -> None:
    first, second, third = old(40), old(41), old(42)
    in_use = LeaseHeldError("box", "another server")
    removals = registry.prune(MONTH, Storage({second.id: in_use}).destroy)
    assert [(removal.record, removal.error) for removal in removals] == [(first, None), (second, in_use), (third, None)]
    assert registry.list().records == [second]


def test_prune_skips_sandboxes_used_meanwhile(
    registry: PersistentSandboxRegistry, old: Callable[..., SandboxRecord]
) -> None:
    first, second = old(40), old(41)
    removals = registry.prune(MONTH, lambda dying: len(str(registry.touch(second.id))))
    assert [removal.record.id for removal in removals] == [first.id]
    assert registry.load(second.id).last_used > second.last_used


def in_processes(count: int, work: Callable[[int, Barrier], None]) -> None:
    """Run ``work`` in ``count`` processes that start together; fail if one of them fails."""
    barrier = FORK.Barrier(count)
    processes = [FORK.Process(target=work, args=(number, barrier)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count


@pytest.mark.user
def test_concurrent_ensure_gives_one_record(folder: Path, stores: Stores) -> None:
    def ensure(number: int, barrier: Barrier) -> None:
        registry = PersistentSandboxRegistry(folder)
        for identity in range(1, 11):
            barrier.wait()
            record = registry.ensure(UUID(int=identity), stores, kernel_name=f"kernel-{number}")
            assert registry.load(record.id) == record
            assert registry.record(f"box-{identity}", stores).sandbox_id == f"box-{identity}"

    in_processes(6, ensure)
    assert len(PersistentSandboxRegistry(folder).list().records) == 20


def test_concurrent_changes_are_not_lost(folder: Path, stores: Stores) -> None:
    rounds = 30
    record = PersistentSandboxRegistry(folder).allocate(stores, notebook_path="/0")

    def change(number: int, barrier: Barrier) -> None:
        registry = PersistentSandboxRegistry(folder)
        barrier.wait()
        for count in range(rounds):
            if number == 0:
                assert len(registry.rename(f"/{count}", f"/{count + 1}")) == 1
            else:
                registry.touch(record.id)
            assert registry.list().unreadable == []

    in_processes(4, change)
    assert PersistentSandboxRegistry(folder).load(record.id).notebook_path == f"/{rounds}"


def test_killed_process_leaves_no_partial_record(folder: Path, stores: Stores) -> None:
    registry = PersistentSandboxRegistry(folder)
    record = registry.allocate(stores)

    def touch_for_ever() -> None:
        while True:
            registry.touch(record.id)

    for _ in range(10):
        process = FORK.Process(target=touch_for_ever)
        process.start()
        before = registry.load(record.id).last_used
        while registry.load(record.id).last_used == before:
            pass
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert registry.touch(record.id).id == record.id
    assert registry.list().unreadable == []


def test_record_is_readable_json(folder: Path, registry: PersistentSandboxRegistry, stores: Stores) -> None:
    record = registry.allocate(stores, kernel_name="python3")
    document = json.loads((folder / f"{record.id}.json").read_text())
    assert document["version"] == 1
    assert document["kernel_name"] == "python3"
