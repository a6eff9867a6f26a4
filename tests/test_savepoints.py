"""Savepoints: a kernel's memory under a name, to rewind to and to fork from, on real runsc and real ipykernel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG, Notebook, Open

from sandbox_provisioner.errors import (
    ConfigurationError,
    SandboxError,
    SavepointExistsError,
    SavepointNotFoundError,
    TooManySavepointsError,
)
from sandbox_provisioner.events import JOURNAL, Entry, What
from sandbox_provisioner.io_thread import IO
from sandbox_provisioner.persistence.metadata import GCSSandboxMetadata
from sandbox_provisioner.sandbox import stored_state

pytestmark = pytest.mark.runsc


@pytest.fixture
def entries() -> Any:
    """What the journal tells meanwhile."""
    told: list[Entry] = []
    end = JOURNAL.subscribe(told.append)
    yield told
    end()


def document(notebook: Notebook) -> GCSSandboxMetadata:
    metadata: GCSSandboxMetadata = notebook.km.provisioner.handle.metadata
    return metadata


def savepoint(notebook: Notebook, name: str) -> None:
    asyncio.run(notebook.km.provisioner.savepoint(name))


def rewind(notebook: Notebook, name: str) -> str:
    kept = asyncio.run(notebook.km.provisioner.rewind(name))
    notebook.kc.wait_for_ready(timeout=LONG)
    return str(kept)


def images(data: Path) -> set[str]:
    return {path.parent.name for path in (data / "sandbox" / "storage").rglob("pages.img")}


def test_a_kernel_runs_on_after_a_savepoint_and_is_rewound_to_it(open_notebook: Open, entries: list[Entry]) -> None:
    notebook = open_notebook()
    notebook.run("x = 1\ndef counter():\n    yield from range(100)\nnumbers = counter(); next(numbers)")
    savepoint(notebook, "one")
    assert notebook.run("x += 1; print(x, next(numbers))") == "2 1\n"
    kept = rewind(notebook, "one")
    assert notebook.run("print(x, next(numbers))") == "1 1\n"
    assert set(document(notebook).savepoints) == {"one", kept}
    rewind(notebook, kept)
    assert notebook.run("print(x, next(numbers))") == "2 2\n"
    happened = [entry.what for entry in entries if entry.what != What.PROGRESS]
    assert happened.count(What.SAVED) == 1
    assert happened.count(What.REWOUND) == 2


def test_a_rewound_kernel_hibernates_wakes_and_ends_as_any_other(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    savepoint(notebook, "one")
    notebook.run("x = 2")
    rewind(notebook, "one")
    notebook.hibernate()
    assert notebook.run("print(x)") == "1\n"
    notebook.run("x = 3")
    notebook.end(keep=True)
    again = open_notebook()
    assert again.run("print(x)") == "1\n"  # what runs is not saved by an end, and the last checkpoint is before x = 3
    assert "one" in document(again).savepoints


def test_one_that_sleeps_gets_a_savepoint_without_waking_and_is_rewound(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    notebook.hibernate()
    savepoint(notebook, "asleep")
    assert notebook.asleep
    notebook.run("x = 2")
    notebook.hibernate()
    rewind(notebook, "asleep")
    assert notebook.run("print(x)") == "1\n"


def test_a_cell_that_runs_at_a_savepoint_runs_on_from_there_in_both(open_notebook: Open) -> None:
    notebook = open_notebook()
    request = notebook.kc.execute("import time\nx = 0\nwhile x < 40:\n    x += 1\n    time.sleep(0.1)\nprint('end')")
    notebook.iopub(request)
    savepoint(notebook, "running")
    assert "".join(notebook.outputs(request)) == "end\n"
    rewind(notebook, "running")
    assert notebook.run("print(x)") == "40\n"  # it was asked after the cell, which had to come to its end again


def test_images_of_savepoints_are_kept_until_they_are_deleted(open_notebook: Open, data: Path) -> None:
    notebook = open_notebook()
    savepoint(notebook, "one")
    (first,) = images(data)
    for _ in range(3):
        notebook.hibernate()
        notebook.run("pass")
    assert first in images(data)
    asyncio.run(notebook.km.provisioner.drop_savepoint("one"))
    assert first not in images(data)
    assert document(notebook).savepoints == {}


def test_names_are_taken_once_valid_and_known(open_notebook: Open) -> None:
    notebook = open_notebook()
    savepoint(notebook, "one")
    with pytest.raises(SavepointExistsError, match="has a savepoint one already"):
        savepoint(notebook, "one")
    with pytest.raises(ConfigurationError, match=r"'\.\./one'"):
        savepoint(notebook, "../one")
    with pytest.raises(SavepointNotFoundError, match=r"no savepoint 'two'\. It has one\."):
        rewind(notebook, "two")
    with pytest.raises(SavepointNotFoundError):
        asyncio.run(notebook.km.provisioner.drop_savepoint("two"))
    assert notebook.run("print(1)") == "1\n"


def test_an_ephemeral_kernel_has_none(open_notebook: Open) -> None:
    notebook = open_notebook("")
    with pytest.raises(SandboxError, match="is ephemeral: nothing of it is kept"):
        savepoint(notebook, "one")


def test_a_damaged_savepoint_leaves_the_present_as_it_is(open_notebook: Open, data: Path) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    savepoint(notebook, "one")
    (image,) = (data / "sandbox" / "storage").rglob("pages.img")
    notebook.run("x = 2")
    image.write_bytes(image.read_bytes()[:-1])
    with pytest.raises(SandboxError, match="damaged"):
        rewind(notebook, "one")
    notebook.kc.wait_for_ready(timeout=LONG)
    assert notebook.run("print(x)") == "2\n"


def test_rewind_cancelled_at_any_moment_leaves_one_of_both_states(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 'then'")
    savepoint(notebook, "one")
    for turn in range(6):
        notebook.run("x = 'now'")
        with suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(notebook.km.provisioner.rewind("one"), turn * 0.15))
        notebook.kc.wait_for_ready(timeout=LONG)
        assert notebook.run("print(x)") in ("now\n", "then\n")


def test_a_fork_goes_its_own_way_with_other_random_numbers(
    open_notebook: Open, sandboxed: Callable[..., str], data: Path, start_kernel: Any
) -> None:
    notebook = open_notebook()
    notebook.run("import random\nx = 1; random.seed(7)")
    savepoint(notebook, "one")
    notebook.run("x = 2")
    asyncio.run(notebook.km.provisioner.fork("from-savepoint", "one"))
    asyncio.run(notebook.km.provisioner.fork("from-present"))
    first = random_numbers(notebook)
    for name, expected in (("from-savepoint", "1\n"), ("from-present", "2\n")):
        fork = open_notebook("", sandbox_id=name)
        assert fork.run("print(x)") == expected
        assert random_numbers(fork) != first
        fork.run("x = 'own'")
        fork.hibernate()
        assert fork.run("print(x)") == "own\n"
    assert notebook.run("print(x)") == "2\n"


def random_numbers(notebook: Notebook) -> str:
    return notebook.run("print([random.random() for _ in range(3)])")


# -- from inside the notebook ------------------------------------------------------------------------------------------


def test_a_notebook_saves_and_rewinds_itself_and_both_cells_end(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    assert notebook.run("%sandbox savepoint before").startswith("Saved as before")
    notebook.run("x = 2")
    for _ in range(3):
        said = notebook.run("%sandbox rewind before")
        assert said.startswith("Rewound to before; what was is kept as savepoint before-rewind-")
        assert notebook.run("print(x); x = 3") == "1\n"
    assert notebook.km.provisioner.handle.metadata.sandbox_id in notebook.run("%sandbox status")
    assert len(document(notebook).savepoints) == 4


def test_a_rewind_that_cannot_be_is_an_error_of_the_cell_and_changes_nothing(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    reply = notebook.reply(notebook.kc.execute("%sandbox rewind nothing"))
    assert (reply["status"], reply["ename"]) == ("error", "UsageError")
    assert "has no savepoint 'nothing'" in reply["evalue"]
    assert notebook.run("print(x)") == "1\n"
    assert document(notebook).savepoints == {}


def test_many_rewinds_at_once_and_a_restart_end_with_one_kernel(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    savepoint(notebook, "one")
    notebook.kc.execute(FLOOD)
    time.sleep(0.5)  # any moment of the rewinds will do
    notebook.km.restart_kernel()
    notebook.kc.wait_for_ready(timeout=LONG)
    assert notebook.run("print('x' in globals())") == "False\n"
    assert notebook.km.is_alive()
    rewind(notebook, "one")
    assert notebook.run("print(x)") == "1\n"


FLOOD = """
import json, socket
asking = []
for _ in range(8):
    one = socket.socket(socket.AF_UNIX)
    one.connect("/run/jupyter/sandbox")
    one.sendall(json.dumps({"op": "rewind", "name": "one"}).encode())
    one.shutdown(socket.SHUT_WR)
    asking.append(one)
"""


def test_what_ran_beside_a_kernel_ends_when_that_is_rewound(open_notebook: Open) -> None:
    notebook = open_notebook()
    savepoint(notebook, "one")

    async def watch() -> int:
        sandbox = notebook.km.provisioner.sandbox
        process = await IO.run(sandbox.execute(["sleep", "1000"]))
        status = asyncio.create_task(IO.run(process.wait()))
        await notebook.km.provisioner.rewind("one")
        return int(await asyncio.wait_for(status, LONG))

    assert asyncio.run(watch()) < 0


def test_with_as_many_savepoints_as_may_be_nothing_changes(
    open_notebook: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_state, "MAX_SAVEPOINTS", 1)
    notebook = open_notebook()
    notebook.run("x = 1")
    savepoint(notebook, "one")
    for change in (savepoint, rewind):
        with pytest.raises(TooManySavepointsError, match="Delete some"):
            change(notebook, "one" if change is rewind else "two")
    assert not notebook.asleep
    assert notebook.run("print(x)") == "1\n"
