"""Test the behaviour that all kinds of ObjectStore share: local folder, mounted folder, bucket and memory."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore
from stores import append, append_many, open_store

from sandbox_provisioner.errors import (
    ConflictError,
    CorruptObjectError,
    ObjectNotFoundError,
    SandboxError,
    StorageError,
)
from sandbox_provisioner.storage.base import NEW, FileRecord, ObjectStore

KINDS = ("local", "mounted", "gcs", "memory")
MIB = 1024 * 1024
HOSTILE = ["", ".", "..", "/", "a/../b", "../x", "/etc/passwd", "a//b", "a/", ".hidden", "a/.b", "a\0b", "a\nb", "ü"]
HOSTILE += ["a" * 256, "a/" * 256 + "b", "-rf\n", "a\\..\\b", "%2e%2e/x", "~root", "a b", ".tmp/x", ".generation"]


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    place = request.getfixturevalue("gcs").bucket if request.param == "gcs" else str(tmp_path / "outer" / "store")
    return open_store(request.param, place)


@pytest.fixture
def a_file(tmp_path: Path) -> Callable[[bytes], Path]:
    """Return a function that creates a file to be stored."""

    def make(data: bytes) -> Path:
        path = tmp_path / f"source{len(list(tmp_path.iterdir()))}"
        path.write_bytes(data)
        return path

    return make


def stored_part(store: ObjectStore, name: str, number: int = 0) -> str:
    """Return the name of the object that contains the bytes of an uploaded file."""
    return f"{name}/{number:05d}" if store.kind == "gcs" else name


def test_written_object_is_read_with_its_generation(store: ObjectStore) -> None:
    written = store.write("sandboxes/a/metadata.json", b"hello")
    assert store.read("sandboxes/a/metadata.json") == (b"hello", written)
    assert store.info("sandboxes/a/metadata.json") == written
    assert (written.name, written.size) == ("sandboxes/a/metadata.json", 5)
    assert written.generation > NEW
    assert written.updated > 1_600_000_000


def test_empty_object(store: ObjectStore) -> None:
    assert store.write("empty", b"").size == 0
    assert store.read("empty")[0] == b""


def test_missing_object_is_named_in_the_error(store: ObjectStore) -> None:
    store.write("folder/other", b"")
    for ask in (store.read, store.info):
        for name in ("absent", "folder", "folder/absent", "folder/other/below"):
            with pytest.raises(ObjectNotFoundError, match=name) as caught:
                ask(name)
            assert (caught.value.name, caught.value.where) == (name, store.where)


def test_generation_grows_with_each_write_and_after_a_delete(store: ObjectStore) -> None:
    seen = []
    for number in range(10):
        seen.append(store.write("name", bytes([number])).generation)
        if number % 3 == 2:
            assert store.delete("name")
    assert seen == sorted(set(seen))


def test_creation_of_an_existing_object_is_a_conflict(store: ObjectStore) -> None:
    first = store.write("name", b"1", NEW)
    with pytest.raises(ConflictError, match="already exists") as caught:
        store.write("name", b"2", NEW)
    assert (caught.value.name, caught.value.expected) == ("name", NEW)
    assert store.read("name") == (b"1", first)


def test_write_with_another_generation_is_a_conflict(store: ObjectStore) -> None:
    first = store.write("name", b"1")
    second = store.write("name", b"2", first.generation)
    with pytest.raises(ConflictError, match=str(first.generation)):
        store.write("name", b"3", first.generation)
    assert store.read("name") == (b"2", second)
    store.delete("name")
    with pytest.raises(ConflictError):
        store.write("name", b"4", second.generation)
    assert store.list("") == []


def test_delete_with_another_generation_is_a_conflict(store: ObjectStore) -> None:
    first = store.write("name", b"1")
    second = store.write("name", b"2")
    with pytest.raises(ConflictError):
        store.delete("name", first.generation)
    assert store.delete("name", second.generation)
    assert not store.delete("name", second.generation)
    assert not store.delete("name")
    assert not store.delete("folder/absent")


def test_list_is_sorted_and_below_the_prefix(store: ObjectStore) -> None:
    for name in ("b/2", "a/1", "b/c/3", "bb/4", "b.txt"):
        store.write(name, name.encode())
    assert [info.name for info in store.list("")] == ["a/1", "b.txt", "b/2", "b/c/3", "bb/4"]
    below = store.list("b/")
    assert [info.name for info in below] == ["b/2", "b/c/3"]
    assert below == [store.info("b/2"), store.info("b/c/3")]
    assert store.list("absent/") == []
    for prefix in ("b", "/", "../", "b/../"):
        with pytest.raises(StorageError):
            store.list(prefix)


def test_uploaded_file_is_downloaded_with_progress(
    store: ObjectStore, a_file: Callable[[bytes], Path], tmp_path: Path
) -> None:
    data = os.urandom(33 * MIB + 5)
    moved: list[int] = []
    record = store.upload(a_file(data), "checkpoints/1/pages.img", moved.append)
    assert (record.size, len(record.parts), sum(moved)) == (len(data), 2, len(data))
    moved.clear()
    store.download("checkpoints/1/pages.img", record, tmp_path / "copy", moved.append)
    assert sum(moved) == len(data)
    assert (tmp_path / "copy").read_bytes() == data
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


def test_empty_file(store: ObjectStore, a_file: Callable[[bytes], Path], tmp_path: Path) -> None:
    record = store.upload(a_file(b""), "empty.img")
    store.download("empty.img", record, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b""


def test_only_the_same_file_can_be_uploaded_again(
    store: ObjectStore, a_file: Callable[[bytes], Path], tmp_path: Path
) -> None:
    record = store.upload(a_file(b"same"), "name")
    assert store.upload(a_file(b"same"), "name") == record
    for other in (b"else", b"longer than before", b""):
        with pytest.raises(ConflictError):
            store.upload(a_file(other), "name")
    store.download("name", record, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"same"


def test_upload_of_an_unreadable_file_raises_storage_error(store: ObjectStore, tmp_path: Path) -> None:
    for source in (tmp_path / "absent", tmp_path):
        with pytest.raises(SandboxError):
            store.upload(source, "name")
    assert store.list("") == []


@pytest.mark.parametrize("damage", ["flipped byte", "truncated", "longer", "missing"])
def test_download_of_a_damaged_file_leaves_no_target(
    store: ObjectStore, a_file: Callable[[bytes], Path], tmp_path: Path, damage: str
) -> None:
    data = os.urandom(33 * MIB)
    record = store.upload(a_file(data), "name")
    part = stored_part(store, "name", 1)
    stored = bytearray(store.read(part)[0])
    if damage == "missing":
        store.delete(part)
    else:
        stored[-5] ^= damage == "flipped byte"
        store.write(part, bytes(stored[:-1] if damage == "truncated" else stored + b"x" * (damage == "longer")))
    with pytest.raises((CorruptObjectError, ObjectNotFoundError), match="name"):
        store.download("name", record, tmp_path / "copy")
    assert not list(tmp_path.glob("*copy*"))
    assert not list(tmp_path.glob(".*"))


def test_inconsistent_record_is_refused(store: ObjectStore, a_file: Callable[[bytes], Path], tmp_path: Path) -> None:
    record = store.upload(a_file(b"data"), "name")
    wrong: list[FileRecord] = [
        replace(record, size=-1),
        replace(record, size=1 << 60),
        replace(record, part_size=0),
        replace(record, part_size=-4),
        replace(record, parts=()),
        replace(record, parts=record.parts * 3),
        replace(record, parts=(record.parts[0] ^ 1,)),
        replace(record, parts=(-1,)),
        replace(record, parts=(1 << 32,)),
    ]
    for bad in wrong:
        with pytest.raises(CorruptObjectError):
            store.download("name", bad, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_download_refuses_other_bytes_with_the_same_crc(
    store: ObjectStore, a_file: Callable[[bytes], Path], tmp_path: Path
) -> None:
    wanted = store.upload(a_file(b"data"), "wanted")
    forged = replace(store.upload(a_file(b"evil"), "forged"), digests=wanted.digests)
    with pytest.raises(CorruptObjectError, match="wrong checksum"):
        store.download("forged", forged, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    if store.kind in ("local", "mounted"):
        with pytest.raises(CorruptObjectError):
            store.in_place("forged", forged)


def test_records_without_digests_are_read(store: ObjectStore, a_file: Callable[[bytes], Path], tmp_path: Path) -> None:
    record = replace(store.upload(a_file(b"data"), "file"), digests=())
    store.download("file", record, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"data"


def test_delete_all_deletes_only_below_the_prefix(store: ObjectStore, a_file: Callable[[bytes], Path]) -> None:
    store.write("a/1", b"12345")
    store.write("a/b/2", b"123")
    store.write("a.b", b"1")
    store.write("ab/1", b"1")
    store.upload(a_file(b"12"), "a/file")
    assert store.delete_all("a/") == 10
    assert [info.name for info in store.list("")] == ["a.b", "ab/1"]
    assert store.delete_all("a/") == 0
    assert store.delete_all("a.b/") == 0
    for prefix in ("", "/", "a", "../", "a/../"):
        with pytest.raises(StorageError):
            store.delete_all(prefix)


def test_folder_stores_allow_use_in_place(store: ObjectStore, a_file: Callable[[bytes], Path]) -> None:
    record = store.upload(a_file(b"data"), "checkpoints/1/file")
    path = store.in_place("checkpoints/1/file", record)
    assert (path is not None) == (store.kind in ("local", "mounted"))
    if path is not None:
        assert path.read_bytes() == b"data"
        with pytest.raises(CorruptObjectError):
            store.in_place("checkpoints/1/file", replace(record, parts=(1,)))


@pytest.mark.parametrize("open_to_others", ["", "checkpoints", "checkpoints/1", "checkpoints/1/file"])
def test_file_that_others_can_change_is_copied_instead(
    store: ObjectStore, a_file: Callable[[bytes], Path], tmp_path: Path, open_to_others: str
) -> None:
    record = store.upload(a_file(b"data"), "checkpoints/1/file")
    if store.kind in ("local", "mounted"):
        Path(store.where, open_to_others).chmod(0o777)
    assert store.in_place("checkpoints/1/file", record) is None
    store.download("checkpoints/1/file", record, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"data"


@pytest.mark.parametrize("name", HOSTILE)
def test_every_method_refuses_hostile_names(
    store: ObjectStore, name: str, a_file: Callable[[bytes], Path], tmp_path: Path
) -> None:
    record = FileRecord(4, MIB, (0,))
    calls: list[Callable[[], object]] = [
        lambda: store.read(name),
        lambda: store.info(name),
        lambda: store.write(name, b""),
        lambda: store.delete(name),
        lambda: store.upload(a_file(b"data"), name),
        lambda: store.download(name, record, tmp_path / "copy"),
        lambda: store.delete_all(f"{name}/"),
        lambda: store.list(f"{name}/"),
    ]
    for call in calls:
        with pytest.raises(StorageError):
            call()


NAMES = st.one_of(
    st.text(),
    st.text("ab./-_\0\\ ~%", max_size=12),
    st.lists(st.sampled_from(["a", "..", ".", "", "b.c", ".x", "-"]), max_size=5).map("/".join),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES)
@example(name="a/b")
def test_no_name_leads_out_of_the_store(store: ObjectStore, tmp_path: Path, name: str) -> None:
    try:
        store.write(name, name.encode(errors="replace"))
    except StorageError:
        assert store.list("") == []
    else:
        assert [info.name for info in store.list("")] == [name]
        assert store.delete(name)
    outer = tmp_path / "outer"
    assert not outer.exists() or [path.name for path in outer.iterdir()] == ["store"]


def test_threads_lose_no_change_of_one_object(store: ObjectStore) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: append(store, str(number)), range(24)))
    assert sorted(map(int, store.read("lines")[0].split())) == list(range(24))


@pytest.mark.user
@pytest.mark.parametrize("store", ["local", "mounted", "gcs"], indirect=True)
def test_processes_lose_no_change_of_one_object(store: ObjectStore, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue("gcs").bucket if store.kind == "gcs" else store.where
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=append_many, args=(store.kind, place, worker, 8)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    lines = store.read("lines")[0].split()
    assert sorted(lines) == sorted(f"{worker}-{number}".encode() for worker in range(4) for number in range(8))


def test_only_one_of_several_simultaneous_creations_succeeds(store: ObjectStore) -> None:
    start = threading.Barrier(6)

    def create(number: int) -> bool:
        start.wait()
        try:
            store.write("lock", str(number).encode(), NEW)
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        won = [number for number, success in enumerate(pool.map(create, range(6))) if success]
    assert [store.read("lock")[0]] == [str(number).encode() for number in won]


def test_reader_sees_only_complete_writes(store: ObjectStore) -> None:
    store.write("name", b"a" * 5000)
    done = threading.Event()

    def write() -> None:
        for letter in b"bcdefghijk":
            store.write("name", bytes([letter]) * 5000)
        done.set()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write)
        while not done.is_set():
            data, info = store.read("name")
            assert (len(data), len(set(data)), info.size) == (5000, 1, 5000)
