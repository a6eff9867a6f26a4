"""Test random and malformed requests with schemathesis: responses match openapi.yaml, and nothing is left."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import requests
import schemathesis
from apis import KERNEL, Api, nothing_is_left, serving
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case
from schemathesis.core.transport import Response
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from servers import READY

from sandbox_provisioner.server import openapi

pytestmark = pytest.mark.runsc

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
DOCUMENTED = (503, 507)
"""Documented statuses of valid requests that the server cannot execute."""
KNOWN = "known"
"""The sandbox id of a sandbox that exists during the test."""
RARELY = 200
"""One in this number of requests names the known sandbox or a real kernel."""
FEW = 300
MANY = int(os.environ.get("FUZZ_REQUESTS", "100000"))

OPERATIONS: dict[str, APIOperation[Any, Any, Any]] = {
    found.ok().label: found.ok()
    for found in schemathesis.openapi.from_dict({**openapi.spec(), "security": []}).get_all_operations()
    if found.ok().label != "GET /api/sandboxes/events"  # its response does not end
}


def requests_for(operation: APIOperation[Any, Any, Any]) -> st.SearchStrategy[tuple[Case, bool]]:
    """Return valid and invalid requests, and True for the few that name the known sandbox or a real kernel.

    A random number decides, because Hypothesis would choose these too often. It can make an invalid request valid.
    """
    choice = Random(operation.label)
    made = operation.as_strategy(GenerationMode.POSITIVE)
    if operation.path_parameters or operation.query or operation.body:
        made |= operation.as_strategy(GenerationMode.NEGATIVE)

    def point(case: Case) -> tuple[Case, bool]:
        pointed = choice.randrange(RARELY) == 0
        if pointed:
            if "id" in case.path_parameters:
                case.path_parameters["id"] = KNOWN
            if operation.label == "POST /api/sandboxes" and isinstance(case.body, dict):
                case.body["kernel_name"] = KERNEL
        return case, pointed

    return made.map(point)


def fuzz(api: Api, operation: APIOperation[Any, Any, Any], wanted: int) -> None:
    """Send this number of requests. Delete each sandbox that they create."""
    session = requests.Session()
    session.headers["Authorization"] = "token t"
    sent = 0

    @settings(
        max_examples=wanted,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(request=requests_for(operation))
    def send(request: tuple[Case, bool]) -> None:
        nonlocal sent
        (case, pointed), sent = request, sent + 1
        response = case.call(base_url=api.server.url.rstrip("/"), session=session, timeout=READY)
        assert response.status_code < 500 or response.status_code in DOCUMENTED, response.text
        checks = [check for check in CHECKS if not pointed or check is not negative_data_rejection]
        case.validate_response(response, checks=checks)
        tidy(api, response)

    while sent < wanted:
        send()


def tidy(api: Api, response: Response) -> None:
    """Delete the sandbox that a request created, or recreate the known sandbox if the request deleted it."""
    made = response.json() if response.status_code == 201 else {}
    if "kernel_id" in made and made["sandbox_id"] != KNOWN:
        api.good("DELETE", f"/{made['id']}")
    elif response.status_code == 200 and response.request.method == "DELETE":
        make_known(api)


def make_known(api: Api) -> None:
    api.good("POST", "", {"sandbox_id": KNOWN, "kernel_name": KERNEL})


@pytest.fixture
def api(tmp_path: Path) -> Any:
    """A server with the known sandbox. Fails if anything else is left after the test."""
    with serving(tmp_path) as api:
        make_known(api)
        yield api
        (known,) = api.good("GET", "")["items"]
        assert known["sandbox_id"] == KNOWN
        api.good("DELETE", f"/{KNOWN}")
        nothing_is_left(api)


def test_some_random_requests(api: Api) -> None:
    for operation in OPERATIONS.values():
        fuzz(api, operation, FEW // len(OPERATIONS))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("label", OPERATIONS)
def test_many_random_requests(api: Api, label: str) -> None:
    fuzz(api, OPERATIONS[label], -(-MANY // len(OPERATIONS)))
