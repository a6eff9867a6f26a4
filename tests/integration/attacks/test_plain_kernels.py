"""A sandboxed kernel cannot make its notebook start a plain kernel, which would run the user's cells on the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from notebooks import Notebook, until
from servers import Server

from sandbox_provisioner.gvisor.runtime_dir import sweep
from sandbox_provisioner.sandbox.sandboxed_notebooks import FOLDER

pytestmark = [pytest.mark.runsc, pytest.mark.user]

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]

PLAIN = "python3"
TAKE_OVER = """
import json, os
document = {"cells": [], "nbformat": 4, "nbformat_minor": 5, "metadata": {
    "kernelspec": {"name": "python3", "display_name": "Python 3 (sandbox)", "language": "python"}}}
open("a.ipynb", "w").write(json.dumps(document))
os.rename("a.ipynb", "b.ipynb"); os.symlink("b.ipynb", "a.ipynb")
"""


def refused(answer: tuple[int, Any]) -> bool:
    """Return True if a start was refused because the notebook ran in a sandbox."""
    status, body = answer
    return status == 409 and body["type"] == "urn:sandbox:plain-kernel"


def close(notebook: Notebook) -> None:
    notebook.close()
    assert notebook.server.ask("DELETE", f"sessions/{notebook.session['id']}")[0] == 204


def test_changed_notebook_does_not_run_outside(serve: Serve, sandboxed: Sandboxed, notebook_folder: Path) -> None:
    server, kernel = serve(), sandboxed()
    notebook = Notebook(server, kernel)
    notebook.run(TAKE_OVER)
    assert refused(server.ask("PATCH", f"sessions/{notebook.session['id']}", {"kernel": {"name": PLAIN}}))
    close(notebook)
    named = json.loads((notebook_folder / "a.ipynb").read_text())["metadata"]["kernelspec"]["name"]
    assert refused(server.open_notebook(named))
    assert server.ask("GET", "kernels") == (200, [])

    permission = {"notebook_path": "a.ipynb", "kernel_name": named}
    assert server.ask("PUT", "sandboxes/plain-notebooks", permission) == (200, permission)
    outside = Notebook(server, named)
    assert outside.run("import os; print(os.getppid())") == f"{server.process.pid}\n"
    close(outside)

    close(Notebook(server, kernel))
    assert refused(server.open_notebook(named))


def test_refusal_after_server_was_killed(serve: Serve, sandboxed: Sandboxed) -> None:
    server = serve()
    Notebook(server, sandboxed(persistent=False)).close()
    server.kill()
    assert refused(serve().open_notebook(PLAIN))
    until(sweep)


def test_failed_start_is_not_recorded(serve: Serve, sandboxed: Sandboxed) -> None:
    server = serve()
    assert server.open_notebook(sandboxed(runsc="/no/such/runsc"))[0] == 503
    assert server.open_notebook(PLAIN)[0] == 201


def test_sandbox_starts_where_nothing_can_be_recorded(serve: Serve, sandboxed: Sandboxed, tmp_path: Path) -> None:
    server = serve()
    record = tmp_path / "data" / "sandbox" / FOLDER
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("a file instead of the folder")
    close(Notebook(server, sandboxed(persistent=False)))
    assert "A notebook that runs in a sandbox was not recorded" in server.log.read_text()
