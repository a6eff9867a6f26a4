"""Claims: which persistent sandbox a start belongs to, here and on a server that shares only the storage."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from gcs_faults import MUTATIONS
from gcs_server import GCS

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.errors import ConfigurationError, LeaseHeldError
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.sandbox.claims import Claim, Wanted
from sandbox_provisioner.sandbox.manager import Features
from sandbox_provisioner.sandbox.registry import PersistentSandboxRegistry
from sandbox_provisioner.sandbox.user_sandboxes import registry

LIMIT = 20
Make = Callable[..., Awaitable[Claim]]

NOTEBOOK = Wanted("python3-sandbox", "/work/a.ipynb", user="me")


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Goes to another machine: another data folder, and so another registry."""

    def move(machine: str) -> None:
        monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / machine))

    monkeypatch.setenv("LOGNAME", "me")
    move("here")
    return move


@pytest.fixture
async def make(runsc: Runsc, tmp_path: Path, move: Callable[[str], None]) -> AsyncIterator[Make]:
    """Makes claims over one storage, and gives them up after the test."""
    made: list[Claim] = []

    async def make(wanted: Wanted = NOTEBOOK, features: Features | None = None) -> Claim:
        config = GCSConfig(tmp_path / "storage")
        made.append(await Claim.make(wanted, config, runsc, "server", features or Features(), 0.0))
        return made[-1]

    yield make
    for claim in made:
        await claim.give_up(forget=False)


async def claimed(make: Make, wanted: Wanted = NOTEBOOK) -> str:
    """The id of the sandbox that is claimed, and given up again."""
    claim = await make(wanted)
    await claim.give_up(forget=False)
    return claim.record.sandbox_id


async def test_a_notebook_and_kernel_have_one_sandbox_on_every_machine(make: Make, move: Callable[[str], None]) -> None:
    first = await claimed(make)
    assert await claimed(make) == first
    move("elsewhere")
    assert await claimed(make) == first
    assert await claimed(make, Wanted("ir-sandbox", "/work/a.ipynb", user="me")) != first
    assert await claimed(make, Wanted("python3-sandbox", "/work/b.ipynb", user="me")) != first
    move("yours")
    assert await claimed(make, Wanted("python3-sandbox", "/work/a.ipynb", user="you")) != first


async def test_one_in_use_is_refused_with_its_owner(make: Make) -> None:
    mine = Wanted("python3-sandbox", "/work/a.ipynb", "mine", user="me")
    await make(mine)
    with pytest.raises(LeaseHeldError, match="in use by server"):
        await make(mine)


async def test_failed_claim_releases_the_lease(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(PersistentSandboxRegistry, "record", fail)
        await make()
    await make()


async def test_cancelled_claim_releases_the_lease(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(*args: object, **kwargs: object) -> None:
        reached.set()
        go_on.wait(LIMIT)

    with monkeypatch.context() as slow:
        slow.setattr(PersistentSandboxRegistry, "record", wait)
        making = asyncio.create_task(make())  # type: ignore[arg-type]
        await asyncio.to_thread(reached.wait, LIMIT)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        go_on.set()
    await make()


async def test_a_notebook_that_changes_its_kernel_for_the_same_gets_a_new_sandbox_and_keeps_that(make: Make) -> None:
    first = await make()
    second = await make()
    assert second.record.sandbox_id != first.record.sandbox_id
    await first.give_up(forget=True)
    await second.give_up(forget=False)
    assert await claimed(make) == second.record.sandbox_id


async def test_a_renamed_notebook_takes_its_sandbox_along(make: Make, move: Callable[[str], None]) -> None:
    claim = await make()
    await claim.follow("/work/new.ipynb")
    await claim.give_up(forget=False)
    new = Wanted("python3-sandbox", "/work/new.ipynb", user="me")
    assert await claimed(make, new) == claim.record.sandbox_id
    assert await claimed(make) != claim.record.sandbox_id
    move("elsewhere")
    assert await claimed(make) != claim.record.sandbox_id


async def test_an_id_of_the_users_own_wins(make: Make) -> None:
    mine = Wanted("python3-sandbox", "/work/a.ipynb", "mine", user="me")
    assert await claimed(make, mine) == "mine"


async def test_gcs_is_demanded_before_anything_is_made(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        await make(Wanted("python3-sandbox", "", "mine", gcs=True, user="me"))
    assert refusal.value.setting == "SANDBOX_LOCK_BUCKET"
    assert not (tmp_path / "storage").exists()
    assert registry().list().records == []


async def test_gcs_id_needs_only_lock_and_metadata_buckets(
    gcs: GCS, runsc: Runsc, tmp_path: Path, move: Callable[[str], None]
) -> None:
    """The lease of a new sandbox is taken once: Google allows about one change of an object per second."""
    buckets = {"SANDBOX_LOCK_BUCKET": gcs.bucket, "SANDBOX_METADATA_BUCKET": gcs.bucket}
    config = GCSConfig.from_environment(tmp_path / "own", buckets)
    wanted = Wanted("python3-sandbox", "", "mine", gcs=True, user="me")
    for features in (Features(enable_handoff=True), Features(enable_checkpoint_at_idle=True)):
        with pytest.raises(ConfigurationError) as refusal:
            await Claim.make(wanted, config, runsc, "server", features, 0.0)
        assert refusal.value.setting == "SANDBOX_CHECKPOINT_BUCKET"
    assert [name for _, name in gcs.requests() if name] == []
    claim = await Claim.make(wanted, config, runsc, "server", Features(), 0.0)
    changes = [name for operation, name in gcs.requests() if operation in MUTATIONS]
    assert sorted(changes) == ["sandboxes/mine/lock", "sandboxes/mine/metadata.json"]
    await claim.give_up(forget=True)


async def test_to_forget_is_to_delete_unless_another_has_it(make: Make) -> None:
    claim = await make()
    await claim.manager.release(claim.record.sandbox_id)
    await claim.give_up(forget=True)
    assert registry().load(claim.record.id) == claim.record or registry().list().records
    again = await make()
    await again.give_up(forget=True)
    assert registry().list().records == []
    assert [info.name for info in again.manager.stores.metadata.list("sandboxes/")] == []


async def test_claims_at_once_do_not_take_the_sandbox_from_each_other(make: Make) -> None:
    first, second = await asyncio.gather(make(), make())
    assert first.record.sandbox_id != second.record.sandbox_id
    assert [claim.handle.lease.wanted.is_set() for claim in (first, second)] == [False, False]
