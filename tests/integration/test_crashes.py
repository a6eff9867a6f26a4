"""Kill a server with SIGKILL before and after each storage operation: the sandbox is never lost.

Afterwards it can be attached, in its old or its new state, and nothing that belongs to nobody is left.
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


class Killing:
    """A victim over one storage, and what was heard of it."""

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

    def victim(self, at: int, act: str) -> list[str]:
        """Let it act, and be killed at the given step; what it said until then."""
        script = Path(__file__).parents[1] / "support" / "killed_server.py"
        ended = subprocess.run(
            [sys.executable, str(script), str(at), act, str(self._given)], capture_output=True, text=True
        )
        assert ended.returncode == (0 if at == NEVER else -9), ended.stderr
        return ended.stdout.splitlines()

    async def heir(self, said: list[str]) -> str | None:
        """Return the sandbox's value as another server finds it, or None without a sandbox."""
        manager = SandboxManager(self.config, self.runsc, "heir")
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
            async with asyncio.timeout(LONG):  # it is removed in a thread
                while list(manager.stores.staging.iterdir()):
                    await asyncio.sleep(0.01)
            self.check_nothing_leaks(manager, handle.metadata.checkpoint.artifact.name)
            return value
        finally:
            await close_all(manager)

    def check_nothing_leaks(self, manager: SandboxManager, checkpoint: str) -> None:
        kept = {info.name for info in manager.stores.metadata.list("sandboxes/")} - {"sandboxes/box/lock"}
        assert {name for name in kept if not name.startswith(checkpoint)} == {"sandboxes/box/metadata.json"}


def last(said: list[str], word: str) -> int:
    return max((int(line.split()[1]) for line in said if line.startswith(word)), default=0)


def sample(total: int, few: bool) -> Iterator[int]:
    """All steps, or some that are spread over the whole life."""
    return iter(range(0, total, max(1, total // 6) | 1) if few else range(total))


def kill_in_life(tmp_path: Path, spec: BundleSpec, runsc: Runsc, few: bool, bucket: str = "") -> None:
    said = Killing(tmp_path / "whole", spec, runsc, bucket).victim(NEVER, "live")
    for at in sample(last(said, "calls"), few):
        killing = Killing(tmp_path / f"at-{at}", spec, runsc, bucket)
        said = killing.victim(at, "live")
        value = asyncio.run(killing.heir(said))
        acked, saved = last(said, "acked"), last(said, "saved")
        if acked == 0:
            assert value in (None, "nothing", "1"), (at, said, value)
        else:
            assert value in (str(acked), str(acked + 1)), (at, said, value)
        assert saved <= acked


def kill_in_deletion(tmp_path: Path, spec: BundleSpec, runsc: Runsc, few: bool) -> None:
    whole = Killing(tmp_path / "whole-deletion", spec, runsc)
    whole.victim(NEVER, "live")
    total = last(whole.victim(NEVER, "delete"), "calls")
    for at in sample(total, few):
        killing = Killing(tmp_path / f"deletion-at-{at}", spec, runsc)
        killing.victim(NEVER, "live")
        killing.victim(at, "delete")
        value = asyncio.run(killing.heir([]))
        assert value in ("3", None), (at, value)
        if value is None:
            left = SandboxManager(killing.config, runsc).stores.metadata.list("sandboxes/")
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
