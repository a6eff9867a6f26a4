"""A setting has an effect wherever it is set, and a mistyped one is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from notebooks import Notebook, until
from servers import Server

from sandbox_provisioner.setup import kernelspecs as twins

pytestmark = pytest.mark.runsc

KERNEL = "python3-sandbox"


@pytest.fixture(autouse=True)
def twin(tmp_path: Path) -> None:
    """Install the kernelspec that `jupyter sandbox setup` installs."""
    (origin,) = twins.origins(["python3"])
    twins.install_twin(origin, tmp_path / "kernels")


def test_idle_timeout_of_the_command_line(serve: Callable[..., Server]) -> None:
    server = serve("--SandboxProvisioner.idle_timeout=1")
    notebook = Notebook(server, KERNEL)
    assert notebook.run("x = 5; x") == "5"
    until(lambda: server.ask("GET", "sandboxes")[1]["items"][0]["state"] == "hibernated")
    assert notebook.run("x") == "5"
    notebook.close()


def test_unknown_setting_of_the_command_line_is_a_warning(serve: Callable[..., Server]) -> None:
    server = serve("--SandboxProvisioner.idle_timout=1")
    assert (
        "The server's configuration or command line contains 'idle_timout', which is not a setting of "
        "SandboxProvisioner and has no effect. The most similar setting is 'idle_timeout'"
    ) in server.log.read_text()
