"""`make bench`: compare the start of a plain kernel with starts without a template, from a template and from the pool.

A second table compares starts with numpy and pandas: the plain kernel imports them; the template has imported them. The
kernels run alternately, so that other load on the machine affects all of them equally. Compare the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from common import readable, run_benchmark, temporary_storage, verdict
from session import (
    IN_PROJECT,
    PLAIN,
    PLAIN_IN_PROJECT,
    PRELOADED,
    SANDBOXED,
    TEMPLATE,
    WARM_POOL,
    Bench,
    Contender,
    site_folder,
)
from traitlets.config import Config
from wake import IMPORTS, use_packages

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.provisioner import SandboxProvisioner
from sandbox_provisioner.templates.build import build
from sandbox_provisioner.templates.match import recipe_for
from sandbox_provisioner.templates.store import TemplateShelf
from sandbox_provisioner.templates.warm_pool import WARM_POOL as POOL

ROUNDS = 21
AFTER_INSTALL = replace(IN_PROJECT, title="after an unrelated pip install")
GOALS = {TEMPLATE: 0.75, WARM_POOL: 0.15, PRELOADED: 0.4, IN_PROJECT: 0.75, AFTER_INSTALL: 0.8}
"""Times relative to the plain kernel."""
TIMEOUT = 60.0
POOL_FOLDER = "pool"
"""Folder of the kernels from the warm pool. The pool has copies only for the folder of the last start."""

Measure = Callable[[Bench, Contender], float]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Compare the start of a plain kernel with starts of sandboxed kernels: without a template, from a "
        "template, and from the warm pool."
    )
    parser.add_argument("--quick", action="store_true", help="start each kind once: check that the benchmark works")
    rounds = 1 if parser.parse_args(arguments).quick else ROUNDS

    def measure() -> None:
        with temporary_storage(), Bench() as bench:
            os.environ["JUPYTER_PATH"] = str(bench.jupyter_path)
            try:
                build_templates()
                kinds = (PLAIN, SANDBOXED, TEMPLATE, WARM_POOL)
                compare(bench, "start to first reply", kinds, seconds_to_ready, rounds)
                kinds = (PLAIN_IN_PROJECT, IN_PROJECT, AFTER_INSTALL)
                compare(bench, "start with .venv in the folder", kinds, seconds_to_ready, rounds)
                compare(bench, "with numpy and pandas", (PLAIN, PRELOADED), seconds_to_use, rounds)
            finally:
                asyncio.run(POOL.end())

    return run_benchmark(measure, "ipykernel", "jupyter_client", "numpy", "pandas")


def build_templates() -> None:
    """Build the templates, and print their sizes."""
    for contender in (TEMPLATE, WARM_POOL, PRELOADED, IN_PROJECT):
        begun = time.perf_counter()
        template = asyncio.run(build(recipe_for(contender.name, Config()), TemplateShelf(), wait=True))
        if template is None or template.unfit or template.left_out:
            raise SandboxError(f"No complete template could be built for the kernel {contender.name!r}.")
        took = readable(time.perf_counter() - begun)
        print(f"Template of {contender.name}: {template.size / 1e6:.0f} MB, built in {took}", flush=True)


def compare(bench: Bench, title: str, contenders: Sequence[Contender], measure: Measure, rounds: int) -> None:
    """Measure and print one table. The first of ``contenders`` is the plain kernel."""
    seconds: dict[Contender, list[float]] = {contender: [] for contender in contenders}
    for contender in contenders:
        measure(bench, contender)  # not counted: work that is done only once in a process
    for _ in range(rounds):
        for contender in contenders:
            seconds[contender].append(measure(bench, contender))
    plain = statistics.median(seconds[contenders[0]])
    print(f"\n{f'{title} (median of {rounds})':44}{'':>12}{'/plain':>10}")
    for contender in contenders:
        median = statistics.median(seconds[contender])
        goal = GOALS.get(contender)
        mark = f"  {verdict(median <= plain * goal)} (goal {goal}x)" if goal else ""
        print(f"{contender.title:44}{readable(median):>12}{f'{median / plain:.2f}x':>10}{mark}", flush=True)


def seconds_to_ready(bench: Bench, contender: Contender) -> float:
    """Return the seconds from ``start_kernel`` to the first ``kernel_info_reply``."""
    if contender is WARM_POOL:
        wait_for_warm_pool(bench)
    if contender == AFTER_INSTALL:
        install_package(site_folder(bench.project / ".venv"))
    session = bench.start(contender, POOL_FOLDER if contender is WARM_POOL else "")
    provisioner = session.provisioner
    if contender not in (PLAIN, PLAIN_IN_PROJECT, SANDBOXED):
        assert isinstance(provisioner, SandboxProvisioner) and provisioner.sandbox
        if provisioner.sandbox.spec.carried is None:
            raise SandboxError(f"The kernel {contender.name!r} was started without its template.")
    bench.stop(session)
    return session.seconds_to_ready


def install_package(site: Path) -> None:
    """Add a package that no kernel uses, with the files that pip writes."""
    name = f"unrelated_{len(list(site.iterdir()))}"
    for folder in (site / name, site / f"{name}-1.0.dist-info"):
        folder.mkdir()
    (site / name / "__init__.py").touch()
    (site / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def wait_for_warm_pool(bench: Bench) -> None:
    """Wait until the warm pool has a copy. If it is empty, start a kernel first: the start fills the pool."""
    if not POOL.copies:
        bench.stop(bench.start(WARM_POOL, POOL_FOLDER))
    deadline = time.monotonic() + TIMEOUT
    while not POOL.copies:
        if time.monotonic() > deadline:
            raise SandboxError(f"The warm pool had no copy after {TIMEOUT:g} s.")
        time.sleep(0.05)
    time.sleep(0.5)  # the new copy still uses the processor


def seconds_to_use(bench: Bench, contender: Contender) -> float:
    """Return the seconds from ``start_kernel`` to the reply of a cell that uses numpy and pandas."""
    begun = time.perf_counter()
    session = bench.start(contender)
    session.execute(IMPORTS)
    use_packages(session)
    seconds = time.perf_counter() - begun
    bench.stop(session)
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
