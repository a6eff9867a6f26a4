"""Local processes without a kernel's key cannot wake it, and endless messages do not grow the server's memory."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from jupyter_client.session import Session
from kernels import Notebook, Open
from notebooks import until

from sandbox_provisioner.kernel.zmtp import GREETING, command, encode, ready

pytestmark = [pytest.mark.runsc, pytest.mark.user]

IDLE = {"enable_checkpoint_at_idle": True, "idle_timeout": 1.0}
HEARTBEATS = 300
KNOCK = """
import socket, sys, time
for port in map(int, sys.argv[2:]):
    peer = socket.create_connection(("127.0.0.1", port))
    peer.sendall(bytes.fromhex(sys.argv[1]))
    time.sleep(0.5)
time.sleep(3)
"""
ENDLESS = """
import os, socket, threading, time
path = "/run/jupyter/kernel-2"
os.unlink(path)
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
sent = 0
def serve():
    global sent
    while True:
        peer, _ = listener.accept()
        try:
            peer.sendall(HELLO)
            time.sleep(1)
            while True:
                peer.sendall(bytes(1 << 16).join(PARTS))
                sent += 1 << 16
        except OSError:
            pass
threading.Thread(target=serve, daemon=True).start()
"""
HELLO = GREETING + command(ready("iopub"))
OLD_HELLO = b"\xff" + bytes(8) + b"\x7f\x01\x01" + bytes(2)
"""The greeting and the empty identity of a publisher that speaks ZMTP 2, which libzmq also accepts."""
FIRST_FRAME = b"\x03" + (52).to_bytes(8, "big") + bytes(41) + b"\x04\x00"
"""The first frame of a ZMTP 2 publisher. With ZMTP 3, the first 41 bytes would be the end of the greeting."""
MORE_FRAME = b"\x03" + (1 << 16).to_bytes(8, "big")
LONGER_FRAME = b"\x03" + ((1 << 16) + 9).to_bytes(8, "big")
LAST_FRAME = b"\x02" + ((1 << 16) + 9).to_bytes(8, "big")
"""The header of a final frame, hidden in the body of another frame. Its own body extends to the next such header."""
ENDLESS_MESSAGES = {
    "frames": (HELLO, (MORE_FRAME, b"")),
    "frames with commands between them": (HELLO, (MORE_FRAME, command(b"\x04PING\x00\x00"))),
    "frames of an old protocol, shifted": (
        OLD_HELLO + FIRST_FRAME + LAST_FRAME,
        (LONGER_FRAME, LAST_FRAME),
    ),
}


@pytest.fixture(autouse=True)
def short_paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep sockets in a folder whose path is short enough for them, however long the user's name is."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", folder)
        yield


def memory() -> int:
    return psutil.Process().memory_info().rss


def endpoint(notebook: Notebook, channel: str) -> str:
    return str(notebook.km._make_url(channel))


def test_sockets_are_private(open_notebook: Open) -> None:
    notebook = open_notebook()
    assert notebook.km.transport == "ipc"
    for channel in ("shell", "iopub", "stdin", "control", "hb"):
        path = Path(endpoint(notebook, channel).removeprefix("ipc://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_unsigned_messages_neither_wake_nor_delay_hibernation(open_notebook: Open, transport: str) -> None:
    notebook = open_notebook(client_transport=transport, **IDLE)
    assert notebook.km.transport == transport
    context, other = zmq.Context(), Session(key=b"another key")
    try:
        sockets = {channel: context.socket(zmq.DEALER) for channel in ("shell", "control", "stdin")}
        for channel, peer in sockets.items():
            peer.linger = 0
            peer.connect(endpoint(notebook, channel))

        def knock() -> None:
            for peer in sockets.values():
                peer.send_multipart(other.serialize(other.msg("execute_request", {"code": "1"})))

        end = time.monotonic() + 60
        while not notebook.asleep:
            assert time.monotonic() < end
            knock()
            time.sleep(0.2)
        until_still = time.monotonic() + 3
        while time.monotonic() < until_still:
            knock()
            time.sleep(0.2)
            assert notebook.asleep
    finally:
        context.destroy(linger=0)
    assert notebook.run("1 + 1") == "2"


def test_new_connection_does_not_wake_the_kernel(open_notebook: Open) -> None:
    notebook = open_notebook(**IDLE)
    until(lambda: notebook.asleep)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(endpoint(notebook, "shell").removeprefix("ipc://"))
        peer.sendall(GREETING[:1])
        time.sleep(1)
        peer.sendall(GREETING[1:] + command(ready("shell").replace(b"ROUTER", b"DEALER")))
        time.sleep(1)
        assert notebook.asleep


def test_unread_heartbeats_use_bounded_memory(open_notebook: Open) -> None:
    notebook = open_notebook(**IDLE)
    until(lambda: notebook.asleep)
    before = memory()
    beat = encode([b"", b"x" * 60_000]) * 10
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(endpoint(notebook, "hb").removeprefix("ipc://"))
        peer.settimeout(2)
        peer.sendall(GREETING + command(ready("hb").replace(b"REP", b"REQ")))
        with pytest.raises(TimeoutError):
            for _ in range(HEARTBEATS):
                peer.sendall(beat)
        assert memory() - before < 50 << 20
    assert notebook.run("1 + 1") == "2"


@pytest.mark.parametrize("how", ENDLESS_MESSAGES)
def test_endless_message_of_a_kernel_is_cut_off(
    open_notebook: Open, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    notebook = open_notebook(max_message_size=4 << 20)
    hello, parts = ENDLESS_MESSAGES[how]
    notebook.run(f"HELLO, PARTS = {hello!r}, {parts!r}\n{ENDLESS}")
    before, context = memory(), zmq.Context()
    try:
        listener = context.socket(zmq.SUB)
        listener.linger = 0
        listener.subscribe(b"")
        listener.connect(endpoint(notebook, "iopub"))
        until(lambda: "max_message_size" in caplog.text)
        time.sleep(3)  # the client reconnects repeatedly, and is cut off each time
        assert memory() - before < 100 << 20
    finally:
        context.destroy(linger=0)
    notebook.kc.execute("sent", user_expressions={"sent": "sent"})
    reply: dict[str, Any] = notebook.kc.get_shell_msg(timeout=60)
    assert reply["content"]["status"] == "ok"


if os.geteuid() == 0:  # only root can become another user

    def test_another_user_cannot_wake_the_kernel_over_tcp(open_notebook: Open) -> None:
        notebook = open_notebook(client_transport="tcp", **IDLE)
        until(lambda: notebook.asleep)
        ports = [str(getattr(notebook.km, f"{channel}_port")) for channel in ("shell", "control", "stdin", "hb")]
        for data in (b"\xff", GREETING, b"\x00" * 100):
            command_line = ["/usr/bin/python3", "-I", "-c", KNOCK, data.hex(), *ports]
            subprocess.run(command_line, user=65534, cwd="/", check=True, timeout=60)
            assert notebook.asleep
        assert notebook.run("1 + 1") == "2"
        asyncio.run(notebook.km.provisioner.wake())
