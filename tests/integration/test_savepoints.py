"""Savepoints with real runsc and ipykernel: rewind to them and fork from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kernels import LONG, Notebook, Open

from sandbox_provisioner.errors import (
    ConfigurationError,
    SandboxError,
    SavepointExistsError,
    SavepointNotFoundError,
    TooManySavepointsError,
)
from sandbox_provisioner.events import EVENT_BUS, Entry, EventKind
from sandbox_provisioner.io_thread import IO
from sandbox_provisioner.persistence.metadata import GCSSandboxMetadata
from sandbox_provisioner.sandbox import stored_state

pytestmark = [pytest.mark.runsc, pytest.mark.template_copies]


@pytest.fixture
def entries() -> Any:
    """The events that are published during the test."""
    published: list[Entry] = []
    unsubscribe = EVENT_BUS.subscribe(published.append)
    yield published
    unsubscribe()


def document(notebook: Notebook) -> GCSSandboxMetadata:
    metadata: GCSSandboxMetadata = notebook.km.provisioner.handle.metadata
    return metadata


def savepoint(notebook: Notebook, name: str) -> None:
    asyncio.run(notebook.km.provisioner.savepoint(name))


def rewind(notebook: Notebook, name: str) -> str:
    """Rewind the kernel. Return the name of the savepoint with the state before."""
    before = asyncio.run(notebook.km.provisioner.rewind(name))
    notebook.kc.wait_for_ready(timeout=LONG)
    return str(before)


def images(data: Path) -> set[str]:
    return {path.parent.name for path in (data / "sandbox" / "storage").rglob("pages.img")}


@pytest.mark.debian
def test_savepoint_and_rewind(open_notebook: Open, entries: list[Entry]) -> None:
    notebook = open_notebook()
    notebook.run("x = 1\ndef counter():\n    yield from range(100)\nnumbers = counter(); next(numbers)")
    savepoint(notebook, "one")
    assert notebook.run("x += 1; print(x, next(numbers))") == "2 1\n"
    before = rewind(notebook, "one")
    assert notebook.run("print(x, next(numbers))") == "1 1\n"
    assert set(document(notebook).savepoints) == {"one", before}
    rewind(notebook, before)
    assert notebook.run("print(x, next(numbers))") == "2 2\n"
    happened = [entry.what for entry in entries if entry.what != EventKind.PROGRESS]
    assert happened.count(EventKind.SAVED) == 1
    assert happened.count(EventKind.REWOUND) == 2


def test_rewound_kernel_hibernates_wakes_and_ends(open_notebook: Open) -> None:
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
    # end() does not save a running kernel: the last checkpoint is before x = 3, and a notice comes first.
    assert again.run("print(x)").endswith("\n1\n")
    assert "one" in document(again).savepoints


def test_savepoint_and_rewind_of_hibernated_kernel(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    notebook.hibernate()
    savepoint(notebook, "asleep")
    assert notebook.asleep
    notebook.run("x = 2")
    notebook.hibernate()
    rewind(notebook, "asleep")
    assert notebook.run("print(x)") == "1\n"


def test_running_cell_continues_after_savepoint_and_rewind(open_notebook: Open) -> None:
    notebook = open_notebook()
    request = notebook.kc.execute("import time\nx = 0\nwhile x < 40:\n    x += 1\n    time.sleep(0.1)\nprint('end')")
    notebook.iopub(request)
    savepoint(notebook, "running")
    assert "".join(notebook.outputs(request)) == "end\n"
    rewind(notebook, "running")
    assert notebook.run("print(x)") == "40\n"  # runs after the restored cell has ended once more


def test_savepoint_images_are_kept_until_deleted(open_notebook: Open, data: Path) -> None:
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


def test_savepoint_names_are_checked(open_notebook: Open) -> None:
    notebook = open_notebook()
    savepoint(notebook, "one")
    with pytest.raises(SavepointExistsError, match="already has a savepoint one"):
        savepoint(notebook, "one")
    with pytest.raises(ConfigurationError, match=r"'\.\./one'"):
        savepoint(notebook, "../one")
    with pytest.raises(SavepointNotFoundError, match=r"no savepoint 'two'\. Its savepoints: one\."):
        rewind(notebook, "two")
    with pytest.raises(SavepointNotFoundError):
        asyncio.run(notebook.km.provisioner.drop_savepoint("two"))
    assert notebook.run("print(1)") == "1\n"


def test_ephemeral_kernel_has_no_savepoints(open_notebook: Open) -> None:
    notebook = open_notebook("")
    with pytest.raises(SandboxError, match="is ephemeral"):
        savepoint(notebook, "one")


def test_damaged_savepoint_leaves_kernel_unchanged(open_notebook: Open, data: Path) -> None:
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


def test_fork_is_independent_with_other_random_numbers(
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


def test_repeated_rewinds_from_a_notebook(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    assert notebook.run("%sandbox savepoint before").startswith("Saved as before")
    notebook.run("x = 2")
    for _ in range(3):
        said = notebook.run("%sandbox rewind before")
        assert said.startswith("Rewound to before; the state before is kept as savepoint before-rewind-")
        assert notebook.run("print(x); x = 3") == "1\n"
    assert notebook.km.provisioner.handle.metadata.sandbox_id in notebook.run("%sandbox status")
    assert len(document(notebook).savepoints) == 4


def test_failed_rewind_is_a_cell_error(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    reply = notebook.reply(notebook.kc.execute("%sandbox rewind nothing"))
    assert (reply["status"], reply["ename"]) == ("error", "UsageError")
    assert "has no savepoint 'nothing'" in reply["evalue"]
    assert notebook.run("print(x)") == "1\n"
    assert document(notebook).savepoints == {}


def test_concurrent_rewinds_and_restart_leave_one_kernel(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    savepoint(notebook, "one")
    notebook.kc.execute(SEND_REWINDS)
    time.sleep(0.5)  # restart at some moment during the rewinds
    notebook.km.restart_kernel()
    notebook.kc.wait_for_ready(timeout=LONG)
    assert notebook.run("print('x' in globals())") == "False\n"
    assert notebook.km.is_alive()
    rewind(notebook, "one")
    assert notebook.run("print(x)") == "1\n"


SEND_REWINDS = """
import json, socket
connections = []
for _ in range(8):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("/run/jupyter/sandbox")
    connection.sendall(json.dumps({"op": "rewind", "name": "one"}).encode())
    connection.shutdown(socket.SHUT_WR)
    connections.append(connection)
"""


def test_rewind_ends_other_processes(open_notebook: Open) -> None:
    notebook = open_notebook()
    savepoint(notebook, "one")

    async def status_after_rewind() -> int:
        sandbox = notebook.km.provisioner.sandbox
        process = await IO.run(sandbox.execute(["sleep", "1000"]))
        status = asyncio.create_task(IO.run(process.wait()))
        await notebook.km.provisioner.rewind("one")
        return int(await asyncio.wait_for(status, LONG))

    assert asyncio.run(status_after_rewind()) < 0


def test_savepoint_limit_is_enforced(open_notebook: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_state, "MAX_SAVEPOINTS", 1)
    notebook = open_notebook()
    notebook.run("x = 1")
    savepoint(notebook, "one")
    for change in (savepoint, rewind):
        with pytest.raises(TooManySavepointsError, match="Delete one first"):
            change(notebook, "one" if change is rewind else "two")
    assert not notebook.asleep
    assert notebook.run("print(x)") == "1\n"
