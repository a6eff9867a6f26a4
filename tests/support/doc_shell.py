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
from servers import READY, connect, hears

from sandbox_provisioner.gvisor.runsc import Runsc

NAME, MACHINE = "ada", "laptop"
MARK = "\x1e"
CONFIG = "c.ServerApp.allow_root = True\nc.ServerApp.open_browser = False\n"
"""What a reader need not know: tests may run as root, and there is no browser."""
FUNCTIONS = """
serve() {
    jupyter server "$@" >> "$HOME/${LOG:-server}.log" 2>&1 &
    SERVER=$!
    until [ -e "$HOME/.local/share/jupyter/runtime/jpserver-$SERVER.json" ]; do kill -0 $SERVER; sleep 0.1; done
}
stop() { kill "${1:-$SERVER}"; wait "${1:-$SERVER}"; }
"""
"""What stands in for a person who starts a server, and stops it with Ctrl-C."""
READY_MADE = """
from sandbox_provisioner.setup import kernelspecs
kernelspecs.install_twin(kernelspecs.origins(["python3"])[0], kernelspecs.kernels_folder(False), kernelspecs.DEFAULTS)
"""


class Reader:
    """A new user with an empty home."""

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
        self.do(Step(0, "sh", FUNCTIONS))

    def _environment(self, runsc: Runsc) -> dict[str, str]:
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {name: os.environ[name] for name in ("LANG", "TMPDIR", "SANDBOX_RUNTIME_DIR") if name in os.environ}
        who = {
            "HOME": str(self.home),
            "USER": NAME,
            "LOGNAME": NAME,
            "PATH": programs,
            "SANDBOX_RUNSC": str(runsc.path),
        }
        return {**kept, **who, "JUPYTER_PORT": "0", "COLUMNS": "160"}

    def prepare(self, server: bool) -> None:
        """Have a sandboxed kernel, be in the folder ``notebooks``, and have a server there if that is wanted."""
        self.do(Step(0, "python", READY_MADE))
        self.do(Step(0, "sh", "mkdir notebooks; cd notebooks"))
        if server:
            self.do(Step(0, "sh", "serve"))

    def do(self, step: Step) -> str:
        """Do it; returns what was seen, as it would look on a machine that is theirs."""
        if step.kind == "browser":
            return self._browse(step.command)
        assert self._shell.stdin and self._shell.stdout
        self._script.write_text(step.command + "\n")
        strictly = "set -e; " if step.status == 0 else ""
        command = f"python {self._script}" if step.kind == "python" else f"{strictly}. {self._script}"
        self._shell.stdin.write(f"{command} < /dev/null; printf '{MARK}%d{MARK}' $?; set +e\n".encode())
        self._shell.stdin.flush()
        seen = self._read()
        status = int(seen[-1]) if len(seen) > 1 else self._shell.wait()
        said = self._as_theirs(seen[0])
        assert status == step.status, f"{step.command}\nended with {status}: {said}\n{self.logs()}"
        return said

    def _read(self) -> list[str]:
        assert self._shell.stdout
        data = b""
        while data.count(MARK.encode()) < 2 and (piece := os.read(self._shell.stdout.fileno(), 1 << 16)):
            data += piece
        return data.decode(errors="replace").split(MARK)[:2]

    def _as_theirs(self, text: str) -> str:
        known = {str(self.home): f"/home/{NAME}", socket.gethostname(): MACHINE}
        for here, theirs in known.items():
            text = text.replace(here, theirs)
        return text

    # -- in the browser ------------------------------------------------------------------------------------------------

    def _browse(self, what: str) -> str:
        """``NOTEBOOK: CODE``: open the notebook in the server that was started last, and run a cell."""
        notebook, _, code = what.partition(": ")
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
            assert hears(kc), self.logs()
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

    def leave(self) -> None:
        """Stop what still runs, as when a terminal is closed; persistent kernels are saved by their servers."""
        servers = [json.loads(file.read_text())["pid"] for file in self.runtime.glob("jpserver-*.json")]
        for pid in filter(_lives, servers):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + READY
        while any(map(_lives, servers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self._shell.stdin and self._shell.stdout
        self._shell.stdin.close()
        self._shell.stdout.close()
        self._shell.wait(READY)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
