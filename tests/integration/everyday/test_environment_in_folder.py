"""A kernel whose folder holds its own environment starts from a template, hibernates and wakes like any other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernel_templates import is_copy
from kernels import Open, run

from sandbox_provisioner.templates.store import TemplateShelf

pytestmark = [pytest.mark.runsc, pytest.mark.templates, pytest.mark.user]

Sandboxed = Callable[..., str]
Start = Callable[..., Any]
COMPILED = ("psutil", "markupsafe", "yaml", "_yaml")
"""Packages with compiled modules in the folder's environment. Some templates preload psutil."""


def environment(prefix: Path) -> Path:
    """Create an environment with some packages of its own and those of this test run, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    (site,) = prefix.glob("lib/python3*/site-packages")
    (own,) = Path(sys.prefix).glob(f"lib/{site.parent.name}/site-packages")
    for package in COMPILED:
        shutil.copytree(own / package, site / package)
    (site / "borrowed.pth").write_text(f"{own}\n")
    return prefix / "bin" / "python"


def kernelspec(python: Path) -> dict[str, Any]:
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    return {"argv": argv, "display_name": "it", "language": "python"}


@pytest.mark.debian
@pytest.mark.parametrize("place", [".venv", ".pixi/envs/default"])
def test_copy_uses_the_environment_in_its_folder_before_and_after_a_wake(
    open_notebook: Open, notebook_folder: Path, place: str
) -> None:
    prefix = notebook_folder / place
    notebook = open_notebook(spec=kernelspec(environment(prefix)), preload=["psutil"])
    assert is_copy(notebook.km)
    assert notebook.run("import sys; sys.prefix") == repr(str(prefix))
    assert notebook.run("import psutil; psutil.__file__").startswith(f"'{prefix}")
    assert notebook.run("import markupsafe; str(markupsafe.escape('<'))") == "'&lt;'"
    for _ in range(2):
        notebook.hibernate()
        assert notebook.run("psutil.Process().pid == __import__('os').getpid()") == "True"
        assert notebook.run("str(markupsafe.escape('<'))") == "'&lt;'"
    assert notebook.run("import yaml; yaml.CSafeLoader and yaml.__file__").startswith(f"'{prefix}")
    assert notebook.run(f"import os; os.access({str(prefix)!r}, os.W_OK)") == "False"
    assert notebook.run("open('made', 'w').write('inside')") == "6"
    assert (notebook_folder / "made").read_text() == "inside"


def test_project_installed_editable_is_writable_in_a_copy(open_notebook: Open, notebook_folder: Path) -> None:
    python = environment(notebook_folder / ".venv")
    (notebook_folder / "src").mkdir()
    (notebook_folder / "src" / "project.py").write_text("x = 1")
    (site,) = (notebook_folder / ".venv").glob("lib/python3*/site-packages")
    (site / "__editable__.project.pth").write_text(f"{notebook_folder}/src\n")
    notebook = open_notebook(spec=kernelspec(python))
    assert is_copy(notebook.km)
    assert notebook.run("import project; project.x") == "1"
    notebook.run("open('src/project.py', 'w').write('x = 2')")
    notebook.hibernate()
    assert notebook.run("import importlib; importlib.reload(project).x") == "2"


def test_reopened_copy_finds_its_environment(open_notebook: Open, notebook_folder: Path) -> None:
    spec = kernelspec(environment(notebook_folder / ".venv"))
    notebook = open_notebook(spec=spec)
    assert is_copy(notebook.km)
    notebook.run("import markupsafe; x = 42")
    notebook.hibernate()
    notebook.end(keep=True)
    again = open_notebook(spec=spec)
    assert again.run("x, str(markupsafe.escape('<'))") == "(42, '&lt;')"


def test_unrelated_package_keeps_the_template(
    sandboxed: Sandboxed, notebook_folder: Path, shelf: TemplateShelf
) -> None:
    name = sandboxed(spec=kernelspec(environment(notebook_folder / ".venv")), preload=["psutil"])
    (site,) = (notebook_folder / ".venv").glob("lib/python3*/site-packages")
    before = shelf.get(name)
    (site / "unrelated").mkdir()
    (site / "unrelated" / "__init__.py").write_text("x = 1")
    (site / "unrelated-1.dist-info").mkdir()
    assert before is not None and before.changed == ""
    shutil.rmtree(site / "unrelated-1.dist-info")
    changes = {
        "a new path file": site / "new.pth",
        "start-up code": site / "sitecustomize.py",
        "a package that was looked for": site / "ipykernel.py",
    }
    for what, path in changes.items():
        path.write_text("")
        assert before.changed == str(site), what
        path.unlink()
        assert before.changed == "", what
    os.utime(site / "psutil" / "__init__.py")
    assert before.changed == str(site / "psutil" / "__init__.py")


def test_new_package_is_found_by_a_copy(start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path) -> None:
    name = sandboxed(spec=kernelspec(environment(notebook_folder / ".venv")))
    (site,) = (notebook_folder / ".venv").glob("lib/python3*/site-packages")
    assert is_copy(start_kernel(name)[0])
    (site / "unrelated.py").write_text("x = 'found'")
    km, kc = start_kernel(name)
    assert is_copy(km)
    assert run(kc, "import unrelated; unrelated.x") == "'found'"
