"""The user at the other end of a connection, on unix sockets and on TCP."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from sandbox_provisioner.kernel.peers import peer_uid, trusted_peer

CONNECT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_own_connections_over_tcp_are_trusted(family: int, address: str) -> None:
    with socket.socket(family) as listener, socket.socket(family) as client:
        listener.bind((address, 0))
        listener.listen()
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert peer_uid(accepted) == os.geteuid()
            assert trusted_peer(accepted)


def test_own_connections_over_unix_sockets_are_trusted(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        accepted, _ = listener.accept()
        with accepted:
            assert peer_uid(accepted) == os.geteuid()
            assert trusted_peer(accepted)


if os.geteuid() == 0:  # only root can become another user

    def test_another_user_over_tcp_is_not_trusted() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = str(listener.getsockname()[1])
            child = subprocess.Popen(
                ["/usr/bin/python3", "-I", "-c", CONNECT, "127.0.0.1", port],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                user=65534,
                cwd="/",
            )
            try:
                accepted, _ = listener.accept()
                with accepted:
                    assert peer_uid(accepted) == 65534
                    assert not trusted_peer(accepted)
            finally:
                child.communicate()
