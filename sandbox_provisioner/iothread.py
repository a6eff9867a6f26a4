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
from typing import Any, TypeVar

T = TypeVar("T")

EXIT_DEADLINE = 10.0


class IOThread:
    """Held by everything that has I/O under way; see ``hold`` and ``release``."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._holders: dict[object, Callable[[], Awaitable[object]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inherited: list[object] = []

    def begin_anew(self) -> None:
        """Called in a forked child: its parent's loop is not its own, and is kept only so that nothing closes it.

        Both share the loop's epoll set: closing a socket of it here would take it away from the parent.
        """
        self._inherited += [self._loop, self._holders]
        self._guard = threading.Lock()
        self._holders = {}
        self._loop = self._thread = None

    def hold(self, holder: object, at_exit: Callable[[], Awaitable[object]]) -> None:
        """Start the thread if need be and keep it; ``at_exit`` is called in it if the interpreter ends first."""
        with self._guard:
            self._holders[holder] = at_exit
            if self._loop is None:
                started = threading.Event()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._serve, args=(self._loop, started), name="sandbox-io", daemon=True
                )
                self._thread.start()
                started.wait()

    def held_by(self, holder: object) -> bool:
        """Whether ``holder`` holds it."""
        return holder in self._holders

    def release(self, holder: object) -> None:
        """Let go, from any thread but this one; the last to do so ends the thread and waits for its end."""
        with self._guard:
            self._holders.pop(holder, None)
            if self._holders or self._loop is None or self._thread is None:
                return
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` in the thread and wait for it on the caller's loop; cancelling reaches it."""
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("hold the I/O thread before running anything in it")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

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
            self.release(holder)

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop, started: threading.Event) -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(started.set)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


IO = IOThread()
os.register_at_fork(after_in_child=IO.begin_anew)
atexit.register(IO.close)
