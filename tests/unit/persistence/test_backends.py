"""Test which storage each setting selects, and that Google's libraries are needed only if a bucket is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.errors import ConfigurationError, LeaseHeldError
from sandbox_provisioner.lock.base import Owner
from sandbox_provisioner.persistence.backends import Stores, open_snapshots, open_stores

LOCK, METADATA = "SANDBOX_LOCK_BUCKET", "SANDBOX_METADATA_BUCKET"
OWNER = Owner("server", "host", 1, "tester", "nonce")


@pytest.fixture(autouse=True)
def emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name an address where nothing listens: opening a store must send no request."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")


def opened(tmp_path: Path, *variables: str, prefix: str = "") -> Stores:
    """Open the stores with these variables. A bucket gets the name of its variable; a mount path is a new folder."""
    environ = {"SANDBOX_OBJECT_PREFIX": prefix}
    for name in variables:
        if name.endswith("_MOUNT_PATH"):
            (tmp_path / name).mkdir(exist_ok=True)
            environ[name] = str(tmp_path / name)
        else:
            environ[name] = name.lower()
    return open_stores(GCSConfig.from_environment(tmp_path / "default", environ))


async def test_default_storage_is_one_private_folder(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        stores = opened(tmp_path)
        lease = await stores.leases.acquire("sandboxes/box/lock", OWNER)
        stores.metadata.write("sandboxes/box/metadata.json", b"{}")
    finally:
        os.umask(mask)
    assert stores.kind == stores.metadata.kind == "local"
    assert stores.metadata.where == str(tmp_path / "default")
    assert stores.metadata is stores.checkpoints is stores.snapshots
    assert {path.name for path in tmp_path.iterdir()} == {"default"}
    everything = [tmp_path / "default", *(tmp_path / "default").rglob("*")]
    assert {path.stat().st_mode & 0o077 for path in everything} == {0}
    assert [info.name for info in stores.metadata.list("")] == ["sandboxes/box/metadata.json"]
    with pytest.raises(LeaseHeldError):
        await opened(tmp_path).leases.acquire("sandboxes/box/lock", OWNER)
    await lease.release()


def kinds(stores: Stores) -> tuple[str, str, str, str]:
    """The classes that were chosen for metadata, leases, checkpoints and snapshots."""
    chosen = (stores.metadata, stores.leases, stores.checkpoints, stores.snapshots)
    metadata, leases, checkpoints, snapshots = (type(one).__name__ if one else "" for one in chosen)
    return metadata, leases, checkpoints, snapshots


METADATA_MOUNT, LOCK_MOUNT = "SANDBOX_METADATA_MOUNT_PATH", "SANDBOX_LOCK_MOUNT_PATH"
CHECKPOINT, CHECKPOINT_MOUNT = "SANDBOX_CHECKPOINT_BUCKET", "SANDBOX_CHECKPOINT_MOUNT_PATH"
SNAPSHOT, SNAPSHOT_MOUNT = "FILESYSTEM_SNAPSHOT_BUCKET", "FILESYSTEM_SNAPSHOT_MOUNT_PATH"
CHOICES = [
    ([], ("LocalStore", "LocalLeases", "LocalStore", "LocalStore")),
    ([METADATA, LOCK], ("GCSStore", "GCSLeases", "", "")),
    ([METADATA, LOCK, CHECKPOINT, SNAPSHOT], ("GCSStore", "GCSLeases", "GCSStore", "GCSStore")),
    ([METADATA_MOUNT, LOCK_MOUNT], ("MountedStore", "ObjectLeases", "", "")),
    ([METADATA, LOCK_MOUNT, CHECKPOINT_MOUNT], ("GCSStore", "ObjectLeases", "MountedStore", "")),
    ([METADATA, METADATA_MOUNT, LOCK, LOCK_MOUNT], ("GCSStore", "GCSLeases", "", "")),
    ([METADATA, LOCK, CHECKPOINT, CHECKPOINT_MOUNT], ("GCSStore", "GCSLeases", "MountedStore", "")),
    ([METADATA, LOCK, SNAPSHOT, SNAPSHOT_MOUNT], ("GCSStore", "GCSLeases", "", "MountedStore")),
]


@pytest.mark.parametrize(("variables", "expected"), CHOICES)
def test_settings_select_the_storage(variables: list[str], expected: tuple[str, ...], tmp_path: Path) -> None:
    stores = opened(tmp_path, *variables)
    assert kinds(stores) == expected
    assert stores.kind == stores.metadata.kind


def test_staging_is_on_this_machine(tmp_path: Path) -> None:
    stores = opened(tmp_path, METADATA, LOCK, CHECKPOINT_MOUNT)
    assert stores.staging.parent == opened(tmp_path).staging.parent == tmp_path / "default"


def test_prefix_applies_to_buckets_and_mounted_folders(tmp_path: Path) -> None:
    stores = opened(tmp_path, METADATA, LOCK, CHECKPOINT_MOUNT, prefix="team/1")
    assert stores.metadata.where == "gs://sandbox_metadata_bucket/team/1"
    assert stores.checkpoints is not None
    stores.checkpoints.write("a/b", b"")
    assert [path.name for path in (tmp_path / CHECKPOINT_MOUNT / "team" / "1" / "a").iterdir()] == ["b"]


async def test_servers_share_the_leases_in_a_folder(tmp_path: Path) -> None:
    one, other = (opened(tmp_path, METADATA_MOUNT, LOCK_MOUNT) for _ in range(2))
    lease = await one.leases.acquire("box", OWNER)
    assert await other.leases.holder("box") == OWNER
    await lease.release()
    assert await other.leases.holder("box") is None


@pytest.mark.parametrize(("variables", "missing"), [([LOCK], METADATA), ([METADATA], LOCK), ([CHECKPOINT], LOCK)])
def test_missing_setting_is_named(variables: list[str], missing: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        opened(tmp_path, *variables)
    assert refusal.value.setting == missing


def test_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError) as refusal:
        open_stores(GCSConfig(folder=tmp_path / "file" / "storage"))
    assert refusal.value.setting == "SANDBOX_STORAGE_DIR"
    assert str(tmp_path / "file" / "storage") in refusal.value.problem


def test_snapshot_store_without_other_storage(tmp_path: Path) -> None:
    settings = GCSConfig.from_environment(tmp_path, {SNAPSHOT_MOUNT: str(tmp_path)})
    snapshots = open_snapshots(settings)
    assert snapshots is not None and snapshots.where == str(tmp_path)
    metadata_only = GCSConfig.from_environment(tmp_path, {METADATA_MOUNT: str(tmp_path)})
    assert open_snapshots(metadata_only) is None
    assert open_snapshots(GCSConfig(folder=tmp_path)) is not None


def test_google_is_imported_only_for_a_bucket() -> None:
    program = "import sys, sandbox_provisioner.persistence.backends; print('google' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


@pytest.mark.parametrize("variables", [(METADATA, LOCK_MOUNT), (METADATA_MOUNT, LOCK)])
def test_missing_google_client_is_reported_with_the_command(
    variables: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith("google") or name in ("sandbox_provisioner.storage.gcs", "sandbox_provisioner.lock.gcs"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google", None)
    with pytest.raises(ConfigurationError) as refusal:
        opened(tmp_path, *variables)
    assert refusal.value.setting in variables
    assert "pip install 'sandbox-provisioner[gcs]'" in refusal.value.remedy
