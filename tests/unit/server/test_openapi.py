"""Test openapi.yaml, and the validation of requests against it."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from jupyter_server.base.handlers import APIHandler
from openapi_spec_validator import validate

from sandbox_provisioner.errors import BadRequestError, subclasses
from sandbox_provisioner.events import EventKind
from sandbox_provisioner.server import openapi
from sandbox_provisioner.server.handlers import AUTH_RESOURCE, OperationHandler, SandboxHandler, handlers, routes
from sandbox_provisioner.server.openapi import check, read_body, read_query
from sandbox_provisioner.server.plain_kernels import PlainKernelGuard
from sandbox_provisioner.server.service import Sandboxes
from sandbox_provisioner.server.settings import ServerSettings

METHODS = ("get", "head", "post", "put", "patch", "delete")
CREATE = ("/api/sandboxes", "post")


def served(handler: type[SandboxHandler]) -> set[str]:
    """Return the HTTP methods that a handler defines itself."""
    return {method for method in METHODS if getattr(handler, method) is not getattr(APIHandler, method)}


def described(path: str) -> set[str]:
    return {method for method in METHODS if method in openapi.spec()["paths"][path]}


def operations() -> list[dict[str, Any]]:
    return [openapi.spec()["paths"][path][method] for path, _ in routes() for method in described(path)]


def test_document_is_valid() -> None:
    validate(openapi.spec())


def test_every_described_operation_is_served() -> None:
    for path, handler in routes():
        if issubclass(handler, OperationHandler):
            assert described(path) <= served(handler)
        else:
            assert described(path) == served(handler)


def test_path_is_served_by_its_own_handler() -> None:
    unused: Any = None
    patterns = [(pattern, options["path"]) for pattern, _, options in handlers("/", unused, unused, unused)]
    for path, _ in routes():
        example = path.format(id="5f0c", name="first")
        assert next(served for pattern, served in patterns if re.fullmatch(pattern, example)) == path


def test_every_operation_is_a_method_of_the_service() -> None:
    names = {operation["operationId"] for operation in operations()} - {"stream_events"}
    public = {name for name, _ in inspect.getmembers(Sandboxes, inspect.isfunction) if not name.startswith("_")}
    guards = {name for name in names if "plain_notebook" in name}
    assert public == names - guards - {"show_settings"}
    assert all(hasattr(PlainKernelGuard, name) for name in guards)
    assert hasattr(ServerSettings, "show_settings")


def test_handlers_share_one_authorization_resource() -> None:
    assert {handler.auth_resource for _, handler in routes()} == {AUTH_RESOURCE}


def test_status_of_every_error_is_described() -> None:
    described_statuses = {status for operation in operations() for status in operation["responses"]}
    assert {str(int(error.kind.status)) for error in subclasses()} <= described_statuses


def test_every_operation_describes_403() -> None:
    assert all("403" in operation["responses"] for operation in operations())


def test_events_match_the_event_bus() -> None:
    assert openapi.spec()["components"]["schemas"]["Event"]["properties"]["what"]["enum"] == [
        str(one) for one in EventKind
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"idle_timeout": NaN}',
        b'{"idle_timeout": Infinity}',
        b'{"idle_timeout": 1e999}',
        b'{"idle_timeout": -1}',
        b'{"idle_timeout": 1e-9}',
        b'{"idle_timeout": "1"}',
        b'{"idle_timeout": ' + b"9" * 5000 + b"}",
        b'{"enable_handoff": 1}',
        b'{"unknown": 1}',
        b'{"sandbox_id": "a\\n"}',
        b'{"sandbox_id": "../a"}',
        b'{"sandbox_id": ""}',
        b'{"notebook_path": "a.txt"}',
        b'{"notebook_path": "a\\u0000.ipynb"}',
        b'{"notebook_path": "\\ud800.ipynb"}',
        b'{"notebook_path": "a\\nb.ipynb"}',
        b'{"savepoint": {"id": "a"}}',
        b'{"savepoint": {"id": "a", "name": "b", "more": 1}}',
        b"[" * 50_000,
        b'{"a":' * 5000,
        b'{"kernel_name": "' + b"a" * (64 << 10) + b'"}',
    ],
    ids=lambda body: body[:30],
)
def test_invalid_body_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        read_body(*CREATE, body)


def test_deeply_nested_body_is_refused() -> None:
    for depth in range(100, 1100):  # some nesting depths can be parsed, but not printed
        with pytest.raises(BadRequestError):
            read_body(*CREATE, b'{"kernel_name": ' + b"[" * depth + b"]" * depth + b"}")


def test_valid_body_is_accepted() -> None:
    body = b'{"notebook_path": "f/a.ipynb", "idle_timeout": 1.5, "savepoint": {"id": "a", "name": "b"}}'
    assert read_body(*CREATE, body) == {
        "notebook_path": "f/a.ipynb",
        "idle_timeout": 1.5,
        "savepoint": {"id": "a", "name": "b"},
    }


def test_refusal_names_field_and_requirement() -> None:
    with pytest.raises(BadRequestError) as raised:
        read_body(*CREATE, b'{"savepoint": {"id": "/", "name": "b"}}')
    assert raised.value.field == "savepoint.id"
    assert "UUID" in raised.value.remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0"),
        ("limit", "1001"),
        ("limit", "1.5"),
        ("limit", "x"),
        ("limit", ""),
        ("limit", " 1"),
        ("limit", "1_0"),
        ("unused_for", "-1"),
        ("unused_for", "nan"),
        ("unused_for", "inf"),
        ("state", "asleep"),
        ("notebook", "a"),
        ("after", "x"),
        ("sate", "saved"),
    ],
)
def test_invalid_parameters_are_refused(name: str, value: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        read_query("/api/sandboxes", "get", {name: [value]})
    assert raised.value.field == name


def test_repeated_parameter_is_refused() -> None:
    with pytest.raises(BadRequestError, match="2 times"):
        read_query("/api/sandboxes", "get", {"limit": ["1", "2"]})


def test_parameters_are_converted() -> None:
    given = {"limit": ["7"], "unused_for": ["1.5"], "state": ["saved"]}
    assert read_query("/api/sandboxes", "get", given) == {"limit": 7, "unused_for": 1.5, "state": "saved"}


def test_boolean_parameter_accepts_only_true_and_false() -> None:
    for value, meant in (("true", True), ("false", False)):
        assert read_query("/api/sandboxes/{id}", "delete", {"unverified": [value]}) == {"unverified": meant}
    with pytest.raises(BadRequestError):
        read_query("/api/sandboxes/{id}", "delete", {"unverified": ["1"]})


def test_missing_parameter_has_its_default() -> None:
    assert read_query("/api/sandboxes", "get", {}) == {"limit": 100}


def test_missing_required_parameter_is_refused() -> None:
    with pytest.raises(BadRequestError) as raised:
        read_query("/api/sandboxes/plain-notebooks", "delete", {})
    assert raised.value.field == "notebook_path"


def test_parameters_of_jupyter_are_ignored() -> None:
    added = {"token": ["t"], "_xsrf": ["2|x"], "no_track_activity": ["1"], "1794845247": [""]}
    assert read_query("/api/sandboxes/capabilities", "get", added) == {}


def test_id_with_final_newline_is_refused() -> None:
    with pytest.raises(BadRequestError):
        check({"$ref": "#/components/schemas/Id"}, "abc\n", "id")
