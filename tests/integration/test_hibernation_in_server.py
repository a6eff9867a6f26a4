"""Hibernation in a real Jupyter Server: culled kernels wake; stopped and killed servers lose no state."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gcs_server import GCS
from kernels import run
from leftovers import leftovers
from notebooks import Notebook, until
from servers import READY, Server

from sandbox_provisioner.gvisor.runtime_dir import left_behind

pytestmark = [pytest.mark.runsc, pytest.mark.template_copies]

CULLING = (
    "--MappingKernelManager.cull_idle_timeout=1",
    "--MappingKernelManager.cull_interval=1",
    "--MappingKernelManager.cull_connected=True",
)

STALLED = 40
"""Timeout in seconds, shorter than that of a request of Google's client."""

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


def sandboxes(runtime: Path) -> list[str]:
    """The sandboxes that run now."""
    return [line for line in leftovers(runtime) if line.startswith("folder")]


def test_culled_kernel_frees_memory_and_wakes_on_next_cell(serve: Serve, sandboxed: Sandboxed, runtime: Path) -> None:
    server = serve(*CULLING)
    notebook = Notebook(server, sandboxed())
    notebook.run("x = 0")
    for number in range(1, 4):
        until(lambda: sandboxes(runtime) == [])
        assert notebook.listed()
        assert server.ask("GET", f"sessions/{notebook.session['id']}")[1]["kernel"]["id"] == notebook.kernel_id
        assert notebook.run("x += 1; x") == str(number)
    notebook.close()


def test_new_client_wakes_kernel(serve: Serve, sandboxed: Sandboxed, runtime: Path) -> None:
    server = serve(*CULLING)
    notebook = Notebook(server, sandboxed())
    notebook.run("x = 5")
    notebook.close()
    until(lambda: sandboxes(runtime) == [])
    kc = server.ready_client(notebook.kernel_id)
    assert run(kc, "x") == "5"
    kc.stop_channels()


@pytest.mark.debian
def test_stopped_server_saves_kernels_for_the_next(serve: Serve, sandboxed: Sandboxed, runtime: Path) -> None:
    kernel = sandboxed()
    server = serve()
    for name in ("a.ipynb", "b.ipynb"):
        notebook = Notebook(server, kernel, name)
        notebook.run(f"import threading; x = {name!r}; g = (n for n in range(10)); next(g)")
        notebook.close()
    server.stop()
    assert sandboxes(runtime) == []
    server = serve()
    for name in ("a.ipynb", "b.ipynb"):
        notebook = Notebook(server, kernel, name)
        assert notebook.run("x, next(g)") == repr((name, 1))
        notebook.close()


@pytest.mark.slow
def test_server_interrupted_without_terminal_saves_kernels(serve: Serve, sandboxed: Sandboxed, runtime: Path) -> None:
    kernel, server = sandboxed(), serve()
    notebook = Notebook(server, kernel)
    notebook.run("x = 1")
    notebook.close()
    server.process.send_signal(signal.SIGINT)  # a hub stops servers with SIGINT
    assert server.process.wait(READY) == 0
    assert sandboxes(runtime) == []
    notebook = Notebook(serve(), kernel)
    assert notebook.run("x") == "1"
    notebook.close()


def test_kernels_of_killed_server_continue(serve: Serve, sandboxed: Sandboxed, runtime: Path) -> None:
    kernel = sandboxed()
    server = serve()
    notebook = Notebook(server, kernel)
    notebook.run("x = 1")
    notebook.close()
    server.kill()
    server = serve()
    notebook = Notebook(server, kernel)
    assert notebook.run("x") == "1"
    notebook.close()


@pytest.mark.slow
def test_ten_cycles_keep_state(serve: Serve, sandboxed: Sandboxed, runtime: Path) -> None:
    kernel = sandboxed()
    server = serve(*CULLING)
    notebook = Notebook(server, kernel)
    notebook.run("x = []")
    for number in range(10):
        notebook.run(f"x.append({number})")
        if number % 3 == 0:
            until(lambda: sandboxes(runtime) == [])
        else:
            notebook.close()
            (server.stop if number % 3 == 1 else server.kill)()
            server = serve(*CULLING)
            notebook = Notebook(server, kernel)
        assert notebook.run("x") == str(list(range(number + 1)))
    notebook.close()


def test_shutdown_deletes_and_restart_is_fresh(serve: Serve, sandboxed: Sandboxed, tmp_path: Path) -> None:
    kernel = sandboxed()
    server = serve()
    notebook = Notebook(server, kernel)
    notebook.run("x = 1")
    notebook.close()
    assert server.ask("POST", f"kernels/{notebook.kernel_id}/restart")[0] == 200
    kc = server.ready_client(notebook.kernel_id)
    assert run(kc, "'x' in globals()") == "False"
    run(kc, "x = 2")
    kc.stop_channels()
    assert server.ask("DELETE", f"sessions/{notebook.session['id']}")[0] == 204
    assert list((tmp_path / "data" / "sandbox" / "storage").rglob("*.img")) == []
    notebook = Notebook(server, kernel)
    assert notebook.run("'x' in globals()") == "False"
    notebook.close()


@pytest.mark.slow
def test_renamed_notebook_keeps_its_kernel(serve: Serve, sandboxed: Sandboxed) -> None:
    kernel = sandboxed()
    server = serve()
    notebook = Notebook(server, kernel)
    notebook.run("x = 1")
    notebook.close()
    assert (
        server.ask("PATCH", f"sessions/{notebook.session['id']}", {"path": "new.ipynb", "name": "new.ipynb"})[0] == 200
    )
    server.stop()
    server = serve()
    notebook = Notebook(server, kernel, "new.ipynb")
    assert notebook.run("x") == "1"
    notebook.close()


@pytest.mark.slow
def test_new_notebook_under_old_name_gets_new_kernel(serve: Serve, sandboxed: Sandboxed) -> None:
    kernel = sandboxed()
    server = serve()
    first = Notebook(server, kernel)
    first.run("x = 1")
    assert server.ask("PATCH", f"sessions/{first.session['id']}", {"path": "new.ipynb", "name": "new.ipynb"})[0] == 200
    first.close()
    server.stop()
    server = serve()
    second = Notebook(server, kernel)
    assert second.run("'x' in globals()") == "False"
    second.close()
    first = Notebook(server, kernel, "new.ipynb")
    assert first.run("x") == "1"
    first.close()


def test_failed_wake_is_explained_in_notebook_and_retried(
    serve: Serve, sandboxed: Sandboxed, runtime: Path, tmp_path: Path
) -> None:
    notebook = Notebook(serve(*CULLING), sandboxed())
    notebook.run("x = 1")
    until(lambda: sandboxes(runtime) == [])
    images = (tmp_path / "data" / "sandbox" / "storage").rglob("pages.img")
    image = max(images, key=lambda path: path.stat().st_mtime_ns)
    whole, times = image.read_bytes(), image.stat()
    for content in (whole[:-1] + bytes([whole[-1] ^ 1]), whole):
        with image.open("r+b") as file:
            file.write(content)
        os.utime(image, ns=(times.st_atime_ns, times.st_mtime_ns))
        if content != whole:
            with pytest.raises(AssertionError, match=r"could not be woken; its saved state is unchanged.*is damaged"):
                notebook.run("x")
    assert notebook.run("x") == "1"
    notebook.close()


@pytest.mark.debian
def test_stopped_server_releases_the_lease_of_a_hibernated_kernel(
    serve: Serve, sandboxed: Sandboxed, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for place in ("SANDBOX_METADATA", "SANDBOX_LOCK", "SANDBOX_CHECKPOINT", "FILESYSTEM_SNAPSHOT"):
        monkeypatch.setenv(f"{place}_MOUNT_PATH", str(shared))
    server = serve(*CULLING)
    notebook = Notebook(server, sandboxed())
    notebook.close()
    until(lambda: sandboxes(runtime) == [])
    assert list(shared.rglob("lock*")) != []
    server.stop()
    assert list(shared.rglob("lock*")) == []
    assert not (server.runtime / f"kernel-{notebook.kernel_id}.json").exists()


def test_stop_does_not_wait_for_a_stalled_upload(
    serve: Serve, sandboxed: Sandboxed, runtime: Path, gcs: GCS, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("SANDBOX_METADATA", "SANDBOX_LOCK", "SANDBOX_CHECKPOINT", "FILESYSTEM_SNAPSHOT"):
        monkeypatch.setenv(f"{place}_BUCKET", gcs.bucket)
    monkeypatch.setenv("SANDBOX_HIBERNATE_DEADLINE", "2")
    server = serve()
    notebook = Notebook(server, sandboxed())
    notebook.close()
    gcs.fault("delay", seconds=600, operation="insert|start|chunk", name=".*pages.*", times=None)
    server.process.terminate()
    assert server.process.wait(STALLED) == 0
    assert "was not saved in time and keeps running" in server.log.read_text()
    for folder in left_behind():
        assert folder.has_processes
        folder.remove()


@pytest.mark.parametrize("handoff", [False, True])
def test_simultaneous_opens_share_one_kernel(serve: Serve, sandboxed: Sandboxed, handoff: bool) -> None:
    server, kernel = serve(), sandboxed(enable_handoff=handoff)
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(lambda _: server.open_notebook(kernel), range(3)))
    assert [status for status, _ in answers] == [201] * 3, answers
    assert len({session["kernel"]["id"] for _, session in answers}) == 1
    session = answers[0][1]
    assert len(server.ask("GET", "kernels")[1]) == 1
    kc = server.ready_client(session["kernel"]["id"])
    assert run(kc, "6 * 7") == "42"
    kc.stop_channels()
    status, changed = server.ask("PATCH", f"sessions/{session['id']}", {"kernel": {"name": kernel}})
    assert status == 200
    assert changed["kernel"]["id"] != session["kernel"]["id"]


def test_plain_kernels_are_culled_as_usual(serve: Serve) -> None:
    server = serve(*CULLING)
    assert server.open_notebook("python3")[0] == 201
    until(lambda: server.ask("GET", "kernels") == (200, []))


@pytest.mark.slow
@pytest.mark.parametrize("end", [Server.stop, Server.kill], ids=["SIGTERM", "SIGKILL"])
def test_ten_kernels_return_after_server_stop(
    end: Callable[[Server], None], serve: Serve, sandboxed: Sandboxed
) -> None:
    kernel, server = sandboxed(), serve()
    names = [f"{number}.ipynb" for number in range(10)]
    for name in names:
        notebook = Notebook(server, kernel, name)
        notebook.run(f"x = {name!r}")
        notebook.close()
    end(server)
    server = serve()
    for name in names:
        notebook = Notebook(server, kernel, name)
        assert notebook.run("x") == repr(name)
        notebook.close()


@pytest.mark.slow
def test_server_killed_at_random_moments_of_hibernate(serve: Serve, sandboxed: Sandboxed) -> None:
    kernel, dice = sandboxed(), random.Random(7)
    server = serve()
    for number in range(30):
        notebook = Notebook(server, kernel)
        if number:
            assert notebook.run("x") == str(number - 1)
        notebook.run(f"x = {number}")
        notebook.close()
        server.process.terminate()
        time.sleep(dice.uniform(0.0, 1.5))
        server.kill()
        server = serve()
