"""Drop a kernel's malformed messages, which would end Jupyter Server's watch on its activity."""

from __future__ import annotations

from collections.abc import Callable
from logging import Logger
from typing import Any

from .._text import excerpt

EXECUTION_STATES = ("starting", "busy", "idle", "restarting", "autorestarting", "terminating", "dead", "unknown")
"""The values of a kernel's ``execution_state``; any other is a kernel's own text, of any size."""

Record = Callable[[list[bytes]], None]


def tolerant(kernel: Any, record: Record, log: Logger) -> Record:
    """Return ``record`` without its exceptions, and without invalid values of the kernel's ``execution_state``.

    After an exception, the stream would be read no more. The first one is logged.
    """
    malformed = False

    def hear(frames: list[bytes]) -> None:
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

    return hear
