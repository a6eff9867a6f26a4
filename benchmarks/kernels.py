"""`make bench`: a plain kernel, gVisor without a relay, and this product, beside each other in one run.

The contenders take turns, so that whatever else the machine does hits them all alike: read the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import relay_delay
from common import framed, readable, verdict
from session import CONTENDERS, DIRECT, OURS, PLAIN, Bench, Contender, Session

GOAL = 1.15
RELAY_GOAL = 1e-3
BLOCK = 10
WARM_UP = 10
OUTPUT = 10_000_000
LINES = 20_000
LINES_SIZE = sum(len(f"{number}\n") for number in range(LINES))


@dataclass(frozen=True)
class Effort:
    """How often each thing is measured."""

    starts: int
    trips: int
    outputs: int
    bounces: int


FULL = Effort(starts=7, trips=200, outputs=9, bounces=2000)
QUICK = Effort(starts=1, trips=20, outputs=1, bounces=200)

Samples = dict[Contender, list[float]]


def main(arguments: Sequence[str]) -> int:
    effort = QUICK if options(arguments).quick else FULL

    def measure() -> None:
        relay_cpu = compare(effort)
        report_relay(relay_cpu, *relay_delay.measure(effort.bounces))

    return framed(measure, "ipykernel", "jupyter_client")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a sandboxed kernel with a plain one.")
    parser.add_argument("--quick", action="store_true", help="in under a minute: that it works, not how fast")
    return parser.parse_args(arguments)


def compare(effort: Effort) -> float:
    """Measure and print the table; returns the CPU seconds that our relay used for one execute."""
    with Bench() as bench:
        starts, sessions = measure_starts(bench, effort.starts)
        print_header()
        report(f"start to ready (median of {effort.starts})", medians(starts))
        trips, relay_cpu = measure_trips(sessions, effort.trips)
        report(f"execute `1` (median of {effort.trips})", medians(trips), GOAL)
        report("execute `1` (90th percentile)", {who: p90(times) for who, times in trips.items()})
        outputs = measure_printing(sessions, f"print('x' * ({OUTPUT} - 1))", OUTPUT, effort.outputs)
        report(f"10 MB in one output (median of {effort.outputs})", medians(outputs), GOAL)
        lines = measure_printing(sessions, f"for n in range({LINES}): print(n)", LINES_SIZE, effort.outputs)
        report(f"{LINES:,} printed lines (median of {effort.outputs})", medians(lines), GOAL)
    return relay_cpu


def measure_starts(bench: Bench, rounds: int) -> tuple[Samples, dict[Contender, Session]]:
    """Start each kind ``rounds`` times; the last of each is kept."""
    samples: Samples = {contender: [] for contender in CONTENDERS}
    sessions: dict[Contender, Session] = {}
    for _ in range(rounds):
        for contender in CONTENDERS:
            if contender in sessions:
                bench.stop(sessions[contender])
            sessions[contender] = bench.start(contender)
            samples[contender].append(sessions[contender].seconds_to_ready)
    return samples, sessions


def measure_trips(sessions: dict[Contender, Session], count: int) -> tuple[Samples, float]:
    """Time ``count`` executions of `1` in alternating blocks; also our relay thread's CPU time for each."""
    for session in sessions.values():
        session.settle()
        for _ in range(WARM_UP):
            session.execute("1")
    samples: Samples = {contender: [] for contender in sessions}
    relay_cpu = 0.0
    for _ in range(count // BLOCK):
        for contender, session in sessions.items():
            before = relay_delay.relay_cpu_time()
            samples[contender] += [session.execute("1").seconds for _ in range(BLOCK)]
            if contender is OURS:
                relay_cpu += relay_delay.relay_cpu_time() - before
    return samples, relay_cpu / count


def measure_printing(sessions: dict[Contender, Session], code: str, size: int, rounds: int) -> Samples:
    """Time ``code`` until the last of its ``size`` bytes has arrived."""
    samples: Samples = {contender: [] for contender in sessions}
    for _ in range(rounds):
        for contender, session in sessions.items():
            execution = session.execute(code)
            if execution.printed != size:
                raise RuntimeError(f"{contender.title}: {execution.printed} bytes of {size} arrived")
            samples[contender].append(execution.seconds)
    return samples


def medians(samples: Samples) -> dict[Contender, float]:
    return {contender: statistics.median(times) for contender, times in samples.items()}


def p90(times: list[float]) -> float:
    return sorted(times)[len(times) * 9 // 10]


def print_header() -> None:
    titles = "".join(f"{contender.title:>14}" for contender in CONTENDERS)
    print(f"\n{'':36}{titles}{'ours/gVisor':>14}{'ours/plain':>12}", flush=True)


def report(title: str, seconds: dict[Contender, float], goal: float | None = None) -> None:
    ratio = seconds[OURS] / seconds[DIRECT]
    columns = "".join(f"{readable(seconds[contender]):>14}" for contender in CONTENDERS)
    ratios = f"{f'{ratio:.2f}x':>14}{f'{seconds[OURS] / seconds[PLAIN]:.2f}x':>12}"
    mark = f"  {verdict(ratio <= goal)} (goal {goal}x)" if goal else ""
    print(f"{title:36}{columns}{ratios}{mark}", flush=True)


def report_relay(cpu_per_execute: float, delay_per_bounce: float, cpu_per_bounce: float) -> None:
    print("\nThe relay's host side alone (goal: under 1 ms per round trip)")
    for title, seconds in (
        ("CPU time of its thread per execute", cpu_per_execute),
        ("delay it adds to a small message there and back", delay_per_bounce),
        ("CPU time of its thread for such a message", cpu_per_bounce),
    ):
        print(f"{title:50}{readable(seconds):>14}  {verdict(seconds < RELAY_GOAL)}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
