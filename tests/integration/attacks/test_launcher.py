"""A file in the notebook's folder does not replace a module of the kernel itself. Cells can import it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernels import Notebook, run

pytestmark = pytest.mark.user

TRAP = "open('trapped', 'w').close(); raise SystemExit('a file of the folder ran')"
MODULES = ("ipykernel_launcher", "ipykernel", "zmq", "tornado", "pathlib", "json", "runpy", "hooks", "magics", "zygote")

Start = Callable[..., tuple[Any, Any]]
Sandboxed = Callable[..., str]


def add_shadowing_modules(folder: Path) -> None:
    for name in MODULES:
        (folder / f"{name}.py").write_text(TRAP)
    (folder / "local_module.py").write_text("print('run' if __name__ == '__main__' else 'imported')\nvalue = 42")


def require_not_shadowed(folder: Path, execute: Callable[[str], str]) -> None:
    """Check that the kernel is the installed one, and that cells use modules of the folder as in a plain kernel."""
    assert not (folder / "trapped").exists()
    loaded = execute("import sys; [sys.modules[name].__file__ for name in ('ipykernel', 'zmq', 'tornado', 'json')]")
    assert str(folder) not in loaded
    assert execute("import local_module; local_module.value") == "imported\n42"
    assert execute("%run local_module.py") == "run\n"
    child = "import subprocess, sys; print(subprocess.run({}, capture_output=True, text=True).stdout)"
    assert "run" in execute(child.format("[sys.executable, '-m', 'local_module']"))
    assert "imported" in execute(child.format("[sys.executable, '-c', 'import local_module']"))


def path_of(kc: Any) -> list[str]:
    return run(kc, "import sys; print(*sys.path, sep='\\n')").splitlines()


@pytest.mark.parametrize("copied", [False, pytest.param(True, marks=pytest.mark.templates)], ids=["new", "copy"])
def test_launcher_is_not_shadowed(
    copied: bool, start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    name = sandboxed()
    add_shadowing_modules(notebook_folder)
    km, kc = start_kernel(name)
    assert bool(km.provisioner.sandbox.spec.carried) == copied
    require_not_shadowed(notebook_folder, lambda code: run(kc, code))


def test_search_path_has_the_entries_of_a_plain_kernel(start_kernel: Start, sandboxed: Sandboxed) -> None:
    own = [entry for entry in path_of(start_kernel(sandboxed())[1]) if ".sandbox-packages" not in entry]
    assert sorted(own) == sorted(path_of(start_kernel("python3")[1]))


def test_launcher_is_not_shadowed_after_wake(open_notebook: Callable[..., Notebook], notebook_folder: Path) -> None:
    notebook = open_notebook()
    add_shadowing_modules(notebook_folder)
    notebook.hibernate()
    notebook.wake()
    notebook.end(keep=True)
    again = open_notebook()
    require_not_shadowed(notebook_folder, again.run)
