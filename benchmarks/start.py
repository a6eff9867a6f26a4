"""`make bench`: how long a kernel takes to start: plain, sandboxed from nothing, from a template and from standby.

Then the same with numpy and pandas, which a plain kernel imports and a preloaded one has. The contenders take turns, so
that whatever else the machine does hits them all alike: read the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from common import framed, readable, scratch, verdict
from session import COPY, OURS, PLAIN, PRELOADED, READY, Bench, Contender
from traitlets.config import Config
from wake import IMPORTS, use

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.provisioner import SandboxProvisioner
from sandbox_provisioner.templates.build import build
from sandbox_provisioner.templates.match import recipe_for
from sandbox_provisioner.templates.store import TemplateShelf
from sandbox_provisioner.templates.warm_pool import WARM_POOL

ROUNDS = 21
GOALS = {COPY.name: 0.75, READY.name: 0.15, PRELOADED.name: 0.4}
PATIENCE = 60.0

Measure = Callable[[Bench, Contender], float]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare the ways in which a kernel starts.")
    parser.add_argument("--quick", action="store_true", help="each once: that it works, not how fast")
    rounds = 1 if parser.parse_args(arguments).quick else ROUNDS

    def measure() -> None:
        with scratch(), Bench() as bench:
            os.environ["JUPYTER_PATH"] = str(bench.jupyter_path)
            try:
                prepare()
                compare(bench, "start to the first answer", (PLAIN, OURS, COPY, READY), seconds_to_ready, rounds)
                compare(bench, "and numpy and pandas used", (PLAIN, PRELOADED), seconds_to_use, rounds)
            finally:
                asyncio.run(WARM_POOL.end())

    return framed(measure, "ipykernel", "jupyter_client", "numpy", "pandas")


def prepare() -> None:
    """Make the templates, and say how large they are."""
    for contender in (COPY, READY, PRELOADED):
        begun = time.perf_counter()
        made = asyncio.run(build(recipe_for(contender.name, Config()), TemplateShelf(), wait=True))
        if made is None or made.unfit or made.left_out:
            raise SandboxError(f"There is no template for {contender.title}.")
        took = readable(time.perf_counter() - begun)
        print(f"The template for {contender.title}: {made.size / 1e6:.0f} MB, made in {took}", flush=True)


def compare(bench: Bench, title: str, contenders: Sequence[Contender], measure: Measure, rounds: int) -> None:
    """Measure and print one table."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        measure(bench, contender)  # what is done only once in a process is not counted
    for _ in range(rounds):
        for contender in contenders:
            seconds[contender.name].append(measure(bench, contender))
    plain = statistics.median(seconds[PLAIN.name])
    print(f"\n{f'{title} (median of {rounds})':44}{'':>12}{'/plain':>10}")
    for contender in contenders:
        median = statistics.median(seconds[contender.name])
        goal = GOALS.get(contender.name)
        mark = f"  {verdict(median <= plain * goal)} (goal {goal}x)" if goal else ""
        print(f"{contender.title:44}{readable(median):>12}{f'{median / plain:.2f}x':>10}{mark}", flush=True)


def seconds_to_ready(bench: Bench, contender: Contender) -> float:
    """From ``start_kernel`` to the first ``kernel_info_reply``."""
    if contender is READY:
        wait_for_standby(bench)
    session = bench.start(contender, "ready" if contender is READY else "")
    provisioner = session.provisioner
    if contender not in (PLAIN, OURS):
        assert isinstance(provisioner, SandboxProvisioner) and provisioner.sandbox
        if provisioner.sandbox.spec.carried is None:
            raise SandboxError(f"The kernel {contender.title} came of no template.")
    bench.stop(session)
    return session.seconds_to_ready


def wait_for_standby(bench: Bench) -> None:
    """Until a copy stands by; the first start has it made."""
    if not WARM_POOL.copies:
        bench.stop(bench.start(READY, "ready"))
    deadline = time.monotonic() + PATIENCE
    while not WARM_POOL.copies:
        if time.monotonic() > deadline:
            raise SandboxError("Nothing stands by.")
        time.sleep(0.05)
    time.sleep(0.5)


def seconds_to_use(bench: Bench, contender: Contender) -> float:
    """From ``start_kernel`` until a cell that uses the packages was answered."""
    begun = time.perf_counter()
    session = bench.start(contender)
    session.execute(IMPORTS)
    use(session)
    seconds = time.perf_counter() - begun
    bench.stop(session)
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
