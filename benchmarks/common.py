"""Common parts of the benchmarks: describe the machine, use a temporary folder, and set the exit status."""

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


def run_benchmark(measure: Callable[[], None], *packages: str) -> int:
    """Print the machine and the versions of ``packages``, call ``measure``, and return the exit status."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
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
def temporary_storage() -> Iterator[Path]:
    """Keep all files of sandboxes in a new folder, and yield it. At the end, remove it and all running sandboxes."""
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
    """Return a duration with three digits."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def verdict(reached: bool) -> str:
    """Return the mark of a row with a goal."""
    return "PASS" if reached else "over"


def _describe_machine(packages: tuple[str, ...]) -> str:
    versions = "".join(f", {package} {version(package)}" for package in packages)
    user = "root" if os.geteuid() == 0 else "an ordinary user"
    return f"Python {platform.python_version()}{versions}, runsc {runsc.find().version}, {user}, {os.cpu_count()} cores"


def _describe_load() -> str:
    load = os.getloadavg()[0]
    advice = " The machine was busy: repeat the benchmark when it is idle." if load > 1 else ""
    return f"\nLoad before the run: {load:.1f}.{advice}"


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
