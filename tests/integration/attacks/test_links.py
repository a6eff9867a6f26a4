"""A link that a guest made becomes neither the next kernel's folder nor the source of a configured mount."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from apis import KERNEL, Api, add_kernels
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from notebooks import Notebook
from servers import Server

from sandbox_provisioner.errors import ConfigurationError, SandboxError
from sandbox_provisioner.gvisor.runsc import Runsc

pytestmark = [pytest.mark.runsc, pytest.mark.user]

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]
Start = Callable[..., tuple[KernelManager, BlockingKernelClient]]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside the server's root folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "key").write_text("not for guests")
    return folder


def test_kernel_folder_behind_a_link_out_of_the_root(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path, elsewhere: Path
) -> None:
    server, kernel = serve(), sandboxed()
    guest = Notebook(server, kernel)
    guest.run(f"import os; os.symlink({str(elsewhere)!r}, 'data')")
    guest.close()
    assert (notebook_folder / "data").is_symlink()

    status, body = server.open_notebook(kernel, "data/y.ipynb")
    assert status == 500, body
    assert str(notebook_folder / "data") in body["message"] and str(elsewhere) in body["message"]
    for path in ("data", "data/y.ipynb", "../elsewhere"):
        status, body = server.ask("POST", "kernels", {"name": kernel, "path": path})
        assert (status, body["type"]) == (400, "urn:sandbox:not-set-up") and str(elsewhere) in body["message"]
    assert sorted(os.listdir(elsewhere)) == ["key"]


def test_kernel_folder_behind_a_guests_link_to_another_folder(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    mine, other = notebook_folder / "mine", notebook_folder / "other"
    for folder in (mine / "sub", other):
        folder.mkdir(parents=True)
    server, kernel = serve(), sandboxed()
    guest = Notebook(server, kernel, "mine/a.ipynb")
    guest.run("import os; os.rmdir('sub'); os.symlink('../other', 'sub'); os.mkdir('real'); os.symlink('real', 'own')")
    guest.close()
    status, body = server.ask("POST", "kernels", {"name": kernel, "path": "mine/sub/b.ipynb"})
    assert (status, body["type"]) == (400, "urn:sandbox:not-set-up")
    assert str(mine / "sub") in body["message"] and f"in {other}" in body["message"]
    notebook = Notebook(server, kernel, "mine/own/b.ipynb")
    assert notebook.run("open('file', 'w').close()") == ""
    notebook.close()
    assert os.listdir(mine / "real") == ["file"]


def test_link_within_the_root_is_followed(serve: Serve, sandboxed: Sandboxed, notebook_folder: Path) -> None:
    (notebook_folder / "real").mkdir()
    (notebook_folder / "real" / "file").touch()
    (notebook_folder / "data").symlink_to("real")
    notebook = Notebook(serve(), sandboxed(), "data/y.ipynb")
    assert notebook.run("import os; os.listdir()") == "['file']"
    notebook.close()


@pytest.mark.debian
def test_writable_mount_allows_a_folder_outside_the_root(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path, elsewhere: Path
) -> None:
    (notebook_folder / "data").symlink_to(elsewhere)
    server = serve(f"--SandboxProvisioner.mounts={elsewhere}:rw")
    notebook = Notebook(server, sandboxed(), "data/y.ipynb")
    assert notebook.run("import os; os.listdir()") == "['key']"
    notebook.close()


def test_rest_refuses_a_notebook_behind_a_link_out_of_the_root(
    serve: Serve, notebook_folder: Path, tmp_path: Path, elsewhere: Path
) -> None:
    add_kernels(tmp_path / "more")
    (notebook_folder / "data").symlink_to(elsewhere)
    os.rename(tmp_path / "more" / "kernels", tmp_path / "kernels")
    api = Api(serve())
    problem = api.bad(400, "POST", "", {"kernel_name": KERNEL, "notebook_path": "data/y.ipynb"})
    assert "link" in json.dumps(problem)
    assert sorted(os.listdir(elsewhere)) == ["key"]


def test_mount_source_that_a_guest_replaced_by_a_link(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path, elsewhere: Path
) -> None:
    shared = notebook_folder / "shared"
    shared.mkdir()
    server, kernel = serve(), sandboxed()
    guest = Notebook(server, kernel)
    guest.run(f"import os; os.rmdir('shared'); os.symlink({str(elsewhere)!r}, 'shared')")
    guest.close()

    (notebook_folder / "other").mkdir()
    sandboxed(mounts=[f"{shared}:/shared:rw"])
    status, body = server.open_notebook(kernel, "other/b.ipynb")
    assert status == 400, body
    assert str(shared) in body["message"] and str(elsewhere) in body["message"]


def test_mount_source_that_is_replaced_during_the_start(
    start_kernel: Start, sandboxed: Sandboxed, runsc: Runsc, notebook_folder: Path, tmp_path: Path, elsewhere: Path
) -> None:
    shared = notebook_folder / "shared"
    shared.mkdir()
    swapping = tmp_path / "runsc"
    swap = f"mv {shared} {shared}-moved; ln -s {elsewhere} {shared}"
    swapping.write_text(f'#!/bin/sh\ncase "$*" in *" run "*) {swap} ;; esac\nexec {runsc.path} "$@"\n')
    swapping.chmod(0o755)
    with pytest.raises(SandboxError):
        start_kernel(sandboxed(runsc=str(swapping), mounts=[f"{shared}:/shared"]), cwd=str(notebook_folder))
    assert shared.is_symlink()


def test_working_folder_behind_a_link_in_the_root(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path, elsewhere: Path
) -> None:
    (notebook_folder / "data").symlink_to(elsewhere)
    status, body = serve().open_notebook(sandboxed(working_folder=str(notebook_folder / "data")))
    assert status == 400
    assert str(elsewhere) in body["message"]


def test_mount_source_below_a_link_in_the_kernel_folder(
    start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path, elsewhere: Path
) -> None:
    (notebook_folder / "link").symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match="is a link to"):
        start_kernel(sandboxed(mounts=[str(notebook_folder / "link" / "key")]))
