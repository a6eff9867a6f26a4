"""A real Jupyter Server in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from jupyter_client.blocking.client import BlockingKernelClient

READY = 90


class Server:
    """A real ``jupyter server`` with the test's kernelspecs, and a client of its REST API."""

    wrapper: tuple[str, ...] = ()
    """The command that runs the server, if any."""

    def __init__(self, folder: Path, *options: str, name: str = "") -> None:
        own = folder / name
        own.mkdir(exist_ok=True)
        self.runtime, self.log = own / "runtime", own / "server.log"
        paths = {"PATH": folder, "RUNTIME_DIR": self.runtime, "CONFIG_DIR": own / "config", "DATA_DIR": own / "data"}
        link_templates(own / "data")
        env = {**os.environ, **{f"JUPYTER_{variable}": str(path) for variable, path in paths.items()}}
        argv = [sys.executable, "-m", "jupyter_server", "--allow-root", "--port=0", "--IdentityProvider.token=t"]
        for file in self.runtime.glob("jpserver-*"):
            file.unlink()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self.wrapper, *argv, *options],
                cwd=folder / "notebooks",
                env=env,
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            (file,) = self.runtime.glob("jpserver-*.json")
            self.url = json.loads(file.read_text())["url"]
            return self.ask("GET", "status")[0] == 200
        except (ValueError, URLError):
            return False

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Send an HTTP request. Return the status and the decoded JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}api/{path}", data, {"Authorization": "token t"}, method=method)
        try:
            with urlopen(request, timeout=READY) as answer:
                return answer.status, json.loads(answer.read() or "null")
        except HTTPError as error:
            return error.code, json.loads(error.read())

    def open_notebook(self, kernel: str, name: str = "a.ipynb") -> tuple[int, Any]:
        """Start a session with a kernel, as JupyterLab does for a notebook."""
        session = {"path": name, "name": name.rpartition("/")[2], "type": "notebook", "kernel": {"name": kernel}}
        return self.ask("POST", "sessions", session)

    def stop(self) -> None:
        """Stop the server with SIGTERM. Fails if its exit status is not 0."""
        if self.process.poll() is None:
            self.process.terminate()
            assert self.process.wait(READY) == 0, self.log.read_text()

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def client(self, kernel_id: str) -> BlockingKernelClient:
        """Return a client of one of the server's kernels."""
        return connect(self.runtime, kernel_id)

    def ready_client(self, kernel_id: str) -> BlockingKernelClient:
        """Return a client of a kernel that has answered it."""
        kc = self.client(kernel_id)
        assert answers(kc), self.log.read_text()
        return kc


def link_templates(data: Path) -> None:
    """With --templates, create a link to the templates of this test run in a data folder."""
    place = data / "sandbox" / "templates"
    if "TEST_TEMPLATES" in os.environ and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.environ["TEST_TEMPLATES"])


def connect(runtime: Path, kernel_id: str) -> BlockingKernelClient:
    """Return a client of a kernel whose server has this runtime folder."""
    kc = BlockingKernelClient(connection_file=str(runtime / f"kernel-{kernel_id}.json"))
    kc.load_connection_file()
    kc.start_channels()
    return kc


def answers(kc: BlockingKernelClient) -> bool:
    """Return True if the kernel answers on shell and iopub in time. Unlike wait_for_ready, ignore the heartbeat."""
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline:
        kc.kernel_info()
        try:
            kc.get_shell_msg(timeout=1)
            kc.get_iopub_msg(timeout=0.5)
        except Empty:
            continue
        return True
    return False
