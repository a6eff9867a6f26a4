"""A small program with a state, run in a sandbox: tests set its value and read it again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.persistence.backends import Stores, open_stores
from sandbox_provisioner.sandbox.handle import SandboxHandle
from sandbox_provisioner.sandbox.manager import SandboxManager

CODE = """
import sys
value = "nothing"
for line in sys.stdin:
    word, _, given = line.strip().partition(" ")
    if word == "set":
        value = given
    print(value, flush=True)
"""
LONG = 60


def local_stores(folder: Path) -> Stores:
    """The stores of a server that keeps everything in ``folder``."""
    return open_stores(GCSConfig(folder=folder))


async def start_cell(handle: SandboxHandle) -> None:
    """Start the program in a running sandbox."""
    process = await handle.instance.execute([handle.instance.spec.python, "-u", "-c", CODE])
    handle.describe({"cell": process.number})


async def tell(handle: SandboxHandle, line: str) -> str:
    """Send ``line`` to the program. Return its value afterwards."""
    process = handle.instance.connection.process(handle.contents["cell"])
    assert process is not None, "the cell has ended"
    await process.write(f"{line}\n".encode())
    answer = b""
    async with asyncio.timeout(LONG):
        while not answer.endswith(b"\n"):
            piece = await anext(process.stream())
            assert piece.stream == "stdout", piece.data
            answer += piece.data
    return answer.decode().strip()


async def close_all(manager: SandboxManager) -> None:
    """Save and release all open sandboxes."""
    await asyncio.gather(*(manager.close(handle, save=True) for handle in list(manager.handles.values())))
