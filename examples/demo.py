"""`make demo`: compare a plain and a sandboxed kernel; show that the state survives hibernation and servers.

The exit code is 0 only if all claims were observed to be true.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from demo_access import Report, compare_kernels
from demo_server import PATIENCE, Server, images, install_kernel, private_jupyter, sandbox_processes

from sandbox_provisioner import SandboxError

IDLE = 2.0
MB = 1e6

CREATE_STATE = """
import threading, time
answer, countdown, ticks = 42, iter(range(9, 0, -1)), 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.01)
thread = threading.Thread(target=tick, daemon=True)
thread.start()
"""
READ_STATE = """
before = ticks
time.sleep(0.1)
print(answer, next(countdown), thread.is_alive() and ticks > before, before)
"""


class Clock:
    """Time since its creation."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def __str__(self) -> str:
        return f"{time.monotonic() - self._begun:.2f} s"


class DemoNotebook:
    """A notebook's kernel in several Jupyter servers, one after another. Its memory is checked after each change."""

    def __init__(self, report: Report, folder: Path, notebooks: Path, kernel: str, stack: contextlib.ExitStack) -> None:
        self._report, self._stack = report, stack
        self._folder, self._notebooks, self._kernel = folder, notebooks, kernel
        self._countdown, self._ticks = 9, 0

    def open_notebook(self, step: str, first: str = "") -> None:
        """Open the notebook in a new server, and check the kernel's memory."""
        self.server = Server(self._folder, self._notebooks)
        self._stack.callback(self.server.kill)
        self.server.wait()
        clock = Clock()
        self.notebook = self.server.open_notebook("demo.ipynb", self._kernel)
        self._stack.callback(self.notebook.close)
        self.notebook.run(first)
        self._check(step, str(clock))

    def wait_for_hibernation(self) -> None:
        """Wait until the kernel is hibernated."""
        _, used = sandbox_processes()
        deadline = time.monotonic() + PATIENCE
        while sandbox_processes()[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        count, left = sandbox_processes()
        seen = f"{images() / MB:.0f} MB on disk, {count} processes, {(used - left) / MB:.0f} MB of memory freed"
        self._report.event(f"no cell for {IDLE:g} s: hibernated", "", seen, count == 0 and images() > 0)
        listed = self.notebook.listed
        seen = "lists the kernel under the same id" if listed else "does not list the kernel"
        self._report.event("the server", "", seen, listed)

    def wake(self) -> None:
        """Run a cell in the hibernated kernel."""
        clock = Clock()
        self.notebook.run("")
        self._check("the next cell wakes it", str(clock))

    def _check(self, step: str, took: str) -> None:
        seen = self.notebook.run(READ_STATE)
        answer, left, counts, ticks = seen.split() if seen.count(" ") == 3 else ("", "", "", "0")
        holds = (answer, left, counts) == ("42", str(self._countdown), "True") and int(ticks) >= self._ticks
        state = f"variable {answer}, generator at {left}, thread continues from {ticks}"
        self._report.event(step, took, state if holds else seen, holds)
        self._countdown, self._ticks = self._countdown - 1, int(ticks)


def show_hibernation(report: Report, demo: DemoNotebook) -> None:
    """Show hibernation, a server's stop, a server's kill, and the shutdown of the kernel."""
    demo.open_notebook("opened in a Jupyter server", first=CREATE_STATE)
    demo.wait_for_hibernation()
    demo.wake()
    clock = Clock()
    demo.server.stop()
    count, _ = sandbox_processes()
    report.event("server stopped (SIGTERM)", str(clock), f"{count} processes left", count == 0)
    demo.open_notebook("opened in another server")
    demo.server.kill()
    count, _ = sandbox_processes()
    seen = "the sandbox continues to run" if count else "the sandbox is gone"
    report.event("server killed (SIGKILL)", "", seen, count > 0)
    demo.open_notebook("opened in a third server")
    clock = Clock()
    demo.notebook.shut_down()
    count, _ = sandbox_processes()
    seen = f"{images() / MB:.0f} MB on disk, {count} processes"
    report.event("Shut Down Kernel", str(clock), seen, count == images() == 0)


def main() -> int:
    print("Installing a sandboxed Python kernel with its template ...", flush=True)
    report = Report()
    with tempfile.TemporaryDirectory(prefix="sandbox-demo-") as scratch, private_jupyter(Path(scratch)):
        notebooks = Path(scratch, "notebooks")
        notebooks.mkdir()
        kernel = install_kernel(IDLE)
        compare_kernels(report, notebooks, kernel)
        print("\n  Now a notebook in a Jupyter server, whose sandboxed kernel keeps its state:\n", flush=True)
        with contextlib.ExitStack() as stack:
            show_hibernation(report, DemoNotebook(report, Path(scratch), notebooks, kernel, stack))
    print("\nEvery claim held." if report.held else "\nNot every claim held: see the lines marked ✗.")
    return 0 if report.held else 1


def exit_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        sys.exit(main())
    except SandboxError as error:
        sys.exit(f"The demo cannot run here: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
