"""A guest cannot read or change the storage, or the folders in which Jupyter and its sandboxes keep files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from kernels import run

from sandbox_provisioner.errors import ConfigurationError

pytestmark = [pytest.mark.runsc, pytest.mark.user]

Sandboxed = Callable[..., str]
Start = Callable[..., tuple[KernelManager, BlockingKernelClient]]


@pytest.mark.parametrize("exists", [True, False])
def test_storage_in_the_notebooks_folder_is_hidden(
    exists: bool, start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = notebook_folder / ".storage"
    if exists:
        storage.mkdir()
        (storage / "metadata.json").write_text("{}")
    monkeypatch.setenv("SANDBOX_STORAGE_DIR", str(storage))
    _, kc = start_kernel(sandboxed())
    assert run(kc, "import os; os.listdir('.storage')") == "[]"
    run(kc, "open('.storage/metadata.json', 'w').write('changed')")
    with pytest.raises(AssertionError, match=r"OSError|PermissionError"):
        run(kc, "os.rename('.storage', 'moved')")
    assert [path.read_text() for path in storage.iterdir()] == (["{}"] if exists else [])


def test_storage_behind_a_guests_link_is_refused(
    start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (notebook_folder / ".storage").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("SANDBOX_STORAGE_DIR", str(notebook_folder / ".storage"))
    with pytest.raises(ConfigurationError, match=r"SANDBOX_STORAGE_DIR.*is a link to"):
        start_kernel(sandboxed())


VARIABLES = [
    "SANDBOX_STORAGE_DIR",
    "SANDBOX_METADATA_MOUNT_PATH",
    "SANDBOX_LOCK_MOUNT_PATH",
    "SANDBOX_CHECKPOINT_MOUNT_PATH",
    "FILESYSTEM_SNAPSHOT_MOUNT_PATH",
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_RUNTIME_DIR",
]


@pytest.mark.parametrize("variable", VARIABLES)
def test_writable_mount_of_a_reserved_folder_is_refused(
    variable: str, start_kernel: Start, sandboxed: Sandboxed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "own" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.setenv(variable, str(tmp_path / "own"))
    with pytest.raises(ConfigurationError, match=variable) as refusal:
        start_kernel(sandboxed(mounts=[f"{inner}:/inner:rw"]))
    assert str(inner) in refusal.value.problem and str(tmp_path / "own") in refusal.value.problem
    with pytest.raises(ConfigurationError, match=variable):
        start_kernel(sandboxed(), cwd=str(inner))
