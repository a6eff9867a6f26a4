"""No callback blocks Jupyter's loop or the I/O loop during a kernel's life.

No callback takes over 50 ms of processor time: wall time would depend on what else the machine does. And no call that
may wait for a disk or for another process is made on a loop: Python reports such calls to audit hooks.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from servers import READY

import sandbox_provisioner

pytestmark = pytest.mark.runsc

LONGEST = 0.05
PACKAGE = str(Path(sandbox_provisioner.__file__).parent)
BLOCKING = {
    "fcntl.flock",
    "fcntl.lockf",
    "glob.glob",
    "open",
    "os.chmod",
    "os.link",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "os.symlink",
    "os.truncate",
    "pathlib.Path.glob",
    "pathlib.Path.rglob",
    "shutil.copyfile",
    "shutil.copytree",
    "shutil.move",
    "shutil.rmtree",
    "socket.connect",
    "socket.getaddrinfo",
    "tempfile.mkdtemp",
    "tempfile.mkstemp",
    "time.sleep",
}
"""Events of Python's audit hooks for calls that can take long."""
NOT_OURS = {"_find_and_load", "write_connection_file", "write_note"}
"""Functions below which anything is allowed: an import, which happens once; Jupyter's own connection file; and the note
for a rescue, a small file in the runtime folder."""


class Witness:
    """Notes the blocking calls that this package makes in a thread whose event loop is running, while it is asked to.

    An audit hook cannot be removed, so there is one for all tests.
    """

    def __init__(self) -> None:
        self.watching = False
        self.seen: set[str] = set()
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.watching or event not in BLOCKING or asyncio._get_running_loop() is None:
            return
        if event == "open" and (isinstance(arguments[0], int) or arguments[0] == os.devnull):
            return  # no file is looked for
        codes = [(frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(1))]
        if any(code.co_name in NOT_OURS for code, _ in codes):
            return
        ours = [(code, line) for code, line in codes if code.co_filename.startswith(PACKAGE)]
        if ours:
            code, line = ours[0]
            self.seen.add(f"{event} in {code.co_filename.removeprefix(PACKAGE)}:{line}, {code.co_qualname}")


WITNESS = Witness()


@pytest.fixture
def slow() -> Iterator[list[str]]:
    """The callbacks of all loops of this process that take too long, with the processor's time."""
    run, found = asyncio.events.Handle._run, []

    def measured(self: asyncio.events.Handle) -> None:
        before, what = time.thread_time(), repr(self)
        run(self)
        if (took := time.thread_time() - before) > LONGEST:
            found.append(f"{took:.3f} s in {threading.current_thread().name}: {what}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.events.Handle, "_run", measured)
        yield found


async def test_no_callback_takes_over_50_ms(
    slow: list[str],
    kernelspecs: KernelSpecManager,
    sandboxed: Callable[..., str],
    notebook_folder: Path,
    data: Path,
) -> None:
    name = sandboxed(on_shutdown="delete")
    for _ in range(2):  # the first time modules are imported, and files read that are cached then
        await asyncio.to_thread(gc.collect)
        gc.disable()
        slow.clear()
        try:
            await live(AsyncKernelManager(kernel_name=name, kernel_spec_manager=kernelspecs), notebook_folder)
        finally:
            gc.enable()
    assert slow == []


async def test_no_blocking_call_is_made_on_a_loop(
    kernelspecs: KernelSpecManager, sandboxed: Callable[..., str], notebook_folder: Path, data: Path
) -> None:
    name = sandboxed(on_shutdown="delete")
    WITNESS.seen.clear()
    WITNESS.watching = True
    try:
        await live(AsyncKernelManager(kernel_name=name, kernel_spec_manager=kernelspecs), notebook_folder)
    finally:
        WITNESS.watching = False
    assert WITNESS.seen == set(), "\n".join(sorted(WITNESS.seen))


async def live(km: AsyncKernelManager, folder: Path) -> None:
    """Start a kernel, execute, hibernate, wake, execute, delete."""
    await km.start_kernel(env={**os.environ, "JPY_SESSION_NAME": str(folder / "a.ipynb")})
    kc = km.client()
    kc.start_channels()
    try:
        await kc.wait_for_ready(timeout=READY)
        await kc._async_execute_interactive("x = 1", timeout=READY)
        await km.provisioner.hibernate()
        assert km.provisioner.asleep
        await km.provisioner.wake()
        reply = await kc._async_execute_interactive("x", timeout=READY, output_hook=lambda message: None)
        assert reply["content"]["status"] == "ok"
    finally:
        kc.stop_channels()
        await km.shutdown_kernel()
