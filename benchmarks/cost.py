"""`make bench`: compare work that takes longer in a sandbox with the same work in a plain kernel, in one run.

The kernels run alternately, so that other load on the machine affects both equally. Compare the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import readable, run_benchmark, temporary_storage
from session import PLAIN, SANDBOXED, Bench, Session

ROUNDS = 11


@dataclass(frozen=True)
class Work:
    """A cell whose duration is compared."""

    title: str
    cell: str


SETUP = """
import importlib, os, subprocess, sys
def small_files(count):
    for number in range(count):
        with open(f"file-{number}", "w") as file:
            file.write("some text")
        with open(f"file-{number}") as file:
            file.read()
        os.unlink(f"file-{number}")
def compute(count):
    total = 0
    for number in range(count):
        total += number * number % 7
def print_lines(count):
    for number in range(count):
        print(number)
def run_programs(count):
    for _ in range(count):
        subprocess.run(["true"], check=True)
PACKAGES = ("email", "html", "http", "unittest", "xml", "xmlrpc", "pydoc", "difflib", "wsgiref")
MODULES = ("email.mime.multipart", "http.server", "unittest.mock", "xml.dom.minidom", "xmlrpc.client", "pydoc",
           "difflib", "wsgiref.simple_server", "xml.etree.ElementTree")
def import_modules():
    before = dict(sys.modules)
    for name in before:
        if name.partition(".")[0] in PACKAGES:
            del sys.modules[name]
    importlib.invalidate_caches()
    for name in MODULES:
        importlib.import_module(name)
    sys.modules.update(before)
def call_system(count):
    for _ in range(count):
        os.getppid()
"""
WORKS = (
    Work("compute in Python", "compute(500_000)"),
    Work("print 2,000 lines", "print_lines(2_000)"),
    Work("import modules of the standard library", "import_modules()"),
    Work("start 20 programs", "run_programs(20)"),
    Work("write, read and delete 200 small files", "small_files(200)"),
    Work("make 50,000 system calls", "call_system(50_000)"),
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare work that takes longer in a sandbox with a plain kernel.")
    parser.add_argument("--quick", action="store_true", help="measure once: check that the benchmark works")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table in this Markdown page, too")
    options = parser.parse_args(arguments)

    def measure() -> None:
        with temporary_storage(), Bench() as bench:
            rows = compare(bench.start(PLAIN), bench.start(SANDBOXED), 1 if options.quick else ROUNDS)
        if options.write:
            page: Path = options.write
            page.write_text(with_table(page.read_text(), rows))

    return run_benchmark(measure, "ipykernel")


Row = tuple[str, float, float]
"""The title of a work, and its median duration in seconds in a plain and in a sandboxed kernel."""


def compare(plain: Session, sandboxed: Session, rounds: int) -> list[Row]:
    """Measure, print and return the rows of the table."""
    for session in (plain, sandboxed):
        session.wait_for_ready()
        session.execute(SETUP)
    print(f"\n{f'work (median of {rounds})':44}{'plain':>12}{'sandboxed':>12}{'ratio':>10}")
    return [_measured(work, plain, sandboxed, rounds) for work in WORKS]


def _measured(work: Work, plain: Session, sandboxed: Session, rounds: int) -> Row:
    seconds: list[tuple[float, float]] = []
    for count in range(rounds + 1):
        pair = plain.execute(work.cell).seconds, sandboxed.execute(work.cell).seconds
        if count:  # the first one includes work that is done only once in a process
            seconds.append(pair)
    before, after = (statistics.median(column) for column in zip(*seconds, strict=True))
    print(f"{work.title:44}{readable(before):>12}{readable(after):>12}{f'{after / before:.1f}x':>10}", flush=True)
    return work.title, before, after


def with_table(page: str, rows: Sequence[Row]) -> str:
    """Return the page with its first table replaced by one of these rows. Raises ValueError if there is no table."""
    lines = page.splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith("|")]
    if not places:
        raise ValueError("The page has no table to replace.")
    first = places[0]
    last = next((number for number in range(first, len(lines)) if not lines[number].startswith("|")), len(lines))
    table = ["| work | plain | sandboxed | ratio |", "|---|---|---|---|"]
    table += [
        f"| {title} | {readable(plain)} | {readable(sandboxed)} | {sandboxed / plain:.1f}x |"
        for title, plain, sandboxed in rows
    ]
    return "\n".join([*lines[:first], *table, *lines[last:]]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
