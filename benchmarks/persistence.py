"""`make bench`: compare checkpoint and restore of a sandbox with `cat` of the same bytes.

The measurements alternate, so that other load on the machine affects all of them equally. Compare the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import readable, run_benchmark, temporary_storage, verdict

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.gvisor.runtime_dir import left_behind

MB = 10**6
MEMORY_GOAL = 100 * MB
ROUND = Path(__file__).with_name("checkpoint_round.py")
EMULATOR = Path(__file__).parents[1] / "tests" / "support" / "gcs_server.py"
BUCKET = "bench-bucket"
CAT, LOCAL, GCS = "cat", "local storage", "emulated GCS"


@dataclass(frozen=True)
class Load:
    """The memory of a sandbox, and the number of times that it is saved and restored."""

    size: int
    rounds: int


FULL = (Load(100 * MB, 5), Load(1000 * MB, 3))
QUICK = (Load(4 * MB, 1), Load(40 * MB, 1))

Samples = dict[tuple[str, str], list[float]]
"""Measurements by storage and by name of the measurement."""


def main(arguments: Sequence[str]) -> int:
    loads = QUICK if options(arguments).quick else FULL

    def measure() -> None:
        with temporary_storage() as folder, emulator() as address:
            os.environ["STORAGE_EMULATOR_HOST"] = address
            compare(loads, folder / "storage")

    return run_benchmark(measure, "google-cloud-storage")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare checkpoint and restore of a sandbox with `cat`.")
    parser.add_argument("--quick", action="store_true", help="use little memory: check that the benchmark works")
    return parser.parse_args(arguments)


@contextmanager
def emulator() -> Iterator[str]:
    """Run the tests' server for GCS's JSON API with one bucket, and yield its address."""
    command = [sys.executable, str(EMULATOR)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            body = json.dumps({"name": BUCKET}).encode()
            urllib.request.urlopen(f"{address}/storage/v1/b?project=bench", body).close()
            yield address
        finally:
            server.kill()


def compare(loads: Sequence[Load], folder: Path) -> None:
    """Measure and print the times, then the peaks of memory."""
    print(f"\n{'':36}{CAT:>22}{LOCAL:>22}{GCS:>22}{'local/cat':>12}{'GCS/cat':>12}", flush=True)
    memory = {}
    for load in loads:
        samples: Samples = defaultdict(list)
        for _ in range(load.rounds):
            for storage, bucket in ((LOCAL, []), (GCS, [BUCKET])):
                for name, value in run_round(folder, load.size, *bucket).items():
                    samples[storage, name].append(value)
        report(load, samples)
        for storage in (LOCAL, GCS):
            peaks = samples[storage, "checkpoint memory"] + samples[storage, "restore memory"]
            memory[f"{load.size // MB:,} MB, {storage}"] = max(peaks)
    report_memory(memory)


def run_round(folder: Path, *arguments: object) -> dict[str, float]:
    """Run one round in a new process and return its measurements. Leaves no process and no sandbox."""
    command = [sys.executable, str(ROUND), str(folder), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        try:
            answer, _ = server.communicate()
        finally:
            server.kill()
            server.wait()
            for left in left_behind():
                left.remove()
    if server.returncode:
        raise SandboxError(f"{ROUND.name} failed with exit status {server.returncode}.")
    measured: dict[str, float] = json.loads(answer)
    return measured


def report(load: Load, samples: Samples) -> None:
    size = statistics.median(samples[LOCAL, "size"])
    cat = statistics.median(samples[LOCAL, CAT])
    for action in ("checkpoint", "restore"):
        local, gcs = (statistics.median(samples[storage, action]) for storage in (LOCAL, GCS))
        title = f"{action}, {load.size // MB:,} MB (median of {load.rounds})"
        columns = "".join(
            f"{f'{readable(seconds)}, {size / seconds / MB:,.0f} MB/s':>22}" for seconds in (cat, local, gcs)
        )
        print(f"{title:36}{columns}{f'{local / cat:.2f}x':>12}{f'{gcs / cat:.2f}x':>12}", flush=True)


def report_memory(peaks: dict[str, float]) -> None:
    print(f"\nPeak memory of the server process, above that before (goal: under {MEMORY_GOAL // MB} MB)")
    for title, peak in peaks.items():
        print(f"{title:36}{f'{peak / MB:.0f} MB':>22}  {verdict(peak < MEMORY_GOAL)}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
