"""Try a kernel in a sandbox before its twin is installed: start, execute, checkpoint, restore and execute again.

Each attempt runs in a process of its own, ``trial_kernel``, with its own data folder: it neither uses nor changes the
user's storage, and it can be ended at any time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._text import one_line
from ..config import STORAGE_FOLDERS
from ..errors import UnusableKernelError
from ..gvisor.runsc import Runsc
from .kernelspecs import Kernel, install_twin
from .progress import Note
from .trial_kernel import FAILED, STEP

TRANSPORTS = ("ipc", "tcp")
ATTEMPT_SECONDS = 120.0
"""Maximum seconds of one attempt; ``trial_kernel`` also limits each of its steps."""
ENDING_SECONDS = 15.0
"""Seconds for an attempt to end its sandbox after SIGTERM."""
OTHER_SANDBOX = ("sandbox_id", "gcs_sandbox_id", "storage_dir", "enable_handoff", "shared_with")
"""Settings that select a certain sandbox or storage: an attempt has its own."""
FIXED = {"persistent": True, "template": "none", "standby": 0, "on_shutdown": "delete"}
REASON = 300
"""Maximum characters of a reason."""


def find_transport(origin: Kernel, config: Mapping[str, Any], runsc: Runsc, note: Note) -> str:
    """Return the transport with which the kernel passes the trial: that in ``config`` is tried first, else ipc.

    ``config`` has the settings of the twin. Raises UnusableKernelError with the reason of each attempt.
    """
    reasons = {}
    for transport in sorted(TRANSPORTS, key=lambda one: one != config.get("guest_transport", TRANSPORTS[0])):
        note(transport)
        reason = attempt(origin, {**config, "guest_transport": transport}, runsc, note)
        if not reason:
            return transport
        reasons[transport] = reason
    parts = "; ".join(f"with {transport}, {reason}" for transport, reason in reasons.items())
    raise UnusableKernelError(
        f"Kernel {origin.name} cannot be used in a sandbox: {parts}.",
        f"If it works without a sandbox, report this. Try again with `jupyter sandbox setup --kernel {origin.name}`.",
    )


def attempt(origin: Kernel, config: Mapping[str, Any], runsc: Runsc, note: Note) -> str:
    """Try the kernel with these settings. Return the reason of a failure; an empty string if it works."""
    with tempfile.TemporaryDirectory(prefix="jupyter-sandbox-trial-") as folder:
        settings = {name: value for name, value in config.items() if name not in OTHER_SANDBOX}
        twin = install_twin(origin, Path(folder, "kernels"), {**settings, **FIXED})
        command = [sys.executable, "-P", "-m", "sandbox_provisioner.setup.trial_kernel", str(twin.folder)]
        with subprocess.Popen(
            command,
            env=_environment(Path(folder), runsc),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            return _follow(process, note)


def _follow(process: subprocess.Popen[str], note: Note) -> str:
    """Report the steps of an attempt, and return the reason of a failure. End the attempt after ATTEMPT_SECONDS."""
    assert process.stdout is not None
    limits = [
        threading.Timer(ATTEMPT_SECONDS, process.terminate),
        threading.Timer(ATTEMPT_SECONDS + ENDING_SECONDS, process.kill),
    ]
    for limit in limits:
        limit.start()
    step = reason = ""
    try:
        for line in process.stdout:
            if line.startswith(STEP):
                step = one_line(line.removeprefix(STEP).strip())
                note(step)
            elif line.startswith(FAILED):
                reason = one_line(line.removeprefix(FAILED).strip())[:REASON].rstrip(". ")
        status = process.wait()
    finally:
        for limit in limits:
            limit.cancel()
        _end(process)
    if status == 0:
        return ""
    if status in (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL):
        reason = f"the attempt took longer than {ATTEMPT_SECONDS:.0f} s"
    return f"it failed at the step {step!r}: {reason or f'the attempt ended with status {status}'}"


def _end(process: subprocess.Popen[str]) -> None:
    """End an attempt that was interrupted, and give it time to end its sandbox."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _environment(folder: Path, runsc: Runsc) -> dict[str, str]:
    """Return the environment of an attempt: that of this process, with an own data folder and local storage."""
    ours = ("SANDBOX_ID", "GCS_SANDBOX_ID", *STORAGE_FOLDERS)
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.endswith("_BUCKET")}
    return {**kept, "JUPYTER_DATA_DIR": str(folder / "data"), "SANDBOX_RUNSC": str(runsc.path)}
