"""Run blocking calls in worker threads: a group for control (start, kill, wake), one for bulk (uploads, hashing).

Unlike with asyncio's default executor, a kill or a wake does not queue behind uploads, and the interpreter's exit does
not wait for the threads: an upload that hangs cannot keep a stopped server alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

IDLE = 5.0
"""Seconds without work until a thread ends."""


class Workers:
    """A group of up to ``most`` daemon threads that are started on demand. May be used from any thread."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self.reset()

    def reset(self) -> None:
        """Forget all threads and jobs. Called by the constructor, and in a forked child, which has no threads."""
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle: set[threading.Thread] = set()
        self._retiring = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue ``call`` and return its future. Raises RuntimeError if the interpreter starts no more threads."""
        future: Future[T] = Future()
        with self._changed:
            self._jobs.append((future, call))
            self._retiring = False
            if len(self._idle) >= len(self._jobs):
                self._changed.notify()
            elif len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not self._threads:
                        self._jobs.pop()
                        raise
                else:
                    self._threads.add(thread)
        return future

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` in a thread and return its result. Cancellation does not stop a call that has begun."""
        context = contextvars.copy_context()
        return await asyncio.wrap_future(self.submit(partial(context.run, function, *args, **kwargs)))

    def retire(self) -> None:
        """End the idle threads and wait up to 1 second for each. Busy threads end after their work."""
        with self._changed:
            idle, self._retiring = list(self._idle), True
            self._changed.notify_all()
        for thread in idle:
            thread.join(1.0)

    def _work(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._changed:
                while not self._jobs:
                    self._idle.add(thread)
                    woken = not self._retiring and self._changed.wait(IDLE)
                    self._idle.discard(thread)
                    if not self._jobs and (self._retiring or not woken):
                        self._threads.discard(thread)
                        return
                future, call = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del future, call  # an idle thread must not keep them alive


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end and return its result. A cancellation of the caller takes effect only after the end."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # mark as retrieved: the cancellation is raised instead
    raise cancelled


CONTROL = Workers("sandbox-control", 32)
"""Threads for calls that a user waits for: starts, kills, wakes, and small reads and writes."""
BULK = Workers("sandbox-bulk", 8)
"""Threads for long calls that can wait: uploads, copies, deletion of images, hashing."""

control, bulk = CONTROL.run, BULK.run

for _workers in (CONTROL, BULK):
    os.register_at_fork(after_in_child=_workers.reset)
