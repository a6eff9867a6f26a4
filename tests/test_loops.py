"""No callback on Jupyter's loop or on the I/O loop takes over 50 ms in a kernel's life.

CPU time of the loop's thread is measured, not wall time, so that a busy machine changes nothing.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import READY
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

pytestmark = pytest.mark.runsc

LONGEST = 0.05


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
