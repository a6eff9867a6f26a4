"""The server extension: enabled by what the wheel installs, it chooses the kernel manager unless the user did."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from jupyter_server.gateway.gateway_client import GatewayClient
from jupyter_server.gateway.managers import GatewayMappingKernelManager
from jupyter_server.serverapp import ServerApp
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager

from sandbox_provisioner.kernelmanager import SandboxKernelManager


@pytest.fixture(autouse=True)
def no_gateway() -> None:
    """A gateway is configured once in a process."""
    GatewayClient.clear_instance()


@pytest.fixture
def few_files() -> Iterator[int]:
    """A process that may have as few open files as is usual; how many it could have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def manager_of_a_server(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> object:
    for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
        monkeypatch.setenv(f"JUPYTER_{name}", str(folder / name))
    app = ServerApp()
    app.initialize(["--allow-root", "--port=0", f"--ServerApp.root_dir={folder}", *options], new_httpserver=False)
    return app.kernel_manager


def test_an_installed_package_makes_any_server_hibernate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert type(manager_of_a_server(monkeypatch, tmp_path)) is SandboxKernelManager


def test_there_are_sockets_and_files_for_hundreds_of_notebooks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, few_files: int
) -> None:
    manager = manager_of_a_server(monkeypatch, tmp_path)
    assert isinstance(manager, SandboxKernelManager)
    assert open_files() == min(few_files, 1 << 16)
    with ExitStack() as sockets:
        for _ in range(1500):
            sockets.enter_context(manager.context.socket(zmq.DEALER))


def test_a_limit_of_open_files_that_the_user_configured_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, few_files: int
) -> None:
    manager_of_a_server(monkeypatch, tmp_path, "--ServerApp.min_open_files_limit=1500")
    assert open_files() == 1500


def test_a_class_that_the_user_configured_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = f"{AsyncMappingKernelManager.__module__}.{AsyncMappingKernelManager.__name__}"
    manager = manager_of_a_server(monkeypatch, tmp_path, f"--ServerApp.kernel_manager_class={theirs}")
    assert type(manager) is AsyncMappingKernelManager


def test_a_server_whose_kernels_a_gateway_has_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manager = manager_of_a_server(monkeypatch, tmp_path, "--GatewayClient.url=http://127.0.0.1:1")
    assert type(manager) is GatewayMappingKernelManager
