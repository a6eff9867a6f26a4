"""A small program that keeps a value in memory. Tests run it in a sandbox, set the value and read it again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.persistence.backends import Stores, open_stores
from sandbox_provisioner.sandbox.handle import SandboxHandle
from sandbox_provisioner.sandbox.manager import SandboxManager

PROGRAM = """
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
    """Return the stores of a server that stores everything in ``folder``."""
    return open_stores(GCSConfig(folder=folder))


async def start_program(handle: SandboxHandle) -> None:
    """Start the program in a running sandbox."""
    process = await handle.instance.execute([handle.instance.spec.python, "-u", "-c", PROGRAM])
    handle.describe({"program": process.number})


async def tell(handle: SandboxHandle, line: str) -> str:
    """Send ``line`` to the program: ``set VALUE``, or anything else. Return the program's value afterwards."""
    process = handle.instance.connection.process(handle.contents["program"])
    assert process is not None, "the program has ended"
    await process.write(f"{line}\n".encode())
    answer = b""
    async with asyncio.timeout(LONG):
        while not answer.endswith(b"\n"):
            piece = await anext(process.stream())
            assert piece.stream == "stdout", piece.data
            answer += piece.data
    return answer.decode().strip()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` returns True."""
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.02)


async def close_all(manager: SandboxManager) -> None:
    """Save and release all open sandboxes."""
    await asyncio.gather(*(manager.close(handle, save=True) for handle in list(manager.handles.values())))
