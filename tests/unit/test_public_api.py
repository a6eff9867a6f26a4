"""Test the names of the public API, and that the examples use no others."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sandbox_provisioner

EXAMPLES = Path(__file__).parents[2] / "examples"
PUBLIC = {
    "AsyncSandboxClient",
    "BundleSpec",
    "GCSArtifact",
    "GCSConfig",
    "GCSSandboxMetadata",
    "GVisorSandbox",
    "Mount",
    "PersistentSandboxRegistry",
    "Persistence",
    "ProblemError",
    "Process",
    "Runsc",
    "Sandbox",
    "SandboxClient",
    "SandboxError",
    "SandboxHandle",
    "SandboxKernelManager",
    "SandboxManager",
    "SandboxProvisioner",
    "SandboxRecord",
    "__version__",
    "find_runsc",
    "interpreter_mounts",
    "left_behind",
    "running_servers",
    "storage_settings",
}


def imports(source: Path) -> list[ast.ImportFrom]:
    """Return the ``from ... import`` statements of a file."""
    return [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ImportFrom)]


def test_public_names() -> None:
    assert set(sandbox_provisioner.__all__) == PUBLIC
    assert set(dir(sandbox_provisioner)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_is_defined(name: str) -> None:
    assert not isinstance(getattr(sandbox_provisioner, name), ModuleType)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sandbox_provisioner.no_such_name  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_origins() -> None:
    """The imports for type checkers and the table of lazy imports are equal."""
    seen = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in imports(Path(sandbox_provisioner.__file__))
        if node.level == 1
        for alias in node.names
    }
    assert seen == sandbox_provisioner._ORIGINS


def test_import_of_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import sandbox_provisioner; print(*set(sys.modules) - before)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in found if name.partition(".")[0] == "sandbox_provisioner"] == ["sandbox_provisioner"]
    assert not {"httpx", "jupyter_client", "traitlets"}.intersection(found)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_examples_use_only_the_public_api(path: Path) -> None:
    used = [
        (node.module, alias.name)
        for node in imports(path)
        for alias in node.names
        if (node.module or "").partition(".")[0] == "sandbox_provisioner"
    ]
    assert {module for module, _ in used} <= {"sandbox_provisioner"}
    assert {name for _, name in used} <= PUBLIC
