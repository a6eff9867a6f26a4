"""The contract: a valid OpenAPI document, of which every path and method is served, and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from jupyter_server.base.handlers import APIHandler
from openapi_spec_validator import validate

from sandbox_provisioner.events import What
from sandbox_provisioner.server import openapi
from sandbox_provisioner.server.handlers import AUTH_RESOURCE, ROUTES, SandboxHandler
from sandbox_provisioner.server.openapi import BadRequestError, check, read_body, read_query
from sandbox_provisioner.server.problem_details import STATUSES

METHODS = ("get", "head", "post", "put", "patch", "delete")
CREATE = ("/api/sandboxes", "post")


def served(handler: type[SandboxHandler]) -> set[str]:
    """The methods that a handler has itself."""
    return {method for method in METHODS if getattr(handler, method) is not getattr(APIHandler, method)}


def described(path: str) -> set[str]:
    return {method for method in METHODS if method in openapi.spec()["paths"][path]}


def operations() -> list[dict[str, Any]]:
    return [openapi.spec()["paths"][path][method] for path, _ in ROUTES for method in described(path)]


def test_the_document_is_valid() -> None:
    validate(openapi.spec())


def test_what_is_described_is_what_is_served() -> None:
    assert [path for path, _ in ROUTES] == sorted(openapi.spec()["paths"], key=[path for path, _ in ROUTES].index)
    assert {path: served(handler) for path, handler in ROUTES} == {path: described(path) for path, _ in ROUTES}


def test_every_operation_has_its_name_in_its_method() -> None:
    for path, handler in ROUTES:
        for method in served(handler):
            name = openapi.spec()["paths"][path][method]["operationId"]
            assert name in (inspect.getdoc(getattr(handler, method)) or "")


def test_there_is_one_resource_to_be_authorised_for() -> None:
    assert {handler.auth_resource for _, handler in ROUTES} == {AUTH_RESOURCE}


def test_every_status_of_a_problem_is_described() -> None:
    described_statuses = {status for operation in operations() for status in operation["responses"]}
    assert {str(int(status)) for _, status, _ in STATUSES} <= described_statuses


def test_every_operation_can_be_refused() -> None:
    assert all("403" in operation["responses"] for operation in operations())


def test_events_are_those_of_the_journal() -> None:
    assert openapi.spec()["components"]["schemas"]["Event"]["properties"]["what"]["enum"] == [str(one) for one in What]


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
def test_a_body_that_is_not_as_described_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        read_body(*CREATE, body)


def test_a_body_is_refused_however_deep_it_is_nested() -> None:
    for depth in range(100, 1100):  # some depths can be parsed, but not printed
        with pytest.raises(BadRequestError):
            read_body(*CREATE, b'{"kernel_name": ' + b"[" * depth + b"]" * depth + b"}")


def test_a_body_as_described_is_taken() -> None:
    body = b'{"notebook_path": "f/a.ipynb", "idle_timeout": 1.5, "savepoint": {"id": "a", "name": "b"}}'
    assert read_body(*CREATE, body) == {
        "notebook_path": "f/a.ipynb",
        "idle_timeout": 1.5,
        "savepoint": {"id": "a", "name": "b"},
    }


def test_a_refusal_says_where_and_what_it_should_be() -> None:
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
def test_parameters_that_are_not_as_described_are_refused(name: str, value: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        read_query("/api/sandboxes", "get", {name: [value]})
    assert raised.value.field == name


def test_a_parameter_that_is_given_twice_is_refused() -> None:
    with pytest.raises(BadRequestError, match="2 times"):
        read_query("/api/sandboxes", "get", {"limit": ["1", "2"]})


def test_parameters_are_what_they_are_described_as() -> None:
    given = {"limit": ["7"], "unused_for": ["1.5"], "state": ["saved"]}
    assert read_query("/api/sandboxes", "get", given) == {"limit": 7, "unused_for": 1.5, "state": "saved"}


def test_a_parameter_that_is_true_or_false_is_nothing_else() -> None:
    for value, meant in (("true", True), ("false", False)):
        assert read_query("/api/sandboxes/{id}", "delete", {"unverified": [value]}) == {"unverified": meant}
    with pytest.raises(BadRequestError):
        read_query("/api/sandboxes/{id}", "delete", {"unverified": ["1"]})


def test_a_parameter_that_is_not_given_has_its_default() -> None:
    assert read_query("/api/sandboxes", "get", {}) == {"limit": 100}


def test_what_jupyter_adds_to_an_address_is_no_parameter_of_ours() -> None:
    added = {"token": ["t"], "_xsrf": ["2|x"], "no_track_activity": ["1"], "1794845247": [""]}
    assert read_query("/api/sandboxes/capabilities", "get", added) == {}


def test_the_end_of_an_id_is_its_end() -> None:
    with pytest.raises(BadRequestError):
        check({"$ref": "#/components/schemas/Id"}, "abc\n", "id")
