"""A library or file that changed while a kernel slept: the refusal says why, and each way out that it offers works."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_line import sandbox_command
from kernels import run
from notebooks import Notebook
from servers import Server

pytestmark = [pytest.mark.runsc, pytest.mark.template_copies, pytest.mark.user]

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


class Package:
    """An installed package with a compiled module, which is a copy of MarkupSafe's."""

    def __init__(self, site: Path) -> None:
        compiled = find_spec("markupsafe._speedups")
        assert compiled and compiled.origin
        self.site = site
        self.library = site / "fastlib" / Path(compiled.origin).name
        self.library.parent.mkdir(parents=True)
        self._original = Path(compiled.origin)
        (self.library.parent / "__init__.py").write_text("from . import _speedups\n")
        self.install("1.0")

    def install(self, version: str) -> None:
        """Replace the files like pip: by new files."""
        for old in self.site.glob("*.dist-info"):
            shutil.rmtree(old)
        new = self.library.with_suffix(".new")
        new.write_bytes(self._original.read_bytes() + version.encode())
        os.replace(new, self.library)
        about = self.site / f"fastlib-{version}.dist-info"
        about.mkdir()
        (about / "RECORD").write_text(f"fastlib/__init__.py,,\nfastlib/{self.library.name},,\n")


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path / "packages" / "site-packages")


def use(package: Package) -> str:
    return f"import sys; sys.path.append({str(package.site)!r}); import fastlib; x = 'library'"


def sandbox_of(server: Server) -> dict[str, Any]:
    (sandbox,) = server.ask("GET", "sandboxes")[1]["items"]
    assert isinstance(sandbox, dict)
    return sandbox


def hibernate(server: Server) -> str:
    """Hibernate the only sandbox of a server and return its id."""
    identity = str(sandbox_of(server)["id"])
    assert server.ask("POST", f"sandboxes/{identity}/hibernate")[0] == 200
    return identity


def refusal(notebook: Notebook) -> str:
    """Run a cell and return the text with which it was refused."""
    reply = notebook.kc.execute_interactive("1", timeout=60, output_hook=lambda message: None)["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KernelNotWoken")
    return str(reply["evalue"])


def test_refused_wake_names_package_and_restart_works(
    serve: Serve, sandboxed: Sandboxed, package: Package, tmp_path: Path
) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed(mounts=[str(package.site)]))
    notebook.run(use(package))
    hibernate(server)
    notebook.run("y = 1")
    identity = hibernate(server)
    package.install("2.0")
    reason = f"{package.library} has changed since the sandbox was saved (fastlib 1.0 is now fastlib 2.0)"
    text = refusal(notebook)
    assert reason in text and "Restart Kernel" in text
    assert "jupyter sandbox revert" not in text  # the previous checkpoint uses the same library
    status, problem = server.ask("POST", f"sandboxes/{identity}/wake")
    assert status == 422 and "fastlib 1.0 is now fastlib 2.0" in problem["detail"]
    assert "revert" not in problem["remedy"] and "Restart Kernel" in problem["remedy"]
    status, output = sandbox_command(tmp_path, "wake", identity)
    assert status == 1 and "fastlib 1.0 is now fastlib 2.0" in output and "Restart Kernel" in output
    assert server.ask("POST", f"sandboxes/{identity}/revert")[0] in (409, 422)
    assert reason in refusal(notebook)  # the kernel is still there
    status, answer = server.ask("POST", f"kernels/{notebook.kernel_id}/restart")
    assert status == 200, answer
    notebook.close()
    kc = server.ready_client(notebook.kernel_id)
    notebook.kc = kc
    # A notice comes first: without a wake, the home folder cannot be carried over.
    assert notebook.run(f"'x' in globals(); {use(package)}; x").endswith("\n'library'")
    notebook.close()


def test_library_is_installed_again(serve: Serve, sandboxed: Sandboxed, package: Package) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed(mounts=[str(package.site)]))
    notebook.run(use(package))
    hibernate(server)
    package.install("2.0")
    assert "Correct this and try again" in refusal(notebook)
    package.install("1.0")
    assert notebook.run("x") == "'library'"
    notebook.close()


def test_offered_older_checkpoint_is_restored(serve: Serve, sandboxed: Sandboxed, package: Package) -> None:
    server, kernel = serve(), sandboxed(mounts=[str(package.site)])
    notebook = Notebook(server, kernel)
    notebook.run("x = 'before'")
    hibernate(server)
    notebook.run(use(package))
    identity = hibernate(server)
    package.install("2.0")
    assert "`jupyter sandbox revert ID` returns to the previous checkpoint" in refusal(notebook)
    status, reverted = server.ask("POST", f"sandboxes/{identity}/revert")
    assert (status, reverted["state"]) == (200, "saved"), reverted
    notebook.close()
    notebook = Notebook(server, kernel)
    assert notebook.run("x") == "'before'"
    notebook.close()


def test_stopped_notebook_starts_again_after_reset(
    serve: Serve, sandboxed: Sandboxed, package: Package, tmp_path: Path
) -> None:
    server, kernel = serve(), sandboxed(mounts=[str(package.site)])
    notebook = Notebook(server, kernel)
    notebook.run(use(package))
    notebook.close()
    server.stop()
    package.install("2.0")
    server = serve()
    status, answer = server.open_notebook(kernel)
    assert (status, answer["type"]) == (422, "urn:sandbox:incompatible")
    assert "fastlib 1.0 is now fastlib 2.0" in answer["message"]
    assert "`jupyter sandbox reset ID`" in answer["message"]
    status, output = sandbox_command(tmp_path, "reset", "notebooks/a.ipynb")
    assert status == 0 and "savepoint before-reset-" in output, output
    notebook = Notebook(server, kernel)
    assert notebook.run("'x' in globals()") == "False"
    notebook.run(use(package))
    (savepoint,) = sandbox_of(server)["savepoints"]
    assert savepoint["name"].startswith("before-reset-")
    package.install("1.0")
    notebook.close()
    fork = {"savepoint": savepoint["name"], "notebook_path": "fork.ipynb"}
    identity = sandbox_of(server)["id"]
    status, forked = server.ask("POST", f"sandboxes/{identity}/fork", fork)
    assert status == 201, forked
    kc = server.ready_client(forked["kernel_id"])
    assert run(kc, "x") == "'library'"
    kc.stop_channels()
    assert server.ask("DELETE", f"sandboxes/{identity}")[0] == 200  # its library was replaced while it ran


def test_reset_of_hibernated_kernel(serve: Serve, sandboxed: Sandboxed) -> None:
    server, kernel = serve(), sandboxed()
    notebook = Notebook(server, kernel)
    notebook.run("x = 1")
    identity = sandbox_of(server)["id"]
    status, problem = server.ask("POST", f"sandboxes/{identity}/reset")
    assert status == 409 and "it is running" in problem["detail"]
    hibernate(server)
    notebook.close()
    status, sandbox = server.ask("POST", f"sandboxes/{identity}/reset")
    assert (status, sandbox["state"], len(sandbox["savepoints"])) == (200, "empty", 1)
    notebook = Notebook(server, kernel)
    assert notebook.run("'x' in globals()") == "False"
    notebook.close()


def test_open_file_deleted_while_asleep(serve: Serve, sandboxed: Sandboxed, notebook_folder: Path) -> None:
    table = notebook_folder / "table"
    table.write_bytes(b"old")
    server = serve()
    notebook = Notebook(server, sandboxed())
    notebook.run("file = open('table')")
    hibernate(server)
    table.unlink()
    text = refusal(notebook)
    assert f"{table} is not there" in text and "Restart Kernel" in text
    table.write_bytes(b"old")
    assert notebook.run("file.read()") == "'old'"
    hibernate(server)
    table.unlink()
    assert "is not there" in refusal(notebook)
    assert server.ask("POST", f"kernels/{notebook.kernel_id}/restart")[0] == 200
    notebook.close()
    notebook.kc = server.ready_client(notebook.kernel_id)
    assert notebook.run("'file' in globals()").endswith("\nFalse")
    notebook.close()


def test_working_folder_deleted_while_asleep(serve: Serve, sandboxed: Sandboxed, notebook_folder: Path) -> None:
    folder = notebook_folder / "project"
    folder.mkdir()
    server = serve()
    notebook = Notebook(server, sandboxed(), "project/a.ipynb")
    notebook.run("x = 1")
    hibernate(server)
    folder.rmdir()
    assert f"{folder}, which is mounted in it, is not there" in refusal(notebook)
    status, answer = server.ask("POST", f"kernels/{notebook.kernel_id}/restart")
    assert status == 400 and f"{folder} does not exist. Create it" in answer["message"]
    folder.mkdir()
    assert server.ask("POST", f"kernels/{notebook.kernel_id}/restart")[0] == 200
    notebook.close()
    notebook.kc = server.ready_client(notebook.kernel_id)
    assert notebook.run("import os; os.getcwd()") == repr(str(folder))
    notebook.close()


def test_kernel_wakes_when_its_folder_is_back(serve: Serve, sandboxed: Sandboxed, notebook_folder: Path) -> None:
    folder = notebook_folder / "project"
    folder.mkdir()
    server = serve()
    notebook = Notebook(server, sandboxed(), "project/a.ipynb")
    notebook.run("x = 1")
    hibernate(server)
    folder.rmdir()
    assert "is not there" in refusal(notebook)
    folder.mkdir()
    assert notebook.run("x") == "1"
    notebook.close()
