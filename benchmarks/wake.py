"""`make bench`: a hibernated kernel that wakes, beside a plain one that starts and imports the same, in one run.

Then how long a kernel takes to hibernate and to wake with much in its memory. The contenders take turns, so that
whatever else the machine does hits them all alike: read the ratios.
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

from common import framed, readable, scratch, verdict
from session import KEPT, PLAIN, Bench, Session

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.provisioner import SandboxProvisioner

GOAL = 0.3
MB = 10**6
IMPORTS = "import numpy, pandas"
USE = "print(int(pandas.DataFrame(numpy.arange(12).reshape(3, 4)).sum().sum()))"
USED = len("66\n")
HOARD = "import os, zlib; hoard = [os.urandom(1_000_000) for _ in range({count})]"
CHECK = "sum(map(zlib.crc32, hoard))"


@dataclass(frozen=True)
class Load:
    """How much memory a kernel has, and how often it hibernates and wakes."""

    size: int
    rounds: int


@dataclass(frozen=True)
class Effort:
    """How often each thing is measured."""

    wakes: int
    loads: Sequence[Load]


FULL = Effort(7, (Load(100 * MB, 5), Load(1000 * MB, 3)))
QUICK = Effort(1, (Load(4 * MB, 1), Load(40 * MB, 1)))


def main(arguments: Sequence[str]) -> int:
    effort = QUICK if options(arguments).quick else FULL

    def measure() -> None:
        with scratch() as folder:
            compare(effort, folder / "storage")

    return framed(measure, "ipykernel", "jupyter_client", "numpy", "pandas")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a kernel that wakes with one that starts.")
    parser.add_argument("--quick", action="store_true", help="little memory: that it works, not how fast")
    return parser.parse_args(arguments)


def compare(effort: Effort, storage: Path) -> None:
    """Measure and print both tables."""
    with Bench() as bench:
        starts, wakes = measure_wakes(bench, effort.wakes)
        plain, ours = statistics.median(starts), statistics.median(wakes)
        print(f"\n{'':36}{'start and import':>22}{'wake':>22}{'wake/start':>12}")
        title = f"numpy and pandas (median of {effort.wakes})"
        mark = f"  {verdict(ours <= plain * GOAL)} (goal {GOAL}x)"
        print(f"{title:36}{readable(plain):>22}{readable(ours):>22}{f'{ours / plain:.2f}x':>12}{mark}", flush=True)
        print(f"\n{'':36}{'hibernate':>22}{'wake':>22}{'on disk':>12}", flush=True)
        for load in effort.loads:
            measure_load(bench, load, storage)


def measure_wakes(bench: Bench, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds until a new plain kernel has imported and used the packages, and until one that slept has used them."""
    starts, wakes = [], []
    kept = bench.start(KEPT)
    kept.settle()
    kept.execute(IMPORTS)
    use(kept)
    for _ in range(rounds):
        begun = time.perf_counter()
        plain = bench.start(PLAIN)
        plain.execute(IMPORTS)
        use(plain)
        starts.append(time.perf_counter() - begun)
        bench.stop(plain)
        hibernate(kept)
        begun = time.perf_counter()
        use(kept)
        wakes.append(time.perf_counter() - begun)
    bench.stop(kept)
    return starts, wakes


def use(session: Session) -> None:
    if session.execute(USE).printed != USED:
        raise SandboxError("The packages do not calculate.")


def hibernate(session: Session) -> None:
    """Until its memory is in storage and given back."""
    provisioner = session.provisioner
    assert isinstance(provisioner, SandboxProvisioner)
    asyncio.run(provisioner.hibernate())
    if not provisioner.asleep:
        raise SandboxError("The kernel does not sleep.")


def measure_load(bench: Bench, load: Load, storage: Path) -> None:
    """A kernel with that much random memory, which must be the same after each sleep."""
    session = bench.start(KEPT)
    session.settle()
    session.execute(HOARD.format(count=load.size // MB))
    session.execute(f"before = {CHECK}")
    sleeps, wakes = [], []
    for _ in range(load.rounds):
        begun = time.perf_counter()
        hibernate(session)
        sleeps.append(time.perf_counter() - begun)
        size = max(sum(file.stat().st_size for file in folder.iterdir()) for folder in images(storage))
        begun = time.perf_counter()
        session.execute("1")
        wakes.append(time.perf_counter() - begun)
        session.execute(f"assert before == {CHECK}")
    bench.stop(session)
    title = f"{load.size // MB:,} MB of memory (median of {load.rounds})"
    times = "".join(f"{readable(statistics.median(seconds)):>22}" for seconds in (sleeps, wakes))
    print(f"{title:36}{times}{f'{size / MB:,.0f} MB':>12}", flush=True)


def images(storage: Path) -> set[Path]:
    """Return the folders of the checkpoints. Staged images may disappear meanwhile, and do not count."""
    found = [(Path(folder), names) for folder, _, names in os.walk(storage) if ".staging" not in folder]
    return {folder for folder, names in found if any(name.endswith(".img") for name in names)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
