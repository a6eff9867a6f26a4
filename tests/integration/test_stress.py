"""Random actions on many notebooks of two real servers that share storage lose no cell and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from leftovers import leftovers
from servers import Server
from stress import Limits, Notebook, ask, stress

pytestmark = pytest.mark.runsc

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]

SEED = os.environ.get("STRESS_SEED") or str(random.randrange(1 << 32))
EXTENSIONS = "--ServerApp.jpserver_extensions={'sandbox_provisioner.extension': True, 'stress_probe': True}"
SETTLED = 20.0
"""Seconds after which idle threads have ended and closed connections were detected."""


@pytest.fixture
def servers(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """Two servers that share their storage."""
    monkeypatch.setenv("SANDBOX_STORAGE_DIR", str(tmp_path / "shared"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    return [serve(EXTENSIONS, name="first"), serve(EXTENSIONS, name="second")]


async def take_census(server: Server) -> dict[str, Any]:
    """Return the open resources of a server."""
    found: dict[str, Any] = await ask(server, "GET", "stress/census")
    return {name: value for name, value in found.items() if name not in ("slow", "blocked")}


async def warm_up(servers: Sequence[Server], kernel: str, limits: Limits) -> list[dict[str, Any]]:
    """Do some actions on each server, so that all modules are imported. Return the servers' open resources."""
    notebook = Notebook("warm-up.ipynb", kernel, servers, limits, SEED)
    await notebook.open()
    for _ in servers:
        for action in (notebook.hibernate, notebook.wake, notebook.interrupt, notebook.disconnect, notebook.hand_off):
            await action()
    await notebook.shut_down()
    await asyncio.sleep(SETTLED / 4)
    for server in servers:
        await ask(server, "GET", "stress/census")
    return [await take_census(server) for server in servers]


async def wait_for_census(server: Server, wanted: dict[str, Any]) -> None:
    """Wait until a server has the same open resources as after the warm-up."""
    for _ in range(int(SETTLED)):
        found = await take_census(server)
        different = {name: (found[name], wanted[name]) for name in wanted if found[name] != wanted[name]}
        if not different:
            return
        await asyncio.sleep(1)
    print(f"The server's resources now, and after the warm-up: {different}")
    assert different == {}


@pytest.mark.parametrize(
    ("count", "seconds", "longest"),
    [
        pytest.param(8, 45, 60.0, id="one minute in all", marks=pytest.mark.timeout(300)),
        pytest.param(30, 600, 10.0, id="ten minutes", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
async def test_random_actions_on_many_notebooks(
    servers: list[Server],
    serve: Serve,
    sandboxed: Sandboxed,
    runtime: Path,
    tmp_path: Path,
    count: int,
    seconds: float,
    longest: float,
) -> None:
    print(f"STRESS_SEED={SEED}")
    kernel, limits = sandboxed(enable_handoff=True, on_shutdown="delete"), Limits(longest)
    first = servers[0]
    counts, _ = await warm_up(servers, kernel, limits)
    notebooks = [Notebook(f"{number}.ipynb", kernel, servers, limits, SEED) for number in range(count)]
    try:
        await stress(notebooks, time.monotonic() + seconds)
    finally:
        print(limits.summary())
    for server in servers:
        found = await ask(server, "GET", "stress/census")
        print(*found["slow"], *found["blocked"], sep="\n", flush=True)
        assert found["slow"] == []
    kept, ended = notebooks[::2], notebooks[1::2]
    for notebook in ended:
        await notebook.shut_down()
    for notebook in kept:
        if notebook.server is first:
            await notebook.hand_off()
        notebook.disconnect_now()
    await wait_for_census(first, counts)
    for server in servers:
        server.stop()
    assert leftovers(runtime) == []
    assert files_of_servers(tmp_path, servers) == []
    third = serve(EXTENSIONS, name="third")
    for notebook in kept:
        notebook.server, notebook.servers = third, [third]
        await notebook.open()
        await notebook.shut_down()


def files_of_servers(folder: Path, servers: Sequence[Server]) -> list[str]:
    """Return the leases, connection files and sockets that stopped servers left."""
    found = [*(folder / "shared").rglob("*.lock"), *(folder / "shared").rglob("*.waiter")]
    found += [path for server in servers for path in server.runtime.glob("kernel-*")]
    return [str(path.relative_to(folder)) for path in found]
