"""Run the commands of a documentation page in a shell, as a new user with an empty home."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from doc_pages import Step
from kernels import run
from servers import READY, answers, connect

from sandbox_provisioner.gvisor.runsc import Runsc

USER, MACHINE = "ada", "laptop"
"""Names of the user and the machine in the documented outputs."""
MARK = "\x1e"
CONFIG = "c.ServerApp.allow_root = True\nc.ServerApp.open_browser = False\n"
"""Needed only in tests, which may run as root and have no browser."""
FUNCTIONS = """
serve() {
    jupyter server "$@" >> "$HOME/${LOG:-server}.log" 2>&1 &
    SERVER=$!
    until [ -e "$HOME/.local/share/jupyter/runtime/jpserver-$SERVER.json" ]; do kill -0 $SERVER; sleep 0.1; done
}
stop() { kill "${1:-$SERVER}"; wait "${1:-$SERVER}"; }
"""
"""Start a server in the background, and stop it. They replace `jupyter lab` and Ctrl-C in the pages."""
INSTALL_KERNEL = """
from sandbox_provisioner.setup import kernelspecs
kernelspecs.install_twin(kernelspecs.origins(["python3"])[0], kernelspecs.kernels_folder(False))
"""


class DocShell:
    """A shell of a new user with an empty home."""

    def __init__(self, folder: Path, runsc: Runsc) -> None:
        self.home = folder / "home"
        (self.home / ".jupyter").mkdir(parents=True)
        (self.home / ".jupyter" / "jupyter_server_config.py").write_text(CONFIG)
        self.runtime = self.home / ".local" / "share" / "jupyter" / "runtime"
        self._script = folder / "block"
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=self.home,
            env=self._environment(runsc),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.run(Step(0, "sh", FUNCTIONS))

    def _environment(self, runsc: Runsc) -> dict[str, str]:
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {name: os.environ[name] for name in ("LANG", "TMPDIR", "SANDBOX_RUNTIME_DIR") if name in os.environ}
        own = {
            "HOME": str(self.home),
            "USER": USER,
            "LOGNAME": USER,
            "PATH": programs,
            "SANDBOX_RUNSC": str(runsc.path),
        }
        return {**kept, **own, "JUPYTER_PORT": "0", "COLUMNS": "160"}

    def prepare(self, server: bool) -> None:
        """Install a sandboxed kernel, go to a new folder ``notebooks``, and start a server there if ``server``."""
        self.run(Step(0, "python", INSTALL_KERNEL))
        self.run(Step(0, "sh", "mkdir notebooks; cd notebooks"))
        if server:
            self.run(Step(0, "sh", "serve"))

    def run(self, step: Step) -> str:
        """Run a step. Return its output, with the user and machine of the pages. Fails on another exit status."""
        if step.kind == "browser":
            return self._run_cell(step.command)
        assert self._shell.stdin and self._shell.stdout
        self._script.write_text(step.command + "\n")
        stop_at_error = "set -e; " if step.status == 0 else ""
        command = f"python {self._script}" if step.kind == "python" else f"{stop_at_error}. {self._script}"
        self._shell.stdin.write(f"{command} < /dev/null; printf '{MARK}%d{MARK}' $?; set +e\n".encode())
        self._shell.stdin.flush()
        parts = self._read()
        status = int(parts[-1]) if len(parts) > 1 else self._shell.wait()
        output = self._with_documented_names(parts[0])
        assert status == step.status, f"{step.command}\nended with {status}: {output}\n{self.logs()}"
        return output

    def _read(self) -> list[str]:
        """Return the output and the exit status of the last command; only the output if the shell has ended."""
        assert self._shell.stdout
        data = b""
        while data.count(MARK.encode()) < 2 and (piece := os.read(self._shell.stdout.fileno(), 1 << 16)):
            data += piece
        return data.decode(errors="replace").split(MARK)[:2]

    def _with_documented_names(self, text: str) -> str:
        return text.replace(str(self.home), f"/home/{USER}").replace(socket.gethostname(), MACHINE)

    # -- in the browser ------------------------------------------------------------------------------------------------

    def _run_cell(self, command: str) -> str:
        """Open a notebook in the server that was started last, and run a cell. ``command`` is ``NOTEBOOK: CODE``."""
        notebook, _, code = command.partition(": ")
        server = self._server()
        if self._ask(server, "GET", f"contents/{notebook}?content=0")[0] == 404:
            empty = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
            self._ask(server, "PUT", f"contents/{notebook}", {"type": "notebook", "content": empty})
        kernel = {"name": "python3-sandbox"}
        session = {"path": notebook, "name": notebook, "type": "notebook", "kernel": kernel}
        status, opened = self._ask(server, "POST", "sessions", session)
        assert status == 201, f"{opened}\n{self.logs()}"
        kc = connect(self.runtime, opened["kernel"]["id"])
        try:
            assert answers(kc), self.logs()
            return run(kc, code)
        finally:
            kc.stop_channels()

    def _server(self) -> dict[str, Any]:
        deadline = time.monotonic() + READY
        while True:
            files = sorted(self.runtime.glob("jpserver-*.json"), key=lambda file: file.stat().st_mtime)
            try:
                server: dict[str, Any] = json.loads(files[-1].read_text())
                self._ask(server, "GET", "status")
                return server
            except (IndexError, URLError, ValueError):
                assert time.monotonic() < deadline, self.logs()
                time.sleep(0.1)

    @staticmethod
    def _ask(server: dict[str, Any], method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {server['token']}"}
        try:
            with urlopen(Request(f"{server['url']}api/{path}", data, headers, method=method), timeout=READY) as answer:
                return answer.status, json.loads(answer.read() or "null")
        except HTTPError as error:
            return error.code, error.read().decode()

    def logs(self) -> str:
        """Return the end of the servers' logs."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in self.home.rglob("*.log"))

    def close(self) -> None:
        """Stop all servers with SIGTERM, and end the shell."""
        servers = [json.loads(file.read_text())["pid"] for file in self.runtime.glob("jpserver-*.json")]
        for pid in filter(_is_alive, servers):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + READY
        while any(map(_is_alive, servers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self._shell.stdin and self._shell.stdout
        self._shell.stdin.close()
        self._shell.stdout.close()
        self._shell.wait(READY)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
