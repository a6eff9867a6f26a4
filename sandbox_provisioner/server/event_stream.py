"""The journal for one who listens in the server's loop; whoever does not listen for long misses the oldest of it."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from .journal import JOURNAL, Entry

MOST = 1000
"""Entries that wait for one who does not read."""


class Subscription:
    """Entries as they are written, from ``with`` on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Entry] = deque(maxlen=MOST)
        self._news = asyncio.Event()

    def __enter__(self) -> Subscription:
        self._end = JOURNAL.subscribe(self._tell)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    async def take(self, timeout: float) -> list[Entry]:
        """What has happened since, or will within ``timeout`` seconds; nothing if it did not."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout)
        except TimeoutError:
            return []
        self._news.clear()
        found = list(self._waiting)
        self._waiting.clear()
        return found

    def _tell(self, entry: Entry) -> None:
        """In any thread."""
        try:
            self._loop.call_soon_threadsafe(self._add, entry)
        except RuntimeError:  # the server's loop is closed
            self._end()

    def _add(self, entry: Entry) -> None:
        self._waiting.append(entry)
        self._news.set()
