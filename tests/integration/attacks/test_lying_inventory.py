"""A guest that reports invented files cannot make the sandbox's document large."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from value_program import local_stores, start_program, tell

from sandbox_provisioner.errors import UnsaveableError
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.state import State
from sandbox_provisioner.lock.base import Owner
from sandbox_provisioner.persistence import capture, compatibility
from sandbox_provisioner.persistence.backends import Stores
from sandbox_provisioner.persistence.names import metadata_name
from sandbox_provisioner.sandbox import memory
from sandbox_provisioner.sandbox.handle import SandboxHandle

pytestmark = pytest.mark.runsc

FORGED = """
import json, sys
names = ["/shared/%05d" % number + "x" * {length} for number in range({count})]
json.dump([(name, "open", "deleted") for name in names], sys.stdout)
"""


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return local_stores(tmp_path / "storage")


@pytest.fixture
async def sandbox(spec: BundleSpec, runsc: Runsc, stores: Stores, tmp_path: Path) -> AsyncIterator[SandboxHandle]:
    (tmp_path / "work").mkdir()
    spec = replace(spec, mounts=(*spec.mounts, Mount(str(tmp_path / "work"), "/shared", True)))
    made = await SandboxHandle.create_persistent("box", spec, runsc, stores, Owner.here("server"))
    await made.start()
    await start_program(made)
    await tell(made, "set 5")
    yield made
    await made.release()


async def forge_file_list(sandbox: SandboxHandle, count: int, length: int) -> None:
    """Replace the guest's tool that lists the files in use, so that it prints ``count`` invented names."""
    script = FORGED.format(count=count, length=length)
    change = ["sh", "-c", 'printf %s "$1" > /.sandbox/open_files.py', "sh", script]
    assert await (await sandbox.instance.execute(change)).wait() == 0


def document_size(stores: Stores) -> int:
    return stores.metadata.info(metadata_name("box")).size


async def test_checkpoint_with_too_many_names_is_refused(sandbox: SandboxHandle, stores: Stores) -> None:
    before = document_size(stores)
    await forge_file_list(sandbox, 16_000, 440)
    for saving in (sandbox.save, lambda: sandbox.save("one")):
        with pytest.raises(UnsaveableError, match=r"16,000 files that it uses has [\d,]+ bytes"):
            await saving()
    assert sandbox.instance.state == State.RUNNING
    assert await tell(sandbox, "get") == "5"
    assert document_size(stores) == before


async def test_savepoints_leave_room_for_checkpoint(
    sandbox: SandboxHandle, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MOST_WITH_SAVEPOINT", 1_000_000)
    await forge_file_list(sandbox, 1_000, 240)  # about 350,000 bytes for each checkpoint
    await sandbox.save("one")
    await sandbox.save("two")
    with pytest.raises(UnsaveableError, match=r"its stored document would have .* delete some of its savepoints"):
        await sandbox.save("three")
    assert document_size(stores) < 1_000_000
    assert sandbox.instance.state == State.RUNNING
    await sandbox.save()
    await sandbox.restore()
    assert await tell(sandbox, "get") == "5"


async def test_largest_number_of_examined_files_can_be_recorded(sandbox: SandboxHandle, stores: Stores) -> None:
    await forge_file_list(sandbox, compatibility.MOST_FILES, 200)
    await sandbox.save()
    assert document_size(stores) < capture.MOST_RECORDED + 100_000
    await sandbox.restore()
    assert await tell(sandbox, "get") == "5"
