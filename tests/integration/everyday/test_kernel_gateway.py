"""Jupyter Kernel Gateway: a kernel that is requested with SANDBOX_ID continues after the gateway was restarted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from kernels import run
from notebooks import until
from servers import READY, answers, connect

from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.setup import kernelspecs

pytestmark = pytest.mark.runsc

OPTIONS = ("--JupyterWebsocketPersonality.env_whitelist=['SANDBOX_ID']", "--SandboxProvisioner.on_shutdown=checkpoint")


@contextmanager
def gateway(folder: Path, runsc: Runsc) -> Iterator[str]:
    """Run a kernel gateway, and yield its address. Stop it with SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("DATA", "RUNTIME", "CONFIG")}
    env = {**os.environ, **places, "SANDBOX_RUNSC": str(runsc.path)}
    argv = [sys.executable, "-m", "kernel_gateway", f"--port={port}", *OPTIONS]
    with (folder / "gateway.log").open("a") as log:
        process = subprocess.Popen(argv, env=env, cwd=folder / "notebooks", stdout=log, stderr=log)
    try:
        until(lambda: responds(f"http://127.0.0.1:{port}/api"))
        yield f"http://127.0.0.1:{port}/api"
    finally:
        process.terminate()
        assert process.wait(READY) == 0, (folder / "gateway.log").read_text()


def responds(url: str) -> bool:
    try:
        with urlopen(url, timeout=READY) as answer:
            return bool(answer.status == 200)
    except URLError:
        return False


def run_in_sandbox(url: str, folder: Path, code: str) -> str:
    """Start a kernel in the sandbox "mine" and return what ``code`` printed."""
    body = {"name": "python3-sandbox", "env": {"SANDBOX_ID": "mine"}}
    with urlopen(Request(f"{url}/kernels", json.dumps(body).encode()), timeout=READY) as answer:
        kc = connect(folder / "runtime", json.loads(answer.read())["id"])
    assert answers(kc)
    printed = run(kc, code)
    kc.stop_channels()
    return printed


def test_requested_sandbox_continues_in_the_next_gateway(tmp_path: Path, notebook_folder: Path, runsc: Runsc) -> None:
    (origin,) = kernelspecs.origins(["python3"])
    kernelspecs.install_twin(origin, tmp_path / "data" / "kernels")
    with gateway(tmp_path, runsc) as url:
        assert run_in_sandbox(url, tmp_path, "x = 41; x") == "41"
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{url}/sandboxes", timeout=READY)
    with gateway(tmp_path, runsc) as url:
        assert run_in_sandbox(url, tmp_path, "x + 1") == "42"
