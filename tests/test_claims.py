"""Claims: which persistent sandbox a start belongs to, here and on a server that shares only the storage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sandbox_provisioner.claims import Claim, Wanted
from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.errors import ConfigurationError, LeaseHeldError
from sandbox_provisioner.manager import Features
from sandbox_provisioner.persistence import registry
from sandbox_provisioner.runsc import Runsc

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


async def test_to_forget_is_to_delete_unless_another_has_it(make: Make) -> None:
    claim = await make()
    await claim.manager.release(claim.record.sandbox_id)
    await claim.give_up(forget=True)
    assert registry().load(claim.record.id) == claim.record or registry().list().records
    again = await make()
    await again.give_up(forget=True)
    assert registry().list().records == []
    assert [info.name for info in again.manager.stores.metadata.list("sandboxes/")] == []
