"""Server extension for many_kernels.py: measures the delays of the server's event loop and of the I/O thread's loop."""

from __future__ import annotations

import asyncio
import os
import time
from typing import NamedTuple

from jupyter_server.base.handlers import APIHandler
from jupyter_server.serverapp import ServerApp
from tornado.web import authenticated

from sandbox_provisioner.io_thread import IO

TICK = 0.01


class Delay(NamedTuple):
    """The longest delays of a loop, in seconds."""

    total: float = 0.0
    blocked: float = 0.0
    """The longest delay, without the time in which the thread was ready but other threads had the processors."""


class DelayProbe:
    """Records by how much a sleep of one tick is too long in one event loop."""

    def __init__(self) -> None:
        self.longest = Delay()

    async def run(self) -> None:
        """Measure until cancelled. Linux counts the time in which the thread waits for a processor."""
        statistics = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        before, waited = time.perf_counter(), 0
        while True:
            await asyncio.sleep(TICK)
            now, waits = time.perf_counter(), int(os.pread(statistics, 99, 0).split()[1])
            delay = now - before - TICK
            if waited:
                self.longest = Delay(*map(max, self.longest, (delay, delay - (waits - waited) / 1e9)))
            before, waited = now, waits


class Report(APIHandler):
    """Reports the number of awake kernels and the longest delays since the last request with ``?reset=1``."""

    @authenticated
    async def get(self) -> None:
        """Answer with the longest delays, and reset them on request. Called by tornado."""
        probes = self.settings["delay_probes"]
        self.finish({"awake": len(self.kernel_manager), "delays": [probe.longest for probe in probes]})
        for probe in probes if self.get_argument("reset", "") else ():
            probe.longest = Delay()


def _load_jupyter_server_extension(serverapp: ServerApp) -> None:
    server, io = serverapp.web_app.settings["delay_probes"] = DelayProbe(), DelayProbe()
    IO.hold(io, asyncio.Event().wait)
    tasks = [asyncio.ensure_future(probe) for probe in (server.run(), IO.run(io.run()))]
    serverapp.web_app.settings["delay_probe_tasks"] = tasks
    serverapp.web_app.add_handlers(".*$", [("/loop-delay", Report)])
