"""A process that acquires and releases a lease as its standard input says, and prints the results as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from sandbox_provisioner.errors import LeaseHeldError, StorageUnavailableError
from sandbox_provisioner.lock.base import CLOCK, Clock, Lease, Leases, Owner

SANDBOX = "sandboxes/a/lock"


def open_leases(kind: str, place: str, lease_time: float, renewal: float, poll: float, clock: Clock = CLOCK) -> Leases:
    """The leases of one server; ``place`` is a folder or a bucket."""
    if kind == "local":
        from sandbox_provisioner.lock.local import LocalLeases

        return LocalLeases(Path(place), renewal, poll, clock)
    if kind == "mounted":
        from sandbox_provisioner.lock.objects import ObjectLeases
        from sandbox_provisioner.storage.mounted import MountedStore

        return ObjectLeases(MountedStore(Path(place)), lease_time, renewal, poll, clock)
    from sandbox_provisioner.lock.gcs import GCSLeases

    return GCSLeases(place, "servers", lease_time, renewal, poll, clock)


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Player:
    """One server with one lease at most."""

    def __init__(self, leases: Leases, name: str) -> None:
        self.leases = leases
        self.name = name
        self.lease: Lease | None = None

    async def acquire(self, patience: float) -> None:
        try:
            self.lease = await self.leases.acquire(SANDBOX, Owner.here(self.name), patience)
        except LeaseHeldError as error:
            tell(held=str(error))
            return
        except StorageUnavailableError as error:
            tell(unreachable=str(error))
            return
        self.lease.lost.add_done_callback(lambda lost: None if lost.cancelled() else tell(lost=lost.result()))
        tell(token=self.lease.token)

    async def release(self) -> None:
        assert self.lease is not None
        await self.lease.release()
        tell(released=True)


async def main(kind: str, place: str, name: str, *times: str) -> None:
    player = Player(open_leases(kind, place, *map(float, times)), name)
    tell(ready=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        action, *arguments = line.split()
        await getattr(player, action)(*map(float, arguments))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
