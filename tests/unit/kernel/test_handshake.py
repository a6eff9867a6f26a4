"""Handshake: a real ZeroMQ client completes its handshake without a kernel, and a kernel's own is dropped later."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from sandbox_provisioner.kernel.handshake import (
    OPENING,
    Handshake,
    KernelHandshake,
)
from sandbox_provisioner.kernel.zmtp import GREETING, SOCKET_TYPES, Position, command, identity, ready

PATIENCE = 30
KINDS = {"shell": zmq.DEALER, "stdin": zmq.DEALER, "control": zmq.DEALER, "iopub": zmq.SUB, "hb": zmq.REQ}
CURVE = GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:]


async def converse(channel: str, prepare: Any = lambda socket: None) -> tuple[Position, Handshake]:
    """Have a real client connect and send a message, if it can; return what it said."""
    said, handshake, heard = Position(), Handshake(channel), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(handshake.answer(data))
            if said.follow(data) or handshake.opaque:
                heard.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    context = zmq.asyncio.Context()
    socket = context.socket(KINDS[channel])
    socket.linger = 0
    prepare(socket)
    socket.connect(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    if channel == "iopub":
        socket.subscribe(b"")
    else:
        await socket.send(b"hello")
    try:
        await asyncio.wait_for(heard.wait(), PATIENCE)
    finally:
        context.destroy(linger=0)
        server.close()
    return said, handshake


@pytest.mark.parametrize("channel", SOCKET_TYPES)
async def test_a_client_gets_through_its_handshake(channel: str) -> None:
    said, handshake = await converse(channel)
    assert handshake.done and not handshake.opaque
    assert b"Socket-Type" in said.ready


async def test_the_identity_of_a_client_is_known() -> None:
    def name(socket: Any) -> None:
        socket.identity = b"a session"

    said, _ = await converse("shell", name)
    assert identity(said.ready) == b"a session"


async def test_an_encrypted_client_waits_for_the_kernel() -> None:
    def encrypt(socket: Any) -> None:
        public, secret = zmq.curve_keypair()
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, public

    _, handshake = await converse("shell", encrypt)
    assert handshake.opaque


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1", b"\xff" + bytes(9), bytes(64)])
def test_other_protocols_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="ZMTP"):
        Handshake("shell").answer(data)


@given(st.lists(st.integers(1, 80), min_size=1, max_size=10))
def test_a_plain_kernels_handshake_is_dropped_however_it_is_cut(cuts: list[int]) -> None:
    data, passed, kernel = GREETING + command(ready("shell")) + b"\x00\x02hi", b"", KernelHandshake()
    while data:
        for cut in cuts:
            passed += data[:cut] if kernel.done else kernel.strip(data[:cut])
            data = data[cut:]
    assert passed == b"\x00\x02hi"


@given(st.lists(st.integers(1, 80), min_size=1, max_size=10))
def test_of_an_encrypted_kernels_handshake_the_opening_is_dropped(cuts: list[int]) -> None:
    data, passed, kernel = CURVE + b"rest", b"", KernelHandshake()
    while data:
        for cut in cuts:
            passed += data[:cut] if kernel.done else kernel.strip(data[:cut])
            data = data[cut:]
    assert passed == CURVE[OPENING:] + b"rest"
