"""Use a project: notebooks in a folder of their own, data and source files beside it, and a repository above."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from kernels import Notebook
from servers import Server

Serve = Callable[..., Server]
pytestmark = [pytest.mark.runsc, pytest.mark.debian, pytest.mark.user]

OpenIn = Callable[..., Notebook]
COMMIT = (
    "subprocess.run('git add . && git -c user.name=me -c user.email=me@example.org commit -qm work', shell=True, "
    "check=True, cwd='..')"
)


@pytest.fixture
def open_in(
    start_kernel: Callable[..., tuple[KernelManager, BlockingKernelClient]],
    sandboxed: Callable[..., str],
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> OpenIn:
    """Return a function that opens a notebook in a folder below the user's home."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def start(path: Path, **config: object) -> Notebook:
        env = {**os.environ, "JPY_SESSION_NAME": str(path)}
        return Notebook(*start_kernel(sandboxed(**config), env=env, cwd=str(path.parent)))

    return start


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with notebooks, data and a module."""
    folder = tmp_path / "work" / "project"
    for name in ("notebooks", "data", "src"):
        (folder / name).mkdir(parents=True)
    (folder / "data" / "in.csv").write_text("a,b\n1,2\n")
    (folder / "src" / "tools.py").write_text("def double(x):\n    return 2 * x\n")
    subprocess.run(["git", "init", "-q", folder], check=True)
    return folder


def test_notebooks_of_one_project_share_its_files(open_in: OpenIn, project: Path) -> None:
    first = open_in(project / "notebooks" / "a.ipynb")
    first.run("import os, subprocess, sys; sys.path.insert(0, '../src'); import tools")
    assert first.run("print(os.getcwd())") == f"{project}/notebooks\n"
    assert first.run("print(open('../data/in.csv').read())") == "a,b\n1,2\n\n"
    first.run(
        "os.makedirs('../out'); file = open('../out/r.txt', 'w'); file.write(str(tools.double(21))); file.flush()"
    )
    first.hibernate()
    second = open_in(project / "notebooks" / "b.ipynb")
    assert second.run("print(open('../out/r.txt').read(), 'tools' in globals())") == "42 False\n"
    first.run("_ = file.write('!'); file.close()")
    first.run(COMMIT)
    assert (project / "out" / "r.txt").read_text() == "42!"
    log = subprocess.run(["git", "-C", project, "log", "--format=%s %an"], check=True, capture_output=True, text=True)
    assert log.stdout == "work me\n"


@pytest.mark.parametrize("scope", ["notebook", "root"])
def test_setting_folder_scope(open_in: OpenIn, project: Path, scope: str) -> None:
    notebook = open_in(project / "notebooks" / "a.ipynb", folder_scope=scope)
    assert notebook.run("import os; print(os.path.exists('../data/in.csv'))") == f"{scope == 'root'}\n"
    notebook.run("open('own.txt', 'w').close()")
    assert (project / "notebooks" / "own.txt").exists()
    writes = "try:\n    open('../../beside.txt', 'w').close()\nexcept OSError as error:\n    print(error.strerror)"
    assert notebook.run(writes) == ("" if scope == "root" else "Read-only file system\n")


def test_environment_beside_the_notebook_is_read_only(open_in: OpenIn, tmp_path: Path) -> None:
    folder = tmp_path / "work" / "analysis"
    folder.mkdir(parents=True)
    venv.create(folder / ".venv", symlinks=True, with_pip=False)
    notebook = open_in(folder / "a.ipynb")
    for _ in range(2):
        notebook.run("open('result.txt', 'w').close()")
        change = "try:\n    open('.venv/pyvenv.cfg', 'a')\nexcept OSError as error:\n    print(error.strerror)"
        assert notebook.run(change) == "Read-only file system\n"
        notebook.hibernate()


def test_marker_that_was_added_while_the_kernel_was_saved(open_in: OpenIn, project: Path) -> None:
    """The kernel keeps the folder that it had. After a restart it has the project."""
    (project / ".git").rename(project / "hidden")
    notebook = open_in(project / "notebooks" / "a.ipynb")
    notebook.run("import os; kept = open('own.txt', 'w')")
    notebook.hibernate()
    notebook.end(keep=True)

    (project / "hidden").rename(project / ".git")
    notebook = open_in(project / "notebooks" / "a.ipynb")
    assert notebook.run("kept.write('kept'); kept.close(); print(os.path.exists('../data'))") == "False\n"
    assert (project / "notebooks" / "own.txt").read_text() == "kept"
    notebook.hibernate()
    assert notebook.run("print(kept.name)") == "own.txt\n"
    notebook.km.restart_kernel(now=True)
    notebook.kc.wait_for_ready(timeout=60)
    assert notebook.run("import os; print(os.path.exists('../data'))") == "True\n"


def test_files_that_became_protected_while_the_kernel_was_saved(open_in: OpenIn, project: Path) -> None:
    notebook = open_in(project / "notebooks" / "a.ipynb")
    notebook.run("x = 41")
    notebook.hibernate()
    notebook.end(keep=True)
    (project / ".envrc").write_text("")
    (project / "notebooks" / ".vscode").mkdir()
    notebook = open_in(project / "notebooks" / "a.ipynb")
    assert notebook.run("print(x + 1)") == "42\n"
    subprocess.run(["git", "-C", project, "config", "user.name", "host"], check=True)
    notebook.hibernate()
    assert notebook.run("print(x + 1)") == "42\n"


def test_notebook_in_the_home_works_in_a_folder_of_its_own(open_in: OpenIn, tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("secret")
    notebook = open_in(tmp_path / "a.ipynb")
    assert (
        notebook.run("import os; print(os.getcwd(), os.path.exists('../.bashrc'))") == f"{tmp_path}/notebooks False\n"
    )
    notebook.run("open('r.txt', 'w').close(); open('../.bashrc', 'w').close(); x = 1")
    assert (tmp_path / "notebooks" / "r.txt").exists()
    assert (tmp_path / ".bashrc").read_text() == "secret"
    notebook.hibernate()
    assert notebook.run("print(x, os.listdir())") == "1 ['r.txt']\n"


def test_server_in_the_home_starts_the_first_notebook(
    serve: Serve, sandboxed: Callable[..., str], notebook_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(notebook_folder))
    server = serve()
    status, session = server.open_notebook(sandboxed(), "Untitled.ipynb")
    assert status == 201, session
    (sandbox,) = server.ask("GET", "sandboxes")[1]["items"]
    assert sandbox["files"]["writable"] == [f"{notebook_folder}/notebooks"]
    assert str(notebook_folder) in sandbox["files"]["in_memory"]
    assert f"its sandboxed kernel works in {notebook_folder}/notebooks" in server.log.read_text()

    status, refusal = server.open_notebook(sandboxed(home_folder=""), "Untitled1.ipynb")
    assert status == 400
    assert "Move the notebook into a folder of its own" in refusal["message"]


@pytest.mark.templates
def test_copy_of_a_template_works_in_a_folder_of_the_project(open_in: OpenIn, tmp_path: Path) -> None:
    project = tmp_path / "work" / "project"
    (project / "notebooks").mkdir(parents=True)
    (project / "pyproject.toml").touch()
    notebook = open_in(project / "notebooks" / "a.ipynb")
    assert notebook.km.provisioner.sandbox.spec.carried == (str(project), str(project), True)
    for step in range(2):
        assert notebook.run("import os; print(os.getcwd())") == f"{project}/notebooks\n"
        notebook.run(f"open('../{step}.txt', 'w').close()")
        assert (project / f"{step}.txt").exists()
        outside = "try:\n    open('../../beside.txt', 'w')\nexcept OSError as error:\n    print(error.strerror)"
        assert notebook.run(outside) == "Read-only file system\n"
        notebook.hibernate()
    notebook.end(keep=True)
    notebook = open_in(project / "notebooks" / "a.ipynb")
    assert notebook.run("print(os.listdir('..'))").count("txt") == 2
