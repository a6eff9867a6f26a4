"""Test that failed requests for a sandbox do not delete saved state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apis import KEEPER, Api, serving

pytestmark = pytest.mark.runsc


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One server for all tests."""
    with serving(tmp_path_factory.mktemp("api")) as api:
        yield api


def data(api: Api) -> Path:
    folder: Path = api.server.runtime.parent / "data" / "sandbox"
    return folder


def save(api: Api, **body: Any) -> dict[str, Any]:
    """Return a saved sandbox that is not open."""
    sandbox: dict[str, Any] = api.good("POST", "", {"kernel_name": KEEPER, **body})
    api.run(sandbox, "x = 1")
    api.good("POST", f"/{sandbox['id']}/hibernate")
    api.server.ask("DELETE", f"kernels/{sandbox['kernel_id']}")
    return sandbox


def forget(api: Api, sandbox: dict[str, Any]) -> None:
    """Delete the record of a sandbox, as if another server had created it."""
    (data(api) / "registry" / f"{sandbox['id']}.json").unlink()


def damage(path: Path) -> bytes:
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    return good


def image(api: Api, sandbox: dict[str, Any]) -> Path:
    (found,) = (data(api) / "storage" / "sandboxes" / sandbox["sandbox_id"]).rglob("pages.img")
    return found


@pytest.mark.parametrize("body", [{"sandbox_id": "theirs"}, {"notebook_path": "theirs.ipynb"}], ids=str)
def test_failed_restore_keeps_saved_state(api: Api, body: dict[str, Any]) -> None:
    sandbox = save(api, **body)
    forget(api, sandbox)
    pages = image(api, sandbox)
    good = damage(pages)
    api.bad(422, "POST", "", {"kernel_name": KEEPER, **body})
    pages.write_bytes(good)
    again = api.good("POST", "", {"kernel_name": KEEPER, **body})
    assert api.run(again, "print(x)") == "1\n"
    api.good("DELETE", f"/{again['id']}")


def test_copy_does_not_replace_existing_sandbox(api: Api) -> None:
    theirs, source = (
        save(api, sandbox_id="theirs"),
        api.good("POST", "", {"kernel_name": KEEPER, "sandbox_id": "source"}),
    )
    api.good("POST", "/source/savepoints", {"name": "one"})
    forget(api, theirs)
    wanted = {"sandbox_id": "theirs", "savepoint": {"id": "source", "name": "one"}}
    assert api.bad(409, "POST", "", wanted)["type"] == "urn:sandbox:exists"
    again = api.good("POST", "", {"kernel_name": KEEPER, "sandbox_id": "theirs"})
    assert api.run(again, "print(x)") == "1\n"
    for one in (again, source):
        api.good("DELETE", f"/{one['id']}")


def test_copy_does_not_take_notebook_of_saved_sandbox(api: Api) -> None:
    saved = save(api, notebook_path="a.ipynb")
    source = api.good("POST", "", {"kernel_name": KEEPER, "sandbox_id": "source"})
    assert "saved" in api.bad(409, "POST", "/source/fork", {"notebook_path": "a.ipynb"})["detail"]
    for one in (saved, source):
        api.good("DELETE", f"/{one['id']}")


def test_sandbox_opened_by_id_keeps_its_notebook(api: Api) -> None:
    saved = save(api, notebook_path="a.ipynb")
    woken = api.good("POST", "", {"kernel_name": KEEPER, "sandbox_id": saved["sandbox_id"]})
    assert (woken["id"], woken["notebook_path"]) == (saved["id"], "a.ipynb")
    api.server.ask("DELETE", f"kernels/{woken['kernel_id']}")
    again = api.good("POST", "", {"kernel_name": KEEPER, "notebook_path": "a.ipynb"})
    assert api.run(again, "print(x)") == "1\n"
    api.good("DELETE", f"/{again['id']}")


def test_failed_snapshot_load_keeps_saved_state(api: Api) -> None:
    sandbox, source = (
        save(api, notebook_path="a.ipynb"),
        api.good("POST", "", {"kernel_name": KEEPER, "sandbox_id": "source"}),
    )
    api.good("POST", "/source/snapshots", {"name": "one"})
    (archive,) = data(api).rglob("files.tar")
    damage(archive)
    wanted = {"kernel_name": KEEPER, "notebook_path": "a.ipynb", "snapshot": {"id": "source", "name": "one"}}
    api.bad(422, "POST", "", wanted)
    again = api.good("POST", f"/{sandbox['id']}/wake")
    assert api.run(again, "print(x)") == "1\n"
    for one in (again, source):
        api.good("DELETE", f"/{one['id']}")
