"""Test the server extension: the wheel enables it, and it chooses classes unless the user configured them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_server.gateway.connections import GatewayWebSocketConnection
from jupyter_server.gateway.gateway_client import GatewayClient
from jupyter_server.gateway.managers import GatewayMappingKernelManager
from jupyter_server.serverapp import ServerApp
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from notebooks import until
from servers import Server

from sandbox_provisioner.server.kernel_manager import SandboxKernelManager
from sandbox_provisioner.server.kernel_websocket import SandboxWebsocketConnection


@pytest.fixture(autouse=True)
def no_gateway() -> None:
    """Reset the gateway, which is configured once per process."""
    GatewayClient.clear_instance()


def started_server(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> ServerApp:
    for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
        monkeypatch.setenv(f"JUPYTER_{name}", str(folder / name))
    app = ServerApp()
    app.initialize(["--allow-root", "--port=0", f"--ServerApp.root_dir={folder}", *options], new_httpserver=False)
    return app


def manager_of_a_server(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> object:
    return started_server(monkeypatch, folder, *options).kernel_manager


def test_installed_package_enables_hibernation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert type(manager_of_a_server(monkeypatch, tmp_path)) is SandboxKernelManager


# Sets the usual low limit of open files, starts a server, and prints the limits that the server has set.
SERVER_WITH_FEW_FILES = """
import resource, sys, zmq
from jupyter_server.serverapp import ServerApp
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
app = ServerApp()
app.initialize(["--allow-root", "--port=0", *sys.argv[2:]], new_httpserver=False)
sockets = [app.kernel_manager.context.socket(zmq.DEALER) for _ in range(int(sys.argv[1]))]
print(len(sockets), resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard)
"""


def server_with_few_files(folder: Path, sockets: int, *options: str) -> list[int]:
    """Return the maximum of ZeroMQ sockets, and the soft and the hard limit of open files."""
    folders = {f"JUPYTER_{name}": str(folder / name) for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")}
    command = [sys.executable, "-c", SERVER_WITH_FEW_FILES, str(sockets), f"--ServerApp.root_dir={folder}", *options]
    done = subprocess.run(command, env=os.environ | folders, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_limits_of_sockets_and_files(tmp_path: Path) -> None:
    sockets, files, possible = server_with_few_files(tmp_path, 1500)
    assert sockets == 1500
    assert files == min(possible, 1 << 16)


def test_configured_limit_of_open_files_is_kept(tmp_path: Path) -> None:
    _, files, _ = server_with_few_files(tmp_path, 0, "--ServerApp.min_open_files_limit=1500")
    assert files == 1500


def test_configured_class_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = f"{AsyncMappingKernelManager.__module__}.{AsyncMappingKernelManager.__name__}"
    manager = manager_of_a_server(monkeypatch, tmp_path, f"--ServerApp.kernel_manager_class={theirs}")
    assert type(manager) is AsyncMappingKernelManager


def test_gateway_server_is_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = started_server(monkeypatch, tmp_path, "--GatewayClient.url=http://127.0.0.1:1")
    assert type(server.kernel_manager) is GatewayMappingKernelManager
    assert server.kernel_websocket_connection_class is GatewayWebSocketConnection


def test_websocket_class_unless_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = started_server(monkeypatch, tmp_path)
    assert server.web_app.settings["kernel_websocket_connection_class"] is SandboxWebsocketConnection
    theirs = f"{ZMQChannelsWebsocketConnection.__module__}.{ZMQChannelsWebsocketConnection.__name__}"
    server = started_server(monkeypatch, tmp_path, f"--ServerApp.kernel_websocket_connection_class={theirs}")
    assert server.web_app.settings["kernel_websocket_connection_class"] is ZMQChannelsWebsocketConnection


def test_language_servers_are_not_detected_in_shared_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.delenv("JP_LSP_VIRTUAL_DIR", raising=False)
    monkeypatch.chdir(tmp_path / "notebooks")
    config = started_server(monkeypatch, tmp_path / "notebooks").config.LanguageServerManager
    assert config.autodetect is False
    assert config.virtual_documents_dir == str(tmp_path / "notebooks" / "DATA_DIR" / "sandbox" / "virtual-documents")
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = started_server(monkeypatch, tmp_path / "notebooks").config.LanguageServerManager
    assert "autodetect" not in config
    option = "--LanguageServerManager.virtual_documents_dir=/chosen"
    config = started_server(monkeypatch, tmp_path / "notebooks", option).config.LanguageServerManager
    assert config.virtual_documents_dir == "/chosen"


def test_log_names_kernels_without_a_twin(serve: Callable[..., Server], tmp_path: Path) -> None:
    for name, metadata in (("new", {}), ("old", {}), ("old-sandbox", {"sandbox_twin_of": "old"})):
        place = tmp_path / "kernels" / name
        place.mkdir(parents=True)
        spec = {"argv": ["sh"], "display_name": name, "language": "sh", "metadata": metadata}
        (place / "kernel.json").write_text(json.dumps(spec))
    server = serve()
    until(lambda: "Kernels without a sandboxed twin: " in server.log.read_text())
    listed = server.log.read_text().split("Kernels without a sandboxed twin: ")[1].split(". ")[0].split(", ")
    assert "new" in listed and "old" not in listed


LATER = (
    "provisioner",
    "sandbox.manager",
    "kernel.kernel",
    "persistence.snapshots",
    "templates.warm_pool",
    "server.service",
)


def test_server_starts_without_the_code_of_kernels(tmp_path: Path) -> None:
    places = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    options = ["--allow-root", "--port=0", f"--ServerApp.root_dir={tmp_path}"]
    program = f"""
import sys
from jupyter_server.serverapp import ServerApp
app = ServerApp()
app.initialize({options}, new_httpserver=False)
print(type(app.kernel_manager).__name__)
print([name for name in {LATER} if "sandbox_provisioner." + name in sys.modules])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **places}, capture_output=True, text=True
    )
    assert ended.stdout.splitlines() == ["SandboxKernelManager", "[]"], ended.stderr
