"""A Jupyter server as `make demo` needs it: private, spoken to over HTTP, stopped or killed, and nothing left of it."""

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
"""Variables of the user's own that the demo does not take over: it would leave something in their storage."""


@contextlib.contextmanager
def private_jupyter(folder: Path) -> Iterator[None]:
    """In this block Jupyter and its sandboxes know no folder but ``folder``; no sandbox outlives the block."""
    before = dict(os.environ)
    binary = str(find_runsc().path)
    for name in before:
        if name.startswith(SETTINGS):
            del os.environ[name]
    places = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    os.environ |= {**places, "SANDBOX_RUNTIME_DIR": str(folder), "SANDBOX_RUNSC": binary}
    os.environ["SANDBOX_TEMPLATE"] = "use"  # nothing is made behind the demo's back, which it would count
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "0"  # the kernel made here, not the environment's of the same name
    try:
        yield
    finally:
        for left in left_behind():
            left.remove()
        os.environ.clear()
        os.environ.update(before)


def install_kernel(idle_timeout: float) -> str:
    """Install a sandboxed twin of Python's kernel, with its template, and return its name."""
    options = ["--kernel", "python3", "--idle-timeout", str(idle_timeout)]
    command = [sys.executable, "-m", "sandbox_provisioner.cli", "setup", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SandboxError(f"`jupyter sandbox setup` failed:\n{ended.stdout}{ended.stderr}")
    return "python3-sandbox"


def sandbox_processes() -> tuple[int, int]:
    """How many processes of sandboxes there are, and the bytes of memory that they share with nobody."""
    count = memory = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"--root={os.environ['SANDBOX_RUNTIME_DIR']}/".encode() in (entry / "cmdline").read_bytes():
                count += 1
                fields = (line.split() for line in (entry / "status").read_text().splitlines())
                memory += sum(int(field[1]) * 1024 for field in fields if field[0] in ("RssAnon:", "RssShmem:"))
    return count, memory


def images() -> int:
    """The bytes of all saved memory."""
    storage = Path(os.environ["JUPYTER_DATA_DIR"], "sandbox", "storage")
    return sum(file.stat().st_size for file in storage.rglob("*.img"))


class Server:
    """A real ``jupyter server`` in a process of its own."""

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
        """Wait until it answers."""
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
        """The answer of its REST API."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {self._token}"}
        request = Request(f"{self._url}api/{path}", data, headers, method=method)
        try:
            with urlopen(request, timeout=PATIENCE) as answer:
                return json.loads(answer.read() or "null")
        except HTTPError as error:
            raise SandboxError(f"The demo's Jupyter server refused: {error.read().decode()}") from error

    def open_notebook(self, name: str, kernel: str) -> Notebook:
        """What JupyterLab does when a notebook is opened."""
        session = {"path": name, "name": name, "type": "notebook", "kernel": {"name": kernel}}
        return Notebook(self, self.ask("POST", "sessions", session), self._runtime)

    def stop(self) -> None:
        """As a service manager would (SIGTERM)."""
        self._process.terminate()
        self._process.wait()

    def kill(self) -> None:
        """With no time for anything (SIGKILL)."""
        self._process.kill()
        self._process.wait()


class Notebook:
    """An open notebook, and a client of its kernel."""

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
        """Until the kernel is heard on both channels; wait_for_ready would take one that starts for dead."""
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
        """Whether the server still has its kernel."""
        return any(kernel["id"] == self.kernel_id for kernel in self._server.ask("GET", "kernels"))

    def close(self) -> None:
        """Close the tab; the kernel stays."""
        self._client.stop_channels()

    def shut_down(self) -> None:
        """Shut Down Kernel."""
        self.close()
        self._server.ask("DELETE", f"sessions/{self._id}")


def run(client: BlockingKernelClient, code: str) -> str:
    """What ``code`` prints."""
    printed: list[str] = []

    def collect(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=PATIENCE, output_hook=collect)
    return "".join(printed).strip() if reply["content"]["status"] == "ok" else reply["content"]["evalue"]
