"""Real ZeroMQ clients complete their handshakes and get their heartbeats without a kernel."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from sandbox_provisioner.kernel.handshake import LARGEST_HEARTBEAT, OPENING, Handshake, Heartbeat, KernelHandshake
from sandbox_provisioner.kernel.zmtp import (
    COMMAND,
    GREETING,
    LONG,
    MORE,
    SOCKET_TYPES,
    Position,
    command,
    identity,
    ready,
)

PATIENCE = 30
KINDS = {"shell": zmq.DEALER, "stdin": zmq.DEALER, "control": zmq.DEALER, "iopub": zmq.SUB, "hb": zmq.REQ}
CURVE = GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:]


async def converse(channel: str, prepare: Any = lambda socket: None) -> tuple[Position, Handshake]:
    """Connect a real client and let it send a message if it can. Return the client's and the kernel's side."""
    received, handshake, arrived = Position(), Handshake(channel), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(handshake.answer(data))
            if received.follow(data) or handshake.opaque:
                arrived.set()
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
        await asyncio.wait_for(arrived.wait(), PATIENCE)
    finally:
        context.destroy(linger=0)
        server.close()
    return received, handshake


@pytest.mark.parametrize("channel", SOCKET_TYPES)
async def test_client_completes_its_handshake(channel: str) -> None:
    received, handshake = await converse(channel)
    assert handshake.done and not handshake.opaque
    assert b"Socket-Type" in received.ready


async def test_identity_of_a_client_is_read() -> None:
    def name(socket: Any) -> None:
        socket.identity = b"a session"

    received, _ = await converse("shell", name)
    assert identity(received.ready) == b"a session"


async def test_encrypted_client_waits_for_kernel() -> None:
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
def test_plain_handshake_of_the_kernel_is_dropped_in_any_pieces(cuts: list[int]) -> None:
    data, passed, kernel = GREETING + command(ready("shell")) + b"\x00\x02hi", b"", KernelHandshake()
    while data:
        for cut in cuts:
            passed += data[:cut] if kernel.done else kernel.strip(data[:cut])
            data = data[cut:]
    assert passed == b"\x00\x02hi"


@given(st.lists(st.integers(1, 80), min_size=1, max_size=10))
def test_only_the_opening_of_an_encrypted_handshake_is_dropped(cuts: list[int]) -> None:
    data, passed, kernel = CURVE + b"rest", b"", KernelHandshake()
    while data:
        for cut in cuts:
            passed += data[:cut] if kernel.done else kernel.strip(data[:cut])
            data = data[cut:]
    assert passed == CURVE[OPENING:] + b"rest"


# -- heartbeats ------------------------------------------------------------------------------------------------------

NULL_READY = bytes([COMMAND, len(ready("hb"))]) + ready("hb").replace(b"REP", b"REQ")


class Beating(asyncio.Protocol):
    """A connection that answers heartbeats."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.heart = transport, Heartbeat()

    def data_received(self, data: bytes) -> None:
        try:
            self.transport.write(self.heart.answer(data))
        except ValueError:
            self.transport.abort()


class BytewiseBeating(Beating):
    """A connection that answers heartbeats and handles each byte separately."""

    def data_received(self, data: bytes) -> None:
        for byte in data:
            super().data_received(bytes([byte]))


@pytest.fixture(params=[Beating, BytewiseBeating])
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The address of a server that answers heartbeats."""
    server = await asyncio.get_running_loop().create_server(request.param, "127.0.0.1", 0)
    yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def beat(socket: zmq.asyncio.Socket, *frames: bytes) -> list[bytes]:
    await socket.send_multipart(list(frames))
    return await asyncio.wait_for(socket.recv_multipart(), PATIENCE)


async def test_req_socket_gets_its_heartbeats_back(url: str, context: zmq.asyncio.Context) -> None:
    socket = context.socket(zmq.REQ)
    socket.connect(url)
    for frames in ([b"ping"], [b""], [b"x" * 255], [b"x" * 256], [b"x" * 40_000], [b"a", b"b", b""]):
        assert await beat(socket, *frames) == frames


async def test_each_of_many_clients_gets_its_own_heartbeats_back(url: str, context: zmq.asyncio.Context) -> None:
    sockets = [context.socket(zmq.REQ) for _ in range(10)]
    for socket in sockets:
        socket.connect(url)
    answers = await asyncio.gather(*(beat(socket, b"%d" % number) for number, socket in enumerate(sockets)))
    assert answers == [[b"%d" % number] for number in range(10)]


async def test_client_with_zeromq_heartbeats_stays_connected(url: str, context: zmq.asyncio.Context) -> None:
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 50)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 200)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.connect(url)
    assert await beat(socket, b"ping") == [b"ping"]
    assert not await monitor.poll(600)
    assert await beat(socket, b"ping") == [b"ping"]
    monitor.close()


async def test_dealer_socket_gets_its_delimiters_back(url: str, context: zmq.asyncio.Context) -> None:
    socket = context.socket(zmq.DEALER)
    socket.connect(url)
    assert await beat(socket, b"", b"ping") == [b"", b"ping"]


async def test_encrypted_heartbeat_is_refused(url: str, context: zmq.asyncio.Context) -> None:
    public, secret = zmq.curve_keypair()
    socket = context.socket(zmq.REQ)
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, public
    monitor = socket.get_monitor_socket()
    socket.connect(url)
    seen = []
    while not seen or seen[-1] not in (zmq.Event.DISCONNECTED, zmq.Event.HANDSHAKE_SUCCEEDED):
        seen.append((await asyncio.wait_for(recv_monitor_message(monitor), PATIENCE))["event"])
    assert seen[-1] == zmq.Event.DISCONNECTED
    monitor.close()


HOSTILE = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda rest: GREETING + rest, st.binary(max_size=200)),
    st.builds(
        lambda flags, size, rest: GREETING + NULL_READY + bytes([flags]) + size + rest,
        st.integers(0, 255),
        st.binary(min_size=1, max_size=8),
        st.binary(max_size=64),
    ),
)


def reply_to(pieces: list[bytes]) -> bytes:
    """Send these pieces, up to the first one that is no heartbeat. Return the reply."""
    heart, received = Heartbeat(), b""
    try:
        for piece in pieces:
            received += heart.answer(piece)
    except ValueError:
        pass
    return received


@given(st.lists(HOSTILE, max_size=4))
def test_any_bytes_raise_only_valueerror_and_get_a_bounded_reply(pieces: list[bytes]) -> None:
    assert len(reply_to(pieces)) <= len(b"".join(pieces)) + len(GREETING) + len(NULL_READY)


@given(HOSTILE, st.lists(st.integers(0, 300), max_size=5))
def test_reply_does_not_depend_on_the_pieces(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(edges)]
    whole, cut = reply_to([data]), reply_to(pieces)
    assert cut.startswith(whole)


@given(st.binary(max_size=64).filter(lambda data: data[:1] not in (b"", b"\xff")))
def test_other_protocols_get_at_most_a_greeting(data: bytes) -> None:
    assert len(reply_to([data, bytes(64)])) <= len(GREETING)


@pytest.mark.parametrize("flags", [0, MORE, COMMAND, LONG, LONG | MORE, LONG | COMMAND])
def test_endless_frame_needs_bounded_memory(flags: int) -> None:
    heart = Heartbeat()
    heart.answer(GREETING + NULL_READY)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="large"):
            for _ in range(1000):
                heart.answer(bytes([flags | LONG]) + (1 << 40).to_bytes(8, "big") + b"x" * 10_000)
        assert tracemalloc.get_traced_memory()[1] < 10 * LARGEST_HEARTBEAT
    finally:
        tracemalloc.stop()


def test_endless_greeting_needs_bounded_memory() -> None:
    heart = Heartbeat()
    with pytest.raises(ValueError):
        for _ in range(1000):
            heart.answer(b"GET / HTTP/1.1\r\n")
