"""`make bench`: measure the time that the imports of this package add to a Jupyter server and to `jupyter sandbox`.

Python measures it (``-X importtime``). A row counts only modules that the same program without this package does not
import. Each program runs in a new process.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common import readable, run_benchmark, verdict

from sandbox_provisioner.errors import SandboxError

ROUNDS = 7
LINE = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", re.MULTILINE)
SERVER = """
from jupyter_server.serverapp import ServerApp
options = ["--no-browser", "--allow-root", "--port=0", "--log-level=ERROR", "--ServerApp.root_dir=" + {root!r}]
ServerApp().initialize([*options, "--ServerApp.jpserver_extensions=sandbox_provisioner.extension={enabled}"])
"""


@dataclass(frozen=True)
class Program:
    """A program whose imports are measured, and the same program without this package."""

    title: str
    code: str
    without: str
    goal: float | None = None
    """Longest time in seconds."""


def programs(root: str) -> list[Program]:
    """Return the programs; ``root`` is the root folder of the servers."""
    return [
        Program("import sandbox_provisioner", "import sandbox_provisioner", ""),
        Program(
            "import of the server extension",
            "import sandbox_provisioner.extension",
            "import jupyter_server.serverapp",
            0.1,
        ),
        Program(
            "server that is ready to serve",
            SERVER.format(root=root, enabled=True),
            SERVER.format(root=root, enabled=False),
        ),
        Program("jupyter sandbox --help", "from sandbox_provisioner.cli import main; main(['--help'])", ""),
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure the time that the imports of this package take.")
    parser.add_argument("--quick", action="store_true", help="measure once: check that the benchmark works")
    rounds = 1 if parser.parse_args(arguments).quick else ROUNDS

    def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="bench-") as root:
            print(f"\n{f'imports (median of {rounds})':44}{'modules':>12}{'time':>12}")
            for program in programs(root):
                show(program, [added(program, root) for _ in range(rounds)])

    return run_benchmark(measure, "jupyter_server")


def added(program: Program, root: str) -> Mapping[str, float]:
    """Return the seconds for each module that the program imports only with this package."""
    without = imported(program.without, root)
    return {name: seconds for name, seconds in imported(program.code, root).items() if name not in without}


def imported(code: str, root: str) -> dict[str, float]:
    """Run a program in a new process, and return the seconds for each module, without those that it imports itself."""
    places = {
        name: f"{root}/{name.lower()}" for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    }
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SandboxError(f"A measured program failed: {done.stderr[-500:]}")
    return {name: int(microseconds) / 1e6 for microseconds, name in LINE.findall(done.stderr)}


def show(program: Program, rounds: Sequence[Mapping[str, float]]) -> None:
    """Print one row."""
    seconds = statistics.median(sum(times.values()) for times in rounds)
    mark = f"  {verdict(seconds <= program.goal)} (goal {readable(program.goal)})" if program.goal else ""
    print(f"{program.title:44}{len(rounds[0]):>12}{readable(seconds):>12}{mark}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
