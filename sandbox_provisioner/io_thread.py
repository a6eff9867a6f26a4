"""The one background thread in which all sandbox I/O runs, on an asyncio loop of its own.

Jupyter calls a provisioner from whatever loop is at hand: the server's, a notebook's, or one that runs only while
a synchronous KernelManager waits. Bytes must flow in between, so nothing that lives longer than one call may hang
on the caller's loop. The thread exists while somebody holds it and leaves nothing behind.
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


class IOThread:
    """Held by everything that has I/O under way; see ``hold`` and ``release``."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._holders: dict[object, Callable[[], Awaitable[object]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: Future[threading.Thread] = _uncancellable()
        self._inherited: list[object] = []

    def begin_anew(self) -> None:
        """Called in a forked child: its parent's loop is not its own, and is kept only so that nothing closes it.

        Both share the loop's epoll set: closing a socket of it here would take it away from the parent.
        """
        self._inherited += [self._loop, self._holders]
        self._guard = threading.Lock()
        self._holders = {}
        self._loop = None

    def hold(self, holder: object, at_exit: Callable[[], Awaitable[object]]) -> None:
        """Start the thread if need be and keep it; ``at_exit`` is called in it if the interpreter ends first."""
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
        """Whether ``holder`` holds it."""
        return holder in self._holders

    def drop(self, holder: object) -> Future[threading.Thread] | None:
        """Remove a holder, from any thread; the last one's removal ends the thread.

        Returns None if the thread goes on, else a future that has the thread when only ``join`` is left to do.
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
        """Remove a holder, from any thread but this one; the last to do so waits, without blocking, for its end."""
        if ended := self.drop(holder):
            thread = await asyncio.shield(asyncio.wrap_future(ended))
            thread.join()  # it returns at once

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` in the thread and wait for it on the caller's loop.

        Cancelling the caller cancels the coroutine, and returns when that has ended.
        """
        loop = self._loop
        if loop is None:
            coroutine.close()
            raise RuntimeError("hold the I/O thread before running anything in it")
        tasks: list[asyncio.Task[T]] = []
        ended: Future[None] = _uncancellable()

        def note_end(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # seen: a cancelled caller does not ask for it
            ended.set_result(None)

        def begin() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(note_end)

        try:
            loop.call_soon_threadsafe(begin)
        except RuntimeError:
            coroutine.close()
            raise
        waiting = asyncio.wrap_future(ended)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # the thread has ended, and all work with it
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            await finished(asyncio.wait({waiting}))
            raise
        return tasks[0].result()

    def close(self) -> None:
        """End everything that is still held; called when the interpreter exits."""
        with self._guard:
            loop, holders = self._loop, dict(self._holders)
        if loop is None:
            return

        async def end_all() -> None:
            await asyncio.gather(*(at_exit() for at_exit in holders.values()), return_exceptions=True)

        try:
            asyncio.run_coroutine_threadsafe(end_all(), loop).result(EXIT_DEADLINE)
        except TimeoutError:
            pass
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
            loop.run_until_complete(asyncio.sleep(0))  # what was about to begin begins, and is cancelled with the rest
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
os.register_at_fork(after_in_child=IO.begin_anew)
atexit.register(IO.close)
