"""In a copy of a template, the protected parts of the kernel's folder are as safe as in any other sandbox."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kernel_templates import is_copy
from kernels import Open, run

from sandbox_provisioner.errors import GuestError
from sandbox_provisioner.guest.capabilities import CARRIED
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.gvisor.carried import parts
from sandbox_provisioner.gvisor.mounts import identity
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox
from sandbox_provisioner.templates.store import TemplateShelf

pytestmark = [pytest.mark.runsc, pytest.mark.templates, pytest.mark.user]

Start = Callable[..., Any]
Sandboxed = Callable[..., str]

ATTACK = """
import ctypes, json, os, shutil, sys
libc = ctypes.CDLL(None, use_errno=True)
done = []
def attempt(name, action, *arguments):
    try:
        if action(*arguments) is not False:
            done.append([name, *map(str, arguments)])
    except OSError:
        pass
def write(path):
    with open(path, "a") as file:
        file.write("written by a guest")
def mmap(path):
    import mmap
    with open(path, "r+b") as file:
        mmap.mmap(file.fileno(), 0)
def through_descriptor(path):
    number = os.open(path, os.O_PATH)
    write(f"/proc/self/fd/{number}")
def mount(*arguments):
    return libc.mount(*arguments) == 0
def swap(path, other):
    return libc.renameat2(-100, path.encode(), -100, other.encode(), 2) == 0
open("own", "w").close()
os.makedirs("own-folder", exist_ok=True)
tops = [os.getcwd(), CARRIED, "/proc/self/cwd", "/proc/1/root" + os.getcwd()]
for top in filter(os.path.isdir, tops):
    for folder in FOLDERS:
        path = f"{top}/{folder}"
        for name in [path, *(os.path.join(path, entry) for entry in os.listdir(path))]:
            attempt("rename", os.rename, name, f"{top}/moved")
            attempt("exchange", swap, name, f"{top}/own-folder")
            attempt("chmod", os.chmod, name, 0o777)
            attempt("utime", os.utime, name)
            attempt("xattr", os.setxattr, name, "user.x", b"x")
            attempt("unmount", lambda name: libc.umount2(name.encode(), 2) == 0, name)
            attempt("remount", mount, None, name.encode(), None, 0x1020, None)
            attempt("cover", mount, b"tmpfs", name.encode(), b"tmpfs", 0, None)
            if os.path.isfile(name):
                for action in (write, mmap, through_descriptor, os.unlink):
                    attempt(action.__name__, action, name)
                attempt("truncate", os.truncate, name, 0)
                attempt("link", os.link, name, f"{top}/linked")
                attempt("replace", os.replace, f"{top}/own", name)
        attempt("create", write, f"{path}/evil.pth")
        attempt("mkdir", os.mkdir, f"{path}/evil")
        attempt("rmtree", shutil.rmtree, path)
    for above in ABOVE:
        attempt("rename above", os.rename, f"{top}/{above}", f"{top}/moved")
        attempt("exchange above", swap, f"{top}/{above}", f"{top}/own-folder")
    attempt("hidden", write, f"{top}/SECRET/key")
    attempt("see", lambda path: bool(os.listdir(path)), f"{top}/SECRET")
print(json.dumps(done))
"""
FOLDERS = (".venv", "settings/deep/jupyter")
ABOVE = ("settings", "settings/deep")


@pytest.fixture
def project(notebook_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an environment, a configuration folder of Jupyter and the storage of saved states."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", notebook_folder / ".venv"], check=True)
    settings = notebook_folder / "settings" / "deep" / "jupyter"
    settings.mkdir(parents=True)
    (settings / "jupyter_server_config.py").write_text("c = get_config()")
    (notebook_folder / "states").mkdir()
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(settings))
    monkeypatch.setenv("SANDBOX_STORAGE_DIR", str(notebook_folder / "states"))
    return notebook_folder


def kernelspec(project: Path) -> dict[str, Any]:
    """Return a kernelspec whose interpreter is the project's own environment."""
    (site,) = (project / ".venv").glob("lib/python3*/site-packages")
    (own,) = Path(sys.prefix).glob(f"lib/{site.parent.name}/site-packages")
    (site / "borrowed.pth").write_text(f"{own}\n")
    argv = [f"{project}/.venv/bin/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    return {"argv": argv, "display_name": "it", "language": "python"}


def content(project: Path) -> dict[str, str]:
    """Return the protected files with their bytes or link targets."""
    paths = (path for folder in FOLDERS for path in sorted((project / folder).rglob("*")))
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes().hex()
        for path in paths
        if path.is_symlink() or path.is_file()
    }


def attack(kc: Any, storage: str = "states") -> Any:
    code = ATTACK.replace("SECRET", storage)
    return json.loads(run(kc, f"CARRIED, FOLDERS, ABOVE = {CARRIED!r}, {FOLDERS}, {ABOVE}\n{code}"))


@pytest.mark.debian
def test_protected_parts_resist_also_after_a_wake(open_notebook: Open, project: Path) -> None:
    notebook = open_notebook(spec=kernelspec(project))
    assert is_copy(notebook.km)
    before = content(project)
    assert len(before) > 10
    for _ in range(2):
        done = [each for each in attack(notebook.kc) if each[0] not in ("hidden", "see")]
        assert done == []
        assert content(project) == before
        assert not list((project / "states").rglob("key"))
        notebook.hibernate()
        notebook.wake()
    assert (project / "own").exists()


# -- attacks by another sandbox while PID 1 binds the folder --------------------------------------------------------


def replaced_by_link(part: Path) -> None:
    part.rename(part.with_name("moved"))
    part.symlink_to("moved")


def replaced_by_folder(part: Path) -> None:
    part.rename(part.with_name("moved"))
    part.mkdir()


def above_replaced_by_link(part: Path) -> None:
    replaced_by_link(part.parent)


def removed(part: Path) -> None:
    part.rename(part.parent.parent / "moved")


@pytest.mark.parametrize("swap", [replaced_by_link, replaced_by_folder, above_replaced_by_link, removed])
async def test_part_replaced_before_it_is_bound_is_refused(
    swap: Callable[[Path], None], project: Path, shelf: TemplateShelf, sandboxed: Sandboxed, start_kernel: Start
) -> None:
    km, _ = await asyncio.to_thread(start_kernel, sandboxed(spec=kernelspec(project)))
    assert is_copy(km)
    spec: BundleSpec = km.provisioner.sandbox.spec
    template = shelf.get(km.kernel_name)
    assert template is not None and spec.carried
    sandbox = GVisorSandbox(str(uuid4()), spec, km.provisioner.sandbox.runsc)
    try:
        with shelf.using(template) as image:
            await sandbox.start(image)
        expected = parts(spec)
        swap(project / "settings" / "deep" / "jupyter")
        with pytest.raises(GuestError) as caught:
            await sandbox.connection.activate(
                folder=spec.carried.destination,
                parts=expected,
                cover="",
                files={},
                expect=identity(Mount(str(project), CARRIED)),
                outlive=False,
            )
        assert caught.value.errno == errno.ESTALE
    finally:
        await sandbox.delete()


def test_part_replaced_by_link_during_restore_is_refused(
    project: Path,
    sandboxed: Sandboxed,
    start_kernel: Start,
    runsc: Runsc,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = project / "settings" / "deep"
    swap = f"mv {part} {part}-moved; ln -s {part}-moved {part}"
    swapping = tmp_path / "runsc"
    swapping.write_text(f'#!/bin/sh\ncase "$*" in *" restore "*) {swap} ;; esac\nexec {runsc.path} "$@"\n')
    swapping.chmod(0o755)
    monkeypatch.setenv("SANDBOX_RUNSC", str(swapping))
    with pytest.raises(Exception, match="was replaced while the start"):
        start_kernel(sandboxed(spec=kernelspec(project)))
