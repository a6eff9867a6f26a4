"""Bound the messages that Jupyter Server keeps for a client: it would keep all that a kernel sends."""

from __future__ import annotations

from typing import Any

MOST_KEPT = 256 << 20
"""Bytes of messages to keep for a client that left, or that reads more slowly than its kernel sends."""


class OfflineMessages(list[Any]):
    """The messages for a client that left, as pairs of a channel and frames; those that do not fit are dropped."""

    size = 0

    def append(self, entry: Any) -> None:
        """Add a pair. Called by Jupyter Server."""
        size = sum(map(len, entry[1]))
        if self.size + size <= MOST_KEPT:
            self.size += size
            super().append(entry)
