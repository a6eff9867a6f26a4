"""Kill a server with SIGKILL before and after each storage operation: the sandbox is never lost.

Afterwards another server can attach to it, in its old or its new state, and no garbage is left.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gcs_server import GCS
from value_program import LONG, close_all, tell

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.errors import SandboxNotFoundError
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.sandbox.manager import SandboxManager

pytestmark = pytest.mark.runsc

NEVER = 1 << 30


class Crash:
    """A server that is killed (``killed_server.py``), and another one that uses its storage afterwards."""

    def __init__(self, folder: Path, spec: BundleSpec, runsc: Runsc, bucket: str = "") -> None:
        buckets = ("SANDBOX_METADATA", "SANDBOX_LOCK", "SANDBOX_CHECKPOINT", "FILESYSTEM_SNAPSHOT")
        places = {f"{name}_BUCKET": bucket for name in buckets} | {"SANDBOX_OBJECT_PREFIX": folder.name}
        key = {"SANDBOX_SIGNING_KEY": os.environ["SANDBOX_SIGNING_KEY"]}
        self.config = GCSConfig.from_environment(folder / "storage", key | places if bucket else key)
        self.spec = spec
        self.runsc = runsc
        self._given = folder / "given"
        folder.mkdir()
        self._given.write_bytes(pickle.dumps((spec, runsc, self.config)))

    def run_victim(self, at: int, act: str) -> list[str]:
        """Run the server until it is killed at step ``at``. Return the lines of its output."""
        script = Path(__file__).parents[1] / "support" / "killed_server.py"
        ended = subprocess.run(
            [sys.executable, str(script), str(at), act, str(self._given)], capture_output=True, text=True
        )
        assert ended.returncode == (0 if at == NEVER else -9), ended.stderr
        return ended.stdout.splitlines()

    async def recovered_value(self) -> str | None:
        """Return the sandbox's value as another server finds it, or None without a sandbox."""
        manager = SandboxManager(self.config, self.runsc, "next")
        try:
            await manager.recover()
            try:
                handle = await manager.attach("box", self.spec, patience=60)
            except SandboxNotFoundError:
                return None
            if handle.metadata.checkpoint is None:
                return "nothing"
            await manager.get("box").restore()
            if "program" not in handle.contents:
                return "nothing"
            value = await tell(handle, "get")
            assert handle.memory.stored.cleanup_task is not None
            await handle.memory.stored.cleanup_task
            async with asyncio.timeout(LONG):  # a thread removes the folder
                while list(manager.stores.staging.iterdir()):
                    await asyncio.sleep(0.01)
            self.require_no_garbage(manager, handle.metadata.checkpoint.artifact.name)
            return value
        finally:
            await close_all(manager)

    def require_no_garbage(self, manager: SandboxManager, checkpoint: str) -> None:
        kept = {info.name for info in manager.stores.metadata.list("sandboxes/")} - {"sandboxes/box/lock"}
        assert {name for name in kept if not name.startswith(checkpoint)} == {"sandboxes/box/metadata.json"}


def last(output: list[str], word: str) -> int:
    return max((int(line.split()[1]) for line in output if line.startswith(word)), default=0)


def sample(total: int, few: bool) -> Iterator[int]:
    """Return all steps or, with ``few``, about six of them."""
    return iter(range(0, total, max(1, total // 6) | 1) if few else range(total))


def kill_in_life(tmp_path: Path, spec: BundleSpec, runsc: Runsc, few: bool, bucket: str = "") -> None:
    output = Crash(tmp_path / "whole", spec, runsc, bucket).run_victim(NEVER, "live")
    for at in sample(last(output, "calls"), few):
        crash = Crash(tmp_path / f"at-{at}", spec, runsc, bucket)
        output = crash.run_victim(at, "live")
        value = asyncio.run(crash.recovered_value())
        acked, saved = last(output, "acked"), last(output, "saved")
        if acked == 0:
            assert value in (None, "nothing", "1"), (at, output, value)
        else:
            assert value in (str(acked), str(acked + 1)), (at, output, value)
        assert saved <= acked


def kill_in_deletion(tmp_path: Path, spec: BundleSpec, runsc: Runsc, few: bool) -> None:
    whole = Crash(tmp_path / "whole-deletion", spec, runsc)
    whole.run_victim(NEVER, "live")
    total = last(whole.run_victim(NEVER, "delete"), "calls")
    for at in sample(total, few):
        crash = Crash(tmp_path / f"deletion-at-{at}", spec, runsc)
        crash.run_victim(NEVER, "live")
        crash.run_victim(at, "delete")
        value = asyncio.run(crash.recovered_value())
        assert value in ("3", None), (at, value)
        if value is None:
            left = SandboxManager(crash.config, runsc).stores.metadata.list("sandboxes/")
            assert left == [], at


def test_kill_at_sampled_storage_steps(tmp_path: Path, spec: BundleSpec, runsc: Runsc) -> None:
    kill_in_life(tmp_path, spec, runsc, few=True)


@pytest.mark.slow
def test_kill_at_every_storage_step(tmp_path: Path, spec: BundleSpec, runsc: Runsc) -> None:
    kill_in_life(tmp_path, spec, runsc, few=False)


@pytest.mark.slow
def test_kill_at_sampled_storage_steps_in_bucket(tmp_path: Path, spec: BundleSpec, runsc: Runsc, gcs: GCS) -> None:
    kill_in_life(tmp_path, spec, runsc, few=True, bucket=gcs.bucket)


@pytest.mark.slow
def test_kill_at_every_step_of_deletion(tmp_path: Path, spec: BundleSpec, runsc: Runsc) -> None:
    kill_in_deletion(tmp_path, spec, runsc, few=False)
