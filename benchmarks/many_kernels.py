"""`make bench`: what a crowd of hibernated kernels costs their server, beside kernels that are kept running.

Each is a notebook's, in a Jupyter Server that has loop_delay.py as an extension, with a websocket as a browser has it.
Then one with much in its memory wakes and sleeps among them, and the server says by how much its loops were late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psutil
from common import framed, readable, scratch, verdict
from loop_delay import Late
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import websocket_connect
from wake import HOARD, MB

from sandbox_provisioner.errors import SandboxError

GOAL, LATE_GOAL = 0.5, 0.05
WEBSOCKETS_GOAL = 2.0
PATIENCE = 120.0
AT_ONCE, FEW, HOARD_MB = 2, 10, 100
SLEEPY = {"enable_checkpoint_at_idle": True, "idle_timeout": 4}
KINDS = {
    "plain, running": ("local-provisioner", {}),
    "sandboxed, running": ("sandbox-provisioner", {}),
    "sandboxed, hibernated": ("sandbox-provisioner", SLEEPY),
}
ONLY_OURS = {"sandbox_provisioner.extension": True, "loop_delay": True, "jupyterlab": False, "jupyter_lsp": False}


class Effort(NamedTuple):
    """How much is measured: kernels that hibernate, websockets to one kernel, rounds, and seconds of quiet in each."""

    kernels: int = 200
    websockets: int = 40
    rounds: int = 3
    quiet: float = 10.0


QUICK = Effort(kernels=2, websockets=10, rounds=1, quiet=1.0)
TOKEN = {"Authorization": "token t"}


class Server:
    """A Jupyter Server in a process and a new folder of its own, whose kernels are of one kind."""

    def __init__(self, folder: Path, provisioner: str, settings: dict[str, Any]) -> None:
        stanza = {"provisioner_name": provisioner, "config": settings}
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": "", "language": "python", "metadata": {"kernel_provisioner": stanza}}
        for needed in ("notebooks", "kernels/bench"):
            (folder / needed).mkdir(parents=True)
        (folder / "kernels/bench/kernel.json").write_text(json.dumps(spec))
        paths = {f"JUPYTER_{name}": str(folder / name) for name in ("RUNTIME_DIR", "CONFIG_DIR", "DATA_DIR")}
        seen = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, **paths, "JUPYTER_PATH": str(folder), "PYTHONPATH": seen}
        flags = [
            "--allow-root",
            "--port=0",
            "--IdentityProvider.token=t",
            f"--ServerApp.jpserver_extensions={ONLY_OURS}",
        ]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyter_server", *flags], cwd=folder / "notebooks", env=env, stderr=log
            )
        self.folder = folder

    async def up(self) -> bool:
        """Whether it answers."""
        if self.process.poll() is not None:
            raise SandboxError(f"The server ended: {(self.folder / 'log').read_text()[-2000:]}")
        try:
            (file,) = self.folder.glob("RUNTIME_DIR/jpserver-*.json")
            self.url = json.loads(file.read_text())["url"]
            return bool(await self.ask("GET", "lateness"))
        except (OSError, ValueError):
            return False

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """The JSON of an HTTP request."""
        data = None if body is None else json.dumps(body)
        request = HTTPRequest(self.url + path, method, TOKEN, data, request_timeout=PATIENCE)
        return json.loads((await AsyncHTTPClient().fetch(request)).body)

    async def sleeps(self) -> bool:
        """Whether none of its kernels is awake."""
        return bool((await self.ask("GET", "lateness"))["awake"] == 0)

    def memory(self) -> tuple[float, float]:
        """What it has for itself (USS), and what its kernels' processes have (PSS), in MB."""
        server = psutil.Process(self.process.pid)
        kernels = 0.0
        for child in server.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                kernels += child.memory_full_info().pss
        return server.memory_full_info().uss / MB, kernels / MB


class Tab:
    """A notebook that is open: its session, and a websocket to its kernel."""

    async def open(self, server: Server, name: str) -> None:
        """Start its kernel, and have a cell answered."""
        body = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "bench"}}
        await self.connect(server, (await server.ask("POST", "api/sessions", body))["kernel"]["id"])

    async def connect(self, server: Server, kernel: str) -> None:
        """Open a websocket to a kernel, and have a cell answered."""
        self._replies: dict[str, asyncio.Future[str]] = {}
        url = f"ws{server.url.removeprefix('http')}api/kernels/{kernel}/channels"
        self._socket = await websocket_connect(
            HTTPRequest(url, headers=TOKEN, request_timeout=PATIENCE), on_message_callback=self._heard
        )
        await self.run("1")

    async def run(self, code: str) -> None:
        """Run a cell, until its reply is there."""
        name = uuid4().hex
        header = {"msg_id": name, "msg_type": "execute_request", "username": "", "session": "bench", "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        reply = self._replies[name] = asyncio.get_running_loop().create_future()
        await self._socket.write_message(json.dumps(message))
        if (status := await asyncio.wait_for(reply, PATIENCE)) != "ok":
            raise SandboxError(f"{code!r} was answered with {status}.")

    def _heard(self, text: str | bytes | None) -> None:
        message = json.loads(text or "{}")
        if message.get("msg_type") == "execute_reply":
            self._replies.pop(message["parent_header"]["msg_id"]).set_result(message["content"]["status"])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not await condition():
        if time.monotonic() > deadline:
            raise SandboxError("What was waited for did not happen.")
        await asyncio.sleep(0.2)


async def measure(effort: Effort, folder: Path) -> None:
    """Print what each kernel costs, and how late the server's loops are."""
    columns = f"{'how many':>10}{'processes':>14}{'in the server':>16}{'in all':>12}{'to plain':>10}"
    print(f"\n{'memory of each, with its tab':30}{columns}")
    plain = jupyters = 0.0
    for title, kind in KINDS.items():
        crowd = effort.kernels if kind[1] else min(effort.kernels, FEW)
        server = Server(folder / title, *kind)
        try:
            await until(server.up)
            before, _ = server.memory()
            tabs = await open_all(server, crowd)
            await (until(server.sleeps) if kind[1] else asyncio.sleep(1))
            after, processes = server.memory()
            each, own = (after - before) / crowd, processes / crowd
            jupyters = jupyters or each
            mark = f"  {verdict(each - jupyters < GOAL)} (goal {GOAL} MB more in the server than a plain one)"
            plain = plain or own + each
            ratio = f"{(own + each) / plain:.2f}x"
            numbers = f"{own:>11.1f} MB{each:>13.2f} MB{own + each:>9.1f} MB{ratio:>10}"
            print(f"{title:30}{crowd:>10}{numbers}{mark if kind[1] else ''}", flush=True)
            if kind[1]:
                await measure_lateness(server, tabs[0], effort)
        finally:
            server.process.terminate()
            server.process.wait(PATIENCE)


async def measure_websockets(count: int, folder: Path) -> None:
    """Print how long the first and the last of many websockets, opened at once to one kernel, wait for a first cell."""
    print(f"\n{f'{count} websockets at once':30}{'first cell':>14}{'last cell':>14}{'last, to plain':>18}", flush=True)
    plain = 0.0
    for title, kind in list(KINDS.items())[:2]:
        server = Server(folder / f"{title}, websockets", *kind)
        try:
            await until(server.up)
            await Tab().open(server, "0.ipynb")
            (kernel,) = await server.ask("GET", "api/kernels")
            began, ends = time.monotonic(), []

            async def connect(server: Server = server, kernel_id: str = kernel["id"], ends: list[float] = ends) -> None:
                await Tab().connect(server, kernel_id)
                ends.append(time.monotonic())

            await asyncio.gather(*(connect() for _ in range(count)))
            first, last = min(ends) - began, max(ends) - began
            mark = f"  {verdict(last < plain * WEBSOCKETS_GOAL)} (goal {WEBSOCKETS_GOAL}x)" if plain else ""
            plain = plain or last
            print(f"{title:30}{readable(first):>14}{readable(last):>14}{f'{last / plain:.1f}x':>18}{mark}", flush=True)
        finally:
            server.process.terminate()
            server.process.wait(PATIENCE)


async def open_all(server: Server, count: int) -> list[Tab]:
    """So many notebooks, a few at once; says how far it is."""
    few, tabs = asyncio.Semaphore(AT_ONCE), [Tab() for _ in range(count)]

    async def open_one(number: int, tab: Tab) -> None:
        async with few:
            await tab.open(server, f"{number}.ipynb")
            if number % 20 == 19:
                now = f"{server.memory()[0]:.0f} MB in the server"
                print(f"  notebook {number + 1} of {count} is open, {now}", file=sys.stderr, flush=True)

    await asyncio.gather(*(open_one(number, tab) for number, tab in enumerate(tabs)))
    return tabs


async def measure_lateness(server: Server, tab: Tab, effort: Effort) -> None:
    """Print how late the loops of a server are at worst, whose kernels sleep, while one of them wakes and sleeps."""
    print(f"\n{'loops late by, at worst':34}{'server':>12}{'blocked':>12}{'I/O thread':>14}{'blocked':>12}", flush=True)
    await tab.run(HOARD.format(count=HOARD_MB))
    seen: dict[str, list[list[Late]]] = {}

    async def watch(title: str, action: Awaitable[object]) -> None:
        await server.ask("GET", "lateness?forget=1")
        await action
        seen.setdefault(title, []).append([Late(*late) for late in (await server.ask("GET", "lateness"))["late"]])

    for _ in range(effort.rounds):
        await watch(f"{HOARD_MB} MB hibernate", until(server.sleeps))
        await watch("all sleep", asyncio.sleep(effort.quiet))
        await watch("all sleep, processors busy", burn(effort.quiet))
        await watch(f"{HOARD_MB} MB wake", tab.run("1"))
    for title, rounds in seen.items():
        server_late, io_late = (Late(*map(max, zip(*lates, strict=True))) for lates in zip(*rounds, strict=True))
        numbers = f"{readable(server_late.in_all):>12}{readable(server_late.blocked):>12}"
        numbers += f"{readable(io_late.in_all):>14}{readable(io_late.blocked):>12}"
        goal = max(server_late.blocked, io_late.blocked) < LATE_GOAL
        print(f"{title:34}{numbers}  {verdict(goal)} (goal {readable(LATE_GOAL)} blocked)", flush=True)


async def burn(seconds: float) -> None:
    """Keep every processor busy, twice: what comes of that is not the fault of anything in the server."""
    spin = [sys.executable, "-c", "while True: pass"]
    burners = [psutil.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        await asyncio.sleep(seconds)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure what hibernated kernels cost their server.")
    parser.add_argument("--quick", action="store_true", help="in about a minute: that it works, not how much it costs")
    parser.add_argument(
        "--kernels", type=int, help="how many hibernate (200, which takes ten minutes); 0: websockets only"
    )
    asked = parser.parse_args(arguments)
    effort = QUICK if asked.quick else Effort()
    if asked.kernels is not None:
        effort = effort._replace(kernels=asked.kernels)

    def compare() -> None:
        with scratch() as folder:
            asyncio.run(measure_websockets(effort.websockets, folder))
            if effort.kernels:
                asyncio.run(measure(effort, folder))

    return framed(compare, "ipykernel", "jupyter_client", "jupyter_server")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
