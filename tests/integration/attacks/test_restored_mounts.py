"""Documents in storage cannot choose the folders that a woken kernel sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from notebooks import Notebook
from servers import Server

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.persistence.signing import Signer

pytestmark = pytest.mark.runsc

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A folder that no kernel may read or change."""
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "key").write_text("not for guests")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert (folder / "key").read_text() == "not for guests"


def saved_notebook(serve: Serve, kernel: str) -> None:
    server = serve()
    notebook = Notebook(server, kernel)
    notebook.run("x = 42")
    notebook.close()
    server.stop()


def change_spec(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the mounts in the only metadata.json and sign it again, like an attacker who also has the user's key."""
    own = tmp_path / "data" / "sandbox"
    (path,) = (own / "storage").rglob("metadata.json")
    document = json.loads(path.read_text())
    del document["signature"]
    change(document["checkpoint"]["spec"])
    signer = Signer(GCSConfig(own / "storage", own=own))
    path.write_bytes(signer.sign(str(path.relative_to(own / "storage")), json.dumps(document, indent=1).encode()))


def outcome(serve: Serve, kernel: str, code: str) -> str:
    """Open the notebook again. Return the output of a cell, or the reason why the kernel was refused."""
    server = serve()
    status, body = server.open_notebook(kernel)
    if status != 201:
        return str(body["message"])
    notebook = Notebook(server, kernel)
    try:
        assert notebook.run("x") == "42"
        return notebook.run(code)
    finally:
        notebook.close()


def test_changed_source_is_not_mounted(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path, tmp_path: Path, secret: Path
) -> None:
    kernel = sandboxed()
    saved_notebook(serve, kernel)

    def redirect(spec: dict[str, Any]) -> None:
        """Make the kernel's folder lead to the secret one."""
        if spec.get("carried"):
            spec["carried"][0] = str(secret)
        for mount in spec["mounts"]:
            if mount[1] == str(notebook_folder):
                mount[0] = str(secret)

    change_spec(tmp_path, redirect)
    text = outcome(serve, kernel, "import os; open('mark', 'w').close(); os.listdir()")
    assert "mark" in text and "key" not in text
    assert (notebook_folder / "mark").exists()


def test_added_mount_is_refused(serve: Serve, sandboxed: Sandboxed, tmp_path: Path, secret: Path) -> None:
    kernel = sandboxed()
    saved_notebook(serve, kernel)
    change_spec(tmp_path, lambda spec: spec["mounts"].append([str(secret), "/stolen", True]))
    text = outcome(serve, kernel, "open('/stolen/key').read()")
    assert "/stolen was mounted when the kernel was saved, and is not in the present configuration" in text


def test_network_is_not_read_from_storage(serve: Serve, sandboxed: Sandboxed, tmp_path: Path) -> None:
    kernel = sandboxed()
    saved_notebook(serve, kernel)
    change_spec(tmp_path, lambda spec: spec.update(network="host"))
    text = outcome(serve, kernel, "import os; os.listdir('/sys/class/net') if os.path.exists('/sys/class/net') else []")
    assert "it was saved with network=host, and the setting network is 'none' now" in text
