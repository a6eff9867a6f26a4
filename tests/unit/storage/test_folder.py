"""Test stores in folders: killed and stopped writers, permissions, links, clock changes, and full or other disks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sandbox_provisioner.errors import DiskFullError, ObjectNotFoundError, StorageError, StorageUnavailableError
from sandbox_provisioner.storage import folder
from sandbox_provisioner.storage.base import NEW
from sandbox_provisioner.storage.disk import ABANDONED
from sandbox_provisioner.storage.folder import FolderStore
from sandbox_provisioner.storage.local import LocalStore
from sandbox_provisioner.storage.mounted import MountedStore

STEPS = ("close", "fchmod", "fsync", "mkdir", "open", "pwrite", "rename", "rmdir", "unlink", "utime", "write")
"""Functions of os that change a disk, or are called between such changes."""


@pytest.fixture(params=["local", "mounted"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FolderStore:
    root = tmp_path / "store"
    return LocalStore(root) if request.param == "local" else MountedStore(root, stale=0.05)


def killed_at(step: int, action: Callable[[], object]) -> bool:
    """Run ``action`` in a child that is killed before change number ``step``. Return True if it was not killed."""
    child = os.fork()
    if not child:
        count = 0

        def counting(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return counted

        for name in STEPS:
            setattr(os, name, counting(getattr(os, name)))
        action()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def age(path: Path) -> None:
    """Set the times of a folder's entries so far back that they count as abandoned."""
    for entry in path.iterdir():
        os.utime(entry, (0, time.time() - ABANDONED - 1))


def test_killed_write_leaves_the_old_or_the_new_object(store: FolderStore) -> None:
    store.write("a/name", b"old")
    step, lived, outcomes = 0, False, set()
    while not lived:
        step += 1
        data, before = store.read("a/name")
        new = f"new {step}".encode()
        lived = killed_at(step, partial(store.write, "a/name", new, before.generation))
        found, after = store.read("a/name")
        assert found in (data, new)
        assert (after.generation > before.generation) == (found == new)
        outcomes.add(found == new)
    assert outcomes == {True, False}
    age(store.root / ".tmp")
    assert [info.name for info in store.list("")] == ["a/name"]
    assert list((store.root / ".tmp").iterdir()) == []


def test_killed_delete_leaves_all_objects_or_none(store: FolderStore) -> None:
    step, lived = 0, False
    while not lived:
        step += 1
        for name in ("a/1", "a/b/2"):
            store.write(name, name.encode())
        lived = killed_at(step, partial(store.delete_all, "a/"))
        names = [info.name for info in store.list("")]
        assert names in ([], ["a/1", "a/b/2"])
    age(store.root / ".tmp")
    assert store.list("") == []
    assert list((store.root / ".tmp").iterdir()) == []


def test_killed_upload_can_be_repeated(store: FolderStore, tmp_path: Path) -> None:
    step, lived = 0, False
    while not lived:
        step += 1
        source = tmp_path / f"source{step}"
        source.write_bytes(b"data")
        lived = killed_at(step, partial(store.upload, source, f"file{step}"))
        if source.exists():
            store.upload(source, f"file{step}")
        assert store.read(f"file{step}")[0] == b"data"


def test_files_and_folders_are_private(store: FolderStore, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store.write("a/b/name", b"secret")
        source = tmp_path / "source"
        source.write_bytes(b"secret")
        source.chmod(0o666)
        store.upload(source, "a/file")
    finally:
        os.umask(old)
    found = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert set(found) >= {"store", "store/a/b", "store/a/b/name", "store/a/file", "store/.tmp"}
    assert {path for path, mode in found.items() if mode not in (0o600, 0o700)} == set()


def test_links_are_not_followed(store: FolderStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.write("a/name", b"ours")
    (store.root / "folder").symlink_to(outside)
    (store.root / "a" / "link").symlink_to(outside / "secret")
    assert [info.name for info in store.list("")] == ["a/name"]
    assert store.list("folder/") == []
    with pytest.raises(ObjectNotFoundError):
        store.read("folder/secret")
    with pytest.raises(StorageError):
        store.read("a/link")
    with pytest.raises(StorageError):
        store.write("folder/new", b"")
    assert not store.delete("folder/secret")
    assert store.delete_all("folder/") == 0
    store.write("a/link", b"ours as well")
    store.delete_all("a/")
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_object_below_another_is_refused(store: FolderStore) -> None:
    store.write("a", b"")
    with pytest.raises(StorageError):
        store.write("a/b", b"")
    store.write("c/d", b"")
    with pytest.raises(StorageError):
        store.write("c", b"")
    assert not store.delete("c")
    assert store.delete_all("a/") == 0
    assert [info.name for info in store.list("")] == ["a", "c/d"]


def test_empty_folders_are_removed(store: FolderStore) -> None:
    store.write("a/b/c/name", b"")
    store.write("a/other", b"")
    store.delete("a/b/c/name")
    assert [path.name for path in (store.root / "a").iterdir()] == ["other"]


def test_generations_grow_after_the_clock_is_set_back(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store.write("name", b"1")
    store.delete("name")
    monkeypatch.setattr(folder.time, "time_ns", lambda: first.generation - 10**15)
    second = store.write("name", b"2")
    third = store.write("name", b"3", second.generation)
    assert first.generation < second.generation < third.generation


def test_generations_grow_with_times_in_whole_seconds(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.utime

    def coarse(path: Any, ns: tuple[int, int]) -> None:
        real(path, ns=(ns[0], ns[1] // 10**9 * 10**9))

    monkeypatch.setattr(os, "utime", coarse)
    written = [store.write("name", bytes([number])).generation for number in range(3)]
    assert written == sorted(set(written))
    assert store.info("name").generation == written[-1]


def test_file_on_the_same_disk_is_moved(store: FolderStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"data")
    number = source.stat().st_ino
    store.upload(source, "file")
    assert not source.exists()
    assert (store.root / "file").stat().st_ino == number


def test_hard_linked_file_or_file_on_another_disk_is_copied(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"data")
    os.link(source, tmp_path / "another name")
    store.upload(source, "linked")
    (tmp_path / "another name").write_bytes(b"changed")
    assert store.read("linked")[0] == b"data"

    source.unlink()
    source.write_bytes(b"far away")
    real = os.rename

    def other_disk(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path) == str(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "rename", other_disk)
    moved: list[int] = []
    record = store.upload(source, "copied", moved.append)
    assert (store.read("copied")[0], source.read_bytes()) == (b"far away", b"far away")
    assert sum(moved) == record.size


def test_full_disk_is_reported_and_leaves_no_file(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("name", b"old")

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DiskFullError):
            store.write("name", b"new")
    assert store.read("name")[0] == b"old"
    assert list((store.root / ".tmp").iterdir()) == []


def test_unusable_folder_raises_storage_error(store: FolderStore) -> None:
    store.root.write_text("a file is in its place")
    with pytest.raises(StorageError, match="Could not write name"):
        store.write("name", b"")


def test_reading_creates_no_folder(store: FolderStore) -> None:
    assert store.list("") == []
    assert not store.delete("name")
    assert store.delete_all("a/") == 0
    assert not store.root.exists()


def test_write_times_out_while_another_writer_is_stopped(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store", patience=0.1)
    written = store.write("name", b"1")
    with (store.root / ".generation").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StorageUnavailableError, match="stopped"):
            store.write("name", b"2")
        assert store.read("name") == (b"1", written)
    store.write("name", b"2", written.generation)


def test_paused_writer_whose_lock_was_broken_changes_nothing(tmp_path: Path) -> None:
    store = MountedStore(tmp_path / "store", stale=0.05)
    written = store.write("name", b"1")
    child = os.fork()
    if not child:
        real = os.utime

        def pause(path: Any, ns: tuple[int, int]) -> None:
            real(path, ns=ns)
            if (store.root / ".lock").exists():
                os.kill(os.getpid(), signal.SIGSTOP)

        os.utime = pause  # type: ignore[assignment]
        try:
            store.write("name", b"3", written.generation)
        except StorageUnavailableError as error:
            os._exit(7 if "paused" in str(error) else 8)
        os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    newer = store.write("name", b"2", written.generation)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert store.read("name") == (b"2", newer)
    assert store.write("new", b"", NEW)
