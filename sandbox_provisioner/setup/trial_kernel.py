"""Run one attempt of ``trial``: a program whose argument is the folder of a twin. It prints its steps."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty
from subprocess import DEVNULL
from types import FrameType
from typing import NoReturn

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from ..provisioner import SandboxProvisioner

STEP, FAILED = "step ", "failed "
START_SECONDS = {"ipc": 40.0, "tcp": 60.0}
"""Seconds for a kernel to answer after its start. A kernel without ipc support may wait for ever."""
ANSWER_SECONDS = 30.0
CODE = "1"
"""A cell for any language: where it is no valid code, the kernel answers with an error, which is an answer too."""


class _Warnings(logging.Handler):
    """Keeps the last warning, which has a dead kernel's last output."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def main(place: Path) -> int:
    """Try the twin in the folder ``place``, and return the exit status."""
    signal.signal(signal.SIGTERM, _exit)
    warnings = _Warnings(logging.WARNING)
    manager = KernelSpecManager(kernel_dirs=[str(place.parent)])
    km = KernelManager(kernel_name=place.name, kernel_spec_manager=manager)
    km.log.addHandler(warnings)
    folder = place.parent.parent / "notebooks"
    folder.mkdir()
    try:
        _try(km, folder)
    except Exception as error:
        print(f"{FAILED}{' '.join(f'{error} {warnings.last}'.split())}", flush=True)
        return 1
    finally:
        if km.has_kernel:
            km.shutdown_kernel(now=True)
    return 0


def _try(km: KernelManager, folder: Path) -> None:
    _say("start")
    env = {**os.environ, "JPY_SESSION_NAME": str(folder / "trial.ipynb")}
    km.start_kernel(cwd=str(folder), env=env, stdout=DEVNULL, stderr=DEVNULL)
    kc = km.blocking_client()
    kc.start_channels()
    try:
        provisioner = km.provisioner
        assert isinstance(provisioner, SandboxProvisioner)
        kc.wait_for_ready(timeout=START_SECONDS[provisioner.guest_transport])
        _say("execute")
        _execute(kc)
        _say("checkpoint")
        asyncio.run(provisioner.hibernate())
        _say("restore")
        asyncio.run(provisioner.wake())
        _say("execute after the restore")
        _execute(kc)
    finally:
        kc.stop_channels()


def _execute(kc: BlockingKernelClient) -> None:
    """Run a cell, and wait for its reply and for the idle status. Raises TimeoutError."""
    request = kc.execute(CODE)
    deadline = time.monotonic() + ANSWER_SECONDS
    waiting = {"execute_reply", "idle"}
    while waiting:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the kernel sent no {' and no '.join(sorted(waiting))} within {ANSWER_SECONDS:.0f} s")
        with suppress(Empty):
            message = kc.get_iopub_msg(timeout=0.2) if "idle" in waiting else kc.get_shell_msg(timeout=0.2)
            if message["parent_header"].get("msg_id") == request:
                waiting -= {message["msg_type"], message["content"].get("execution_state")}


def _say(step: str) -> None:
    print(f"{STEP}{step}", flush=True)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
