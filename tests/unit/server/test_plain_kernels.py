"""Test the refusal of kernels without a sandbox over REST, for notebooks that are recorded as sandboxed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from servers import Server

from sandbox_provisioner.sandbox.sandboxed_notebooks import FOLDER, SandboxedNotebooks

PLAIN = "python3"
PERMISSIONS = "sandboxes/plain-notebooks"
SPELLINGS = [
    ("sub/../a.ipynb", "a.ipynb"),
    ("/a.ipynb", "a.ipynb"),
    ("./a.ipynb", "a.ipynb"),
    ("RTC:a.ipynb", "a.ipynb"),
    ("RTC:a.ipynb", "x"),
    ("RTC:Drive:a.ipynb", "x"),
    ("A.ipynb", "A.ipynb"),
    ("a.ipynb", "other.ipynb"),
    ("a.ipynb", None),
    ("other.ipynb", "a.ipynb"),
    ("link.ipynb", "link.ipynb"),
    ("folder/a.ipynb", "a.ipynb"),
    ("folder/folder/link.ipynb", "x"),
    ("moved.ipynb", "moved.ipynb"),
]


class Jupyter(Server):
    """A server with notebooks that are recorded as sandboxed."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.root = folder / "notebooks"
        self.notebooks = SandboxedNotebooks(folder / "data" / "sandbox" / FOLDER)
        super().__init__(folder, *options)

    def opened(self, path: str, kernel: str = PLAIN) -> bool:
        """Return True if a notebook can be opened. Shuts the kernel down."""
        status, body = self.open_notebook(kernel, path)
        if status == 201:
            assert self.ask("DELETE", f"sessions/{body['id']}")[0] == 204
            return True
        assert refused((status, body))
        return False

    def allow(self, path: str, kernel: str = PLAIN) -> None:
        body = {"notebook_path": path, "kernel_name": kernel}
        assert self.ask("PUT", PERMISSIONS, body) == (200, body)

    def record(self, *paths: str) -> None:
        """Create notebooks, and record that they ran in a sandbox."""
        for path in paths:
            (self.root / path).parent.mkdir(exist_ok=True)
            (self.root / path).write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
        self.notebooks.record(str(self.root / path) for path in paths)


def refused(answer: tuple[int, Any]) -> bool:
    """Return True if a start was refused as it is documented."""
    status, body = answer
    if status == 409:
        assert (body["status"], body["type"], body["reason"]) == (409, "urn:sandbox:plain-kernel", "Plain kernel")
        assert body["message"].replace("\n", " ") == f"{body['detail']} {body['remedy']}"
        command = re.search("`jupyter sandbox allow-plain[^`]*`", body["remedy"])
        assert command is None or command[0] in body["message"], "the command can be copied"
        assert "The requested kernel" in body["message"] and "jupyter sandbox allow-plain" in body["message"]
    return status == 409


def serving(folder: Path, *options: str) -> Iterator[Jupyter]:
    (folder / "notebooks" / "sub").mkdir(parents=True)
    server = Jupyter(folder, *options)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jupyter]:
    for server in serving(tmp_path_factory.mktemp("server")):
        server.record("a.ipynb", "new.ipynb")
        server.notebooks.record([str(server.root / "moved.ipynb")])
        (server.root / "link.ipynb").symlink_to("a.ipynb")
        (server.root / "folder").symlink_to(".")
        (server.root / "moved.ipynb").symlink_to("never.ipynb")
        yield server


def test_other_paths_of_a_notebook_are_refused(server: Jupyter) -> None:
    for path, name in SPELLINGS:
        for kind in ("notebook", "console", "file"):
            for kernel in ({"name": PLAIN}, {"name": "Python3"}, {}):
                body = {"path": path, "type": kind, "kernel": kernel, **({"name": name} if name else {})}
                assert refused(server.ask("POST", "sessions", body)), body
    assert server.ask("GET", "kernels") == (200, [])
    assert server.opened("plain.ipynb")


def test_start_without_a_session(server: Jupyter) -> None:
    assert refused(server.ask("POST", "kernels", {"name": PLAIN, "path": "a.ipynb"}))
    assert refused(server.ask("POST", "kernels", {"path": "link.ipynb"}))


def test_running_kernel_does_not_get_the_notebook(server: Jupyter) -> None:
    _, kernel = server.ask("POST", "kernels", {"name": PLAIN})
    notebook = {"path": "a.ipynb", "name": "a.ipynb", "type": "notebook"}
    assert refused(server.ask("POST", "sessions", {**notebook, "kernel": {"id": kernel["id"]}}))
    _, session = server.open_notebook(PLAIN, "b.ipynb")
    own = f"sessions/{session['id']}"
    assert refused(server.ask("PATCH", own, {"path": "a.ipynb"}))
    assert refused(server.ask("PATCH", own, {"path": "a.ipynb", "kernel": {"name": PLAIN}}))
    assert refused(server.ask("PATCH", own, {"notebook": {"path": "a.ipynb"}}))
    assert server.ask("GET", own)[1]["path"] == "b.ipynb"
    assert server.ask("PATCH", own, {"path": "c.ipynb"})[0] == 200
    server.record("c.ipynb")
    assert refused(server.ask("PATCH", own, {"path": "d.ipynb", "kernel": {"id": kernel["id"]}}))
    server.ask("DELETE", own)
    server.ask("DELETE", f"kernels/{kernel['id']}")


def test_permission_is_for_one_notebook_and_kernel(server: Jupyter) -> None:
    server.record("one.ipynb", "two.ipynb")
    server.allow("one.ipynb", "another")
    assert not server.opened("one.ipynb")
    server.allow("one.ipynb")
    assert server.opened("one.ipynb") and server.opened("one.ipynb", "Python3")
    assert not server.opened("two.ipynb")
    assert server.ask("GET", PERMISSIONS) == (200, {"items": [{"notebook_path": "one.ipynb", "kernel_name": PLAIN}]})
    assert server.ask("DELETE", f"{PERMISSIONS}?notebook_path=one.ipynb")[0] == 204
    assert server.ask("GET", PERMISSIONS) == (200, {"items": []})
    assert not server.opened("one.ipynb")
    server.allow("one.ipynb")
    server.notebooks.record([str(server.root / "one.ipynb")])
    assert not server.opened("one.ipynb")


def test_refused_permissions(server: Jupyter) -> None:
    for path in ("never-ran.ipynb", "../notebooks-of-others/a.ipynb"):
        status, body = server.ask("PUT", PERMISSIONS, {"notebook_path": path, "kernel_name": PLAIN})
        assert (status, body["variable"]) == (400, "notebook_path")
    for query in ("", "?notebook_path=a%08.ipynb"):
        status, body = server.ask("DELETE", f"{PERMISSIONS}{query}")
        assert (status, body["variable"]) == (400, "notebook_path")


def test_command_allows_the_refused_kernel(server: Jupyter) -> None:
    server.record("by-command.ipynb")
    assert not server.opened("by-command.ipynb")
    command = [sys.executable, "-m", "sandbox_provisioner.cli", "allow-plain", "notebooks/by-command.ipynb"]
    env = {**os.environ, "JUPYTER_DATA_DIR": str(server.root.parent / "data")}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0 and PLAIN in done.stdout, done
    assert server.opened("by-command.ipynb")
    assert subprocess.run([*command, "--revoke"], env=env, cwd="/").returncode == 0
    assert not server.opened("by-command.ipynb")


def test_long_names_with_spaces_stay_in_one_line(server: Jupyter) -> None:
    name = "Quarterly report of the northern region, with appendices and tables, 2026.ipynb"
    server.record(name)
    assert not server.opened(name)


def test_root_folder_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "notebooks").symlink_to("real")
    server = Jupyter(tmp_path)
    try:
        server.record("a.ipynb")
        assert not server.opened("a.ipynb")
        server.notebooks.revoke(str(server.root / "a.ipynb"))
        server.notebooks.allow(str(tmp_path / "real" / "a.ipynb"), PLAIN)
        assert server.opened("a.ipynb")
    finally:
        server.stop()


def test_renamed_copied_and_deleted_notebooks(server: Jupyter) -> None:
    server.record("r.ipynb")
    assert server.ask("PATCH", "contents/r.ipynb", {"path": "sub/b.ipynb"})[0] == 200
    assert server.opened("r.ipynb") and not server.opened("sub/b.ipynb")
    assert server.ask("PATCH", "contents/sub", {"path": "dir"})[0] == 200
    assert not server.opened("dir/b.ipynb")
    status, copy = server.ask("POST", "contents/dir", {"copy_from": "dir/b.ipynb"})
    assert status == 201 and not server.opened(copy["path"])
    status, copied = server.ask("POST", "contents", {"copy_from": "dir"})
    assert status == 201 and not server.opened(f"{copied['path']}/b.ipynb")
    assert server.ask("DELETE", "contents/dir/b.ipynb")[0] == 204
    assert server.opened("dir/b.ipynb") and not server.opened(copy["path"])


def test_two_servers_share_the_record(server: Jupyter) -> None:
    second = Jupyter(server.root.parent)
    try:
        server.record("shared.ipynb")
        assert not second.opened("shared.ipynb")
        second.allow("shared.ipynb")
        assert server.opened("shared.ipynb")
    finally:
        second.stop()


@pytest.mark.parametrize("mode", ["allow", "refuse"])
def test_modes_allow_and_refuse(mode: str, tmp_path: Path) -> None:
    for server in serving(tmp_path, f"--PlainKernelGuard.plain_kernels={mode}"):
        server.record("a.ipynb")
        server.notebooks.allow(str(server.root / "a.ipynb"), PLAIN)
        status, body = server.open_notebook(PLAIN)
        assert status == (201 if mode == "allow" else 409)
        if mode == "refuse":
            assert "allow-plain" not in body["message"]
            wanted = {"notebook_path": "a.ipynb", "kernel_name": PLAIN}
            assert server.ask("PUT", PERMISSIONS, wanted)[0] == 409


def test_other_kernel_manager(tmp_path: Path) -> None:
    theirs = f"{AsyncMappingKernelManager.__module__}.{AsyncMappingKernelManager.__name__}"
    for server in serving(tmp_path, f"--ServerApp.kernel_manager_class={theirs}"):
        server.record("a.ipynb")
        assert not server.opened("a.ipynb") and server.opened("b.ipynb")
