"""Each REST request needs the authorizer's consent to the action that docs/rest.md names for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from apis import Api, serving

from sandbox_provisioner.server import openapi

pytestmark = pytest.mark.runsc

DOCS = Path(__file__).parents[3] / "docs" / "rest.md"
UNKNOWN = "0f8a6e0e-8a54-4e0c-9d0a-3f2f2d1b7c11"
AUTHORIZER = """
from pathlib import Path
from jupyter_server.auth import Authorizer

class FromFile(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        return resource != "sandboxes" or action in Path({allowed!r}).read_text().split()

c.ServerApp.authorizer_class = FromFile
"""


def documented() -> dict[tuple[str, str], str]:
    """Return the action of each method and path, from the table in the documentation."""
    rows = re.findall(r"^\| `([A-Z]+) (\S+)` \| `(\w+)` \|$", DOCS.read_text(), re.MULTILINE)
    return {(method, path): action for method, path, action in rows}


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file with the actions that the server's authorizer allows."""
    return tmp_path_factory.mktemp("allowed") / "actions"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, allowed: Path) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("api")
    (folder / "config").mkdir()
    (folder / "config" / "jupyter_server_config.py").write_text(AUTHORIZER.format(allowed=str(allowed)))
    allowed.write_text("read write execute")
    with serving(folder) as api:
        yield api


def test_documented_actions_cover_all_routes() -> None:
    paths = openapi.spec()["paths"]
    methods = ("get", "post", "put", "patch", "delete")
    routes = {(method.upper(), path) for path in paths for method in methods if method in paths[path]}
    assert set(documented()) == routes


@pytest.mark.parametrize(
    "actions", [set(), {"read"}, {"read", "write"}, {"execute"}], ids=["nothing", "read", "no-execute", "execute-only"]
)
def test_routes_require_documented_action(api: Api, allowed: Path, actions: set[str]) -> None:
    allowed.write_text(" ".join(actions))
    refused = set()
    for method, path in documented():
        if path.endswith("/events") and "read" in actions:
            continue  # its response does not end
        short = path.removeprefix("/api/sandboxes").replace("{id}", UNKNOWN).replace("{name}", "a")
        answer = api.ask(method, short, {"unknown field": 1} if method == "POST" else None)
        if answer.status == 403:
            refused.add((method, path))
    assert refused == {route for route, action in documented().items() if action not in actions}
