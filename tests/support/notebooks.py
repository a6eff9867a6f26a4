"""Notebooks in a real Jupyter Server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kernels import run
from servers import READY, Server


class Notebook:
    """An open notebook: a session, and a client of its kernel."""

    def __init__(self, server: Server, kernel: str, name: str = "a.ipynb") -> None:
        status, self.session = server.open_notebook(kernel, name)
        assert status == 201, self.session
        self.server = server
        self.kernel_id = self.session["kernel"]["id"]
        self.kc = server.ready_client(self.kernel_id)

    def run(self, code: str) -> str:
        return run(self.kc, code)

    def close(self) -> None:
        self.kc.stop_channels()

    def listed(self) -> bool:
        """Return True if the server lists the kernel."""
        _, kernels = self.server.ask("GET", "kernels")
        return self.kernel_id in [kernel["id"] for kernel in kernels]


def until(condition: Callable[[], Any]) -> None:
    """Wait until ``condition`` returns a true value. Fails after READY seconds."""
    deadline = time.monotonic() + READY
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true within {READY} s"
        time.sleep(0.05)
