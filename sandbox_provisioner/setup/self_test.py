"""Test that this machine can start, checkpoint and restore a sandbox, by doing so once. Takes seconds."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .. import config
from ..errors import SandboxError
from ..gvisor.bundle import BundleSpec
from ..gvisor.interpreter import visible
from ..gvisor.runsc import PLATFORMS, Runsc
from ..process import Process
from ..sandbox.handle import SandboxHandle

COUNTER = "import sys\nfor count, _ in enumerate(sys.stdin, 1): print(count, flush=True)"


def run_self_test(runsc: Runsc, say: Callable[[str], None]) -> str:
    """Run the test, call ``say`` with the name of each step, and return a summary. Raises SandboxError on failure."""
    return asyncio.run(_run(runsc, say))


async def _require_answer(process: Process, count: int) -> None:
    await process.write(b"next\n")
    async for piece in process.stream():
        if piece.stream == "stdout" and piece.data.strip() == str(count).encode():
            return
        raise SandboxError(f"A process in the sandbox answered {piece.data!r} instead of {count}.")
    raise SandboxError("A process in the sandbox ended too early.")


def _spec() -> BundleSpec:
    """Return the spec of a sandbox in which this Python runs."""
    python = os.path.realpath(sys.executable)
    environment = {"PATH": os.environ.get("PATH", os.defpath)}
    mounts = tuple(visible([python], environment))
    return BundleSpec(python=python, home="/home/sandbox", user="sandbox", mounts=mounts, environment=environment)


async def _run(runsc: Runsc, say: Callable[[str], None]) -> str:
    started, spec = time.monotonic(), _spec()
    platform = config.choice("SANDBOX_PLATFORM", PLATFORMS, PLATFORMS[0])
    sandbox = SandboxHandle.create_ephemeral("self-test", spec, runsc, platform).instance
    with tempfile.TemporaryDirectory(prefix="jupyter-sandbox-test-") as folder:
        image = Path(folder, "image")
        try:
            say("start")
            await sandbox.start()
            say("execute")
            process = await sandbox.execute([spec.python, "-I", "-c", COUNTER])
            await _require_answer(process, 1)
            say("checkpoint")
            await sandbox.checkpoint(image)
            say("restore")
            await sandbox.restore(image)
            await _require_answer(process, 2)
        finally:
            await sandbox.delete()
    return f"started, executed, checkpointed and restored in {time.monotonic() - started:.1f} s"
