"""A server that is PID 1, as in many containers, leaves no zombies."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from notebooks import Notebook, until
from servers import READY, Server

pytestmark = [pytest.mark.runsc, pytest.mark.root]

Sandboxed = Callable[..., str]


class ContainerServer(Server):
    """A Jupyter Server that is PID 1 of its own PID namespace."""

    wrapper: tuple[str, ...] = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

    def process_inside(self) -> psutil.Process:
        """Return the server's process."""
        (found,) = psutil.Process(self.process.pid).children()
        return found

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process_inside().send_signal(signal.SIGTERM)
            try:
                assert self.process.wait(READY) == 0, self.log.read_text()
            finally:
                self.process.kill()  # ends all processes in the namespace


@pytest.fixture
def server(tmp_path: Path, notebook_folder: Path) -> Iterator[ContainerServer]:
    found = ContainerServer(tmp_path)
    yield found
    found.stop()


def zombies(server: ContainerServer) -> list[str]:
    """Return the names of the processes that have ended, and that the server has not waited for."""
    children = server.process_inside().children()
    return [child.name() for child in children if child.status() == psutil.STATUS_ZOMBIE]


def test_server_in_a_container_reaps_the_processes_of_sandboxes(server: ContainerServer, sandboxed: Sandboxed) -> None:
    notebook = Notebook(server, sandboxed())
    notebook.run("x = 1")
    sandbox = server.ask("GET", "sandboxes")[1]["items"][0]["id"]
    for _ in range(2):
        assert server.ask("POST", f"sandboxes/{sandbox}/hibernate")[0] == 200
        until(lambda: zombies(server) == [])
        assert notebook.run("x") == "1"
    notebook.kc.execute("import os; os.kill(os.getpid(), 9)")
    notebook.close()
    until(lambda: "restarting kernel" in server.log.read_text())
    server.ready_client(notebook.kernel_id).stop_channels()
    until(lambda: zombies(server) == [])
    assert server.ask("DELETE", f"sessions/{notebook.session['id']}")[0] == 204
    until(lambda: zombies(server) == [])
