"""Protect Jupyter Server against malformed and too many messages of a kernel.

Without it, a malformed message would end the tracking of a kernel's activity, and buffers would have no limit.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import Logger
from typing import Any

from .._text import excerpt

EXECUTION_STATES = ("starting", "busy", "idle", "restarting", "autorestarting", "terminating", "dead", "unknown")
"""The valid values of ``execution_state``. A kernel can send any other text, of any size."""

MOST_KEPT = 256 << 20
"""Bytes of messages to keep for a client that left, or that reads more slowly than its kernel sends."""

Record = Callable[[list[bytes]], None]


def tolerant(kernel: Any, record: Record, log: Logger) -> Record:
    """Return ``record`` without its exceptions, and without invalid values of the kernel's ``execution_state``.

    After an exception, Jupyter would stop reading the stream. The first exception is logged.
    """
    malformed = False

    def receive(frames: list[bytes]) -> None:
        nonlocal malformed
        before = kernel.execution_state
        try:
            record(frames)
        except Exception as error:
            if not malformed:
                log.warning("Kernel %s: malformed messages are dropped: %s", kernel.kernel_id, excerpt(error))
            malformed = True
        if kernel.execution_state not in EXECUTION_STATES:
            kernel.execution_state = before

    return receive


class OfflineMessages(list[Any]):
    """The messages for a client that left, as pairs of a channel and frames; dropped beyond MOST_KEPT bytes."""

    size = 0

    def append(self, entry: Any) -> None:
        """Add a pair. Called by Jupyter Server."""
        size = sum(map(len, entry[1]))
        if self.size + size <= MOST_KEPT:
            self.size += size
            super().append(entry)
