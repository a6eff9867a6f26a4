"""The server of one round, in a process of its own: a sandbox full of memory, saved and brought back once.

    checkpoint_round.py FOLDER SIZE [BUCKET]

Prints what it saw as one line of JSON. Its memory is its own, so the peak that it reports is of the work alone.
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

SANDBOX_ID = "hoard"
PIECE = 1 << 20
HOARD = f"""
import os, sys, zlib
hoard = bytearray(int(sys.argv[1]))
for start in range(0, len(hoard), {PIECE}):
    end = min(start + {PIECE}, len(hoard))
    hoard[start:end] = os.urandom(end - start)
for line in sys.stdin:
    print(zlib.crc32(hoard) if line == "sum\\n" else "here", flush=True)
"""


def main(folder: Path, size: int, bucket: str = "") -> None:
    seen = asyncio.run(hoard(SandboxManager(settings(folder, bucket), runsc.find()), size, folder, not bucket))
    print(json.dumps(seen), flush=True)


def settings(folder: Path, bucket: str) -> GCSConfig:
    """All in ``folder``; or all in ``bucket``, and in the folder what is on its way."""
    if not bucket:
        return GCSConfig(folder)
    metadata, locks, checkpoints = (
        Place(place.stem, bucket) for place in (GCSConfig.metadata, GCSConfig.locks, GCSConfig.checkpoints)
    )
    return GCSConfig(folder, metadata=metadata, locks=locks, checkpoints=checkpoints)


async def hoard(manager: SandboxManager, size: int, folder: Path, local: bool) -> dict[str, float]:
    """Fill a sandbox with ``size`` bytes, save it, copy the image if it is ``local``, and bring the sandbox back."""
    python = os.path.realpath(sys.executable)
    environment = {"PATH": os.defpath}
    spec = BundleSpec(python, "/home/me", "me", tuple(visible([python], environment)), environment=environment)
    handle = await manager.create(SANDBOX_ID, spec)
    try:
        await handle.start()
        process = await handle.instance.execute([python, "-c", HOARD, str(size)])
        before = await ask(process, "sum")

        async def restore() -> None:
            await handle.restore()
            await ask(process, "are you there?")

        seen = await watch("checkpoint", handle.save)
        saved = handle.metadata.checkpoint
        assert saved is not None
        seen["size"] = saved.size
        if local:
            seen["cat"] = copy(folder / saved.artifact.name, folder / "copy")
        seen |= await watch("restore", restore)
        if await ask(process, "sum") != before:
            raise SandboxError("The sandbox's memory is not what it was.")
        return seen
    finally:
        await manager.delete(SANDBOX_ID)


async def ask(process: GuestProcess, question: str) -> str:
    """Send a line to the process in the sandbox and return its answer. Raises SandboxError if it failed."""
    await process.write(f"{question}\n".encode())
    piece = await anext(process.stream())
    if piece.stream != "stdout":
        raise SandboxError(f"The process in the sandbox failed: {piece.data.decode()}")
    return piece.data.decode()


async def watch(name: str, action: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """Return the seconds that ``action`` takes, and by how much this process's memory peaks above its value before."""
    forget_peak()
    idle, begun = memory("VmRSS"), time.perf_counter()
    await action()
    return {name: time.perf_counter() - begun, f"{name} memory": memory("VmHWM") - idle}


def forget_peak() -> None:
    """Reset VmHWM. Where that is not allowed, it stays the peak since the process started, which is no lower."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def copy(image: Path, target: Path) -> float:
    """How long `cat` takes for an image's files, until the copy is on the disk."""
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
