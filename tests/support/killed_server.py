"""A server that lives a whole life with one sandbox, and is killed before or after the n-th thing it asks of storage.

It prints what it knows to be so: ``acked N`` when the sandbox has the value N, ``saved N`` when that was checkpointed,
``deleted`` when it is gone; and, if it is never killed, ``calls N``.
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

from value_program import start_cell, tell

from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.persistence.backends import Stores
from sandbox_provisioner.sandbox.manager import SandboxManager
from sandbox_provisioner.storage.base import ObjectStore

STEPS = ("read", "info", "write", "delete", "list", "upload", "download", "in_place", "delete_all")


class Doom:
    """Counts, and kills this process at the count it was given: an even one before a step, an odd one after it."""

    def __init__(self, at: int) -> None:
        self.count = 0
        self._at = at

    def step(self) -> None:
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def over(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def doomed(*given: Any, **named: Any) -> Any:
            self.step()
            try:
                return action(*given, **named)
            finally:
                self.step()

        return doomed

    def watch(self, stores: Stores) -> None:
        """Count every step of these stores and their leases."""
        for store in {id(store): store for store in (stores.metadata, stores.checkpoints, stores.snapshots)}.values():
            assert isinstance(store, ObjectStore)
            for name in STEPS:
                setattr(store, name, self.over(getattr(store, name)))
        acquire = stores.leases.acquire

        async def acquire_(*given: Any) -> Any:
            self.step()
            lease = await acquire(*given)
            self.step()
            release = lease.release

            async def release_() -> None:
                self.step()
                await release()
                self.step()

            lease.release = release_  # type: ignore[method-assign]
            return lease

        stores.leases.acquire = acquire_  # type: ignore[method-assign]


async def live(manager: SandboxManager, spec: BundleSpec) -> None:
    """Create, checkpoint twice, hand over."""
    handle = await manager.create("box", spec)
    await manager.get("box").start()
    await start_cell(handle)
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


async def die(manager: SandboxManager, spec: BundleSpec) -> None:
    """Delete it."""
    await manager.delete("box")
    print("deleted", flush=True)


async def main(at: int, act: str, given: str) -> None:
    spec, runsc, config = pickle.loads(Path(given).read_bytes())
    manager = SandboxManager(config, runsc, "victim")
    doom = Doom(at)
    doom.watch(manager.stores)
    await {"live": live, "die": die}[act](manager, spec)
    print("calls", doom.count, flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
