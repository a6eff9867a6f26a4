"""Reap the processes that runsc leaves behind if this process is PID 1, as in many containers: no other process does.

Only processes that were seen as children of our runsc are waited for. Each is held by a pidfd, because its number could
be reused for another child of this process.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

REAP_TIMEOUT = 5.0
"""Seconds to wait for the end of each killed process."""


def hold_children(pid: int) -> list[int]:
    """Return a pidfd for each child of the process ``pid``, for ``reap``; none if this process is not PID 1. Blocks."""
    if os.getpid() != 1:
        return []
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread or the child has ended
            found += [os.pidfd_open(int(child)) for child in listed.read_text().split()]
    return found


def reap(pidfds: Iterable[int]) -> None:
    """Wait for killed processes whose parent has ended, so that they are no zombies. Close the pidfds. Blocks."""
    for pidfd in pidfds:
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        if waiting.poll(REAP_TIMEOUT * 1000):
            with suppress(ChildProcessError):  # it was reaped by its own parent
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        os.close(pidfd)
