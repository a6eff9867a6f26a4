"""Heart against real ZeroMQ sockets, and against everything that is none."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from sandbox_provisioner.kernel.heartbeat import LARGEST, Heartbeat
from sandbox_provisioner.kernel.zmtp import COMMAND, GREETING, LONG, MORE, ready

PATIENCE = 20
NULL_READY = bytes([COMMAND, len(ready("hb"))]) + ready("hb").replace(b"REP", b"REQ")


class Beating(asyncio.Protocol):
    """A connection to a server that has nothing but hearts."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.heart = transport, Heartbeat()

    def data_received(self, data: bytes) -> None:
        try:
            self.transport.write(self.heart.answer(data))
        except ValueError:
            self.transport.abort()


class Drop(Beating):
    """The same, but the network brings one byte at a time."""

    def data_received(self, data: bytes) -> None:
        for byte in data:
            super().data_received(bytes([byte]))


@pytest.fixture(params=[Beating, Drop])
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Where hearts beat."""
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


async def test_a_real_req_socket_gets_its_own_beats_back(url: str, context: zmq.asyncio.Context) -> None:
    socket = context.socket(zmq.REQ)
    socket.connect(url)
    for frames in ([b"ping"], [b""], [b"x" * 255], [b"x" * 256], [b"x" * 40_000], [b"a", b"b", b""]):
        assert await beat(socket, *frames) == frames


async def test_many_clients_are_answered_each_its_own(url: str, context: zmq.asyncio.Context) -> None:
    sockets = [context.socket(zmq.REQ) for _ in range(10)]
    for socket in sockets:
        socket.connect(url)
    answers = await asyncio.gather(*(beat(socket, b"%d" % number) for number, socket in enumerate(sockets)))
    assert answers == [[b"%d" % number] for number in range(10)]


async def test_a_client_that_sends_heartbeats_of_zeromqs_own_stays_connected(
    url: str, context: zmq.asyncio.Context
) -> None:
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 50)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 200)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.connect(url)
    assert await beat(socket, b"ping") == [b"ping"]
    assert not await monitor.poll(600)
    assert await beat(socket, b"ping") == [b"ping"]
    monitor.close()


async def test_a_dealer_with_delimiters_of_its_own_gets_them_back(url: str, context: zmq.asyncio.Context) -> None:
    socket = context.socket(zmq.DEALER)
    socket.connect(url)
    assert await beat(socket, b"", b"ping") == [b"", b"ping"]


async def test_an_encrypted_client_is_refused(url: str, context: zmq.asyncio.Context) -> None:
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


def talk(pieces: list[bytes]) -> bytes:
    """Send pieces to a Heartbeat until it rejects one. Return its replies."""
    heart, said = Heartbeat(), b""
    try:
        for piece in pieces:
            said += heart.answer(piece)
    except ValueError:
        pass
    return said


@given(st.lists(HOSTILE, max_size=4))
def test_whatever_is_sent_only_a_valueerror_is_raised_and_no_more_is_said_than_was_heard(pieces: list[bytes]) -> None:
    assert len(talk(pieces)) <= len(b"".join(pieces)) + len(GREETING) + len(NULL_READY)


@given(HOSTILE, st.lists(st.integers(0, 300), max_size=5))
def test_how_it_is_cut_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(edges)]
    whole, cut = talk([data]), talk(pieces)
    assert cut.startswith(whole)


@given(st.binary(max_size=64).filter(lambda data: data[:1] not in (b"", b"\xff")))
def test_what_is_not_zeromq_is_refused_or_waited_for_but_never_answered_as_if_it_were(data: bytes) -> None:
    assert len(talk([data, bytes(64)])) <= len(GREETING)


@pytest.mark.parametrize("flags", [0, MORE, COMMAND, LONG, LONG | MORE, LONG | COMMAND])
def test_a_frame_that_never_ends_costs_bounded_memory(flags: int) -> None:
    heart = Heartbeat()
    heart.answer(GREETING + NULL_READY)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="large"):
            for _ in range(1000):
                heart.answer(bytes([flags | LONG]) + (1 << 40).to_bytes(8, "big") + b"x" * 10_000)
        assert tracemalloc.get_traced_memory()[1] < 10 * LARGEST
    finally:
        tracemalloc.stop()


def test_a_greeting_that_never_comes_costs_bounded_memory() -> None:
    heart = Heartbeat()
    with pytest.raises(ValueError):
        for _ in range(1000):
            heart.answer(b"GET / HTTP/1.1\r\n")
