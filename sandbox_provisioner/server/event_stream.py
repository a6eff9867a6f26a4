"""Deliver entries of the event bus to a reader on the server's loop, with a limited queue."""

from __future__ import annotations

import asyncio
from collections import deque

from ..events import EVENT_BUS, Entry

MAX_QUEUED = 1000
"""Maximum queued entries per reader; when there are more, the oldest are dropped."""


class Subscription:
    """A context manager that queues entries of the event bus. Server loop only, except ``_receive``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Entry] = deque(maxlen=MAX_QUEUED)
        self._arrived = asyncio.Event()

    def __enter__(self) -> Subscription:
        self._end = EVENT_BUS.subscribe(self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    async def take(self, timeout: float) -> list[Entry]:
        """Return the queued entries, waiting up to ``timeout`` seconds for the first; empty after a timeout."""
        try:
            await asyncio.wait_for(self._arrived.wait(), timeout)
        except TimeoutError:
            return []
        self._arrived.clear()
        found = list(self._queue)
        self._queue.clear()
        return found

    def _receive(self, entry: Entry) -> None:
        """Queue an entry. Called by the event bus in any thread."""
        try:
            self._loop.call_soon_threadsafe(self._add, entry)
        except RuntimeError:  # the server's loop is closed
            self._end()

    def _add(self, entry: Entry) -> None:
        self._queue.append(entry)
        self._arrived.set()
