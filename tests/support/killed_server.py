"""A server that creates, saves and deletes one sandbox, and kills itself at a given step.

    killed_server.py STEP live|delete FILE

A step is a point before (even number) or after (odd number) an operation on the storage or a lease. FILE contains the
pickled BundleSpec, Runsc and GCSConfig. The program prints ``acked N`` when the program in the sandbox has the value N,
``saved N`` when this value is saved, ``deleted`` when the sandbox is deleted, and ``calls N`` with the number of steps
if it was not killed.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from value_program import start_program, tell

from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.persistence.backends import Stores
from sandbox_provisioner.sandbox.manager import SandboxManager
from sandbox_provisioner.storage.base import ObjectStore

OPERATIONS = ("read", "info", "write", "delete", "list", "upload", "download", "in_place", "delete_all")


class StepCounter:
    """Counts steps, and kills this process at step ``kill_at``."""

    def __init__(self, kill_at: int) -> None:
        self.count = 0
        self._kill_at = kill_at

    def step(self) -> None:
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """Return the operation with a step before and after it."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            self.step()
            try:
                return operation(*arguments, **keywords)
            finally:
                self.step()

        return run

    def count_operations(self, stores: Stores) -> None:
        """Count the operations on these stores and their leases."""
        for store in {id(store): store for store in (stores.metadata, stores.checkpoints, stores.snapshots)}.values():
            assert isinstance(store, ObjectStore)
            for name in OPERATIONS:
                setattr(store, name, self.counted(getattr(store, name)))
        acquire = stores.leases.acquire

        async def counted_acquire(*arguments: Any) -> Any:
            self.step()
            lease = await acquire(*arguments)
            self.step()
            release = lease.release

            async def counted_release() -> None:
                self.step()
                await release()
                self.step()

            lease.release = counted_release  # type: ignore[method-assign]
            return lease

        stores.leases.acquire = counted_acquire  # type: ignore[method-assign]


async def live(manager: SandboxManager, spec: BundleSpec) -> None:
    """Create a sandbox, save and restore it twice, then save and release it."""
    handle = await manager.create("box", spec)
    await manager.get("box").start()
    await start_program(handle)
    for number in (1, 2):
        await tell(handle, f"set {number}")
        print("acked", number, flush=True)
        await manager.get("box").save()
        print("saved", number, flush=True)
        await manager.get("box").restore()
    await tell(handle, "set 3")
    print("acked 3", flush=True)
    await manager.close(manager.get("box"), save=True)
    print("saved 3", flush=True)


async def delete(manager: SandboxManager, spec: BundleSpec) -> None:
    """Delete the sandbox."""
    await manager.delete("box")
    print("deleted", flush=True)


async def main(kill_at: int, action: str, file: str) -> None:
    spec, runsc, config = pickle.loads(Path(file).read_bytes())
    manager = SandboxManager(config, runsc, "killed server")
    steps = StepCounter(kill_at)
    steps.count_operations(manager.stores)
    await {"live": live, "delete": delete}[action](manager, spec)
    print("calls", steps.count, flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
