"""A server process that acquires and releases a lease, as commanded on its standard input.

    lease_process.py KIND PLACE NAME [TIMES...]

It reads the commands ``acquire SECONDS`` and ``release``, and prints each result as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

from sandbox_provisioner.errors import LeaseHeldError, StorageUnavailableError
from sandbox_provisioner.lock.base import CLOCK, Clock, Lease, Leases, Owner, Pace

SANDBOX = "sandboxes/a/lock"


def open_leases(kind: str, place: str, lease_time: float, renewal: float, poll: float, clock: Clock = CLOCK) -> Leases:
    """Return the leases of one server. ``place`` is a folder, or the name of a bucket."""
    if kind == "local":
        from sandbox_provisioner.lock.local import LocalLeases

        return LocalLeases(Path(place), Pace(math.inf, renewal, poll), clock)
    if kind == "mounted":
        from sandbox_provisioner.lock.objects import ObjectLeases
        from sandbox_provisioner.storage.mounted import MountedStore

        return ObjectLeases(MountedStore(Path(place)), Pace(lease_time, renewal, poll), clock)
    from sandbox_provisioner.lock.gcs import GCSLeases

    return GCSLeases(place, "servers", Pace(lease_time, renewal, poll), clock)


def report(**result: Any) -> None:
    print(json.dumps(result), flush=True)


class Server:
    """A server with at most one lease."""

    def __init__(self, leases: Leases, name: str) -> None:
        self.leases = leases
        self.name = name
        self.lease: Lease | None = None

    async def acquire(self, patience: float) -> None:
        try:
            self.lease = await self.leases.acquire(SANDBOX, Owner.here(self.name), patience)
        except LeaseHeldError as error:
            report(held=str(error))
            return
        except StorageUnavailableError as error:
            report(unreachable=str(error))
            return
        self.lease.lost.add_done_callback(lambda lost: None if lost.cancelled() else report(lost=lost.result()))
        report(token=self.lease.token)

    async def release(self) -> None:
        assert self.lease is not None
        await self.lease.release()
        report(released=True)


async def main(kind: str, place: str, name: str, *times: str) -> None:
    server = Server(open_leases(kind, place, *map(float, times)), name)
    report(ready=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        action, *arguments = line.split()
        await getattr(server, action)(*map(float, arguments))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
