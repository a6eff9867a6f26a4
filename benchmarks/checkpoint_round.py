"""One round of persistence.py: fill a sandbox with SIZE bytes, save it, and restore it.

    checkpoint_round.py FOLDER SIZE [BUCKET]

Prints the measurements as one line of JSON. It runs in its own process, so that its peak memory is that of one round.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from sandbox_provisioner.config import GCSConfig, Place
from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.gvisor import runsc
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.interpreter import visible
from sandbox_provisioner.mux.process import GuestProcess
from sandbox_provisioner.sandbox.manager import SandboxManager

SANDBOX_ID = "bench"
PIECE = 1 << 20
PROGRAM = f"""
import os, sys, zlib
data = bytearray(int(sys.argv[1]))
for start in range(0, len(data), {PIECE}):
    end = min(start + {PIECE}, len(data))
    data[start:end] = os.urandom(end - start)
for line in sys.stdin:
    print(zlib.crc32(data) if line == "checksum\\n" else "ready", flush=True)
"""
"""Runs in the sandbox: fills its memory with random bytes, and answers requests for their checksum."""


def main(folder: Path, size: int, bucket: str = "") -> None:
    manager = SandboxManager(settings(folder, bucket), runsc.find())
    print(json.dumps(asyncio.run(measure_round(manager, size, folder, local=not bucket))), flush=True)


def settings(folder: Path, bucket: str) -> GCSConfig:
    """Return settings that store everything in ``bucket`` if it is given, otherwise in ``folder``."""
    if not bucket:
        return GCSConfig(folder)
    metadata, locks, checkpoints = (
        Place(place.stem, bucket) for place in (GCSConfig.metadata, GCSConfig.locks, GCSConfig.checkpoints)
    )
    return GCSConfig(folder, metadata=metadata, locks=locks, checkpoints=checkpoints)


async def measure_round(manager: SandboxManager, size: int, folder: Path, local: bool) -> dict[str, float]:
    """Save and restore a sandbox with ``size`` random bytes. If its image is local, also time a copy of the image."""
    python = os.path.realpath(sys.executable)
    environment = {"PATH": os.defpath}
    spec = BundleSpec(python, "/home/me", "me", tuple(visible([python], environment)), environment=environment)
    handle = await manager.create(SANDBOX_ID, spec)
    try:
        await handle.start()
        process = await handle.instance.execute([python, "-c", PROGRAM, str(size)])
        before = await ask(process, "checksum")

        async def restore() -> None:
            await handle.restore()
            await ask(process, "ready?")

        measured = await measure("checkpoint", handle.save)
        saved = handle.metadata.checkpoint
        assert saved is not None
        measured["size"] = saved.size
        if local:
            measured["cat"] = time_copy(folder / saved.artifact.name, folder / "copy")
        measured |= await measure("restore", restore)
        if await ask(process, "checksum") != before:
            raise SandboxError("The restored memory differs from the saved memory.")
        return measured
    finally:
        await manager.delete(SANDBOX_ID)


async def ask(process: GuestProcess, question: str) -> str:
    """Send a line to the process in the sandbox and return its answer. Raises SandboxError if it failed."""
    await process.write(f"{question}\n".encode())
    piece = await anext(process.stream())
    if piece.stream != "stdout":
        raise SandboxError(f"The process in the sandbox failed: {piece.data.decode()}")
    return piece.data.decode()


async def measure(name: str, action: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """Return the duration of ``action``, and its peak of this process's memory minus the memory before."""
    reset_peak_memory()
    before, begun = memory("VmRSS"), time.perf_counter()
    await action()
    return {name: time.perf_counter() - begun, f"{name} memory": memory("VmHWM") - before}


def reset_peak_memory() -> None:
    """Reset VmHWM. If that is not allowed, VmHWM stays the peak since the start, and the result is an upper bound."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def time_copy(image: Path, target: Path) -> float:
    """Return the seconds in which `cat` copies an image's files, until the copy is written to the disk."""
    begun = time.perf_counter()
    subprocess.run(["sh", "-c", 'cat "$@" > "$0" && sync "$0"', target, *sorted(image.iterdir())], check=True)
    seconds = time.perf_counter() - begun
    target.unlink()
    return seconds


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    except SandboxError as error:
        sys.exit(str(error))
