"""Test the definitions of all exceptions of the package: kind, HTTP status and exit status."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from http import HTTPStatus
from pathlib import Path

import pytest

import sandbox_provisioner
from sandbox_provisioner.cli.exit_codes import exit_status
from sandbox_provisioner.client import ProblemError
from sandbox_provisioner.client.errors import refusal
from sandbox_provisioner.errors import SandboxError, subclasses
from sandbox_provisioner.errors.kinds import ExitStatus, Kind
from sandbox_provisioner.server.problem_details import describe

DOCS = Path(__file__).parents[2] / "docs"

for module in pkgutil.walk_packages(sandbox_provisioner.__path__, "sandbox_provisioner."):
    if not module.name.endswith("__main__") and not module.name.startswith("sandbox_provisioner.guest."):
        importlib.import_module(module.name)

ERRORS = [error for error in subclasses() if error.__module__.startswith("sandbox_provisioner.")]


def example(error: type[SandboxError]) -> SandboxError:
    """Return an instance, without the arguments that its class requires."""
    made = error.__new__(error)
    SandboxError.__init__(made, "It failed.", "Try again.")
    return made


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_has_kind_status_and_exit_status(error: type[SandboxError]) -> None:
    assert isinstance(error.kind, Kind)
    assert isinstance(error.kind.status, HTTPStatus) and error.kind.status >= HTTPStatus.BAD_REQUEST
    assert isinstance(error.kind.exit_status, ExitStatus) and error.kind.exit_status != ExitStatus.OK


@pytest.mark.parametrize("error", [one for one in ERRORS if one is not ProblemError], ids=lambda error: error.__name__)
def test_same_kind_and_exit_status_through_server(error: type[SandboxError]) -> None:
    local = example(error)
    problem = describe(local)
    received = refusal("http://localhost/", problem["status"], problem)
    assert problem["type"] == f"urn:sandbox:{error.kind}"
    assert received.known and received.kind == error.kind
    assert exit_status(received) == exit_status(local) == error.kind.exit_status


def test_every_kind_has_an_error() -> None:
    assert {error.kind for error in ERRORS} == set(Kind)


def test_subclass_inherits_kind() -> None:
    class OwnError(SandboxError, kind=Kind.IN_USE):
        pass

    class InheritingError(OwnError):
        pass

    assert InheritingError.kind is Kind.IN_USE
    assert SandboxError.kind is Kind.SANDBOX


def test_documentation_lists_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    try:
        commands = importlib.import_module("generate_commands").exits()
        rest = importlib.import_module("generate_rest").markdown()
    finally:
        for name in ("generate_commands", "generate_rest", "generate_settings"):
            sys.modules.pop(name, None)
    for error in ERRORS:
        if error is not ProblemError:
            assert f"`{error.__name__}`" in commands
        if not error.__module__.startswith(("sandbox_provisioner.client.", "sandbox_provisioner.cli.")):
            assert f"`{error.__name__}`" in rest
    assert all(f"`{kind}`" in rest for kind in set(Kind) - {Kind.UNREACHABLE})
