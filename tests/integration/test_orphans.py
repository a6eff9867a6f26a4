"""A sandbox whose server was killed with SIGKILL: another process finds, saves and restores it."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_provisioner.errors import LinkClosedError
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.runtime_dir import RuntimeFolder, left_behind, sweep
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox

pytestmark = [pytest.mark.runsc, pytest.mark.debian, pytest.mark.user]
LONG = 60

COUNTING = """
import time
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.001)
"""

SERVER = """
import asyncio, os, pickle, signal, sys
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox

async def main():
    spec, runsc, code = pickle.loads(bytes.fromhex(sys.argv[1]))
    sandbox = GVisorSandbox("box", spec, runsc)
    sandbox.leave_note({"sandbox_id": "box"})
    await sandbox.start()
    process = await sandbox.execute([spec.python, "-c", code])
    print("running", flush=True)
    async for piece in process.stream():
        print(piece.data.split()[-1].decode(), flush=True)

asyncio.run(main())
"""


class Server:
    """A process that starts a sandbox with a counting program and prints the numbers that it receives."""

    def __init__(self, spec: BundleSpec, runsc: Runsc) -> None:
        given = pickle.dumps((spec, runsc, COUNTING)).hex()
        self._child = subprocess.Popen([sys.executable, "-c", SERVER, given], stdout=subprocess.PIPE, text=True)
        self._read("running")

    def _read(self, word: str) -> str:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if word in line:
                return line.strip()
        raise AssertionError("the server ended")

    def kill_at(self, number: int) -> None:
        """Kill the process when it has received ``number``."""
        assert self._child.stdout is not None
        while int(self._read("")) < number:
            pass
        self._child.kill()
        self._child.wait()
        self._child.stdout.close()


@pytest.fixture
def orphaned(spec: BundleSpec, runsc: Runsc, runtime: Path) -> RuntimeFolder:
    """Return the runtime folder of a sandbox whose server was killed while it received output."""
    Server(replace(spec, outlives=True), runsc).kill_at(200)
    return next(left_behind())


def adopt(folder: RuntimeFolder, spec: BundleSpec, runsc: Runsc) -> GVisorSandbox:
    note = folder.read_note()
    assert note is not None
    return GVisorSandbox.orphan("box", replace(spec, outlives=True), runsc, "systrap", folder, note["container_id"])


async def test_orphan_can_be_saved_and_restored(
    orphaned: RuntimeFolder, spec: BundleSpec, runsc: Runsc, tmp_path: Path
) -> None:
    assert orphaned.has_processes
    await adopt(orphaned, spec, runsc).checkpoint(tmp_path / "image")
    restored = GVisorSandbox("box", replace(spec, outlives=True), runsc)
    try:
        await asyncio.wait_for(restored.restore(tmp_path / "image"), LONG)
        process = restored.connection.process(1)
        assert process is not None
        received: list[int] = []
        async for piece in process.stream():
            received += map(int, piece.data.split()[1:-1])
            if len(received) > 500:
                break
        assert received[0] > 200
        assert len(received) - 1 <= received[-1] - received[0]
    finally:
        await restored.delete()


async def test_orphan_can_be_deleted_but_not_used_or_swept(
    orphaned: RuntimeFolder, spec: BundleSpec, runsc: Runsc
) -> None:
    sandbox = adopt(orphaned, spec, runsc)
    with pytest.raises(LinkClosedError, match="its server was killed"):
        await sandbox.execute(["/bin/true"])
    assert sweep() == []
    await sandbox.delete()
    assert not orphaned.path.exists()


async def test_failed_save_leaves_orphan_running(
    orphaned: RuntimeFolder, spec: BundleSpec, runsc: Runsc, tmp_path: Path
) -> None:
    sandbox = adopt(orphaned, spec, runsc)

    async def refuse() -> None:
        raise RuntimeError("storage is full")

    with pytest.raises(RuntimeError, match="storage is full"):
        await sandbox.checkpoint(tmp_path / "image", refuse)
    assert not (tmp_path / "image").exists()
    await sandbox.checkpoint(tmp_path / "image")
    assert (tmp_path / "image" / "checkpoint.img").exists()
    assert not orphaned.has_processes


def test_sandbox_without_note_ends_with_server(spec: BundleSpec, runsc: Runsc, runtime: Path) -> None:
    Server(spec, runsc).kill_at(10)
    (left,) = left_behind()
    (left.path / "note.json").unlink()
    left.release()
    assert sweep() == [left.path.name]
    assert os.listdir(runtime) == []
