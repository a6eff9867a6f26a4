"""Test the words that a user meets in the log, the command line and errors, with a real server and real kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from notebooks import Notebook, until
from servers import Server

from sandbox_provisioner.cli import main
from sandbox_provisioner.server.kernels import PAUSED

pytestmark = [pytest.mark.runsc, pytest.mark.user]

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


@pytest.fixture
def server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that `jupyter sandbox` finds, with its storage."""
    server = serve("--MultiKernelManager.default_kernel_name=python3-sandbox")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(server.runtime))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(server.runtime.parent / "data"))
    return server


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run `jupyter sandbox`. Return its exit status and what it printed."""
    capsys.readouterr()
    status = main(list(arguments))
    return status, *capsys.readouterr()


def sandbox_of(server: Server, kernel_id: str) -> dict[str, Any]:
    """Return the REST API's model of the sandbox of a kernel."""
    _, page = server.ask("GET", "sandboxes")
    (found,) = [one for one in page["items"] if one["kernel_id"] == kernel_id]
    return dict(found)


def iopub(notebook: Notebook, request: str) -> dict[str, Any]:
    """Wait for the next message of a request on iopub."""
    while (message := notebook.kc.get_iopub_msg(timeout=60))["parent_header"].get("msg_id") != request:
        pass
    return dict(message)


def test_kernel_with_a_running_cell_is_hibernated_only_by_force(
    server: Server, sandboxed: Sandboxed, notebook_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(server, sandboxed())
    path = f"sandboxes/{sandbox_of(server, notebook.kernel_id)['id']}"
    code = "import time, pathlib\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.1)\nprint('went')"
    request = notebook.kc.execute(code)
    until(lambda: server.ask("GET", path)[1]["busy"])
    status, problem = server.ask("POST", f"{path}/hibernate")
    assert status == 409
    assert "was not hibernated: its kernel is busy. A cell has been running for" in problem["detail"]
    assert server.ask("GET", path)[1]["state"] == "running"
    status, _, error = command(capsys, "hibernate", "a.ipynb")
    assert status == 4 and "A cell has been running for" in error and "--force" in error
    status, printed, _ = command(capsys, "hibernate", "--force", "a.ipynb")
    assert status == 0
    assert (
        "hibernated" in printed
        and "A cell is paused: it continues when the kernel receives its next message" in printed
    )
    shown = server.ask("GET", path)[1]
    assert (shown["state"], shown["busy"]) == ("hibernated", False)
    assert shown["busy_reasons"] == [PAUSED]
    (notebook_folder / "go").touch()
    notebook.kc.is_complete("1")  # wakes the kernel
    outputs = []
    while (message := iopub(notebook, request))["content"].get("execution_state") != "idle":
        outputs += [message["content"]["text"]] if message["msg_type"] == "stream" else []
    assert "went\n" in outputs
    until(lambda: not server.ask("GET", path)[1]["busy_reasons"])
    assert server.ask("POST", f"{path}/keep-awake", {"seconds": None})[0] == 200
    assert server.ask("POST", f"{path}/hibernate")[0] == 409
    assert server.ask("POST", f"{path}/hibernate?force=true")[1]["state"] == "hibernated"
    notebook.close()


def test_log_and_commands_name_the_notebook(
    server: Server,
    sandboxed: Sandboxed,
    notebook_folder: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (notebook_folder / "deep").mkdir()
    notebook = Notebook(server, sandboxed(), "deep/demo.ipynb")
    notebook.run("import os; os.write(2, b'from the kernel\\n')")
    monkeypatch.chdir(tmp_path)
    for arguments in (["hibernate"], ["wake"], ["show"]):
        status, printed, error = command(capsys, *arguments, "demo.ipynb")
        assert status == 0, error
    assert str(notebook_folder / "deep" / "demo.ipynb") in printed
    notebook.close()
    log = server.log.read_text()
    identity = sandbox_of(server, notebook.kernel_id)["sandbox_id"]
    assert f"{identity} (deep/demo.ipynb) hibernated in" in log
    assert f"{identity} (deep/demo.ipynb) woken in" in log
    assert f"output of sandbox {identity} (deep/demo.ipynb) | from the kernel" in log
    other = Notebook(server, sandboxed(), "demo.ipynb")
    other.close()
    status, _, error = command(capsys, "show", "demo.ipynb")
    assert status == 2 or "matches 2 sandboxes" in error
    assert str(notebook_folder / "deep" / "demo.ipynb") in error
    assert str(notebook_folder / "demo.ipynb") in error


def test_dead_kernel_is_not_listed_as_running(
    serve: Serve, sandboxed: Sandboxed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("--KernelManager.autorestart=False", "--ServerKernelManager.autorestart=False")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(server.runtime))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(server.runtime.parent / "data"))
    kept, lost = Notebook(server, sandboxed()), server.ask("POST", "kernels", {"name": sandboxed()})[1]
    kept.run("saved = 1")
    path = f"sandboxes/{sandbox_of(server, kept.kernel_id)['id']}"
    kept.kc.execute("import os; os._exit(3)")
    client = server.ready_client(lost["id"])
    client.execute("import os; os._exit(3)")
    until(lambda: server.ask("GET", path)[1]["state"] == "empty")
    until(lambda: server.ask("GET", f"sandboxes/{lost['id']}")[0] == 404)
    _, printed, _ = command(capsys, "list", "--json")
    assert [one["state"] for one in json.loads(printed)["sandboxes"]] == ["empty"]
    assert server.ask("POST", f"{path}/restart")[1]["state"] == "running"
    for one in (kept.kc, client):
        one.stop_channels()


def test_folder_outside_of_the_root_is_refused_with_the_reason(
    server: Server, sandboxed: Sandboxed, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    for path in ("../outside", "../outside/a.ipynb", "../../../../../../etc"):
        status, problem = server.ask("POST", "kernels", {"name": sandboxed(), "path": path})
        assert 400 <= status < 500, problem
        assert "root folder" in problem["message"]


@pytest.mark.parametrize("with_server", [True, False])
def test_fork_without_a_notebook_works_in_the_folder_of_the_original(
    server: Server, sandboxed: Sandboxed, notebook_folder: Path, capsys: pytest.CaptureFixture[str], with_server: bool
) -> None:
    (notebook_folder / "project" / "notebooks").mkdir(parents=True)
    (notebook_folder / ".venv" / "bin").mkdir(parents=True)
    (notebook_folder / ".venv" / "pyvenv.cfg").touch()
    notebook = Notebook(server, sandboxed(template="none"), "project/notebooks/a.ipynb")
    notebook.run("x = 7")
    identity = sandbox_of(server, notebook.kernel_id)["id"]
    assert server.ask("POST", f"sandboxes/{identity}/hibernate")[0] == 200
    if with_server:
        status, forked = server.ask("POST", f"sandboxes/{identity}/fork", {})
    else:
        notebook.close()
        server.stop()
        status, printed, error = command(capsys, "fork", "--no-server", "--json", identity)
        assert status == 0, error
        forked = json.loads(printed)
        server.__init__(notebook_folder.parent)  # type: ignore[misc]
        status, forked = server.ask("POST", f"sandboxes/{forked['id']}/wake")
    assert status in (200, 201), forked
    client = server.ready_client(forked["kernel_id"])
    reply = client.execute_interactive("assert x == 7; open('fork.txt', 'w').write('here')", timeout=60)
    assert reply["content"]["status"] == "ok"
    assert (notebook_folder / "project" / "notebooks" / "fork.txt").read_text() == "here"
    client.stop_channels()
