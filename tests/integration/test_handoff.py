"""Two Jupyter Servers that share storage but no registry: a notebook's kernel moves with its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gcs_server import GCS
from google.cloud.storage import Client
from notebooks import Notebook, until
from servers import Server

pytestmark = [pytest.mark.runsc, pytest.mark.template_copies]

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


@pytest.fixture(params=["folder", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bucket", "limited"))])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gcs: GCS) -> None:
    """Configure storage that both servers use."""
    if request.param == "folder":
        monkeypatch.setenv("SANDBOX_STORAGE_DIR", str(tmp_path / "shared"))
        return
    if request.param == "limited":
        gcs.limit_mutations()
    for name in ("SANDBOX_METADATA", "SANDBOX_LOCK", "SANDBOX_CHECKPOINT", "FILESYSTEM_SNAPSHOT"):
        monkeypatch.setenv(f"{name}_BUCKET", gcs.bucket)


def test_kernel_moves_to_opening_server_and_back(shared: None, serve: Serve, sandboxed: Sandboxed) -> None:
    kernel = sandboxed(enable_handoff=True)
    first, second = serve(name="first"), serve(name="second")
    notebook = Notebook(first, kernel)
    notebook.run("x = 1")
    notebook.close()
    moved = Notebook(second, kernel)
    assert moved.run("x += 1; x") == "2"
    moved.close()
    until(lambda: "is no longer on this server: another server asked for it" in first.log.read_text())
    until(lambda: not notebook.listed())
    back = Notebook(first, kernel)
    assert back.run("x += 1; x") == "3"
    back.close()


@pytest.mark.slow
def test_refused_hand_off_names_the_owner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serve: Serve, sandboxed: Sandboxed
) -> None:
    monkeypatch.setenv("SANDBOX_STORAGE_DIR", str(tmp_path / "shared"))
    kernel = sandboxed()
    first, second = serve(name="first"), serve(name="second")
    notebook = Notebook(first, kernel)
    notebook.run("x = 1")
    status, answer = second.open_notebook(kernel)
    assert status == 409
    assert f"is in use by Jupyter server {first.process.pid}" in answer["message"]
    assert notebook.run("x") == "1"
    notebook.close()


def test_server_without_checkpoint_bucket_keeps_the_record(
    monkeypatch: pytest.MonkeyPatch, gcs: GCS, serve: Serve, sandboxed: Sandboxed
) -> None:
    """The kernel starts and ends with the server. The sandbox is kept and can be opened again at once."""
    monkeypatch.setenv("SANDBOX_METADATA_BUCKET", gcs.bucket)
    monkeypatch.setenv("SANDBOX_LOCK_BUCKET", gcs.bucket)
    gcs.limit_mutations()
    kernel = sandboxed(gcs_sandbox_id="box")
    for name in ("first", "second"):
        server = serve(name=name)
        notebook = Notebook(server, kernel)
        assert notebook.run("'x' in globals()") == "False"
        notebook.run("x = 1")
        notebook.close()
        server.stop()
        assert "ends unsaved: SANDBOX_CHECKPOINT_BUCKET is not set" in server.log.read_text()
        assert [blob.name for blob in Client().list_blobs(gcs.bucket)] == ["sandboxes/box/metadata.json"]
