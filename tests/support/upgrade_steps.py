"""Start, save and reopen a kernel with the sandbox_provisioner on the path: save|reopen|start FOLDER."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager


async def run(client: Any, code: str) -> str:
    """Execute a cell; return what it prints."""
    printed: list[str] = []

    def note(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = await client.execute_interactive(code, timeout=60, output_hook=note)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(printed)


async def start(folder: Path, notebook: str) -> tuple[Any, Any]:
    """Start or reopen a notebook's kernel."""
    manager = AsyncKernelManager(kernel_name="python3-sandbox")
    await manager.start_kernel(env={**os.environ, "JPY_SESSION_NAME": str(folder / notebook)}, cwd=str(folder))
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    return manager, client


async def keep(manager: Any, client: Any) -> None:
    """Save the kernel as a server does that stops."""
    await manager.provisioner.hibernate()
    manager.provisioner.keep_state()
    client.stop_channels()
    await manager.shutdown_kernel(now=True)


async def save(folder: Path) -> None:
    """Leave a saved kernel with a savepoint and a generator that was begun."""
    manager, client = await start(folder, "a.ipynb")
    await run(client, "x = 41; steps = iter(range(100)); next(steps)")
    await run(client, "open('/tmp/kept', 'w').write('in the home of the kernel')")
    await run(client, "%sandbox savepoint before")
    await run(client, "x = 0")
    await keep(manager, client)


async def reopen(folder: Path) -> None:
    """Use everything that the older version saved."""
    manager, client = await start(folder, "a.ipynb")
    assert await run(client, "print(x, next(steps), open('/tmp/kept').read())") == "0 1 in the home of the kernel\n"
    await manager.provisioner.hibernate()
    assert await run(client, "x += 1; print(x)") == "1\n"
    await run(client, "%sandbox savepoint later")
    await run(client, "%sandbox rewind before")
    client.stop_channels()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    assert await run(client, "print(x)") == "41\n"
    await keep(manager, client)


async def copy(folder: Path) -> None:
    """Start another notebook's kernel, from a template if there is one that fits."""
    manager, client = await start(folder, "b.ipynb")
    assert await run(client, "print(6 * 7)") == "42\n"
    client.stop_channels()
    await manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    asyncio.run({"save": save, "reopen": reopen, "start": copy}[sys.argv[1]](Path(sys.argv[2])))
