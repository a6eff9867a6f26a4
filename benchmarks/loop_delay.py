"""Server extension for many_kernels.py: the delays of the loops of a Jupyter Server, its own and the I/O thread's."""

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


class Late(NamedTuple):
    """By how many seconds a loop was late at worst: in all, and not for want of a processor."""

    in_all: float = 0.0
    blocked: float = 0.0


class Watch:
    """Looks at one loop, from inside."""

    def __init__(self) -> None:
        self.worst = Late()

    async def look(self) -> None:
        """Go on until cancelled. Linux knows how long a thread was ready to run while others ran."""
        statistics = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        before, waited = time.perf_counter(), 0
        while True:
            await asyncio.sleep(TICK)
            now, waits = time.perf_counter(), int(os.pread(statistics, 99, 0).split()[1])
            late = now - before - TICK
            if waited:
                self.worst = Late(*map(max, self.worst, (late, late - (waits - waited) / 1e9)))
            before, waited = now, waits


class Report(APIHandler):
    """How many of the server's kernels are awake, and how late its loops were since it was last asked to ``forget``."""

    @authenticated
    async def get(self) -> None:
        """Called by tornado."""
        watches = self.settings["watches"]
        self.finish({"awake": len(self.kernel_manager), "late": [watch.worst for watch in watches]})
        for watch in watches if self.get_argument("forget", "") else ():
            watch.worst = Late()


def _load_jupyter_server_extension(serverapp: ServerApp) -> None:
    server, io = serverapp.web_app.settings["watches"] = Watch(), Watch()
    IO.hold(io, asyncio.Event().wait)
    serverapp.web_app.settings["looking"] = [asyncio.ensure_future(look) for look in (server.look(), IO.run(io.look()))]
    serverapp.web_app.add_handlers(".*$", [("/lateness", Report)])
