"""JupyterHub example with a real proxy and culler: the state survives a cull, and moves between a user's servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hubs import Browser, Hub
from leftovers import leftovers
from notebooks import until

pytestmark = [pytest.mark.hub, pytest.mark.timeout(300)]

CULL_SOON = """
c.JupyterHub.services[0]["command"][-2:] = ["--timeout=30", "--cull-every=1"]
c.Spawner.environment["JUPYTERHUB_ACTIVITY_INTERVAL"] = "1"
"""
"""Cull a server after 30 idle seconds, and let servers report their activity every second."""

Sandboxed = Callable[..., str]


def sandboxes(runtime: Path) -> list[str]:
    """Return the running sandboxes."""
    return [line for line in leftovers(runtime) if line.startswith("folder")]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """The hub of the example, with the test's kernelspecs."""
    running = Hub(tmp_path, f"{CULL_SOON}c.Spawner.environment['JUPYTER_PATH'] = {str(tmp_path)!r}")
    yield running
    running.stop()


def test_notebook_survives_cull_of_server_and_moves(hub: Hub, sandboxed: Sandboxed, runtime: Path) -> None:
    kernel = sandboxed()
    browser = Browser(hub, "alice")
    notebook = browser.open_notebook(kernel, "a.ipynb")
    notebook.run("x = 41; g = (n for n in range(10)); next(g)")
    assert browser.servers() == [""]
    notebook.close()
    until(lambda: browser.servers() == [])
    until(lambda: sandboxes(runtime) == [])

    notebook = browser.open_notebook(kernel, "a.ipynb")
    assert notebook.run("x += 1; x, next(g)") == "(42, 1)"

    elsewhere = browser.open_notebook(kernel, "a.ipynb", server="second")
    assert elsewhere.run("x, next(g)") == "(42, 2)"
    assert sorted(browser.servers()) == ["", "second"]
    assert len(sandboxes(runtime)) == 1
    notebook.close()
    elsewhere.close()
