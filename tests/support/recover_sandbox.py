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
    """Save the sandbox ``name`` of a killed server. Blocks until it is saved."""

    async def work() -> None:
        manager = SandboxManager(GCSConfig(folder=storage), runsc, "recovering server")
        (recovered,) = await manager._recovery.save(name)
        assert recovered.saved

    asyncio.run(work())


async def in_child(function: Callable[..., None], *arguments: object) -> None:
    """Call a function of this module in a child process. Fails if it raises an exception."""
    code = "import pickle, sys; function, arguments = pickle.loads(bytes.fromhex(sys.argv[1])); function(*arguments)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    call = pickle.dumps((function, arguments)).hex()
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, call, env=env)
    assert await child.wait() == 0
