"""Test that kernels which hibernate repeatedly on a busy machine answer every cell."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from kernels import Notebook, Open

pytestmark = [pytest.mark.runsc, pytest.mark.slow]

KERNELS, SECONDS, IDLE, SPINNERS = 4, 90, 1.0, 6


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Keep the machine busy with more processes than processors."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(SPINNERS)]
    yield
    for spinner in spinners:
        spinner.kill()
        spinner.wait()


def use(notebook: Notebook, chance: random.Random) -> int:
    """Run cells at moments when the kernel probably starts to hibernate, and return their number."""
    until, cells = time.monotonic() + SECONDS, 0
    while time.monotonic() < until:
        time.sleep(chance.choice([0, chance.random(), IDLE + chance.uniform(-0.2, 0.6), 2 * IDLE]))
        cells += 1
        assert notebook.run("n = globals().get('n', 0) + 1\nn") == str(cells)
    return cells


def test_cells_at_any_moment_are_answered(open_notebook: Open, busy_machine: None) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    settings = {"enable_checkpoint_at_idle": True, "idle_timeout": IDLE}
    notebooks = [open_notebook(name=f"{number}.ipynb", **settings) for number in range(KERNELS)]
    with ThreadPoolExecutor(KERNELS) as users:
        chances = [random.Random(seed + number) for number in range(KERNELS)]
        assert min(users.map(use, notebooks, chances)) > 5
