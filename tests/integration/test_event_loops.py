"""No callback blocks Jupyter's loop or the I/O loop during a kernel's life.

No callback uses more than 50 ms of processor time. (Wall time would depend on other load on the machine.) No call that
may wait for a disk or another process is made on a loop. Python reports such calls to audit hooks.
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
"""Events of Python's audit hooks for calls that can block."""
ALLOWED = {"_find_and_load", "write_connection_file", "write_note"}
"""Functions that may make blocking calls: imports, which happen once; Jupyter's write of the connection file; and the
write of the orphan's note, a small file in the runtime folder."""


class BlockingCalls:
    """Records this package's blocking calls in threads with a running event loop, while ``recording`` is set.

    An audit hook cannot be removed, so all tests share one.
    """

    def __init__(self) -> None:
        self.recording = False
        self.found: set[str] = set()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.recording or event not in BLOCKING or asyncio._get_running_loop() is None:
            return
        if event == "open" and (isinstance(arguments[0], int) or arguments[0] == os.devnull):
            return  # does not access a disk
        codes = [(frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(1))]
        if any(code.co_name in ALLOWED for code, _ in codes):
            return
        callers = [(code, line) for code, line in codes if code.co_filename.startswith(PACKAGE)]
        if callers:
            code, line = callers[0]
            self.found.add(f"{event} in {code.co_filename.removeprefix(PACKAGE)}:{line}, {code.co_qualname}")


BLOCKING_CALLS = BlockingCalls()


@pytest.fixture
def slow() -> Iterator[list[str]]:
    """The callbacks of all loops of this process with more than 50 ms of processor time."""
    run, found = asyncio.events.Handle._run, []

    def measured(self: asyncio.events.Handle) -> None:
        before, description = time.thread_time(), repr(self)
        run(self)
        if (took := time.thread_time() - before) > LONGEST:
            found.append(f"{took:.3f} s in {threading.current_thread().name}: {description}")

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
    for _ in range(2):  # only the second run counts: the first one imports modules and fills caches
        await asyncio.to_thread(gc.collect)
        gc.disable()
        slow.clear()
        try:
            await use_kernel(AsyncKernelManager(kernel_name=name, kernel_spec_manager=kernelspecs), notebook_folder)
        finally:
            gc.enable()
    assert slow == []


async def test_no_blocking_call_is_made_on_a_loop(
    kernelspecs: KernelSpecManager, sandboxed: Callable[..., str], notebook_folder: Path, data: Path
) -> None:
    name = sandboxed(on_shutdown="delete")
    BLOCKING_CALLS.found.clear()
    BLOCKING_CALLS.recording = True
    try:
        await use_kernel(AsyncKernelManager(kernel_name=name, kernel_spec_manager=kernelspecs), notebook_folder)
    finally:
        BLOCKING_CALLS.recording = False
    assert BLOCKING_CALLS.found == set(), "\n".join(sorted(BLOCKING_CALLS.found))


async def use_kernel(km: AsyncKernelManager, folder: Path) -> None:
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
