"""Take every kernel that is installed here through all steps in a sandbox, and write the table in docs/kernels.md.

`make test-kernels` runs it, and installs kernels from PyPI and npm. Those of Debian, such as R's, are used as well.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from kernels import LONG, run
from languages import LANGUAGES, Language

from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.setup import kernelspecs
from sandbox_provisioner.setup.trial import find_transport

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(600)]

Start = Callable[..., tuple[KernelManager, BlockingKernelClient]]
INTERRUPTED = 10
"""Seconds for a kernel to answer an interrupted request."""
HEADING = """\
# Kernels

sandbox-provisioner works with kernels of any language. These were installed from PyPI, npm and Debian on one machine,
and each was taken through all steps in a sandbox: start, execute, complete, interrupt, hibernate, wake, restart,
savepoint, rewind and shut down. `jupyter sandbox setup` tries each kernel that you have, and sets the transport that it
needs. (`make test-kernels` generates this page.)

| kernelspec | kernel | language | transport | result |
|---|---|---|---|---|
"""


@dataclass
class Row:
    """A row of the table."""

    name: str
    kernel: str = ""
    language: str = ""
    transport: str = ""
    unsupported: list[str] = field(default_factory=list)
    step: str = "start"
    done: bool = False

    def __str__(self) -> str:
        result = "all steps" if self.done else f"failed: {self.step}"
        if self.done and self.unsupported:
            result += f"; {' and '.join(self.unsupported)}: not supported by the kernel, also without a sandbox"
        return f"| {self.name} | {self.kernel} | {self.language} | {self.transport} | {result} |"


def installed() -> list[str]:
    return [kernel.name for kernel in kernelspecs.origins()]


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    """The rows of the table. They replace those of the same kernels in the file that KERNELS_TABLE names."""
    rows: list[Row] = []
    yield rows
    if "KERNELS_TABLE" in os.environ:
        file = Path(os.environ["KERNELS_TABLE"])
        before = file.read_text().removeprefix(HEADING).splitlines() if file.exists() else []
        lines = {line.split("|")[1]: line for line in [*before, *map(str, rows)]}
        file.write_text(HEADING + "".join(f"{lines[name]}\n" for name in sorted(lines)))


def completes(km: KernelManager, kc: BlockingKernelClient, language: Language) -> bool:
    """Return True if the kernel completes the beginning of a word."""
    content = kc.complete(language.prefix, len(language.prefix), reply=True, timeout=LONG)["content"]
    return any(language.prefix in match and match != language.prefix for match in content.get("matches", []))


def interrupts(km: KernelManager, kc: BlockingKernelClient, language: Language) -> bool:
    """Return True if the kernel answers in time after it was interrupted, and then runs the next cell."""
    request = kc.execute(language.wait)
    wait_for(kc.get_iopub_msg, lambda message: message["content"].get("execution_state") == "busy", LONG)
    time.sleep(2)
    km.interrupt_kernel()
    try:
        wait_for(kc.get_shell_msg, lambda message: message["parent_header"].get("msg_id") == request, INTERRUPTED)
        run(kc, language.set_x.format(1), timeout=INTERRUPTED)
    except (Empty, TimeoutError, RuntimeError, AssertionError, KeyError):
        return False
    return True


def wait_for(get: Callable[..., dict[str, Any]], wanted: Callable[[dict[str, Any]], bool], seconds: float) -> None:
    """Receive messages until ``wanted`` is true for one. Raises Empty."""
    deadline = time.monotonic() + seconds
    while not wanted(get(timeout=max(0.1, deadline - time.monotonic()))):
        pass


def drain(kc: BlockingKernelClient) -> None:
    """Discard the messages about the new connection: jupyter_client cannot read those of xeus outside of a request."""
    with suppress(Empty):
        while True:
            kc.get_iopub_msg(timeout=1)


def shows(kc: BlockingKernelClient, language: Language, value: int) -> bool:
    """Return True if the kernel's variable has this value."""
    try:
        return str(value) in run(kc, language.show_x, timeout=LONG)
    except (AssertionError, KeyError):  # the variable does not exist; not every kernel sends a traceback
        time.sleep(1)  # tslab aborts a cell that follows an error at once
        return False


@pytest.mark.parametrize("name", installed())
def test_kernel_takes_all_steps(
    name: str, start_kernel: Start, sandboxed: Callable[..., str], data: Path, notebook_folder: Path, runsc: Runsc,
    table: list[Row],
) -> None:  # fmt: skip
    row = Row(name)
    table.append(row)
    (origin,) = kernelspecs.origins([name])
    row.transport = find_transport(origin, {}, runsc, lambda step: None)
    env = {**os.environ, "JPY_SESSION_NAME": str(notebook_folder / "a.ipynb")}
    km, kc = start_kernel(sandboxed(name, guest_transport=row.transport), env=env)
    info = kc.kernel_info(reply=True, timeout=LONG)["content"]
    spoken = info["language_info"]
    row.kernel = f"{info['implementation']} {info['implementation_version']}"
    row.language = f"{spoken['name']} {spoken.get('version', '')}".strip()
    language = LANGUAGES[spoken["name"].lower()]
    supported = {}
    for row.step, use in (("complete", completes), ("interrupt", interrupts)):
        supported[row.step] = use(km, kc, language)
    steps(row, km, kc, language)
    for row.step, use in (("complete", completes), ("interrupt", interrupts)):
        if not supported[row.step]:
            assert not use(*start_kernel(name), language), f"{row.step} works without a sandbox"
            row.unsupported.append(row.step)
    row.done = True


def steps(row: Row, km: KernelManager, kc: BlockingKernelClient, language: Language) -> None:
    """Take a kernel through the steps that each must support."""
    row.step = "restart"
    km.restart_kernel(now=True)
    kc.wait_for_ready(timeout=LONG)
    assert not shows(kc, language, 41)
    row.step = "execute"
    run(kc, language.set_x.format(41), timeout=LONG)
    assert shows(kc, language, 41)
    row.step = "hibernate"
    asyncio.run(km.provisioner.hibernate())
    assert km.provisioner.asleep
    row.step = "wake"
    assert shows(kc, language, 41)
    row.step = "savepoint"
    asyncio.run(km.provisioner.savepoint("before"))
    run(kc, language.set_x.format(42), timeout=LONG)
    assert shows(kc, language, 42)
    row.step = "rewind"
    asyncio.run(km.provisioner.rewind("before"))
    drain(kc)
    assert shows(kc, language, 41)
    row.step = "restart"
    km.restart_kernel()
    kc.wait_for_ready(timeout=LONG)
    assert not shows(kc, language, 41)
    row.step = "shut down"
    km.shutdown_kernel()
    assert not km.is_alive()
