"""The REST API of a real server; every answer is checked against the OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from kernels import run
from leftovers import leftovers
from servers import READY, Server

from sandbox_provisioner.gvisor.runtime_dir import runtime_root
from sandbox_provisioner.server import openapi

KERNEL = "python3-sandbox"
BROKEN = "broken-sandbox"
"""A sandboxed kernel whose program does not exist."""
KEEPER = "keeper-sandbox"
"""A sandboxed kernel whose state is saved when it is shut down."""


@dataclass
class Answer:
    """A response of the REST API."""

    status: int
    body: Any
    headers: Any


class Api:
    """A client of a server's REST API for sandboxes."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def open(self, method: str, path: str, body: Any = None, token: str = "t") -> HTTPResponse:
        """Send a request and return the open response. Raises HTTPError."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {token}"} if token else {}
        request = Request(f"{self.server.url}api/sandboxes{path}", data, headers, method=method)
        answer: HTTPResponse = urlopen(request, timeout=READY)
        return answer

    def ask(self, method: str, path: str, body: Any = None, token: str = "t") -> Answer:
        """Send a request, check the response against the OpenAPI document, and return the response."""
        try:
            with self.open(method, path, body, token) as found:
                status, headers, raw = found.status, found.headers, found.read()
        except HTTPError as error:
            status, headers, raw = error.code, error.headers, error.read()
        answer = Answer(status, json.loads(raw) if raw else None, headers)
        conform(method, path, answer)
        return answer

    def good(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request that must succeed. Return the body of the response."""
        answer = self.ask(method, path, body)
        assert answer.status < 300, answer
        return answer.body

    def bad(self, status: int, method: str, path: str, body: Any = None) -> Any:
        """Send a request that must fail with this status. Return the body of the response."""
        answer = self.ask(method, path, body)
        assert answer.status == status, answer
        return answer.body

    def run(self, sandbox: dict[str, Any], code: str) -> str:
        """Run a cell in a sandbox's kernel. Return its output."""
        kc = self.server.ready_client(sandbox["kernel_id"])
        try:
            return run(kc, code)
        finally:
            kc.stop_channels()


def conform(method: str, path: str, answer: Answer) -> None:
    """Fail if a response does not match the OpenAPI document."""
    assert answer.headers["Cache-Control"] == "no-store"
    if answer.status >= 400:
        assert answer.headers["Content-Type"] == "application/problem+json"
        openapi.check({"$ref": "#/components/schemas/Problem"}, answer.body, "the problem")
        assert answer.body["status"] == answer.status
    template = next((known for known in openapi.spec()["paths"] if _matches(known, path)), None)
    operation = openapi.spec()["paths"].get(template, {}).get(method.lower())
    if operation is None:
        assert answer.status in (403, 404, 405)
        return
    response = operation["responses"][str(answer.status)]
    if "content" in response:
        ((media_type, content),) = response["content"].items()
        assert answer.headers["Content-Type"] == media_type
        openapi.check(content["schema"], answer.body, "the answer")


def _matches(template: str, path: str) -> bool:
    path = "/api/sandboxes" + path.partition("?")[0]
    return re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path) is not None


def nothing_is_left(api: Api) -> None:
    """Fail if there is a sandbox, a kernel, a session, a record or anything stored."""
    assert api.good("GET", "") == {"items": [], "next": None, "unreadable": 0}
    assert api.server.ask("GET", "kernels") == (200, [])
    assert api.server.ask("GET", "sessions") == (200, [])
    data = api.server.runtime.parent / "data" / "sandbox"
    stored = [path for path in data.rglob("*") if path.is_file() and path.name.endswith((".json", ".img", ".tar"))]
    assert [path for path in stored if ".cache" not in path.parts] == []


def add_kernels(folder: Path) -> None:
    """Write the kernelspecs KERNEL, KEEPER and BROKEN below ``folder``."""
    working = KernelSpecManager().get_kernel_spec("python3").to_dict()
    broken = {"argv": ["/no/such/program"], "display_name": "Broken", "language": "python"}
    for name, spec in ((KERNEL, working), (KEEPER, working), (BROKEN, broken)):
        path = folder / "kernels" / name
        path.mkdir(parents=True)
        config = {"on_shutdown": "checkpoint" if name == KEEPER else "delete"}
        stanza = {"kernel_provisioner": {"provisioner_name": "sandbox-provisioner", "config": config}}
        (path / "kernel.json").write_text(json.dumps({**spec, "metadata": stanza}))


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Api]:
    """Run a server with these kernelspecs. Fails if the stopped server left a process, mount or folder."""
    add_kernels(folder)
    (folder / "notebooks").mkdir()
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_RUNTIME_DIR", str(runtime))
        runtime = runtime_root()
        server = Server(folder, *options)
    try:
        yield Api(server)
    finally:
        server.stop()
    assert leftovers(runtime) == []


def become_user(server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use the server's Jupyter folders in this process. Return the folder of its notebooks."""
    own = server.runtime.parent
    for name in ("runtime", "data", "config"):
        monkeypatch.setenv(f"JUPYTER_{name.upper()}_DIR", str(own / name))
    monkeypatch.delenv("JUPYTER_TOKEN", raising=False)
    monkeypatch.chdir(own / "notebooks")
    return own / "notebooks"
