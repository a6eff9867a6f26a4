"""Test the REST API of a real server with real sandboxes: operations, authorization and failures."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPCookieProcessor, Request, build_opener, urlopen

import pytest
import websocket
from apis import BROKEN, KEEPER, KERNEL, Api, nothing_is_left, serving

from sandbox_provisioner.server import openapi

pytestmark = pytest.mark.runsc

DENY = """
from jupyter_server.auth import Authorizer

class Nobody(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        return resource != "sandboxes"

c.ServerApp.authorizer_class = Nobody
"""
NOBODYS = "0f8a6e0e-8a54-4e0c-9d0a-3f2f2d1b7c11"
PATIENCE = 30


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Yield one server for all tests; each test deletes its sandboxes."""
    with serving(tmp_path_factory.mktemp("api")) as api:
        yield api


@pytest.fixture
def create(api: Api) -> Iterator[Callable[..., dict[str, Any]]]:
    """Yield a function that creates sandboxes; check after the test that nothing is left."""

    def make(**body: Any) -> dict[str, Any]:
        sandbox: dict[str, Any] = api.good("POST", "", {"kernel_name": KERNEL, **body})
        return sandbox

    yield make
    for sandbox in api.good("GET", "")["items"]:
        api.good("DELETE", f"/{sandbox['id']}")
    nothing_is_left(api)


def notebooks(api: Api) -> Path:
    return api.server.runtime.parent / "notebooks"


def output(answer: HTTPResponse) -> tuple[bytes, bytes, int]:
    """Return the stdout, the stderr and the exit status of a command."""
    lines = [json.loads(line) for line in answer]
    streams = {"stdout": b"", "stderr": b""}
    for line in lines[:-1]:
        openapi.check({"$ref": "#/components/schemas/Output"}, line, "output")
        streams[line["stream"]] += base64.b64decode(line["data"])
    openapi.check({"$ref": "#/components/schemas/Exit"}, lines[-1], "exit")
    return streams["stdout"], streams["stderr"], lines[-1]["status"]


def execute(api: Api, sandbox: dict[str, Any], *command: str, **more: Any) -> tuple[bytes, bytes, int]:
    with api.open("POST", f"/{sandbox['id']}/execute", {"command": command, **more}) as answer:
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        return output(answer)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# -- authorization ---------------------------------------------------------------------------------------------------


def operations() -> list[tuple[str, str]]:
    """Return every method and path, with unknown ids."""
    paths = openapi.spec()["paths"]
    found = [(method, path) for path in paths for method in ("get", "post", "delete") if method in paths[path]]
    short = [(method.upper(), path.removeprefix("/api/sandboxes")) for method, path in found]
    return [(method, path.replace("{id}", NOBODYS).replace("{name}", "a")) for method, path in short]


@pytest.mark.parametrize(("method", "path"), [*operations(), ("GET", "/no/such/path")])
def test_unauthenticated_requests_are_forbidden(api: Api, method: str, path: str) -> None:
    answer = api.ask(method, path, {} if method == "POST" else None, token="")
    assert (answer.status, answer.body) == (403, FORBIDDEN)


def test_forbidden_does_not_reveal_existence(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    mine, theirs = create()["id"], NOBODYS
    for method, path in operations():
        for body in ({}, b"nonsense"):
            answers = [
                api.ask(method, path.replace(NOBODYS, one), body if method == "POST" else None, token="wrong")
                for one in (mine, theirs)
            ]
            assert [(answer.status, answer.body) for answer in answers] == [(403, FORBIDDEN)] * 2


def test_unauthorized_requests_are_forbidden(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "jupyter_server_config.py").write_text(DENY)
    with serving(tmp_path) as api:
        for method, path in operations():
            answer = api.ask(method, path, {} if method == "POST" else None)
            assert (answer.status, answer.body) == (403, FORBIDDEN)
        assert api.server.ask("GET", "kernels") == (200, [])


def test_cookie_authentication_needs_xsrf_token(api: Api) -> None:
    jar = CookieJar()
    browser = build_opener(HTTPCookieProcessor(jar))
    for page in ("login", "api/status?token=t"):
        browser.open(f"{api.server.url}{page}", timeout=PATIENCE).close()
    (proof,) = [str(cookie.value) for cookie in jar if cookie.name == "_xsrf"]
    for headers, status in (({}, 403), ({"X-XSRFToken": proof}, 400)):
        request = Request(f"{api.server.url}api/sandboxes", b"no json", headers, method="POST")
        with pytest.raises(HTTPError) as raised:
            browser.open(request, timeout=PATIENCE)
        assert raised.value.code == status
        assert raised.value.headers["Content-Type"] == "application/problem+json"


FORBIDDEN = {
    "type": "about:blank",
    "title": "Forbidden",
    "status": 403,
    "detail": "You are not logged in or not authorized.",
}


# -- invalid requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", f"/{NOBODYS}", 404),
        ("DELETE", f"/{NOBODYS}", 404),
        ("POST", f"/{NOBODYS}/wake", 404),
        ("GET", "/.hidden", 400),
        ("GET", "/a%2F..%2Fb", 400),
        ("GET", "/a%0A", 400),
        ("GET", "/%FF", 400),
        ("GET", "/a/b/c", 404),
        ("GET", "/", 404),
        ("PUT", "", 405),
        ("PATCH", f"/{NOBODYS}", 405),
        ("GET", f"/{NOBODYS}/wake", 405),
        ("GET", "?limit=0", 400),
        ("GET", "?sate=saved", 400),
        ("GET", "?no_track_activity=%FF", 400),
        ("POST", "", 400),
    ],
)
def test_invalid_requests_are_refused(api: Api, method: str, path: str, status: int) -> None:
    api.bad(status, method, path)


def test_method_not_allowed_lists_methods(api: Api) -> None:
    assert api.ask("PUT", "").headers["Allow"] == "GET, POST, OPTIONS"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kernel_name": "python3"}, "kernel_name"),
        ({"notebook_path": "/etc/a.ipynb"}, "notebook_path"),
        ({"notebook_path": "../a.ipynb"}, "notebook_path"),
        ({"notebook_path": "a/../../b.ipynb"}, "notebook_path"),
        ({"notebook_path": "no/such/folder/a.ipynb"}, "notebook_path"),
        ({"notebook_path": ".hidden/a.ipynb"}, "notebook_path"),
        ({"sandbox_id": "a", "gcs_sandbox_id": "a"}, "gcs_sandbox_id"),
        ({"enable_handoff": True}, "enable_handoff"),
        ({"snapshot": {"id": "a", "name": "b"}}, "snapshot"),
        ({"gcs_sandbox_id": "a"}, "SANDBOX_LOCK_BUCKET"),
    ],
)
def test_invalid_create_names_the_field(api: Api, body: dict[str, Any], field: str) -> None:
    assert api.bad(400, "POST", "", body)["variable"] == field
    nothing_is_left(api)


def test_unknown_kernel_lists_kernels(api: Api) -> None:
    assert (
        f"Sandboxed kernels: {BROKEN}, {KEEPER}, {KERNEL}"
        in api.bad(400, "POST", "", {"kernel_name": "no-such"})["remedy"]
    )


@pytest.mark.parametrize(
    "body", [{}, {"notebook_path": "a.ipynb"}, {"sandbox_id": "mine"}, {"notebook_path": "a.ipynb", "sandbox_id": "b"}]
)
def test_failed_start_leaves_nothing(api: Api, body: dict[str, Any]) -> None:
    assert api.bad(422, "POST", "", {**body, "kernel_name": BROKEN})["type"] == "urn:sandbox:command"
    nothing_is_left(api)


def test_responses_contain_no_path(api: Api) -> None:
    problem = api.bad(422, "POST", "", {"kernel_name": BROKEN, "notebook_path": "a.ipynb"})
    assert "/no/such" not in str(problem)
    assert "/no/such/program" in api.server.log.read_text()


# -- operations ------------------------------------------------------------------------------------------------------


def test_capabilities(api: Api) -> None:
    found = api.good("GET", "/capabilities")
    assert found["kernels"][:3] == [BROKEN, KEEPER, KERNEL]  # others may be installed
    assert (found["storage"], found["persistent"], found["gcs"]) == ("local", True, False)


def test_kernel_without_notebook_is_ephemeral(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create()
    assert (sandbox["persistent"], sandbox["state"], sandbox["id"]) == (False, "running", sandbox["kernel_id"])
    assert api.good("GET", "")["items"] == [sandbox | {"last_used": api.good("GET", "")["items"][0]["last_used"]}]
    for action in ("hibernate", "revert"):
        assert "ephemeral" in api.bad(409, "POST", f"/{sandbox['id']}/{action}")["detail"]
    assert "ephemeral" in api.bad(409, "POST", f"/{sandbox['id']}/fork", {})["detail"]
    for kind in ("savepoints", "snapshots"):
        assert api.good("GET", f"/{sandbox['id']}/{kind}") == {"items": []}
        assert "ephemeral" in api.bad(409, "POST", f"/{sandbox['id']}/{kind}", {"name": "a"})["detail"]
    assert api.good("DELETE", f"/{sandbox['id']}") == {"id": sandbox["id"], "freed": 0}


def test_create_with_notebook_creates_session(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    (notebooks(api) / "folder").mkdir(exist_ok=True)
    answer = api.ask("POST", "", {"kernel_name": KERNEL, "notebook_path": "folder/a.ipynb"})
    sandbox = answer.body
    assert answer.status == 201
    assert answer.headers["Location"] == f"/api/sandboxes/{sandbox['id']}"
    assert (sandbox["notebook_path"], sandbox["persistent"]) == ("folder/a.ipynb", True)
    _, (session,) = api.server.ask("GET", "sessions")
    assert (session["path"], session["kernel"]["id"]) == ("folder/a.ipynb", sandbox["kernel_id"])
    assert api.run(sandbox, "import os; print(os.getcwd())").strip() == str(notebooks(api) / "folder")
    again = api.ask("POST", "", {"kernel_name": KERNEL, "notebook_path": "folder/a.ipynb"})
    assert (again.status, again.body["kernel_id"]) == (200, sandbox["kernel_id"])
    api.bad(409, "POST", "", {"kernel_name": KERNEL, "notebook_path": "folder/a.ipynb", "idle_timeout": 1})
    assert api.good("GET", "?notebook=folder/a.ipynb")["items"][0]["id"] == sandbox["id"]
    assert api.good("GET", "?notebook=a.ipynb")["items"] == []


def test_hibernate_and_wake(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create(sandbox_id="sleeper")
    here = f"/{sandbox['id']}"
    api.run(sandbox, "x = 41")
    asleep = api.good("POST", f"{here}/hibernate")
    assert (asleep["state"], asleep["kernel_id"]) == ("hibernated", sandbox["kernel_id"])
    assert asleep["checkpoint"]["size"] == asleep["size"] > 0
    assert [one["id"] for one in api.good("GET", "?state=hibernated")["items"]] == [sandbox["id"]]
    assert api.good("GET", "?state=running")["items"] == []
    assert api.good("POST", f"{here}/wake")["state"] == "running"
    assert api.run(sandbox, "print(x + 1)") == "42\n"
    assert api.good("POST", "/sleeper/restart")["state"] == "running"
    assert api.run(sandbox, "print('x' in globals())") == "False\n"


def test_stored_sandbox_is_shown_and_woken(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create(notebook_path="kept.ipynb", kernel_name=KEEPER)
    here = f"/{sandbox['id']}"
    api.run(sandbox, "x = 41")
    api.server.ask("DELETE", f"kernels/{sandbox['kernel_id']}")
    assert api.good("GET", here)["state"] == "saved"
    assert api.good("POST", f"{here}/hibernate")["kernel_id"] is None
    for action, body in (("restart", None), ("execute", {"command": ["true"]}), ("savepoints", {"name": "a"})):
        assert "not open on this server" in api.bad(409, "POST", f"{here}/{action}", body)["detail"]
    assert "it has no previous checkpoint" in api.bad(409, "POST", f"{here}/revert")["detail"]
    woken = api.good("POST", f"{here}/wake")
    assert woken["state"] == "running"
    assert api.run(woken, "print(x + 1)") == "42\n"
    _, (session,) = api.server.ask("GET", "sessions")
    assert session["path"] == "kept.ipynb"


def test_stored_sandbox_is_reverted_forked_and_deleted(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create(sandbox_id="old", kernel_name=KEEPER)
    here = f"/{sandbox['id']}"
    api.run(sandbox, "x = 1")
    api.good("POST", f"{here}/savepoints", {"name": "one"})
    api.good("POST", f"{here}/hibernate")
    api.server.ask("DELETE", f"kernels/{sandbox['kernel_id']}")
    fork = api.good("POST", f"{here}/fork", {"savepoint": "one"})
    assert api.run(fork, "print(x)") == "1\n"
    api.good("DELETE", f"/{fork['id']}")
    api.good("DELETE", f"{here}/savepoints/one")
    api.bad(404, "DELETE", f"{here}/savepoints/one")
    shown = api.good("GET", here)
    assert shown["savepoints"] == []
    assert api.good("DELETE", here) == {"id": sandbox["id"], "freed": shown["size"]}
    api.bad(404, "GET", here)


def test_delete_unverified(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create(sandbox_id="lost", kernel_name=KEEPER)
    here = f"/{sandbox['id']}"
    api.good("POST", f"{here}/hibernate")
    api.server.ask("DELETE", f"kernels/{sandbox['kernel_id']}")
    (document,) = api.server.runtime.parent.rglob("sandboxes/lost/metadata.json")
    data = document.read_bytes()
    changed = re.sub(rb'"signature": "[0-9a-f]{16}', b'"signature": "' + b"0" * 16, data)
    assert changed != data
    document.write_bytes(changed)
    refused = api.bad(422, "DELETE", here)
    assert refused["variable"] == "SANDBOX_SIGNING_KEY"
    assert "`jupyter sandbox doctor`" in refused["remedy"]
    assert document.exists()
    api.good("DELETE", f"{here}?unverified=true")
    assert not document.exists()
    api.bad(404, "GET", here)


def test_savepoint_and_rewind(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create(notebook_path="a.ipynb")
    here = f"/{sandbox['id']}"
    api.run(sandbox, "x = 1")
    made = api.good("POST", f"{here}/savepoints", {"name": "one"})
    assert api.good("GET", f"{here}/savepoints") == {"items": [made]}
    api.bad(409, "POST", f"{here}/savepoints", {"name": "one"})
    api.run(sandbox, "x = 2")
    rewound = api.good("POST", f"{here}/savepoints/one/rewind")
    assert api.run(sandbox, "print(x)") == "1\n"
    assert {one["name"] for one in rewound["sandbox"]["savepoints"]} == {"one", rewound["kept"]}
    api.bad(404, "POST", f"{here}/savepoints/two/rewind")
    api.good("DELETE", f"{here}/savepoints/one")
    api.bad(404, "DELETE", f"{here}/savepoints/one")


def test_rewind_during_a_cell_is_reported_as_restart(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create(notebook_path="a.ipynb")
    api.run(sandbox, "x = 1")
    api.good("POST", f"/{sandbox['id']}/savepoints", {"name": "one"})
    address = f"{api.server.url}api/kernels/{sandbox['kernel_id']}/channels?token=t".replace("http", "ws", 1)
    browser = websocket.create_connection(address, timeout=PATIENCE)
    kc = api.server.ready_client(sandbox["kernel_id"])
    try:
        request = kc.execute("x = 2\nwhile True: pass")
        wait_for(browser, lambda told: told["parent_header"].get("msg_id") == request)
        while api.server.ask("GET", f"kernels/{sandbox['kernel_id']}")[1]["execution_state"] != "busy":
            time.sleep(0.05)
        api.good("POST", f"/{sandbox['id']}/savepoints/one/rewind")
        wait_for(browser, lambda told: told["content"].get("execution_state") == "restarting")
    finally:
        kc.stop_channels()
        browser.close()
    assert api.run(sandbox, "print(x)") == "1\n"


def wait_for(browser: Any, wanted: Callable[[dict[str, Any]], bool]) -> None:
    while not wanted(json.loads(browser.recv())):
        pass


def test_fork_copies_memory_and_notebook(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    written = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (notebooks(api) / "first.ipynb").write_text(json.dumps(written))
    sandbox = create(notebook_path="first.ipynb")
    here = f"/{sandbox['id']}"
    api.run(sandbox, "x = 1")
    fork = api.good("POST", f"{here}/fork", {"notebook_path": "second.ipynb"})
    assert json.loads((notebooks(api) / "second.ipynb").read_text()) == written
    api.run(fork, "x += 1")
    assert (api.run(sandbox, "print(x)"), api.run(fork, "print(x)")) == ("1\n", "2\n")
    assert "has a kernel" in api.bad(409, "POST", f"{here}/fork", {"notebook_path": "second.ipynb"})["detail"]
    api.bad(404, "POST", f"{here}/fork", {"savepoint": "none", "notebook_path": "third.ipynb"})
    assert not (notebooks(api) / "third.ipynb").exists()
    assert len(api.good("GET", "")["items"]) == 2


def test_create_from_savepoint_or_snapshot(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    first = create(notebook_path="a.ipynb")
    here = f"/{first['id']}"
    api.run(first, "x = 1; import pathlib; n = pathlib.Path.home().joinpath('f').write_text('written')")
    api.good("POST", f"{here}/savepoints", {"name": "memory"})
    made = api.good("POST", f"{here}/snapshots", {"name": "files"})
    assert [one["name"] for one in api.good("GET", f"{here}/snapshots")["items"]] == [made["name"]]
    second = create(sandbox_id="second", savepoint={"id": first["id"], "name": "memory"})
    assert api.run(second, "print(x)") == "1\n"
    third = create(sandbox_id="third", snapshot={"id": first["id"], "name": "files"})
    assert (
        execute(api, third, "cat", "f", cwd=api.run(third, "import os; print(os.environ['HOME'])").strip())[0]
        == b"written"
    )
    for kind in ("savepoint", "snapshot"):
        body = {"sandbox_id": "fourth", kind: {"id": first["id"], "name": "none"}}
        api.bad(404, "POST", "", body)
        api.bad(404, "POST", "", body | {kind: {"id": NOBODYS, "name": "none"}})
    api.bad(409, "POST", "", {"sandbox_id": "second", "savepoint": {"id": first["id"], "name": "memory"}})
    api.good("DELETE", f"{here}/snapshots/files")
    api.bad(404, "DELETE", f"{here}/snapshots/files")


def test_execute(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create(notebook_path="a.ipynb")
    said = execute(api, sandbox, "sh", "-c", "pwd; echo problem >&2; exit 3")
    assert said == (f"{notebooks(api)}\n".encode(), b"problem\n", 3)
    assert execute(api, sandbox, "sh", "-c", "kill -9 $$")[2] == -9
    api.good("POST", f"/{sandbox['id']}/hibernate")
    assert execute(api, sandbox, "head", "-c", "3000000", "/dev/zero") == (bytes(3_000_000), b"", 0)
    for body in ({"command": ["no-such-program"]}, {"command": ["true"], "cwd": "/no/such/folder"}):
        api.bad(422, "POST", f"/{sandbox['id']}/execute", body)


def test_disconnect_kills_the_command(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create()
    answer = api.open("POST", f"/{sandbox['id']}/execute", {"command": ["sh", "-c", "echo on; sleep 12345"]})
    assert b"stream" in answer.readline()
    answer.close()
    until(lambda: sleepers(api, sandbox) == 0)


def test_disconnect_kills_subprocesses_of_ended_command(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create()
    answer = api.open("POST", f"/{sandbox['id']}/execute", {"command": ["sh", "-c", "sleep 12345 & echo on"]})
    assert b"stream" in answer.readline()
    assert sleepers(api, sandbox) == 1
    answer.close()
    until(lambda: sleepers(api, sandbox) == 0)


def test_disconnect_during_wake_kills_the_command(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create(notebook_path="a.ipynb")
    api.good("POST", f"/{sandbox['id']}/hibernate")
    connection = HTTPConnection(urlsplit(api.server.url).netloc)
    command = json.dumps({"command": ["sleep", "12345"]})
    connection.request("POST", f"/api/sandboxes/{sandbox['id']}/execute", command, {"Authorization": "token t"})
    connection.close()
    until(lambda: str(api.good("GET", f"/{sandbox['id']}")["state"]) == "running")
    until(lambda: sleepers(api, sandbox) == 0)


def sleepers(api: Api, sandbox: dict[str, Any]) -> int:
    """Return the number of ``sleep 12345`` processes in a sandbox."""
    seen = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 1234[5]' || true"
    return int(execute(api, sandbox, "sh", "-c", seen)[0])


def test_running_command_keeps_sandbox_busy(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox = create(sandbox_id="idler", enable_checkpoint_at_idle=True, idle_timeout=1)
    assert execute(api, sandbox, "sh", "-c", "sleep 5; echo on") == (b"on\n", b"", 0)
    until(lambda: str(api.good("GET", "/idler")["state"]) == "hibernated")


def test_event_stream(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    with api.open("GET", "/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.readline().startswith(b":")
        sandbox = create(sandbox_id="told")
        api.run(sandbox, "pass")
        api.good("POST", f"/{sandbox['id']}/hibernate")
        api.good("POST", f"/{sandbox['id']}/wake")
        api.good("DELETE", f"/{sandbox['id']}")
        events = list(events_until_deletion(answer))
    for name, event in events:
        openapi.check({"$ref": "#/components/schemas/Event"}, event, "event")
        assert (name, event["id"]) == (event["what"], "told")
    assert [name for name, _ in events if name != "progress"] == [
        "created",
        "started",
        "hibernated",
        "woken",
        "ended",
        "deleted",
    ]


def events_until_deletion(answer: HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the names and the data of the events up to a deletion."""
    name = ""
    while name != "deleted":
        line = answer.readline()
        if line.startswith(b"event: "):
            name = line.removeprefix(b"event: ").decode().strip()
            yield name, json.loads(answer.readline().removeprefix(b"data: "))


def test_event_stream_does_not_prevent_server_stop(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        answer = api.open("GET", "/events")
        answer.readline()
        api.server.stop()
        with suppress(OSError, HTTPException):
            answer.read()


def test_list_in_pages(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    made = [create()["id"] for _ in range(3)]
    first = api.good("GET", "?limit=2")
    second = api.good("GET", f"?limit=2&after={first['next']}")
    assert second["next"] is None
    assert sorted(one["id"] for page in (first, second) for one in page["items"]) == sorted(made)
    assert api.good("GET", "?unused_for=1000")["items"] == []


def test_concurrent_requests_are_serialized(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    create(sandbox_id="box")
    named = {"name": "a"}
    asked: list[tuple[str, str, Any]] = [
        *(("POST", f"/box/{action}", None) for action in ("hibernate", "wake", "restart", "hibernate")),
        *(("POST", f"/box/{kind}", named) for kind in ("savepoints", "snapshots", "savepoints")),
        ("POST", "/box/savepoints/a/rewind", None),
        ("POST", "/box/fork", {}),
        ("POST", "", {"kernel_name": KERNEL, "sandbox_id": "box"}),
        ("DELETE", "/box", None),
        ("POST", "", {"kernel_name": KERNEL, "sandbox_id": "box"}),
    ]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda request: api.ask(*request), asked))
    assert {answer.status for answer in answers} <= {200, 201, 404, 409, 422}  # the delete ends other requests


def test_concurrent_deletes_end_the_kernel_once(api: Api, create: Callable[..., dict[str, Any]]) -> None:
    sandbox, before = create(sandbox_id="box"), running(api)
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda _: api.ask("DELETE", f"/{sandbox['id']}"), range(2)))
    assert {answer.status for answer in answers} <= {200, 404}
    assert running(api) == before - 1


def running(api: Api) -> float:
    """Return the number of kernels according to the server."""
    request = Request(f"{api.server.url}metrics", headers={"Authorization": "token t"})
    with urlopen(request, timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("kernel_currently_running_total{"))


def test_server_with_pending_kernels(tmp_path: Path) -> None:
    with serving(tmp_path, "--SandboxKernelManager.use_pending_kernels=True") as api:
        for body in ({}, {"notebook_path": "a.ipynb"}):
            sandbox = api.good("POST", "", {"kernel_name": KERNEL, **body})
            assert api.run(sandbox, "print(1)") == "1\n"
            api.good("DELETE", f"/{sandbox['id']}")
            api.bad(422, "POST", "", {"kernel_name": BROKEN, **body})
            nothing_is_left(api)


def test_other_kernel_manager_and_base_url(tmp_path: Path) -> None:
    other = "jupyter_server.services.kernels.kernelmanager.AsyncMappingKernelManager"
    with serving(tmp_path, f"--ServerApp.kernel_manager_class={other}", "--ServerApp.base_url=/some/where") as api:
        answer = api.ask("POST", "", {"kernel_name": KERNEL, "notebook_path": "a.ipynb"})
        assert answer.headers["Location"] == f"/some/where/api/sandboxes/{answer.body['id']}"
        assert api.good("POST", f"/{answer.body['id']}/hibernate")["state"] == "hibernated"
        api.good("DELETE", f"/{answer.body['id']}")
        nothing_is_left(api)
