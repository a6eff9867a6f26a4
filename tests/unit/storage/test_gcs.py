"""Test GCSStore with faults of the network and of the service: the real client and an emulated server."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from pathlib import Path

import pytest
from gcs_faults import Kind
from gcs_server import GCS
from google.cloud import storage
from stores import append_many

from sandbox_provisioner.errors import ConflictError, CorruptObjectError, StorageError, StorageUnavailableError
from sandbox_provisioner.storage.base import NEW
from sandbox_provisioner.storage.gcs import GCSStore

MIB = 1024 * 1024
PASSING = [
    {"kind": "status", "code": 429},
    {"kind": "status", "code": 503},
    {"kind": "cut"},
    {"kind": "lose"},
    {"kind": "truncate"},
    {"kind": "end"},
    {"kind": "short"},
]


@pytest.fixture
def store(gcs: GCS) -> GCSStore:
    return GCSStore(gcs.bucket, "prefix")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(70 * MIB))
    return path


def parts_sent(gcs: GCS) -> Counter[str]:
    """Return how many times the upload of each part was started."""
    return Counter(name.rpartition("/")[2] for operation, name in gcs.requests() if operation in ("start", "insert"))


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: str(fault.get("code", fault["kind"])))
def test_temporary_failures_are_retried(gcs: GCS, store: GCSStore, tmp_path: Path, fault: dict[str, object]) -> None:
    (tmp_path / "source").write_bytes(os.urandom(9 * MIB))
    gcs.fault(**{"times": None, "every": 2, **fault})  # type: ignore[arg-type]
    first = store.write("name", b"1", NEW)
    second = store.write("name", b"2", first.generation)
    third = store.write("name", b"3")
    assert first.generation < second.generation < third.generation
    assert store.read("name") == (b"3", third)
    assert store.list("") == [store.info("name")]
    assert store.delete("name", third.generation)
    moved: list[int] = []
    record = store.upload(tmp_path / "source", "file", moved.append)
    store.download("file", record, tmp_path / "copy", moved.append)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "source").read_bytes()
    assert sum(moved) == 2 * record.size
    assert store.delete_all("file/") == record.size
    assert store.list("") == []


@pytest.mark.parametrize("kind", ["short", "end"])
@pytest.mark.parametrize("operation", ["insert", "get", "media", "list"])
def test_truncated_response_is_retried(gcs: GCS, store: GCSStore, operation: str, kind: Kind) -> None:
    gcs.fault(kind, operation=operation, times=2)
    written = store.write("name", b"four bytes and more", NEW)
    assert store.read("name") == (b"four bytes and more", written)
    assert store.list("") == [written]
    assert gcs.faults()[0]["struck"] == 2


def test_truncated_download_is_retried(gcs: GCS, store: GCSStore, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(os.urandom(MIB))
    record = store.upload(tmp_path / "source", "file")
    gcs.fault("short", operation="media", times=2)
    store.download("file", record, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "source").read_bytes()
    assert gcs.faults()[0]["struck"] == 2


def test_write_with_lost_response_does_not_conflict_with_itself(gcs: GCS, store: GCSStore) -> None:
    gcs.fault("lose", operation="insert")
    created = store.write("name", b"1", NEW)
    assert created == store.info("name")
    gcs.fault("lose", operation="insert")
    assert store.write("name", b"2", created.generation) == store.info("name")
    assert gcs.faults()[0]["struck"] == gcs.faults()[1]["struck"] == 1


def test_mutation_limit_delays_writes_of_one_name(gcs: GCS, store: GCSStore) -> None:
    gcs.limit_mutations()
    generation = NEW
    for number in range(3):
        generation = store.write("name", b"%d" % number, generation).generation
    with pytest.raises(ConflictError):
        store.write("name", b"", NEW)
    assert store.read("name")[0] == b"2"
    assert store.delete("name", generation)
    assert gcs.refused_mutations() > 0


def test_write_by_another_is_a_conflict_after_a_lost_response(gcs: GCS, store: GCSStore) -> None:
    created = store.write("name", b"1")
    GCSStore(gcs.bucket, "prefix").write("name", b"same bytes")
    gcs.fault("cut", operation="insert")
    with pytest.raises(ConflictError):
        store.write("name", b"same bytes", created.generation)
    gcs.fault("cut", operation="insert")
    store.delete("name")
    with pytest.raises(ConflictError):
        store.write("name", b"same bytes", created.generation)


def test_delete_with_lost_response_returns_true(gcs: GCS, store: GCSStore) -> None:
    written = store.write("name", b"1")
    gcs.fault("lose", operation="delete")
    assert store.delete("name", written.generation)
    assert not store.delete("name")


@pytest.mark.user
def test_processes_lose_and_repeat_no_change_despite_failures(gcs: GCS) -> None:
    for fault in PASSING:
        gcs.fault(**{"times": None, "probability": 0.05, **fault})  # type: ignore[arg-type]
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=append_many, args=("gcs", gcs.bucket, worker, 8)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert [worker.exitcode for worker in workers] == [0] * 4
    lines = GCSStore(gcs.bucket, "some/prefix").read("lines")[0].split()
    assert sorted(lines) == sorted(f"{worker}-{number}".encode() for worker in range(4) for number in range(8))


def test_unreachable_bucket_is_an_error_after_patience(gcs: GCS) -> None:
    gcs.fault("status", code=503, times=None)
    store = GCSStore(gcs.bucket, patience=0.3)
    for ask in (lambda: store.read("name"), lambda: store.write("name", b""), lambda: store.list("")):
        with pytest.raises(StorageUnavailableError, match=gcs.bucket):
            ask()


@pytest.mark.parametrize("code", [401, 403])
def test_denied_request_names_the_bucket_and_the_role(gcs: GCS, store: GCSStore, code: int) -> None:
    gcs.fault("status", code=code)
    with pytest.raises(StorageError, match=rf"{gcs.bucket}.*GOOGLE_APPLICATION_CREDENTIALS"):
        store.write("name", b"")


def test_rejected_request_raises_storage_error(gcs: GCS, store: GCSStore) -> None:
    gcs.fault("status", code=400)
    with pytest.raises(StorageError, match=gcs.bucket):
        store.write("name", b"")


def test_invalid_address_raises_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "no address")
    with pytest.raises(StorageError, match="the-bucket"):
        GCSStore("the-bucket").read("name")


@pytest.mark.parametrize("bucket", ["", "..", "a/b", "../../x", "Bucket", "a?b", "x\n"])
def test_invalid_bucket_name_is_refused(bucket: str) -> None:
    with pytest.raises(StorageError, match="is not a valid bucket name"):
        GCSStore(bucket)


def test_missing_bucket_is_named(gcs: GCS, tmp_path: Path) -> None:
    store = GCSStore("no-such-bucket")
    (tmp_path / "source").write_bytes(b"1")
    for ask in (
        lambda: store.write("name", b""),
        lambda: store.list(""),
        lambda: store.upload(tmp_path / "source", "x"),
        lambda: store.delete_all("x/"),
    ):
        with pytest.raises(StorageError, match="no-such-bucket does not exist"):
            ask()


def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    with pytest.raises(StorageError, match="GOOGLE_APPLICATION_CREDENTIALS"):
        GCSStore("bucket").read("name")


def test_interrupted_upload_sends_only_missing_parts(gcs: GCS, store: GCSStore, source: Path, tmp_path: Path) -> None:
    gcs.fault("status", code=403, operation="start", name=".*/00001", times=None)
    with pytest.raises(StorageError):
        store.upload(source, "file")
    there = {info.name.rpartition("/")[2] for info in store.list("file/")}
    assert there == {"00000", "00002"}
    gcs.reset_faults()
    moved: list[int] = []
    record = store.upload(source, "file", moved.append)
    assert set(parts_sent(gcs)) == {"00001"}
    assert sum(moved) == record.size
    store.download("file", record, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_interrupted_download_fetches_only_missing_parts(
    gcs: GCS, store: GCSStore, source: Path, tmp_path: Path
) -> None:
    record = store.upload(source, "file")
    impatient = GCSStore(gcs.bucket, "prefix", patience=0.2)
    gcs.fault("status", code=503, operation="media", name=".*/00001", times=None)
    with pytest.raises(StorageUnavailableError):
        impatient.download("file", record, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    gcs.reset_faults()
    moved: list[int] = []
    store.download("file", record, tmp_path / "copy", moved.append)
    assert [name for operation, name in gcs.requests() if operation == "media"] == ["prefix/file/00001"]
    assert sum(moved) == record.size
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "copy"}


def test_upload_over_parts_of_another_file_is_a_conflict(store: GCSStore, source: Path, tmp_path: Path) -> None:
    store.write("file/00001", b"other")
    with pytest.raises(ConflictError):
        store.upload(source, "file")
    store.delete_all("file/")
    store.write("file/00007", b"more than it has")
    with pytest.raises(ConflictError):
        store.upload(source, "file")


def test_part_deleted_during_a_download_is_reported_as_missing(gcs: GCS, store: GCSStore, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"data")
    record = store.upload(tmp_path / "source", "file")
    gcs.fault("status", code=404, operation="media")
    with pytest.raises(CorruptObjectError, match="missing"):
        store.download("file", record, tmp_path / "copy")


def test_store_lists_only_valid_names_below_its_prefix(gcs: GCS, store: GCSStore) -> None:
    bucket = storage.Client().bucket(gcs.bucket)
    for name in ("prefix/ours", "prefix/not ours", "prefix/.hidden", "prefix//x", "prefixed/x", "other"):
        bucket.blob(name).upload_from_string("x")
    assert [info.name for info in store.list("")] == ["ours"]
    for prefix in ("..", "/", "a//b", ".x"):
        with pytest.raises(StorageError):
            GCSStore(gcs.bucket, prefix)
