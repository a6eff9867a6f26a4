"""Many kernels at once leave nothing after a stop, and after their owner was killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from leftovers import leftovers, listening
from notebooks import until

from sandbox_provisioner.gvisor.runtime_dir import sweep

pytestmark = pytest.mark.runsc

Sandboxed = Callable[..., str]

AT_ONCE = 20
PATIENCE = 300

OWNER = """
import asyncio, sys
from jupyter_client.manager import AsyncKernelManager

async def main(name, count):
    managers = [AsyncKernelManager(kernel_name=name) for _ in range(count)]
    await asyncio.gather(*(km.start_kernel() for km in managers))
    print("started", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.gather(*(km.shutdown_kernel(now=True) for km in managers))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for all temporary files and connection files of this process and its children."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    for variable in ("TMPDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not ended within 10 seconds. Zombies count as ended."""
    return [one for one in psutil.wait_procs(processes, timeout=10)[1] if one.status() != psutil.STATUS_ZOMBIE]


async def ask(km: AsyncKernelManager, expression: str) -> str:
    """Evaluate an expression in a kernel that may still be starting."""
    kc = km.client()
    kc.start_channels()
    await kc.wait_for_ready(timeout=PATIENCE)
    reply = await kc.execute("", user_expressions={"it": expression}, reply=True, timeout=PATIENCE)
    kc.stop_channels()
    return str(reply["content"]["user_expressions"]["it"]["data"]["text/plain"])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", [4, pytest.param(AT_ONCE, marks=pytest.mark.slow)])
async def test_many_kernels_leave_nothing(
    sandboxed: Sandboxed,
    kernelspecs: KernelSpecManager,
    notebook_folder: Path,
    runtime: Path,
    temporary: Path,
    count: int,
) -> None:
    name = sandboxed(client_transport="tcp")
    ports, descriptors = listening(), psutil.Process().num_fds()
    others = psutil.Process().children(recursive=True)
    managers = [AsyncKernelManager(kernel_name=name, kernel_spec_manager=kernelspecs) for _ in range(count)]
    await asyncio.gather(*(km.start_kernel() for km in managers))
    processes = [process for process in psutil.Process().children(recursive=True) if process not in others]
    assert len(listening() - ports) == 5 * count
    answers = await asyncio.gather(*(ask(km, f"{number} ** 2") for number, km in enumerate(managers)))
    assert answers == [str(number**2) for number in range(count)]
    await asyncio.gather(*(km.shutdown_kernel() for km in managers))
    assert leftovers(runtime) == []
    assert alive(processes) == []
    assert list(temporary.iterdir()) == []
    assert listening() <= ports
    assert psutil.Process().num_fds() <= descriptors


@pytest.fixture
def own(
    sandboxed: Sandboxed, notebook_folder: Path, tmp_path: Path, temporary: Path
) -> Callable[[int], subprocess.Popen[str]]:
    """Return a function that starts a process with ``count`` kernels. The process stops when its stdin is closed."""

    def start(count: int) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", OWNER, sandboxed(), str(count)]
        env = {**os.environ, "JUPYTER_PATH": str(tmp_path)}
        owner = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert owner.stdout and owner.stdout.readline() == "started\n"
        return owner

    return start


@pytest.mark.slow
@pytest.mark.parametrize("remedy", ["a sweep", "the next start"])
def test_kernels_of_killed_owner_are_swept(
    own: Callable[[int], subprocess.Popen[str]], runtime: Path, temporary: Path, remedy: str
) -> None:
    owner = own(AT_ONCE)
    processes = psutil.Process(owner.pid).children(recursive=True)
    owner.kill()
    owner.communicate()
    assert len(list(runtime.iterdir())) == AT_ONCE
    if remedy == "a sweep":
        assert len(sweep()) == AT_ONCE
    else:
        newcomer = own(1)
        until(lambda: len(list(runtime.iterdir())) == 1)  # the new process sweeps in the background
        newcomer.communicate()
    assert leftovers(runtime) == []
    assert alive(processes) == []


def test_sweep_keeps_kernels_of_live_owner(own: Callable[[int], subprocess.Popen[str]], runtime: Path) -> None:
    owner = own(1)
    running = leftovers(runtime)
    assert sweep() == []
    assert leftovers(runtime) == running
    owner.communicate()
    assert owner.returncode == 0
