"""Run all sandbox I/O in one background thread with its own asyncio loop.

Jupyter calls a provisioner from different loops: the server's, a notebook's, or one that runs only while a synchronous
KernelManager waits. Bytes must also flow between these calls, so they cannot depend on the caller's loop. The thread
runs only while it has a holder.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from .workers import BULK, CONTROL, finished

T = TypeVar("T")

EXIT_DEADLINE = 10.0
"""Longest time, in seconds, that the interpreter's exit waits for the holders, and then for the thread."""


class IOThread:
    """The I/O thread and its loop. Objects with I/O in progress hold it, from ``hold`` to ``drop`` or ``release``."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._holders: dict[object, Callable[[], Awaitable[object]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: Future[threading.Thread] = _uncancellable()
        self._inherited: list[object] = []

    def reset_after_fork(self) -> None:
        """Start without a thread in a forked child. Called by ``os.fork``.

        The parent's loop and holders stay referenced, so that they are never closed: both processes share the loop's
        epoll set, and closing a socket here would remove it from the parent's.
        """
        self._inherited += [self._loop, self._holders]
        self._guard = threading.Lock()
        self._holders = {}
        self._loop = None

    def hold(self, holder: object, at_exit: Callable[[], Awaitable[object]]) -> None:
        """Add a holder; start the thread if needed. ``at_exit`` is called if the interpreter exits before ``drop``."""
        with self._guard:
            self._holders[holder] = at_exit
            if self._loop is None:
                started = threading.Event()
                self._loop, self._ended = asyncio.new_event_loop(), _uncancellable()
                threading.Thread(
                    target=self._serve, args=(self._loop, started, self._ended), name="sandbox-io", daemon=True
                ).start()
                started.wait()

    def held_by(self, holder: object) -> bool:
        """Return True if ``holder`` holds the thread."""
        return holder in self._holders

    def drop(self, holder: object) -> Future[threading.Thread] | None:
        """Remove a holder; callable from any thread. The I/O thread ends after its last holder is removed.

        Return None if the thread continues, else a future whose result is the thread as soon as it can be joined.
        """
        with self._guard:
            self._holders.pop(holder, None)
            if self._holders or self._loop is None:
                return None
            loop, ended = self._loop, self._ended
            self._loop = None
        loop.call_soon_threadsafe(loop.stop)
        return ended

    async def release(self, holder: object) -> None:
        """Remove a holder; if it was the last, wait until the I/O thread has ended. Do not call in the I/O thread."""
        if ended := self.drop(holder):
            thread = await asyncio.shield(asyncio.wrap_future(ended))
            thread.join()  # returns at once

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` in the thread and return its result to the caller's loop.

        If the caller is cancelled, cancel the coroutine and wait for its end. Raises RuntimeError if the thread does
        not run.
        """
        loop = self._loop
        if loop is None:
            coroutine.close()
            raise RuntimeError("The I/O thread does not run: call IO.hold before IO.run.")
        tasks: list[asyncio.Task[T]] = []
        ended: Future[None] = _uncancellable()

        def report_end(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # mark as retrieved: a cancelled caller does not do so
            ended.set_result(None)

        def begin() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(report_end)

        try:
            loop.call_soon_threadsafe(begin)
        except RuntimeError:
            coroutine.close()
            raise
        waiting = asyncio.wrap_future(ended)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # the thread and all its work have ended
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            await finished(asyncio.wait({waiting}))
            raise
        return tasks[0].result()

    def close(self) -> None:
        """Call each holder's ``at_exit`` function and end the thread. Called by ``atexit``."""
        with self._guard:
            loop, holders = self._loop, dict(self._holders)
        if loop is None:
            return

        async def end_all() -> None:
            await asyncio.gather(*(at_exit() for at_exit in holders.values()), return_exceptions=True)

        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end_all(), loop).result(EXIT_DEADLINE)
        for holder in holders:
            if ended := self.drop(holder):
                with suppress(TimeoutError):
                    ended.result(EXIT_DEADLINE).join()

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop, started: threading.Event, ended: Future[threading.Thread]) -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(started.set)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(asyncio.sleep(0))  # let scheduled tasks begin: they are cancelled below
            while tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            for workers in (CONTROL, BULK):
                workers.retire()
            ended.set_result(threading.current_thread())


def _uncancellable() -> Future[Any]:
    """Return a future that a waiter cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


IO = IOThread()
os.register_at_fork(after_in_child=IO.reset_after_fork)
atexit.register(IO.close)
