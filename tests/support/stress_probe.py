"""Server extension for test_stress.py: measures the server's event loops, counts its resources, and cancels calls."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from jupyter_server.base.handlers import APIHandler
from jupyter_server.serverapp import ServerApp
from tornado.web import authenticated

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.io_thread import IO
from sandbox_provisioner.sandbox.handle import SandboxHandle

LONGEST = 0.05
SAMPLE_INTERVAL = 0.02


class Loops:
    """Measures the callbacks of all event loops of this process.

    ``slow`` lists callbacks with more than 50 ms of processor time, without that of Python's garbage collector.
    ``blocked`` lists callbacks that waited for more than 50 ms, with the place in the code. Time in which the thread
    was ready, but other threads ran, does not count (from Linux's schedstat). It also lists garbage collections of more
    than 50 ms, which can occur in any callback.
    """

    def __init__(self) -> None:
        self.slow: list[str] = []
        self.blocked: list[str] = []
        self._running: dict[int, float] = {}
        self._stacks: dict[int, list[str]] = {}
        self._run = asyncio.events.Handle._run
        self._own = threading.local()

    def start(self) -> None:
        """Start the measurement."""
        probe = self

        def measured(handle: asyncio.events.Handle) -> None:
            probe._measure(handle)

        asyncio.events.Handle._run = measured  # type: ignore[method-assign]
        gc.callbacks.append(self._collect)
        threading.Thread(target=self._watch, name="stress-watch", daemon=True).start()

    def _waited(self) -> float:
        """Return the seconds for which this thread was ready, but other threads ran."""
        if not hasattr(self._own, "statistics"):
            self._own.statistics = Path("/proc/thread-self/schedstat").open("rb", buffering=0)  # noqa: SIM115
        return int(os.pread(self._own.statistics.fileno(), 99, 0).split()[1]) / 1e9

    def _collect(self, phase: str, about: dict[str, int]) -> None:
        """Measure a garbage collection. Called by Python, in the thread of the collection."""
        if phase == "start":
            self._own.began = time.thread_time()
            return
        took = time.thread_time() - getattr(self._own, "began", time.thread_time())
        self._own.collecting = self._collecting() + took
        if took > LONGEST:
            self.blocked.append(
                f"{took:.3f} s of generation {about['generation']} in {threading.current_thread().name}"
            )

    def _collecting(self) -> float:
        return float(getattr(self._own, "collecting", 0.0))

    def _measure(self, handle: asyncio.events.Handle) -> None:
        me = threading.get_ident()
        waited, used, began = self._waited(), time.thread_time(), time.perf_counter()
        collecting = self._collecting()
        self._running[me] = began
        try:
            self._run(handle)
        finally:
            del self._running[me]
            used = time.thread_time() - used
            blocked = time.perf_counter() - began - used - (self._waited() - waited)
            used -= self._collecting() - collecting
            stack = self._stacks.pop(me, [])
            where = f"in {threading.current_thread().name}: {handle!r:.300}\n{''.join(stack)}"
            if used > LONGEST:
                self.slow.append(f"{used:.3f} s of processor time {where}")
            if blocked > LONGEST:
                self.blocked.append(f"blocked for {blocked:.3f} s {where}")

    def _watch(self) -> None:
        """Record the stack of a loop's thread while one of its callbacks takes too long. Runs in its own thread."""
        while True:
            time.sleep(SAMPLE_INTERVAL)
            for thread, began in list(self._running.items()):
                if time.perf_counter() - began > LONGEST and (frame := sys._current_frames().get(thread)):
                    self._stacks.setdefault(thread, traceback.format_stack(frame)[-6:])


LOOPS = Loops()


def census() -> dict[str, Any]:
    """Return the open resources of this process, without the threads of asyncio's pool, whose number varies."""
    gc.collect()
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found[re.sub(r"\d+", "", os.readlink(entry))] += 1
    own = psutil.Process()
    return {
        "descriptors": dict(found),
        "threads": sorted(name for thread in threading.enumerate() if not (name := thread.name).startswith("asyncio_")),
        "children": sorted(" ".join(child.cmdline())[:200] for child in own.children(recursive=True)),
        "listening": sum(item.status == psutil.CONN_LISTEN for item in own.net_connections("tcp")),
        "sockets": sorted(item.laddr for item in own.net_connections("unix") if "kernel-" in str(item.laddr)),
        "holders": len(IO._holders),
    }


class Census(APIHandler):
    """Reports the server's open resources, and the callbacks that were too slow since the last request."""

    @authenticated
    async def get(self) -> None:
        """Called by tornado."""
        found = await asyncio.to_thread(census)
        self.finish(json.dumps({**found, "slow": LOOPS.slow, "blocked": LOOPS.blocked}))
        LOOPS.slow, LOOPS.blocked = [], []


class Cancel(APIHandler):
    """Starts an action of a kernel, cancels it after some seconds, and reports its result."""

    @authenticated
    async def post(self) -> None:
        """Called by tornado."""
        body = json.loads(self.request.body)
        if body["action"] == "start":
            path, name = body["path"], body["kernel"]
            action = self.session_manager.create_session(path=path, name=path, type="notebook", kernel_name=name)
        else:
            action = getattr(self.kernel_manager.get_kernel(body["kernel_id"]).provisioner, body["action"])()
        task = asyncio.ensure_future(action)
        await asyncio.wait({task}, timeout=body["after"])
        task.cancel()
        result = "done"
        try:
            await task
        except asyncio.CancelledError:
            result = "cancelled"
        except SandboxError as error:
            result = str(error)
        self.finish(json.dumps({"result": result}))


class IsWanted(APIHandler):
    """Reports whether a listed kernel was handed to another server, or is being handed off."""

    @authenticated
    async def get(self) -> None:
        """Called by tornado."""
        kernel_id = self.get_argument("kernel_id")
        provisioner = (
            self.kernel_manager.get_kernel(kernel_id).provisioner if kernel_id in self.kernel_manager else None
        )
        handle = provisioner.handle if provisioner else None
        wanted = provisioner is not None and (handle is None or _is_leaving(handle))
        self.finish(json.dumps({"wanted": wanted}))


def _is_leaving(handle: SandboxHandle) -> bool:
    return handle.closed or handle.lease.wanted.is_set() or handle.lock.locked()


def _load_jupyter_server_extension(serverapp: ServerApp) -> None:
    LOOPS.start()
    routes = [("/api/stress/census", Census), ("/api/stress/cancel", Cancel), ("/api/stress/wanted", IsWanted)]
    serverapp.web_app.add_handlers(".*$", routes)
