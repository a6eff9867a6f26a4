"""`make bench`: compare a plain kernel, a kernel in gVisor without a relay, and a sandboxed kernel.

The kernels run alternately, so that other load on the machine affects all of them equally. Compare the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import relay_delay
from common import readable, run_benchmark, verdict
from session import CONTENDERS, GVISOR, PLAIN, SANDBOXED, Bench, Contender, Session

GOAL = 1.15
"""Time of a sandboxed kernel, relative to that of gVisor without a relay."""
RELAY_GOAL = 1e-3
"""Seconds for a round trip through the relay's host side."""
BLOCK = 10
"""Number of cells that one kernel runs before it is another kernel's turn."""
WARM_UP = 10
OUTPUT = 10_000_000
LINES = 20_000
LINES_SIZE = sum(len(f"{number}\n") for number in range(LINES))


@dataclass(frozen=True)
class Effort:
    """Number of repetitions of each measurement."""

    starts: int
    executions: int
    outputs: int
    round_trips: int


FULL = Effort(starts=7, executions=200, outputs=9, round_trips=2000)
QUICK = Effort(starts=1, executions=20, outputs=1, round_trips=200)

Samples = dict[Contender, list[float]]


def main(arguments: Sequence[str]) -> int:
    effort = QUICK if options(arguments).quick else FULL

    def measure() -> None:
        relay_cpu = compare(effort)
        report_relay(relay_cpu, *relay_delay.measure(effort.round_trips))

    return run_benchmark(measure, "ipykernel", "jupyter_client")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare starts, executions and output of a plain kernel, a kernel in gVisor without a relay, and "
        "a sandboxed kernel."
    )
    parser.add_argument("--quick", action="store_true", help="check in under a minute that the benchmark works")
    return parser.parse_args(arguments)


def compare(effort: Effort) -> float:
    """Measure and print the table. Return the CPU seconds of the relay for one execution."""
    with Bench() as bench:
        starts, sessions = measure_starts(bench, effort.starts)
        print_header()
        report(f"start to ready (median of {effort.starts})", medians(starts))
        executions, relay_cpu = measure_executions(sessions, effort.executions)
        report(f"execute `1` (median of {effort.executions})", medians(executions), GOAL)
        report("execute `1` (90th percentile)", {contender: p90(times) for contender, times in executions.items()})
        outputs = measure_printing(sessions, f"print('x' * ({OUTPUT} - 1))", OUTPUT, effort.outputs)
        report(f"10 MB in one output (median of {effort.outputs})", medians(outputs), GOAL)
        lines = measure_printing(sessions, f"for n in range({LINES}): print(n)", LINES_SIZE, effort.outputs)
        report(f"{LINES:,} printed lines (median of {effort.outputs})", medians(lines), GOAL)
    return relay_cpu


def measure_starts(bench: Bench, rounds: int) -> tuple[Samples, dict[Contender, Session]]:
    """Start each kind ``rounds`` times. Return the times, and the last session of each kind."""
    samples: Samples = {contender: [] for contender in CONTENDERS}
    sessions: dict[Contender, Session] = {}
    for _ in range(rounds):
        for contender in CONTENDERS:
            if contender in sessions:
                bench.stop(sessions[contender])
            sessions[contender] = bench.start(contender)
            samples[contender].append(sessions[contender].seconds_to_ready)
    return samples, sessions


def measure_executions(sessions: dict[Contender, Session], count: int) -> tuple[Samples, float]:
    """Time ``count`` executions of `1` in alternating blocks. Return the times, and the relay's CPU time for each."""
    for session in sessions.values():
        session.wait_for_ready()
        for _ in range(WARM_UP):
            session.execute("1")
    samples: Samples = {contender: [] for contender in sessions}
    relay_cpu = 0.0
    for _ in range(count // BLOCK):
        for contender, session in sessions.items():
            before = relay_delay.relay_cpu_time()
            samples[contender] += [session.execute("1").seconds for _ in range(BLOCK)]
            if contender is SANDBOXED:
                relay_cpu += relay_delay.relay_cpu_time() - before
    return samples, relay_cpu / count


def measure_printing(sessions: dict[Contender, Session], code: str, size: int, rounds: int) -> Samples:
    """Time ``code`` until all ``size`` bytes of its output have arrived."""
    samples: Samples = {contender: [] for contender in sessions}
    for _ in range(rounds):
        for contender, session in sessions.items():
            execution = session.execute(code)
            if execution.printed != size:
                raise RuntimeError(f"{contender.title}: only {execution.printed} of {size} bytes arrived")
            samples[contender].append(execution.seconds)
    return samples


def medians(samples: Samples) -> dict[Contender, float]:
    return {contender: statistics.median(times) for contender, times in samples.items()}


def p90(times: list[float]) -> float:
    return sorted(times)[len(times) * 9 // 10]


def print_header() -> None:
    titles = "".join(f"{contender.title:>14}" for contender in CONTENDERS)
    print(f"\n{'':36}{titles}{'sandboxed/gVisor':>18}{'sandboxed/plain':>17}", flush=True)


def report(title: str, seconds: dict[Contender, float], goal: float | None = None) -> None:
    ratio = seconds[SANDBOXED] / seconds[GVISOR]
    columns = "".join(f"{readable(seconds[contender]):>14}" for contender in CONTENDERS)
    ratios = f"{f'{ratio:.2f}x':>18}{f'{seconds[SANDBOXED] / seconds[PLAIN]:.2f}x':>17}"
    mark = f"  {verdict(ratio <= goal)} (goal {goal}x of gVisor alone)" if goal else ""
    print(f"{title:36}{columns}{ratios}{mark}", flush=True)


def report_relay(cpu_per_execution: float, delay_per_round_trip: float, cpu_per_round_trip: float) -> None:
    print("\nThe relay's host side alone (goal: under 1 ms)")
    for title, seconds in (
        ("CPU time of the I/O thread per execution", cpu_per_execution),
        ("delay added to the round trip of a small message", delay_per_round_trip),
        ("CPU time of the I/O thread per round trip", cpu_per_round_trip),
    ):
        print(f"{title:50}{readable(seconds):>14}  {verdict(seconds < RELAY_GOAL)}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
