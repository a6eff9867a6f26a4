"""Start, save and reopen a kernel with the version of sandbox_provisioner that is on PYTHONPATH.

upgrade_steps.py save|reopen|start FOLDER
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager


async def run(client: Any, code: str) -> str:
    """Execute a cell. Return its printed output."""
    printed: list[str] = []

    def collect(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = await client.execute_interactive(code, timeout=60, output_hook=collect)
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


async def stop(manager: Any, client: Any) -> None:
    """Save and end the kernel as a stopping server does."""
    await manager.provisioner.hibernate()
    manager.provisioner.keep_state()
    client.stop_channels()
    await manager.shutdown_kernel(now=True)


async def save(folder: Path) -> None:
    """Save a kernel with a savepoint, a file and a started generator."""
    manager, client = await start(folder, "a.ipynb")
    await run(client, "x = 41; steps = iter(range(100)); next(steps)")
    await run(client, "open('/tmp/kept', 'w').write('in the home of the kernel')")
    await run(client, "%sandbox savepoint before")
    await run(client, "x = 0")
    await stop(manager, client)


async def reopen(folder: Path) -> None:
    """Reopen the kernel, and use all of its saved state."""
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
    await stop(manager, client)


async def start_another(folder: Path) -> None:
    """Start another notebook's kernel, from a template if one matches."""
    manager, client = await start(folder, "b.ipynb")
    assert await run(client, "print(6 * 7)") == "42\n"
    client.stop_channels()
    await manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    asyncio.run({"save": save, "reopen": reopen, "start": start_another}[sys.argv[1]](Path(sys.argv[2])))
