"""Test the warm pool with real kernels."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel_templates import is_copy
from kernels import run
from servers import Server

from sandbox_provisioner.gvisor.state import State
from sandbox_provisioner.templates import warm_pool
from sandbox_provisioner.templates.store import TemplateShelf
from sandbox_provisioner.templates.warm_pool import WARM_POOL, scarce

pytestmark = [pytest.mark.runsc, pytest.mark.templates]

Start = Callable[..., Any]
Sandboxed = Callable[..., str]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Empty the pool after each test."""
    yield
    asyncio.run(WARM_POOL.end())


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_start_takes_a_copy_and_the_pool_is_refilled(
    start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    name = sandboxed(standby=1)
    km, _ = start_kernel(name)
    assert is_copy(km)
    until(lambda: len(WARM_POOL.copies) == 1)
    waiting = WARM_POOL.copies[0].sandbox
    km, kc = start_kernel(name)
    assert km.provisioner.sandbox is waiting
    assert (waiting.sandbox_id, WARM_POOL.copies) == (km.kernel_id, [])
    run(kc, "open('made', 'w').write('inside')")
    assert (notebook_folder / "made").read_text() == "inside"
    until(lambda: len(WARM_POOL.copies) == 1)
    assert WARM_POOL.copies[0].sandbox is not waiting


def test_copy_from_the_pool_can_be_persistent(open_notebook: Start) -> None:
    open_notebook("a.ipynb", standby=1)
    until(lambda: len(WARM_POOL.copies) == 1)
    waiting = WARM_POOL.copies[0].sandbox
    notebook = open_notebook("b.ipynb", standby=1)
    assert notebook.km.provisioner.sandbox is waiting
    notebook.run("x = 1")
    notebook.hibernate()
    assert notebook.run("x") == "1"


def test_pool_follows_the_folder_of_the_last_start(
    start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    name = sandboxed(standby=2)
    start_kernel(name)
    until(lambda: len(WARM_POOL.copies) == 2)
    other = notebook_folder / "other"
    other.mkdir()
    km, _ = start_kernel(name, cwd=str(other))
    assert is_copy(km)
    until(lambda: [copy.match.spec.carried.source for copy in WARM_POOL.copies] == [str(other)] * 2)  # type: ignore[union-attr]


def test_dead_copy_is_not_taken_and_template_is_kept(
    start_kernel: Start, sandboxed: Sandboxed, shelf: TemplateShelf
) -> None:
    name = sandboxed(standby=1)
    start_kernel(name)
    until(lambda: len(WARM_POOL.copies) == 1)
    dead = WARM_POOL.copies[0].sandbox
    dead._container.main.send_signal(9)  # type: ignore[union-attr]
    until(lambda: dead.state != State.RUNNING)
    km, kc = start_kernel(name)
    assert is_copy(km) and km.provisioner.sandbox is not dead and run(kc, "1") == "1"
    assert shelf.get(name) is not None


def test_copy_with_replaced_folder_is_not_taken(
    start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    name, folder = sandboxed(standby=1), notebook_folder / "again"
    folder.mkdir()
    start_kernel(name, cwd=str(folder))
    until(lambda: len(WARM_POOL.copies) == 1)
    waiting = WARM_POOL.copies[0].sandbox
    folder.rmdir()
    folder.mkdir()
    km, kc = start_kernel(name, cwd=str(folder))
    assert is_copy(km) and km.provisioner.sandbox is not waiting
    run(kc, "open('made', 'w').write('inside')")
    assert (folder / "made").read_text() == "inside"


def test_copy_with_changed_mount_source_is_not_taken(start_kernel: Start, sandboxed: Sandboxed, tmp_path: Path) -> None:
    first, second, current = tmp_path / "first", tmp_path / "second", tmp_path / "current"
    for folder in (first, second):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    current.symlink_to(first)
    name = sandboxed(standby=1, mounts=[f"{current}:/data"])
    start_kernel(name)
    until(lambda: len(WARM_POOL.copies) == 1)
    current.unlink()
    current.symlink_to(second)
    _, kc = start_kernel(name)
    assert run(kc, "open('/data/name').read()") == "'second'"


def test_pool_is_emptied_when_memory_is_scarce(
    start_kernel: Start, sandboxed: Sandboxed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_pool, "LOOK_EVERY", 0.1)
    name = sandboxed(standby=1)
    start_kernel(name)
    until(lambda: len(WARM_POOL.copies) == 1)
    monkeypatch.setattr(warm_pool, "scarce", lambda: True)
    until(lambda: WARM_POOL.copies == [])
    km, _ = start_kernel(name)
    assert is_copy(km)


@pytest.mark.parametrize(
    ("available", "limit", "used", "cached", "expected"),
    [
        (900, "max", 0, 0, False),
        (50, "max", 0, 0, True),
        (900, "1000", 950, 0, True),
        (900, "1000", 950, 500, False),
        (900, "1000", 100, 0, False),
    ],
)
def test_scarce_memory_of_machine_or_control_group(
    tmp_path: Path, available: int, limit: str, used: int, cached: int, expected: bool
) -> None:
    own = tmp_path / "groups" / "above" / "own"
    own.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/above/own\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n")
    (own.parent / "memory.max").write_text(f"{limit}\n")
    (own.parent / "memory.current").write_text(f"{used}\n")
    (own.parent / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    assert scarce(tmp_path, tmp_path / "groups") is expected


def test_server_lists_and_deletes_copies_and_ends_them_at_stop(
    serve: Callable[..., Server], sandboxed: Sandboxed, runtime: Path
) -> None:
    name = sandboxed(standby=1, persistent=False)
    server = serve()
    assert server.open_notebook(name)[0] == 201

    def listed() -> list[Any]:
        return list(server.ask("GET", "sandboxes?state=standby")[1]["items"])

    until(listed)
    (copy,) = listed()
    assert (copy["kernel_name"], copy["persistent"], copy["kernel_id"]) == (name, False, None)
    assert server.ask("GET", f"sandboxes/{copy['id']}") == (200, copy)
    assert server.ask("POST", f"sandboxes/{copy['id']}/hibernate")[0] == 409
    assert server.ask("DELETE", f"sandboxes/{copy['id']}") == (200, {"id": copy["id"], "freed": 0})
    until(lambda: listed() and listed()[0]["id"] != copy["id"])
    server.stop()
    assert list(runtime.iterdir()) == []
