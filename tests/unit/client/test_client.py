"""Test the Python client: decoding, errors, and real sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from apis import KERNEL, become_user, serving
from servers import Server

from sandbox_provisioner.client import (
    AnswerError,
    AsyncSandboxClient,
    Event,
    Exit,
    NoServerError,
    Output,
    ProblemError,
    Sandbox,
    SandboxClient,
    ServerUnreachableError,
    models,
    running_servers,
)
from sandbox_provisioner.client.discovery import address
from sandbox_provisioner.client.models import CreateSandbox, decode
from sandbox_provisioner.errors import ConfigurationError, SandboxError
from sandbox_provisioner.sandbox import model
from sandbox_provisioner.sandbox.model import Capabilities, NamedStates, encode

UNASYNC = Path(__file__).parents[3] / "tools" / "unasync.py"
SPEC = yaml.safe_load(files("sandbox_provisioner").joinpath("server/openapi.yaml").read_text())
METHODS = {
    "list_sandboxes": "list", "create_sandbox": "create", "get_capabilities": "capabilities", "stream_events": "events",
    "show_sandbox": "show", "delete_sandbox": "delete", "hibernate_sandbox": "hibernate", "wake_sandbox": "wake",
    "restart_sandbox": "restart", "revert_sandbox": "revert", "reset_sandbox": "reset",
    "execute_in_sandbox": "execute", "fork_sandbox": "fork",
    "list_savepoints": "savepoints", "create_savepoint": "savepoint", "delete_savepoint": "delete_savepoint",
    "rewind_sandbox": "rewind", "list_snapshots": "snapshots", "create_snapshot": "snapshot",
    "delete_snapshot": "delete_snapshot", "keep_sandbox_awake": "keep_awake",
    "list_plain_notebooks": "plain_notebooks", "allow_plain_notebook": "allow_plain",
    "revoke_plain_notebook": "revoke_plain", "show_settings": "settings",
}  # fmt: skip


def test_sync_client_is_generated_from_async_client() -> None:
    assert subprocess.run([sys.executable, UNASYNC, "--check"]).returncode == 0


def test_clients_have_every_operation() -> None:
    operations = {
        operation["operationId"]
        for path in SPEC["paths"].values()
        for name, operation in path.items()
        if name != "parameters"
    }
    assert operations == set(METHODS)
    for client in (SandboxClient, AsyncSandboxClient):
        assert all(callable(getattr(client, method)) for method in METHODS.values())


@pytest.mark.parametrize(
    "name",
    ["Sandbox", "Stored", "NamedState", "NamedStates", "SandboxPage", "Rewound", "Deleted", "Output", "Exit",
     "Capabilities", "Event", "PlainNotebook", "PlainNotebooks", "EffectiveSetting", "EffectiveSettings"],
)  # fmt: skip
def test_models_match_the_schemas(name: str) -> None:
    assert {field.name for field in fields(getattr(models if hasattr(models, name) else model, name))} == set(
        SPEC["components"]["schemas"][name]["properties"]
    )


def test_create_arguments_match_the_schema() -> None:
    assert set(CreateSandbox.__annotations__) == set(SPEC["components"]["schemas"]["CreateSandbox"]["properties"])


def a_sandbox(**changes: Any) -> dict[str, Any]:
    kept = {"created": "2026-11-16T12:00:00+00:00", "size": 7}
    return {
        "id": "a", "sandbox_id": "b", "state": "saved", "persistent": True, "kernel_id": None, "kernel_name": "k",
        "notebook_path": None, "created": "2026-11-16T12:00:00+00:00", "last_used": "2026-11-16T12:00:00Z", "size": 7,
        "checkpoint": kept, "previous": None, "savepoints": [{**kept, "name": "one"}], "snapshots": [], "problem": None,
        "busy": False, "busy_reasons": [], "files": None, "lost_since": None, **changes,
    }  # fmt: skip


def test_decode_and_encode() -> None:
    sandbox = decode(Sandbox, a_sandbox())
    assert sandbox.last_used == datetime(2026, 11, 16, 12, tzinfo=UTC)
    assert sandbox.checkpoint and sandbox.checkpoint.size == 7
    assert [savepoint.name for savepoint in sandbox.savepoints] == ["one"]
    assert encode(sandbox) == a_sandbox(last_used="2026-11-16T12:00:00+00:00")
    assert decode(Output, {"stream": "stdout", "data": "AP8="}).data == b"\0\xff"


def test_unknown_fields_and_values_are_accepted() -> None:
    sandbox = decode(Sandbox, a_sandbox(state="dreaming", mood="good"))
    assert sandbox.state == "dreaming"
    older = {name: value for name, value in a_sandbox().items() if not name.startswith("busy")}
    assert decode(Sandbox, older).busy is False
    event = decode(Event, {"id": "a", "what": "dreamt", "time": "2026-11-16T12:00:00+00:00"})
    assert (event.what, event.seconds, event.doing) == ("dreamt", None, "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"size": "big"}, "size has the wrong type: 'big'"), ({"persistent": 1}, "persistent"),
     ({"created": "soon"}, "soon"),
     ({"savepoints": {}}, "savepoints"), ({"checkpoint": {"size": 1}}, "created"), ({"size": True}, "size")],
)  # fmt: skip
def test_invalid_response_names_the_field(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(AnswerError, match=said):
        decode(Sandbox, a_sandbox(**changes))
    for nonsense in (None, [], "x", {}):
        with pytest.raises(AnswerError):
            decode(NamedStates, nonsense)


@pytest.mark.parametrize(
    ("given", "token", "expected"),
    [
        ("http://localhost:8888", "", ("http://localhost:8888/", "")),
        ("http://localhost:8888/lab?token=abc", "", ("http://localhost:8888/", "abc")),
        ("https://hub/user/ada/tree", "t", ("https://hub/user/ada/", "t")),
        ("http://localhost:8888/?token=abc", "mine", ("http://localhost:8888/", "mine")),
    ],
)
def test_address_as_printed_by_server(given: str, token: str, expected: tuple[str, str]) -> None:
    assert address(given, token) == expected


@pytest.mark.parametrize("given", ["", "localhost:8888", "ftp://x/", "http://", "http://[::1", "http+unix://%2Fs"])
def test_invalid_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="not the address of a Jupyter Server"):
        SandboxClient(given)


def test_running_servers_have_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert running_servers() == []
    (tmp_path / "runtime").mkdir()
    with subprocess.Popen(["true"]) as dead:
        pass
    for number, (pid, url) in enumerate(
        [
            (os.getpid(), "http://a/"),
            (dead.pid, "http://dead/"),
            (os.getpid(), "http+unix://s"),
            (os.getpid(), "http://b/"),
        ]
    ):
        file = tmp_path / "runtime" / f"jpserver-{number}.json"
        file.write_text(json.dumps({"pid": pid, "url": url, "token": "t", "root_dir": "/n"}))
        os.utime(file, (number, number))
    (tmp_path / "runtime" / "jpserver-9.json").write_text("{")
    (tmp_path / "runtime" / "jpserver-8.json").write_text("[]")
    assert [(server.url, server.token, server.root_dir) for server in running_servers()] == [
        ("http://b/", "t", "/n"),
        ("http://a/", "t", "/n"),
    ]


def test_server_that_stops_while_read_is_not_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "jpserver-1.json"
    os.mkfifo(file)

    def stop() -> None:
        with file.open("w") as opened:  # blocks until the file is read
            file.unlink()
            json.dump({"pid": os.getpid(), "url": "http://a/"}, opened)

    server = threading.Thread(target=stop)
    server.start()
    assert running_servers() == []
    server.join()


Answer = Callable[[int, str], str]


@pytest.fixture
def answering() -> Iterator[Answer]:
    """Start a web server that answers every request with this status and body."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, body: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, "<html>", "does not serve sandboxes. Install sandbox-provisioner in its environment"),
        (404, '{"message": "Not Found"}', "does not serve sandboxes."),
        (403, '{"message": "Forbidden"}', "denied access. Check the token for http://"),
        (302, "", "denied access."),
        (502, "Bad \x1b[2J Gateway", "answered with status 502. See the server's log."),
        (500, '{"message": "one\\ntwo"}', "answered with status 500: one | two."),
        (
            409,
            '{"type": "urn:sandbox:in-use", "title": "In use", "detail": "It is.", "remedy": "Wait."}',
            "It is. Wait.",
        ),
    ],
)
def test_refused_request_has_problem_and_remedy(status: int, body: str, said: str, answering: Answer) -> None:
    with SandboxClient(answering(status, body)) as client:
        for ask in (client.list, lambda: list(client.execute("a", ["ls"])), lambda: next(iter(client.events()))):
            with pytest.raises(ProblemError) as caught:
                ask()
            assert said in str(caught.value)
            assert isinstance(caught.value, SandboxError) and caught.value.status == status


def test_problem_detail_becomes_error(answering: Answer) -> None:
    problem = {"type": "urn:sandbox:not-set-up", "title": "Not set up", "status": 400, "detail": "No bucket.",
               "remedy": "Set it.", "variable": "SANDBOX_LOCK_BUCKET"}  # fmt: skip
    with SandboxClient(answering(400, json.dumps(problem))) as client, pytest.raises(ProblemError) as caught:
        client.create(gcs_sandbox_id="a")
    error = caught.value
    assert (error.type, error.title, error.detail, error.variable) == tuple(
        problem[name] for name in ("type", "title", "detail", "variable")
    )
    assert (error.kind, error.problem, error.remedy) == ("not-set-up", "No bucket.", "Set it.")


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"items": 3}'])
def test_response_without_problem_detail_becomes_error(body: str, answering: Answer) -> None:
    with SandboxClient(answering(200, body)) as client:
        with pytest.raises(AnswerError):
            client.list()
        with pytest.raises((AnswerError, ServerUnreachableError)):
            list(client.execute("a", ["ls"]))


def test_output_without_exit_status_is_an_error(answering: Answer) -> None:
    with SandboxClient(answering(200, '{"stream": "stdout", "data": "aGk="}\n')) as client:
        pieces = client.execute("a", ["ls"])
        assert next(pieces) == Output("stdout", b"hi")
        with pytest.raises(ServerUnreachableError, match="closed before the command"):
            next(pieces)


async def test_unreachable_server_is_named() -> None:
    async with AsyncSandboxClient("http://127.0.0.1:1/") as client:
        with pytest.raises(ServerUnreachableError, match=r"http://127\.0\.0\.1:1/ does not answer"):
            await client.list()
        with pytest.raises(ServerUnreachableError):
            _ = [event async for event in client.events()]


async def test_no_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answering: Answer) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    other = {"pid": os.getpid(), "url": answering(404, ""), "token": ""}
    (tmp_path / "jpserver-1.json").write_text(json.dumps(other))
    with pytest.raises(NoServerError, match="jupyter lab"):
        SandboxClient.from_running_server()
    with pytest.raises(NoServerError):
        await AsyncSandboxClient.from_running_server()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as api:
        yield api.server


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxClient]:
    """Yield a client of the server; delete all sandboxes after the test."""
    become_user(server, monkeypatch)
    with SandboxClient.from_running_server() as client:
        yield client
        for sandbox in client.list():
            client.delete(sandbox.id)


def output(client: SandboxClient, id: str, *command: str) -> tuple[bytes, bytes, int]:
    """Return the output and the exit status of a command."""
    *pieces, end = client.execute(id, command)
    assert isinstance(end, Exit)
    written = {"stdout": b"", "stderr": b""}
    for piece in pieces:
        assert isinstance(piece, Output)
        written[piece.stream] += piece.data
    return written["stdout"], written["stderr"], end.status


@pytest.mark.runsc
def test_all_operations_of_one_sandbox(client: SandboxClient) -> None:
    assert KERNEL in decode(Capabilities, encode(client.capabilities())).kernels
    made = client.create(kernel_name=KERNEL, notebook_path="life.ipynb")
    assert (made.state, made.notebook_path, made.persistent) == ("running", "life.ipynb", True)
    assert output(client, made.id, "sh", "-c", "echo out; echo err >&2; exit 3") == (b"out\n", b"err\n", 3)
    assert client.savepoint(made.id, "first").name == "first"
    assert [savepoint.name for savepoint in client.savepoints(made.id)] == ["first"]
    asleep = client.hibernate(made.id)
    assert asleep.state == "hibernated" and asleep.checkpoint
    assert [sandbox.id for sandbox in client.list(state="hibernated")] == [made.id]
    assert [sandbox.id for sandbox in client.list(notebook="other.ipynb")] == []
    assert [sandbox.id for sandbox in client.list(unused_for=3600)] == []
    assert client.wake(made.id).state == "running"
    kept = client.rewind(made.id, "first").kept
    assert {savepoint.name for savepoint in client.savepoints(made.id)} == {"first", kept}
    client.delete_savepoint(made.id, kept)
    fork = client.fork(made.id, "first", "fork.ipynb")
    assert fork.id != made.id and fork.notebook_path == "fork.ipynb" and fork.state == "running"
    assert client.snapshot(made.id, "files").name == "files"
    assert [snapshot.name for snapshot in client.snapshots(made.id)] == ["files"]
    client.delete_snapshot(made.id, "files")
    assert client.restart(made.id).state == "running"
    assert client.delete(made.id).freed > 0
    assert [sandbox.id for sandbox in client.list()] == [fork.id]
    with pytest.raises(ProblemError) as caught:
        client.show(made.id)
    assert (caught.value.status, caught.value.kind) == (404, "not-found")


@pytest.mark.runsc
def test_list_joins_pages(client: SandboxClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [client.create(kernel_name=KERNEL, notebook_path=f"{number}.ipynb").id for number in range(3)]
    for identity in made:  # a starting sandbox updates its last use, and so would change its place in the list
        client.hibernate(identity)
    seen: list[tuple[str, datetime]] = []
    while seen != (seen := [(sandbox.id, sandbox.last_used) for sandbox in client.list()]) or len(seen) != len(made):
        time.sleep(1)
    pages: list[dict[str, Any]] = []
    ask = SandboxClient._ask

    def one_by_one(self: SandboxClient, *given: Any, query: Any = None) -> Any:
        pages.append(query)
        return ask(self, *given, query={**query, "limit": 1})

    monkeypatch.setattr(SandboxClient, "_ask", one_by_one)
    assert {sandbox.id for sandbox in client.list()} == set(made)
    assert len(pages) == 3
    monkeypatch.undo()


@pytest.mark.runsc
async def test_events_are_streamed(server: Server, client: SandboxClient) -> None:
    made = await asyncio.to_thread(client.create, kernel_name=KERNEL, notebook_path="events.ipynb")
    async with AsyncSandboxClient(server.url, "t") as other:
        events = other.events()
        first = asyncio.ensure_future(anext(events))
        while not first.done():
            await other.hibernate(made.id)
            await other.wake(made.id)
        seen = [await first]
        async for event in events:
            seen.append(event)
            if event.what == "woken":
                break
        await events.aclose()
    assert {event.id for event in seen} == {made.sandbox_id}
    assert {"hibernated", "woken"} <= {event.what for event in seen}
    (hibernated, *_) = (event for event in seen if event.what == "hibernated")
    assert hibernated.size and hibernated.seconds


@pytest.mark.runsc
async def test_closing_the_iterator_kills_the_command(server: Server, client: SandboxClient) -> None:
    made = await asyncio.to_thread(client.create, kernel_name=KERNEL, notebook_path="kill.ipynb")
    async with AsyncSandboxClient(server.url, "t") as other:
        pieces = other.execute(made.id, ["sh", "-c", "echo up; exec sleep 1000"])
        assert await anext(pieces) == Output("stdout", b"up\n")
        await pieces.aclose()
        running = b"sleep"
        while b"sleep" in running:
            running, _, _ = await asyncio.to_thread(output, client, made.id, "sh", "-c", "cat /proc/[0-9]*/comm")


@pytest.mark.runsc
def test_wrong_token_is_refused(server: Server) -> None:
    with SandboxClient(server.url, "wrong") as client, pytest.raises(ProblemError) as caught:
        client.list()
    assert caught.value.status == 403
