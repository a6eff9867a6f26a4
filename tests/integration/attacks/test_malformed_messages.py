"""Test that malformed messages of a kernel neither use up the server's memory nor forge its log."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from notebooks import Notebook, until
from servers import Server
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from sandbox_provisioner.server.kernel_messages import MOST_KEPT

pytestmark = pytest.mark.runsc

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]

FORGED = "\x1b[2J\r[E 2026-11-18 12:00:00.000 ServerApp] forged by a guest"
UNREAD = """
import threading, time
kernel, written = get_ipython().kernel, 0
def flood():
    global written
    time.sleep(1)
    kernel.iopub_socket.send_multipart([b"it", b"<IDS|MSG>", b"unsigned", b"x", b"{}", b"{}", b"{}"])
    time.sleep(1)
    for number in range(40):
        kernel.session.send(kernel.iopub_socket, "display_data", {"data": {"text/plain": "x" * (10 << 20)}})
        time.sleep(0.1)
    open("flooded", "w").close()
threading.Thread(target=flood).start()
"""
UNWANTED = """
import threading, time
kernel = get_ipython().kernel
def flood():
    time.sleep(3)
    for number in range(60):
        kernel.session.send(kernel.iopub_socket, "display_data", {"data": {"text/plain": "x" * (10 << 20)}})
        time.sleep(0.1)
    open("flooded", "w").close()
threading.Thread(target=flood).start()
"""
STATE = f"""
import threading, time
kernel = get_ipython().kernel
parent = dict(kernel.get_parent())
def forge():
    time.sleep(1)
    state = {FORGED!r} + "x" * (1 << 20)
    kernel.session.send(kernel.iopub_socket, "status", {{"execution_state": state}}, parent=parent)
    open("forged", "w").close()
threading.Thread(target=forge).start()
"""
VERSION = f"""
kernel = type(get_ipython().kernel)
usual = kernel.kernel_info.fget
kernel.kernel_info = property(lambda self: {{**usual(self), "protocol_version": "5." + {FORGED!r}}})
"""


def connect(notebook: Notebook) -> None:
    """Open a websocket to a kernel, as JupyterLab does, and close it."""

    async def once() -> None:
        url = f"{notebook.server.url.replace('http', 'ws', 1)}api/kernels/{notebook.kernel_id}/channels?session_id=it"
        connection = await websocket_connect(
            HTTPRequest(url, headers={"Authorization": "token t"}), subprotocols=["v1.kernel.websocket.jupyter.org"]
        )
        connection.close()

    asyncio.run(once())


def open_unread_websocket(notebook: Notebook) -> socket.socket:
    """Open a websocket to a kernel, and read nothing from it."""
    address = urlsplit(notebook.server.url)
    peer = socket.create_connection((address.hostname, address.port))
    peer.sendall(
        f"GET {address.path}api/kernels/{notebook.kernel_id}/channels?session_id=it&token=t HTTP/1.1\r\n"
        f"Host: {address.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        "Sec-WebSocket-Protocol: v1.kernel.websocket.jupyter.org\r\n\r\n".encode()
    )
    return peer


@pytest.mark.parametrize("client", ["that left", "that does not read"])
def test_unread_messages_need_bounded_memory(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path, client: str
) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    notebook.run(UNWANTED)
    notebook.close()
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    with ExitStack() as open_until_the_end:
        if client == "that left":
            connect(notebook)
        else:
            open_until_the_end.enter_context(open_unread_websocket(notebook))
        until((notebook_folder / "flooded").exists)
        time.sleep(5)
        assert process.memory_info().rss - before < MOST_KEPT + (200 << 20)


def test_messages_after_a_malformed_one_need_bounded_memory(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    notebook.run(UNREAD)
    notebook.close()
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    until((notebook_folder / "flooded").exists)
    time.sleep(2)
    assert process.memory_info().rss - before < 200 << 20
    assert server.log.read_text().count("malformed messages are dropped") == 1


def test_forged_execution_state_is_ignored(serve: Serve, sandboxed: Sandboxed, notebook_folder: Path) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    notebook.run(STATE)
    until((notebook_folder / "forged").exists)
    time.sleep(1)
    _, kernels = server.ask("GET", "kernels")
    assert [kernel["execution_state"] for kernel in kernels] == ["idle"]
    notebook.close()


def test_protocol_version_cannot_forge_log_lines(serve: Serve, sandboxed: Sandboxed) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    notebook.run(VERSION)
    connect(notebook)
    notebook.close()
    said = server.log.read_bytes()
    assert b"malformed kernel_info_reply" in said
    assert b"\x1b" not in said and b"\r" not in said and b"forged by a guest" not in said
