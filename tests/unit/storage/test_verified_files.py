"""Test that a verified file is read again only after a change, and that every change is noticed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_provisioner.errors import CorruptObjectError
from sandbox_provisioner.storage import folder, verified_files
from sandbox_provisioner.storage.base import FileRecord
from sandbox_provisioner.storage.folder import FolderStore
from sandbox_provisioner.storage.local import LocalStore
from sandbox_provisioner.storage.mounted import MountedStore
from sandbox_provisioner.storage.verified_files import SMALL

NAME = "checkpoints/1/pages.img"


def save(store: FolderStore, name: str = NAME, size: int = SMALL) -> FileRecord:
    source = store.root.parent / "source"
    source.write_bytes(os.urandom(size))
    return store.upload(source, name)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the names of all files that are verified by reading them during the test."""
    names: list[str] = []
    verify = folder.verify

    def count(where: str, name: str, *rest: object) -> None:
        names.append(name)
        verify(where, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(folder, "verify", count)
    return names


def test_saved_file_is_not_read_again(store: LocalStore, verified: list[str]) -> None:
    record = save(store)
    for _ in range(2):
        assert store.in_place(NAME, record) == store.root / NAME
    assert verified == []


def test_verified_file_is_not_read_again(store: LocalStore, verified: list[str]) -> None:
    record = save(store)
    restarted = LocalStore(store.root)
    for _ in range(2):
        assert restarted.in_place(NAME, record) == store.root / NAME
    assert verified == [NAME]


def overwrite(path: Path) -> None:
    """Change one byte in place."""
    with path.open("r+b", buffering=0) as file:
        file.seek(4096)
        byte = file.read(1)
        file.seek(4096)
        file.write(bytes([byte[0] ^ 1]))


def overwrite_mapped(path: Path) -> None:
    """Change one byte through a new mapping of the file."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[4096] ^= 1


def overwrite_linked(path: Path) -> None:
    """Change one byte through a hard link to the file."""
    other = path.with_name("other")
    os.link(path, other)
    overwrite(other)
    other.unlink()


def replace(path: Path) -> None:
    """Replace the file by another one of the same size."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.chmod(0o600)
    overwrite(other)
    other.rename(path)


@pytest.mark.parametrize("round", range(5))
@pytest.mark.parametrize("change", [overwrite, overwrite_mapped, overwrite_linked, replace])
def test_changed_file_is_refused_even_if_its_mtime_is_set_back(
    store: LocalStore, change: Callable[[Path], None], round: int
) -> None:
    record, path = save(store), store.root / NAME
    before = path.stat()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(CorruptObjectError, match="wrong checksum"):
        store.in_place(NAME, record)


def test_changed_file_is_refused_after_it_was_verified(store: LocalStore, verified: list[str]) -> None:
    record = save(store)
    assert store.in_place(NAME, record)
    overwrite(store.root / NAME)
    for _ in range(2):
        with pytest.raises(CorruptObjectError):
            store.in_place(NAME, record)
    overwrite(store.root / NAME)
    assert store.in_place(NAME, record)
    assert verified == [NAME] * 3


def test_change_while_a_file_is_saved_is_noticed(store: LocalStore, verified: list[str]) -> None:
    changed = False

    def change(_: int) -> None:
        nonlocal changed
        if not changed and (store.root / NAME).exists():
            changed = True
            overwrite(store.root / NAME)

    source = store.root.parent / "source"
    source.write_bytes(os.urandom(SMALL))
    record = store.upload(source, NAME, change)
    assert changed
    with pytest.raises(CorruptObjectError):
        store.in_place(NAME, record)
    assert verified == [NAME]


def test_file_of_another_record_is_refused(store: LocalStore) -> None:
    save(store)
    other = save(store, "checkpoints/2/pages.img")
    with pytest.raises(CorruptObjectError):
        store.in_place(NAME, other)


def test_each_process_verifies_each_file(store: LocalStore, verified: list[str]) -> None:
    record = save(store)
    overwrite(store.root / NAME)
    with pytest.raises(CorruptObjectError):
        LocalStore(store.root).in_place(NAME, record)
    assert verified == [NAME]


def test_file_in_a_mounted_folder_is_always_read(tmp_path: Path, verified: list[str]) -> None:
    store = MountedStore(tmp_path / "store")
    record = save(store)
    for _ in range(2):
        assert store.in_place(NAME, record)
    assert verified == [NAME, NAME]


@pytest.mark.parametrize(
    ("setting", "value"), [("FILE_SYSTEMS", frozenset()), ("TRUSTED", 0.0), ("COARSE_CLOCK", 1), ("SMALL", SMALL + 1)]
)
def test_file_whose_times_are_not_trusted_is_read_again(
    store: LocalStore, verified: list[str], monkeypatch: pytest.MonkeyPatch, setting: str, value: object
) -> None:
    monkeypatch.setattr(verified_files, setting, value)
    record = save(store)
    assert store.in_place(NAME, record)
    assert verified == [NAME]


def test_only_the_last_files_are_remembered(tmp_path: Path, verified: list[str]) -> None:
    store = LocalStore(tmp_path / "store")
    store._verified = verified_files.VerifiedFiles(2)
    records = {name: save(store, name) for name in ("a", "b", "c")}
    for name in ("c", "b", "a", "a", "c"):
        assert store.in_place(name, records[name])
    assert verified == ["a"]


def test_upload_that_cannot_be_read_leaves_nothing(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folder, "record_of", fail)
    with pytest.raises(Exception, match="Input/output error"):
        save(store)
    assert store.list("") == []
