"""``entrypoint`` runs a module as ``python -m`` does, and calls in it map no memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_provisioner.gvisor.bundle import GUEST, GUEST_INSIDE
from sandbox_provisioner.gvisor.interpreter import with_entrypoint

SEEN = """
import json, sys
spec = __spec__
names = sorted(name for name in globals() if not name.startswith("__"))
print(json.dumps([__name__, spec.name, sys.argv, sorted(sys.path), names]))
sys.exit(7)
"""

FAULTS_AT_ANY_DEPTH = """
import resource

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def leaf(a=0, b=0, c=0, d=0):
    e = f = g = a
    return e

def calls_from(depth):
    if depth:
        return calls_from(depth - 1)
    before = faults()
    for _ in range(100):
        leaf()
    return faults() - before

calls_from(300)
print(max(calls_from(depth) for depth in range(300)))
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """Return the path for a module ``seen`` in the working folder."""
    return tmp_path / "seen.py"


def python(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("-I",), ("-X", "dev")], ids=" ".join)
def test_module_runs_as_with_dash_m(module: Path, options: tuple[str, ...]) -> None:
    module.write_text(SEEN)
    plain = python(module.parent, *options, "-m", "seen", "-f", "file")
    ours = python(module.parent, *options, str(GUEST / "entrypoint.py"), "seen", "-f", "file")

    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    if "-I" in options:
        assert "No module named seen" in ours.stderr
    else:
        assert json.loads(ours.stdout)[:2] == ["__main__", "seen"]


@pytest.mark.parametrize("name", ["json", "ipykernel_launcher"])
def test_modules_of_working_folder_do_not_shadow_installed_ones(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "pathlib.py").write_text("raise SystemExit('shadowed')")
    module = {"json": "json.tool"}.get(name, name)
    ours = python(tmp_path, str(GUEST / "entrypoint.py"), module, "--help")

    assert ours.returncode == 0, ours.stderr


def test_calls_map_no_memory_at_any_depth(module: Path) -> None:
    module.write_text(FAULTS_AT_ANY_DEPTH)
    ours = python(module.parent, str(GUEST / "entrypoint.py"), "seen")

    assert int(ours.stdout) < 50


@pytest.mark.parametrize(
    ("argv", "inside"),
    [
        (
            ["/a/python", "-m", "ipykernel_launcher", "-f", "x"],
            ["/a/python", "ENTRYPOINT", "ipykernel_launcher", "-f", "x"],
        ),
        (
            ["/a/python3.12", "-Xfrozen_modules=off", "-m", "k"],
            ["/a/python3.12", "-Xfrozen_modules=off", "ENTRYPOINT", "k"],
        ),
        (["/a/python3", "script.py", "-m", "k"], None),
        (["/a/python3", "-c", "pass", "-m"], None),
        (["/a/python3", "-m"], None),
        (["/a/python3"], None),
        (["/a/bash", "-m", "k"], None),
    ],
    ids=lambda argv: " ".join(argv) if argv else "unchanged",
)
def test_only_commands_that_run_a_module_get_entrypoint(argv: list[str], inside: list[str] | None) -> None:
    expected = [part.replace("ENTRYPOINT", f"{GUEST_INSIDE}/entrypoint.py") for part in inside or argv]

    assert with_entrypoint(argv) == expected
