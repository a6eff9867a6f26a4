"""`make bench`: measure a server's memory for many hibernated kernels, and the delays of its event loops.

Each kernel belongs to an open notebook in a Jupyter Server, and has a websocket like that of a browser tab. While all
other kernels are hibernated, one kernel with much memory hibernates and wakes, and the server extension loop_delay.py
reports the longest delays of the server's event loops.
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
from common import readable, run_benchmark, temporary_storage, verdict
from loop_delay import Delay
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import websocket_connect
from wake import FILL_MEMORY, MB

from sandbox_provisioner.errors import SandboxError

MEMORY_GOAL = 0.5
"""MB in the server for each sandboxed kernel, in addition to those for a plain one."""
BLOCKED_GOAL = 0.05
"""Seconds for which an event loop may be blocked."""
WEBSOCKETS_GOAL = 2.0
"""Time of the last websocket's first cell, relative to a plain kernel."""
TIMEOUT = 120.0
STARTS_AT_ONCE = 2
RUNNING_KERNELS = 10
"""Number of kernels that are measured without hibernation."""
LARGE_MB = 100
HIBERNATE_WHEN_IDLE = {"enable_checkpoint_at_idle": True, "idle_timeout": 4}
KINDS = {
    "plain, running": ("local-provisioner", {}),
    "sandboxed, running": ("sandbox-provisioner", {}),
    "sandboxed, hibernated": ("sandbox-provisioner", HIBERNATE_WHEN_IDLE),
}
EXTENSIONS = {"sandbox_provisioner.extension": True, "loop_delay": True, "jupyterlab": False, "jupyter_lsp": False}


class Effort(NamedTuple):
    """How much is measured."""

    kernels: int = 200
    """Hibernated kernels."""
    websockets: int = 40
    """Websockets to one kernel."""
    rounds: int = 3
    """Repetitions of the measurement of delays."""
    idle_seconds: float = 10.0
    """Duration of each measurement in which nothing happens."""


QUICK = Effort(kernels=2, websockets=10, rounds=1, idle_seconds=1.0)
TOKEN = {"Authorization": "token t"}


class Server:
    """A Jupyter Server in its own process and folder, with one kind of kernel."""

    def __init__(self, folder: Path, provisioner: str, settings: dict[str, Any]) -> None:
        stanza = {"provisioner_name": provisioner, "config": settings}
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": "", "language": "python", "metadata": {"kernel_provisioner": stanza}}
        for name in ("notebooks", "kernels/bench"):
            (folder / name).mkdir(parents=True)
        (folder / "kernels/bench/kernel.json").write_text(json.dumps(spec))
        paths = {f"JUPYTER_{name}": str(folder / name) for name in ("RUNTIME_DIR", "CONFIG_DIR", "DATA_DIR")}
        modules = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, **paths, "JUPYTER_PATH": str(folder), "PYTHONPATH": modules}
        flags = [
            "--allow-root",
            "--port=0",
            "--IdentityProvider.token=t",
            f"--ServerApp.jpserver_extensions={EXTENSIONS}",
        ]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyter_server", *flags], cwd=folder / "notebooks", env=env, stderr=log
            )
        self.folder = folder

    async def answers(self) -> bool:
        """Return True if the server answers. Raises SandboxError if it has ended."""
        if self.process.poll() is not None:
            raise SandboxError(f"The server ended: {(self.folder / 'log').read_text()[-2000:]}")
        try:
            (file,) = self.folder.glob("RUNTIME_DIR/jpserver-*.json")
            self.url = json.loads(file.read_text())["url"]
            return bool(await self.request("GET", "loop-delay"))
        except (OSError, ValueError):
            return False

    async def request(self, method: str, path: str, body: object = None) -> Any:
        """Send an HTTP request and return the decoded JSON."""
        data = None if body is None else json.dumps(body)
        request = HTTPRequest(self.url + path, method, TOKEN, data, request_timeout=TIMEOUT)
        return json.loads((await AsyncHTTPClient().fetch(request)).body)

    async def all_hibernated(self) -> bool:
        """Return True if no kernel is awake."""
        return bool((await self.request("GET", "loop-delay"))["awake"] == 0)

    def memory(self) -> tuple[float, float]:
        """Return the memory of the server (USS) and of its kernels' processes (PSS), in MB."""
        server = psutil.Process(self.process.pid)
        kernels = 0.0
        for child in server.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                kernels += child.memory_full_info().pss
        return server.memory_full_info().uss / MB, kernels / MB


class Tab:
    """An open notebook: its session, and a websocket to its kernel."""

    async def open(self, server: Server, name: str) -> None:
        """Start the notebook's kernel, and run a cell."""
        body = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "bench"}}
        await self.connect(server, (await server.request("POST", "api/sessions", body))["kernel"]["id"])

    async def connect(self, server: Server, kernel: str) -> None:
        """Open a websocket to a kernel, and run a cell."""
        self._replies: dict[str, asyncio.Future[str]] = {}
        url = f"ws{server.url.removeprefix('http')}api/kernels/{kernel}/channels"
        self._socket = await websocket_connect(
            HTTPRequest(url, headers=TOKEN, request_timeout=TIMEOUT), on_message_callback=self._on_message
        )
        await self.run("1")

    async def run(self, code: str) -> None:
        """Run a cell and wait for its reply."""
        request_id = uuid4().hex
        header = {
            "msg_id": request_id,
            "msg_type": "execute_request",
            "username": "",
            "session": "bench",
            "version": "5.3",
        }
        content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        reply = self._replies[request_id] = asyncio.get_running_loop().create_future()
        await self._socket.write_message(json.dumps(message))
        if (status := await asyncio.wait_for(reply, TIMEOUT)) != "ok":
            raise SandboxError(f"The cell {code!r} ended with status {status!r}.")

    def _on_message(self, text: str | bytes | None) -> None:
        message = json.loads(text or "{}")
        if message.get("msg_type") == "execute_reply":
            self._replies.pop(message["parent_header"]["msg_id"]).set_result(message["content"]["status"])


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until ``condition`` is true. Raises SandboxError after the timeout."""
    deadline = time.monotonic() + TIMEOUT
    while not await condition():
        if time.monotonic() > deadline:
            raise SandboxError(f"A condition was not met in {TIMEOUT:g} s: {condition.__name__}.")
        await asyncio.sleep(0.2)


async def measure_kernels(effort: Effort, folder: Path) -> None:
    """Print the memory of each kind of kernel, and the delays of a server with hibernated kernels."""
    columns = f"{'kernels':>10}{'processes':>14}{'in the server':>16}{'total':>12}{'/plain':>10}"
    print(f"\n{'memory per kernel':30}{columns}")
    plain_total = plain_in_server = 0.0
    for title, (provisioner, settings) in KINDS.items():
        hibernates = bool(settings)
        count = effort.kernels if hibernates else min(effort.kernels, RUNNING_KERNELS)
        server = Server(folder / title, provisioner, settings)
        try:
            await wait_until(server.answers)
            before, _ = server.memory()
            tabs = await open_all(server, count)
            await (wait_until(server.all_hibernated) if hibernates else asyncio.sleep(1))
            after, processes = server.memory()
            in_server, in_processes = (after - before) / count, processes / count
            total = in_server + in_processes
            plain_in_server, plain_total = plain_in_server or in_server, plain_total or total
            reached = in_server - plain_in_server < MEMORY_GOAL
            mark = f"  {verdict(reached)} (goal: at most {MEMORY_GOAL} MB more in the server than a plain kernel)"
            numbers = (
                f"{in_processes:>11.1f} MB{in_server:>13.2f} MB{total:>9.1f} MB{f'{total / plain_total:.2f}x':>10}"
            )
            print(f"{title:30}{count:>10}{numbers}{mark if hibernates else ''}", flush=True)
            if hibernates:
                await measure_delays(server, tabs[0], effort)
        finally:
            server.process.terminate()
            server.process.wait(TIMEOUT)


async def measure_websockets(count: int, folder: Path) -> None:
    """Open many websockets at once to one kernel, and print when the first and the last cell were answered."""
    print(f"\n{f'{count} websockets at once':30}{'first cell':>14}{'last cell':>14}{'last/plain':>18}", flush=True)
    plain = 0.0
    for title, kind in list(KINDS.items())[:2]:
        server = Server(folder / f"{title}, websockets", *kind)
        try:
            await wait_until(server.answers)
            await Tab().open(server, "0.ipynb")
            (kernel,) = await server.request("GET", "api/kernels")
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
            server.process.wait(TIMEOUT)


async def open_all(server: Server, count: int) -> list[Tab]:
    """Open ``count`` notebooks and return their tabs. Print the progress to stderr."""
    limit, tabs = asyncio.Semaphore(STARTS_AT_ONCE), [Tab() for _ in range(count)]

    async def open_one(number: int, tab: Tab) -> None:
        async with limit:
            await tab.open(server, f"{number}.ipynb")
            if number % 20 == 19:
                memory = f"{server.memory()[0]:.0f} MB in the server"
                print(f"  notebook {number + 1} of {count} is open, {memory}", file=sys.stderr, flush=True)

    await asyncio.gather(*(open_one(number, tab) for number, tab in enumerate(tabs)))
    return tabs


async def measure_delays(server: Server, tab: Tab, effort: Effort) -> None:
    """Print the longest delays of a server's loops while one kernel hibernates and wakes."""
    print(f"\n{'longest delay of a loop':34}{'server':>12}{'blocked':>12}{'I/O thread':>14}{'blocked':>12}", flush=True)
    await tab.run(FILL_MEMORY.format(count=LARGE_MB))
    measured: dict[str, list[list[Delay]]] = {}

    async def measure(title: str, action: Awaitable[object]) -> None:
        await server.request("GET", "loop-delay?reset=1")
        await action
        delays = (await server.request("GET", "loop-delay"))["delays"]
        measured.setdefault(title, []).append([Delay(*delay) for delay in delays])

    for _ in range(effort.rounds):
        await measure(f"{LARGE_MB} MB hibernate", wait_until(server.all_hibernated))
        await measure("all hibernated", asyncio.sleep(effort.idle_seconds))
        await measure("all hibernated, processors busy", load_processors(effort.idle_seconds))
        await measure(f"{LARGE_MB} MB wake", tab.run("1"))
    for title, rounds in measured.items():
        server_loop, io_loop = (Delay(*map(max, zip(*delays, strict=True))) for delays in zip(*rounds, strict=True))
        numbers = f"{readable(server_loop.total):>12}{readable(server_loop.blocked):>12}"
        numbers += f"{readable(io_loop.total):>14}{readable(io_loop.blocked):>12}"
        reached = max(server_loop.blocked, io_loop.blocked) < BLOCKED_GOAL
        print(f"{title:34}{numbers}  {verdict(reached)} (goal {readable(BLOCKED_GOAL)} blocked)", flush=True)


async def load_processors(seconds: float) -> None:
    """Run two busy processes for each processor. The server has no part in the delays that they cause."""
    argv = [sys.executable, "-c", "while True: pass"]
    busy = [psutil.Popen(argv) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        await asyncio.sleep(seconds)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure a server's memory and delays with many hibernated kernels.")
    parser.add_argument("--quick", action="store_true", help="check in about a minute that the benchmark works")
    parser.add_argument(
        "--kernels",
        type=int,
        metavar="COUNT",
        help="number of hibernated kernels (default: 200, which takes ten minutes; 0: only measure websockets)",
    )
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else Effort()
    if options.kernels is not None:
        effort = effort._replace(kernels=options.kernels)

    def measure() -> None:
        with temporary_storage() as folder:
            asyncio.run(measure_websockets(effort.websockets, folder))
            if effort.kernels:
                asyncio.run(measure_kernels(effort, folder))

    return run_benchmark(measure, "ipykernel", "jupyter_client", "jupyter_server")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
