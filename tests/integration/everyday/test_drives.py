"""Notebooks whose session path begins with the name of a drive, as JupyterLab's real-time collaboration sends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from kernels import run
from servers import Server

pytestmark = pytest.mark.runsc

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


def open_session(server: Server, kernel: str, path: str) -> tuple[int, Any]:
    """Start a session as JupyterLab does: the path has the drive's name, the name is the file's."""
    body = {
        "path": path,
        "name": PurePosixPath(path.split(":")[-1]).name,
        "type": "notebook",
        "kernel": {"name": kernel},
    }
    return server.ask("POST", "sessions", body)


def run_in(server: Server, kernel: str, path: str, code: str) -> str:
    """Open a notebook and run ``code``."""
    status, session = open_session(server, kernel, path)
    assert status == 201, session
    kc = server.ready_client(session["kernel"]["id"])
    try:
        return run(kc, code).strip()
    finally:
        kc.stop_channels()


def recorded(server: Server) -> list[str]:
    """Return the notebooks of all sandboxes, relative to the server's root folder."""
    return sorted(sandbox["notebook_path"] for sandbox in server.ask("GET", "sandboxes")[1]["items"])


def test_state_of_drives_notebook_is_found_again(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path, data: Path
) -> None:
    kernel = sandboxed()
    (notebook_folder / "sub").mkdir()
    server = serve()
    assert run_in(server, kernel, "RTC:sub/a.ipynb", "x = 1; import os; print(os.getcwd())") == f"{notebook_folder}/sub"
    assert run_in(server, kernel, "RTC:a.ipynb", "x = 2") == ""
    assert run_in(server, kernel, "Shelf:a.ipynb", "x = 3; import os; print(os.getcwd())") == str(notebook_folder)
    names = ["Shelf:a.ipynb", "a.ipynb", "sub/a.ipynb"]
    assert recorded(server) == names
    server.stop()
    server = serve()
    assert run_in(server, kernel, "RTC:sub/a.ipynb", "x") == "1"
    assert run_in(server, kernel, "a.ipynb", "x") == "2", "it is the same file without the prefix"
    assert run_in(server, kernel, "Shelf:a.ipynb", "x") == "3"
    assert recorded(server) == names


def test_prefix_of_shared_documents_names_same_session(serve: Serve, sandboxed: Sandboxed, data: Path) -> None:
    kernel, server = sandboxed(), serve()
    body = {"kernel_name": kernel, "notebook_path": "a.ipynb"}
    assert server.ask("POST", "sandboxes", body)[0] == 201
    first = open_session(server, kernel, "RTC:a.ipynb")[1]
    assert first == open_session(server, kernel, "a.ipynb")[1]
    assert recorded(server) == ["a.ipynb"]
    assert server.ask("POST", "sandboxes", {"notebook_path": "RTC:a.ipynb"})[0] == 200
    assert server.ask("GET", "sandboxes?notebook=RTC:a.ipynb")[1]["items"]


def test_plain_kernel_is_refused_through_prefix(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path, data: Path
) -> None:
    kernel, server = sandboxed(), serve()
    (notebook_folder / "sub").mkdir()
    _, session = open_session(server, kernel, "RTC:sub/a.ipynb")
    assert server.ask("DELETE", f"sessions/{session['id']}")[0] == 204
    for path in ("sub/a.ipynb", "RTC:sub/a.ipynb"):
        assert open_session(server, "python3", path)[0] == 409
    permission = {"notebook_path": "RTC:sub/a.ipynb", "kernel_name": "python3"}
    assert server.ask("PUT", "sandboxes/plain-notebooks", permission)[0] == 200
    for path in ("sub/a.ipynb", "RTC:sub/a.ipynb"):
        assert open_session(server, "python3", path)[0] == 201
