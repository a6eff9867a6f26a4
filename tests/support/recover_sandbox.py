"""Save the sandbox of a killed server, in this process or in a child."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.sandbox.manager import SandboxManager


def recover(runsc: Runsc, storage: Path, name: str) -> None:
    """Save a killed server's sandbox; blocks."""

    async def work() -> None:
        manager = SandboxManager(GCSConfig(folder=storage), runsc, "rescuer")
        (one,) = await manager._recovery.save(name)
        assert one.saved

    asyncio.run(work())


async def in_child(function: Callable[..., None], *given: object) -> None:
    """Call a function of this module in a child process."""
    code = "import pickle, sys; function, given = pickle.loads(bytes.fromhex(sys.argv[1])); function(*given)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, pickle.dumps((function, given)).hex(), env=env
    )
    assert await child.wait() == 0
