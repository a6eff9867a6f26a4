"""Run private Jupyter servers for `make demo`, use them over HTTP, and remove everything afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from jupyter_client.blocking.client import BlockingKernelClient

from sandbox_provisioner import SandboxError, find_runsc, left_behind

PATIENCE = 60.0
SETTINGS = ("SANDBOX_", "GCS_SANDBOX_", "FILESYSTEM_SNAPSHOT_", "JUPYTER_")
"""Prefixes of variables that are not passed to the demo, so that it stores nothing in the user's own storage."""


@contextlib.contextmanager
def private_jupyter(folder: Path) -> Iterator[None]:
    """Use only ``folder`` for Jupyter and its sandboxes in this block, and remove all sandboxes at its end."""
    before = dict(os.environ)
    binary = str(find_runsc().path)
    for name in before:
        if name.startswith(SETTINGS):
            del os.environ[name]
    places = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    os.environ |= {**places, "SANDBOX_RUNTIME_DIR": str(folder), "SANDBOX_RUNSC": binary}
    os.environ["SANDBOX_TEMPLATE"] = "use"  # a build in the background would be counted with the demo's processes
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "0"  # prefer the demo's kernel to the environment's kernel of the same name
    try:
        yield
    finally:
        for left in left_behind():
            left.remove()
        os.environ.clear()
        os.environ.update(before)


def install_kernel(idle_timeout: float) -> str:
    """Install a sandboxed version of Python's kernel with its template, and return its name."""
    options = ["--kernel", "python3", "--idle-timeout", str(idle_timeout)]
    command = [sys.executable, "-m", "sandbox_provisioner.cli", "setup", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SandboxError(f"`jupyter sandbox setup` failed:\n{ended.stdout}{ended.stderr}")
    return "python3-sandbox"


def sandbox_processes() -> tuple[int, int]:
    """Return the number of sandbox processes, and their unshared memory in bytes."""
    count = memory = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"--root={os.environ['SANDBOX_RUNTIME_DIR']}/".encode() in (entry / "cmdline").read_bytes():
                count += 1
                fields = (line.split() for line in (entry / "status").read_text().splitlines())
                memory += sum(int(field[1]) * 1024 for field in fields if field[0] in ("RssAnon:", "RssShmem:"))
    return count, memory


def images() -> int:
    """Return the size of all saved memory in bytes."""
    storage = Path(os.environ["JUPYTER_DATA_DIR"], "sandbox", "storage")
    return sum(file.stat().st_size for file in storage.rglob("*.img"))


class Server:
    """A ``jupyter server`` in its own process."""

    def __init__(self, folder: Path, notebooks: Path) -> None:
        self._token = secrets.token_hex(16)
        self._log = folder / "server.log"
        self._runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"])
        for stale in self._runtime.glob("jpserver-*"):
            stale.unlink()
        root = ["--allow-root"] if os.geteuid() == 0 else []
        command = [sys.executable, "-m", "jupyter_server", "--port=0", *root]
        env = {**os.environ, "JUPYTER_TOKEN": self._token}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command,
                cwd=notebooks,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SandboxError(f"The demo's Jupyter server does not answer:\n{self.log()}")
            time.sleep(0.05)

    def log(self) -> str:
        return self._log.read_text()

    def _answers(self) -> bool:
        try:
            (file,) = self._runtime.glob("jpserver-*.json")
            self._url = json.loads(file.read_text())["url"]
            self.ask("GET", "status")
        except (ValueError, URLError):
            return False
        return True

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request to the REST API, and return the answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {self._token}"}
        request = Request(f"{self._url}api/{path}", data, headers, method=method)
        try:
            with urlopen(request, timeout=PATIENCE) as answer:
                return json.loads(answer.read() or "null")
        except HTTPError as error:
            raise SandboxError(f"The demo's Jupyter server refused: {error.read().decode()}") from error

    def open_notebook(self, name: str, kernel: str) -> Notebook:
        """Open a notebook in the same way as JupyterLab."""
        session = {"path": name, "name": name, "type": "notebook", "kernel": {"name": kernel}}
        return Notebook(self, self.ask("POST", "sessions", session), self._runtime)

    def stop(self) -> None:
        """Stop the server with SIGTERM, as a service manager does."""
        self._process.terminate()
        self._process.wait()

    def kill(self) -> None:
        """Kill the server with SIGKILL, so that it cannot save anything."""
        self._process.kill()
        self._process.wait()


class Notebook:
    """An open notebook with a client of its kernel."""

    def __init__(self, server: Server, session: dict[str, Any], runtime: Path) -> None:
        self._server = server
        self._id = session["id"]
        self.kernel_id = session["kernel"]["id"]
        connection = runtime / f"kernel-{self.kernel_id}.json"
        self._client = BlockingKernelClient(connection_file=str(connection))
        self._client.load_connection_file()
        self._client.start_channels()
        self._wait()

    def _wait(self) -> None:
        """Wait for answers on shell and iopub. wait_for_ready would regard a starting kernel as dead."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self._client.kernel_info()
            with contextlib.suppress(Empty):
                self._client.get_shell_msg(timeout=1)
                self._client.get_iopub_msg(timeout=0.2)
                return
        raise SandboxError(f"The notebook's kernel does not answer:\n{self._server.log()}")

    def run(self, code: str) -> str:
        return run(self._client, code)

    @property
    def listed(self) -> bool:
        """True if the server still lists the kernel."""
        return any(kernel["id"] == self.kernel_id for kernel in self._server.ask("GET", "kernels"))

    def close(self) -> None:
        """Close the client. The kernel stays."""
        self._client.stop_channels()

    def shut_down(self) -> None:
        """Close the client and shut the kernel down."""
        self.close()
        self._server.ask("DELETE", f"sessions/{self._id}")


def run(client: BlockingKernelClient, code: str) -> str:
    """Run ``code``. Return its printed output, or its error."""
    printed: list[str] = []

    def collect(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=PATIENCE, output_hook=collect)
    return "".join(printed).strip() if reply["content"]["status"] == "ok" else reply["content"]["evalue"]
