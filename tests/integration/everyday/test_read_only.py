"""Write outside of the kernel's folder: the write fails, instead of going to a place that nobody keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from kernels import Open

from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox

pytestmark = [pytest.mark.runsc, pytest.mark.debian, pytest.mark.user]

WRITE = """
import os
def error(path):
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w") as file:
            file.write("kept?")
    except OSError as error:
        return os.strerror(error.errno)
    return "written"
"""
READ_ONLY = "Read-only file system"


@pytest.mark.template_copies
@pytest.mark.templates
def test_write_beside_the_folder_fails(open_notebook: Open, notebook_folder: Path) -> None:
    notebook = open_notebook()
    notebook.run(WRITE)
    for _ in range(2):
        assert notebook.run("print(error('../out/r.txt'))") == f"{READ_ONLY}\n"
        for place in ("/r.txt", "/opt/r.txt", "/etc/r.txt", f"{notebook_folder.parent}/r.txt", "/.sandbox/r.py"):
            assert notebook.run(f"print(error({place!r}))") == f"{READ_ONLY}\n"
        for place in ("r.txt", "~/r.txt", "~/.cache/r.txt", "/tmp/r.txt", "/var/tmp/r.txt", "/dev/shm/r.txt"):
            assert notebook.run(f"print(error(os.path.expanduser({place!r})))") == "written\n"
        notebook.hibernate()
    assert (notebook_folder / "r.txt").read_text() == "kept?"
    assert [entry.name for entry in notebook_folder.parent.iterdir() if entry.name in ("out", "r.txt")] == []


@pytest.fixture
async def sandbox(spec: BundleSpec, runsc: Runsc, tmp_path: Path) -> AsyncIterator[GVisorSandbox]:
    """A sandbox whose folder lies in a project in its home, beside another project's folder."""
    home = Path(spec.home)
    for name in ("notebooks", "library"):
        (tmp_path / name).mkdir()
    mounts = (
        Mount(str(tmp_path / "notebooks"), str(home / "project" / "notebooks"), True),
        Mount(str(tmp_path / "library"), str(home / "project" / "library")),
        Mount(str(tmp_path / "library"), "/srv/data/shared", True),
    )
    sandbox = GVisorSandbox("box", replace(spec, read_only=True, mounts=(*spec.mounts, *mounts)), runsc)
    await asyncio.wait_for(sandbox.start(), 60)
    yield sandbox
    await sandbox.delete()


async def test_folders_above_mounts_are_read_only(sandbox: GVisorSandbox, tmp_path: Path) -> None:
    home = sandbox.spec.home
    places = {
        f"{home}/project/notebooks/a": "written",
        f"{home}/mine/a": "written",
        f"{home}/project/a": READ_ONLY,
        f"{home}/project/library/a": READ_ONLY,
        f"{home}/../a": READ_ONLY,
        "/srv/data/shared/a": "written",
        "/srv/data/a": READ_ONLY,
        "/srv/a": READ_ONLY,
    }
    program = f"{WRITE}\nprint([error(path) for path in {[*places]!r}])"
    for step in range(2):
        process = await sandbox.execute([sandbox.spec.python, "-c", program])
        printed = b"".join([piece.data async for piece in process.stream()]).decode()
        assert printed.strip() == str([*places.values()])
        if step == 0:
            await sandbox.checkpoint(tmp_path / "image")
            await sandbox.restore(tmp_path / "image")
