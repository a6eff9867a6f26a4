"""A kernel that comes back with an older state, because its last one was lost, tells this with the first output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full_disks import use_full_disk
from kernels import run
from notebooks import Notebook
from servers import Server

from sandbox_provisioner.gvisor.runtime_dir import left_behind

pytestmark = [pytest.mark.runsc, pytest.mark.user]

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


def end_container() -> None:
    """Kill the sandboxes of killed servers and remove their folders, as the end of the servers' container does."""
    found = left_behind()
    assert found
    for folder in found:
        assert folder.has_processes
        folder.remove()


def described(server: Server) -> dict[str, Any]:
    """Return the only persistent sandbox, as the REST API shows it."""
    (sandbox,) = server.ask("GET", "sandboxes")[1]["items"]
    found: dict[str, Any] = sandbox
    return found


BASH = {
    "argv": [sys.executable, "-m", "bash_kernel", "-f", "{connection_file}"],
    "display_name": "Bash",
    "language": "bash",
    "env": {"PS1": "$"},
}


@pytest.mark.parametrize(
    ("name", "spec", "show"), [("python3", None, "print(x)"), ("bash", BASH, "echo $x")], ids=["python", "bash"]
)
def test_first_cell_after_a_killed_container_tells_how_old_the_state_is(
    serve: Serve, sandboxed: Sandboxed, name: str, spec: dict[str, Any] | None, show: str
) -> None:
    kernel = sandboxed(name, spec)
    server = serve()
    notebook = Notebook(server, kernel)
    notebook.run("x=1")
    notebook.close()
    server.stop()
    server = serve()
    notebook = Notebook(server, kernel)
    assert notebook.run(show) == "1\n"
    notebook.run("x=2")
    notebook.close()
    assert described(server)["lost_since"] is None
    server.kill()
    end_container()
    server = serve()
    notebook = Notebook(server, kernel)
    shown = described(server)
    saved = shown["checkpoint"]["created"]
    assert shown["lost_since"] == saved
    notice = f"This is the kernel's state of {saved[:19].replace('T', ' ')} UTC. Any later changes are lost"
    log = server.log.read_text()
    assert f"{notice}: the sandbox ended without being saved" in log
    assert f"with its state of {saved[:19]}" in log
    notebook.kc.execute("x=1", silent=True, reply=True, timeout=60)
    first = notebook.run(show)
    assert first.startswith(notice)
    assert first.endswith("1\n")
    assert notebook.run(show) == "1\n"
    assert described(server)["lost_since"] is None
    notebook.close()
    server.stop()
    notebook = Notebook(serve(), kernel)
    assert notebook.run(show) == "1\n"
    notebook.close()


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; while it exists, checkpoints fail as on a full disk."""
    return use_full_disk(tmp_path, monkeypatch)


def test_first_cell_after_a_failed_save_at_the_servers_stop_tells_how_old_the_state_is(
    serve: Serve, sandboxed: Sandboxed, full_disk: Path
) -> None:
    kernel = sandboxed()
    server = serve()
    notebook = Notebook(server, kernel)
    notebook.run("x = 1")
    assert server.ask("POST", f"sandboxes/{described(server)['id']}/hibernate")[0] == 200
    assert notebook.run("x") == "1"
    notebook.run("x = 2")
    notebook.close()
    full_disk.touch()
    server.stop()
    end_container()
    full_disk.unlink()
    server = serve()
    notebook = Notebook(server, kernel)
    assert "Any later changes are lost" in notebook.run("x")
    notebook.close()


def test_orphan_that_is_saved_has_lost_nothing(serve: Serve, sandboxed: Sandboxed) -> None:
    kernel = sandboxed()
    server = serve()
    notebook = Notebook(server, kernel)
    notebook.run("x = 1")
    assert server.ask("POST", f"sandboxes/{described(server)['id']}/hibernate")[0] == 200
    notebook.run("x = 2")
    notebook.close()
    server.kill()
    server = serve()
    notebook = Notebook(server, kernel)
    assert notebook.run("x") == "2"
    assert described(server)["lost_since"] is None
    notebook.close()


def test_state_that_the_user_chose_is_not_reported_as_older(serve: Serve, sandboxed: Sandboxed) -> None:
    kernel = sandboxed()
    server = serve()
    notebook = Notebook(server, kernel)
    sandbox = described(server)["id"]
    notebook.run("x = 1")
    assert server.ask("POST", f"sandboxes/{sandbox}/savepoints", {"name": "one"})[0] == 201
    assert server.ask("POST", f"sandboxes/{sandbox}/hibernate")[0] == 200
    notebook.run("x = 2")
    notebook.close()
    server.kill()
    end_container()
    server = serve()
    notebook = Notebook(server, kernel)
    assert described(server)["lost_since"] is not None
    notebook.close()
    status, answer = server.ask("POST", f"sandboxes/{sandbox}/savepoints/one/rewind")
    assert status == 200, answer
    assert described(server)["lost_since"] is None
    kc = server.ready_client(notebook.kernel_id)
    assert run(kc, "x") == "1"
    kc.stop_channels()
