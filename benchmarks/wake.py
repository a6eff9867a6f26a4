"""`make bench`: compare the wake of a hibernated kernel with the start of a plain one that imports the same packages.

A second table shows how long a kernel with much memory takes to hibernate and to wake. Starts and wakes alternate, so
that other load on the machine affects both equally. Compare the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import readable, run_benchmark, temporary_storage, verdict
from session import PERSISTENT, PLAIN, Bench, Session

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.provisioner import SandboxProvisioner

GOAL = 0.3
"""Time of a wake, relative to the start of a plain kernel."""
MB = 10**6
IMPORTS = "import numpy, pandas"
USE_PACKAGES = "print(int(pandas.DataFrame(numpy.arange(12).reshape(3, 4)).sum().sum()))"
USE_PRINTS = len("66\n")
FILL_MEMORY = "import os, zlib; data = [os.urandom(1_000_000) for _ in range({count})]"
CHECKSUM = "sum(map(zlib.crc32, data))"


@dataclass(frozen=True)
class Load:
    """The memory of a kernel, and the number of times that it hibernates and wakes."""

    size: int
    rounds: int


@dataclass(frozen=True)
class Effort:
    """Number of repetitions of each measurement."""

    wakes: int
    loads: Sequence[Load]


FULL = Effort(7, (Load(100 * MB, 5), Load(1000 * MB, 3)))
QUICK = Effort(1, (Load(4 * MB, 1), Load(40 * MB, 1)))


def main(arguments: Sequence[str]) -> int:
    effort = QUICK if options(arguments).quick else FULL

    def measure() -> None:
        with temporary_storage() as folder:
            compare(effort, folder / "storage")

    return run_benchmark(measure, "ipykernel", "jupyter_client", "numpy", "pandas")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare the wake of a hibernated kernel with the start of a plain one that imports its packages."
    )
    parser.add_argument("--quick", action="store_true", help="use little memory: check that the benchmark works")
    return parser.parse_args(arguments)


def compare(effort: Effort, storage: Path) -> None:
    """Measure and print both tables."""
    with Bench() as bench:
        starts, wakes = measure_wakes(bench, effort.wakes)
        start, wake = statistics.median(starts), statistics.median(wakes)
        print(f"\n{'':36}{'plain start, import':>22}{'wake':>22}{'wake/start':>12}")
        title = f"numpy and pandas (median of {effort.wakes})"
        mark = f"  {verdict(wake <= start * GOAL)} (goal {GOAL}x)"
        print(f"{title:36}{readable(start):>22}{readable(wake):>22}{f'{wake / start:.2f}x':>12}{mark}", flush=True)
        print(f"\n{'':36}{'hibernate':>22}{'wake':>22}{'on disk':>12}", flush=True)
        for load in effort.loads:
            measure_load(bench, load, storage)


def measure_wakes(bench: Bench, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds until a new plain kernel, and a hibernated kernel, have used the packages."""
    starts, wakes = [], []
    hibernated = bench.start(PERSISTENT)
    hibernated.wait_for_ready()
    hibernated.execute(IMPORTS)
    use_packages(hibernated)
    for _ in range(rounds):
        begun = time.perf_counter()
        plain = bench.start(PLAIN)
        plain.execute(IMPORTS)
        use_packages(plain)
        starts.append(time.perf_counter() - begun)
        bench.stop(plain)
        hibernate(hibernated)
        begun = time.perf_counter()
        use_packages(hibernated)
        wakes.append(time.perf_counter() - begun)
    bench.stop(hibernated)
    return starts, wakes


def use_packages(session: Session) -> None:
    """Run a cell that uses numpy and pandas. Raises SandboxError if its output is wrong."""
    if session.execute(USE_PACKAGES).printed != USE_PRINTS:
        raise SandboxError("A cell that uses numpy and pandas printed a wrong result.")


def hibernate(session: Session) -> None:
    """Hibernate the kernel, and wait until it is saved and its sandbox has ended."""
    provisioner = session.provisioner
    assert isinstance(provisioner, SandboxProvisioner)
    asyncio.run(provisioner.hibernate())
    if not provisioner.asleep:
        raise SandboxError("The kernel was not hibernated.")


def measure_load(bench: Bench, load: Load, storage: Path) -> None:
    """Hibernate and wake a kernel with random bytes, print the times, and compare the bytes after each wake."""
    session = bench.start(PERSISTENT)
    session.wait_for_ready()
    session.execute(FILL_MEMORY.format(count=load.size // MB))
    session.execute(f"before = {CHECKSUM}")
    saves, wakes = [], []
    for _ in range(load.rounds):
        begun = time.perf_counter()
        hibernate(session)
        saves.append(time.perf_counter() - begun)
        size = max(sum(file.stat().st_size for file in folder.iterdir()) for folder in images(storage))
        begun = time.perf_counter()
        session.execute("1")
        wakes.append(time.perf_counter() - begun)
        session.execute(f"assert before == {CHECKSUM}")
    bench.stop(session)
    title = f"{load.size // MB:,} MB of memory (median of {load.rounds})"
    times = "".join(f"{readable(statistics.median(seconds)):>22}" for seconds in (saves, wakes))
    print(f"{title:36}{times}{f'{size / MB:,.0f} MB':>12}", flush=True)


def images(storage: Path) -> set[Path]:
    """Return the folders of the checkpoints, without images in transfer, which may disappear at any time."""
    found = [(Path(folder), names) for folder, _, names in os.walk(storage) if ".staging" not in folder]
    return {folder for folder, names in found if any(name.endswith(".img") for name in names)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
