"""A program that a guest wrote into a folder on the server's PATH does not run on the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from notebooks import Notebook
from servers import Server
from traitlets import Unicode
from traitlets.config import Configurable

from sandbox_provisioner.errors import ConfigurationError
from sandbox_provisioner.gvisor.programs import writable_folders

pytestmark = [pytest.mark.runsc, pytest.mark.user]

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]

PROGRAMS = ("runsc", "unshare", "true", "umount")


@pytest.mark.parametrize("place", ["absolute", "relative"])
def test_guest_program_on_path_is_not_run(
    place: str,
    serve: Serve,
    sandboxed: Sandboxed,
    notebook_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, mark = notebook_folder / "bin", tmp_path / "ran-on-the-host"
    monkeypatch.setenv("PATH", f"{folder if place == 'absolute' else 'bin'}:{os.environ['PATH']}")
    server, kernel = serve(), sandboxed()
    guest = Notebook(server, kernel)
    script = f"#!/bin/sh\necho $0 >> {mark}\nexit 1\n"
    guest.run(
        "import os; os.mkdir('bin')\n"
        f"for name in {PROGRAMS}:\n"
        f"    open('bin/' + name, 'w').write({script!r}); os.chmod('bin/' + name, 0o755)"
    )
    guest.close()
    assert sorted(os.listdir(folder)) == sorted(PROGRAMS)

    other = Notebook(server, kernel, "b.ipynb")
    assert other.run("1 + 1") == "2"
    other.close()
    server.stop()
    again = Notebook(serve(), kernel, "b.ipynb")
    assert again.run("2 + 2") == "4"
    again.close()
    assert not mark.exists()


class Parent(Configurable):
    """The part of Jupyter Server's kernel manager that has the root folder."""

    root_dir = Unicode()


def test_refused_folder_is_not_noted_as_writable(
    sandboxed: Sandboxed, kernelspecs: KernelSpecManager, notebook_folder: Path, tmp_path: Path
) -> None:
    """If the folder were noted, this server would never again run a program in it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    km = KernelManager(
        kernel_name=sandboxed(), kernel_spec_manager=kernelspecs, parent=Parent(root_dir=str(notebook_folder))
    )
    with pytest.raises(ConfigurationError):
        km.start_kernel(cwd=str(elsewhere))
    assert str(elsewhere) not in writable_folders()
