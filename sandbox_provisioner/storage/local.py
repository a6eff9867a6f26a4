"""LocalStore: objects in a folder on a local disk, the default store, which needs no setup."""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StorageUnavailableError
from .disk import OPEN, closing
from .folder import GENERATION, Check, FolderStore

VERIFIED = 256
"""Number of verified files that are not read again while they are unchanged. A checkpoint has one large file."""


class LocalStore(FolderStore):
    """A store in a folder on a local disk, shared by any number of processes of this machine.

    Writers exclude each other by a flock, which the operating system releases when its holder exits. Each write holds
    it for a fraction of a millisecond. A process that is stopped (SIGSTOP) in that time blocks the others; they give up
    after ``patience`` seconds.
    """

    kind = "local"

    def __init__(self, folder: Path, patience: float = 60.0) -> None:
        super().__init__(folder, most_verified=VERIFIED)
        self._patience = patience

    @contextmanager
    def _exclusive(self, root: int) -> Iterator[Check]:
        deadline = time.monotonic() + self._patience
        with closing(os.open(GENERATION, OPEN, 0o600, dir_fd=root)) as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        problem = f"Another process has held the write lock of {self.where} for {self._patience:.0f} s."
                        remedy = "Check with `ps` if a Jupyter server is stopped (state T), and continue or end it."
                        raise StorageUnavailableError(self.where, problem, remedy) from None
                    time.sleep(random.uniform(0.0005, 0.005))
            yield _never_lost


def _never_lost() -> None:
    """Do nothing: the operating system never takes a flock away from a live process."""
