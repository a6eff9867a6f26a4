"""Two servers and one bucket: a sandbox moves between them and never runs on both."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gcs_server import GCS
from value_program import LONG, close_all, start_program, tell

from sandbox_provisioner.config import GCSConfig, Place
from sandbox_provisioner.errors import LeaseHeldError
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.sandbox.manager import SandboxManager
from sandbox_provisioner.sandbox.start_request import Features

pytestmark = pytest.mark.runsc

POLITE = Features(enable_handoff=True)


@pytest.fixture(params=["unlimited", "limited"])
def config(request: pytest.FixtureRequest, gcs: GCS, tmp_path: Path) -> GCSConfig:
    """Settings that store everything in one bucket, without and with Google's limit on changes of an object."""
    if request.param == "limited":
        gcs.limit_mutations()
    return GCSConfig(
        tmp_path / "own",
        metadata=Place("SANDBOX_METADATA", gcs.bucket),
        locks=Place("SANDBOX_LOCK", gcs.bucket),
        checkpoints=Place("SANDBOX_CHECKPOINT", gcs.bucket),
        snapshots=Place("FILESYSTEM_SNAPSHOT", gcs.bucket),
        prefix="team",
    )


@pytest.fixture
async def pair(config: GCSConfig, runsc: Runsc) -> AsyncIterator[tuple[SandboxManager, SandboxManager]]:
    """Two servers."""
    managers = SandboxManager(config, runsc, "first"), SandboxManager(config, runsc, "second")
    yield managers
    for manager in managers:
        await close_all(manager)


async def begin(manager: SandboxManager, spec: BundleSpec, value: str, features: Features = POLITE) -> None:
    handle = await manager.create("box", spec, features=features)
    await manager.get("box").start()
    await start_program(handle)
    await tell(handle, f"set {value}")


async def test_sandbox_moves_back_and_forth_with_state(
    pair: tuple[SandboxManager, SandboxManager], spec: BundleSpec
) -> None:
    owner, other = pair
    await begin(owner, spec, "0")
    for number in (1, 2):
        handle = await other.attach("box", spec, POLITE, patience=LONG)
        await other.get("box").restore()
        assert await tell(handle, "get") == str(number - 1)
        await tell(handle, f"set {number}")
        assert "box" not in owner.handles
        owner, other = other, owner


async def test_lease_error_without_hand_off_names_the_owner(
    pair: tuple[SandboxManager, SandboxManager], spec: BundleSpec
) -> None:
    first, second = pair
    await begin(first, spec, "1", Features())
    with pytest.raises(LeaseHeldError, match=f"in use by first .process {os.getpid()}"):
        await second.attach("box", spec)
    assert await tell(first.get("box"), "get") == "1"


async def test_transient_storage_failures_are_survived(
    pair: tuple[SandboxManager, SandboxManager], spec: BundleSpec, gcs: GCS
) -> None:
    first, second = pair
    gcs.fault("status", code=503, probability=0.05, times=None)
    gcs.fault("status", code=429, probability=0.05, times=None)
    gcs.fault("cut", probability=0.05, times=None)
    gcs.fault("lose", probability=0.05, times=None)
    await begin(first, spec, "1")
    for _ in range(3):
        await first.get("box").save()
        await first.get("box").restore()
    await first.close(first.get("box"), save=True)
    handle = await second.attach("box", spec)
    await second.get("box").restore()
    assert await tell(handle, "get") == "1"


FROZEN = """
import asyncio, pickle, sys
sys.path.insert(0, sys.argv[2])
from value_program import start_program, tell
from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.sandbox.manager import SandboxManager

async def main():
    spec, runsc, config = pickle.loads(bytes.fromhex(sys.argv[1]))
    manager = SandboxManager(config, runsc, "frozen")
    handle = await manager.create("box", spec)
    await manager.get("box").start()
    await start_program(handle)
    await tell(handle, "set saved")
    await manager.get("box").save()
    await manager.get("box").restore()
    await tell(handle, "set unsaved")
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        await manager.get("box").save()
        print("it was saved", flush=True)
    except SandboxError as error:
        print(type(error).__name__, error, flush=True)
    await manager.close(manager.get("box"), save=False)

asyncio.run(main())
"""


def start_frozen(spec: BundleSpec, runsc: Runsc, config: GCSConfig) -> subprocess.Popen[str]:
    given = pickle.dumps((spec, runsc, config)).hex()
    command = [sys.executable, "-c", FROZEN, given, str(Path(__file__).parents[1] / "support")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
async def test_server_paused_past_its_lease_cannot_write(
    pair: tuple[SandboxManager, SandboxManager], spec: BundleSpec, runsc: Runsc, config: GCSConfig
) -> None:
    frozen = start_frozen(spec, runsc, config)
    assert frozen.stdin and frozen.stdout
    try:
        assert frozen.stdout.readline() == "ready\n"
        frozen.send_signal(signal.SIGSTOP)
        heir, _ = pair
        handle = await heir.attach("box", spec, POLITE, patience=2 * LONG)
        await heir.get("box").restore()
        assert await tell(handle, "get") == "saved"
        frozen.send_signal(signal.SIGCONT)
        frozen.stdin.write("go on\n")
        frozen.stdin.flush()
        outcome = await asyncio.to_thread(frozen.stdout.readline)
        assert outcome.startswith(("FencedError", "SandboxNotFoundError")), outcome
        await tell(handle, "set heir's")
        await heir.get("box").save()
        await heir.get("box").restore()
        assert await tell(handle, "get") == "heir's"
    finally:
        frozen.communicate(timeout=LONG)
