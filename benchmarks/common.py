"""What every benchmark is framed by: the machine, its load, a place that is clean afterwards, and an exit status."""

from __future__ import annotations

import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.gvisor import runsc
from sandbox_provisioner.gvisor.runtime_dir import left_behind


def framed(measure: Callable[[], None], *packages: str) -> int:
    """Measure, between what a reader must know of this machine and its load; returns the exit status."""
    signal.signal(signal.SIGTERM, _end_politely)
    try:
        load = _describe_load()
        print(_describe_machine(packages), flush=True)
        measure()
        print(load)
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder for everything that sandboxes keep or leave, of which nothing stays, nor runs on."""
    binary = str(runsc.find().path)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        places = {"JUPYTER_DATA_DIR": f"{folder}/data", "SANDBOX_STORAGE_DIR": f"{folder}/storage"}
        os.environ |= {**places, "SANDBOX_RUNTIME_DIR": folder, "SANDBOX_RUNSC": binary, "SANDBOX_TEMPLATE": "none"}
        try:
            yield Path(folder)
        finally:
            for left in left_behind():
                left.remove()


def readable(seconds: float) -> str:
    """A time in three digits."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def verdict(reached: bool) -> str:
    """What is said of a goal."""
    return "PASS" if reached else "over"


def _describe_machine(packages: tuple[str, ...]) -> str:
    versions = "".join(f", {package} {version(package)}" for package in packages)
    user = "root" if os.geteuid() == 0 else "an ordinary user"
    return f"Python {platform.python_version()}{versions}, runsc {runsc.find().version}, {user}, {os.cpu_count()} cores"


def _describe_load() -> str:
    load = os.getloadavg()[0]
    advice = " The machine was busy: run it again when it is quiet." if load > 1 else ""
    return f"\nLoad before the run: {load:.1f}.{advice}"


def _end_politely(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
