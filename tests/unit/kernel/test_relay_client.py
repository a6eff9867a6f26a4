"""Test ClientConnection: which messages count, which wake a kernel, and how much memory a client can use."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from guests import LIMIT, real_guest
from jupyter_client.session import Session
from relays import ANY, IP, Dial, kernel, until

from sandbox_provisioner.kernel import relay as relay_module
from sandbox_provisioner.kernel import relay_client
from sandbox_provisioner.kernel.relay import CHANNELS, ChannelRelay
from sandbox_provisioner.kernel.relay_client import peer_uid, trusted_peer
from sandbox_provisioner.kernel.zmtp import FRAME_COST, GREETING, GREETING_SIZE, command, encode, ready
from sandbox_provisioner.mux.connection import ConnectionState

KEY = b"the kernel's key"
SIGNING = (KEY, "hmac-sha256")
CLIENT = GREETING + command(ready("shell").replace(b"ROUTER", b"DEALER"))
KERNEL = GREETING + command(ready("shell"))
CURVE = GREETING.replace(b"NULL\0", b"CURVE")


class Kernel:
    """The kernel's end of its channels: records what it receives, and sends what a test tells it to."""

    def __init__(self) -> None:
        self.received: dict[str, bytearray] = {channel: bytearray() for channel in CHANNELS}
        self.writers: list[asyncio.StreamWriter] = []
        self.closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        channel = Path(str(writer.get_extra_info("sockname"))).name
        while data := await reader.read(1 << 16):
            self.received[channel] += data
        self.closed += 1
        writer.close()


@asynccontextmanager
async def joined(relay: ChannelRelay, folder: Path) -> AsyncIterator[tuple[Kernel, Any]]:
    """Connect a relay that knows the key to a new kernel. Yield the kernel and the connection."""
    end = Kernel()
    async with kernel(folder, end.serve) as (connection, targets):
        relay.connect(connection, targets, SIGNING)
        yield end, connection


def message(kind: str = "execute_request", key: bytes = KEY, **content: Any) -> tuple[str, bytes]:
    session = Session(key=key)
    made = session.msg(kind, content)
    return made["msg_id"], encode(session.serialize(made))


def reply(msg_id: str, key: bytes = KEY) -> bytes:
    session = Session(key=key)
    parent = {"msg_id": msg_id, "msg_type": "execute_request"}
    return encode(session.serialize(session.msg("execute_reply", {"status": "ok"}, parent=parent)))


async def test_busy_from_a_signed_request_to_its_reply(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (end, _):
        client = await dial(ports["shell"])
        msg_id, request = message(code="pass")
        await client.send(CLIENT + request)
        await until(lambda: relay.activity.busy)
        await until(lambda: end.received["shell"] == CLIENT + request)
        end.writers[0].write(KERNEL + reply(msg_id))
        assert await client.receive(len(KERNEL + reply(msg_id)))
        assert not relay.activity.busy


async def test_replies_with_another_key_are_ignored(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (end, _):
        client = await dial(ports["shell"])
        msg_id, request = message()
        await client.send(CLIENT + request)
        await until(lambda: len(end.received["shell"]) == len(CLIENT + request))
        forged = KERNEL + reply(msg_id, b"another key")
        end.writers[0].write(forged)
        await client.receive(len(forged))
        assert relay.activity.busy


@pytest.mark.parametrize("bad", ["another key", "not a message", "one byte"])
@pytest.mark.parametrize("channel", ["shell", "control", "stdin"])
async def test_unsigned_messages_neither_count_nor_wake(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path, channel: str, bad: str
) -> None:
    calls: list[None] = []
    relay.on_call = lambda: calls.append(None)
    data = {"another key": message(key=b"another key")[1], "not a message": encode([b"x" * 100]), "one byte": b"\x00"}
    async with joined(relay, tmp_path) as (end, connection):
        client = await dial(ports[channel])
        await client.send(CLIENT)
        await until(lambda: end.received[channel] == CLIENT)
        end.writers[0].write(KERNEL)
        await client.receive(len(KERNEL))
        connection.state = ConnectionState.QUIESCED
        await client.send(data[bad])
        await until(lambda: any(one.held() for one in relay._clients))
        assert not relay.waited_for and not relay.activity.busy
        connection._continue_traffic()
        await until(lambda: end.received[channel] == CLIENT + data[bad])  # it is still forwarded
        assert relay.sent == 0 and calls == []


@pytest.mark.parametrize(
    "data",
    [bytes(100), bytes(GREETING_SIZE + 2), CURVE, CURVE + encode([b"x" * 100]), CURVE + command(b"") * 3],
    ids=["zeros", "empty frame", "greeting", "message without handshake", "commands"],
)
async def test_connections_that_cannot_be_read_do_not_count_before_the_handshake(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path, data: bytes
) -> None:
    async with joined(relay, tmp_path) as (end, _):
        client = await dial(ports["shell"])
        await client.send(data)
        await until(lambda: end.received["shell"] == data)
        assert relay.sent == 0 and not relay.activity.busy


async def test_messages_on_an_encrypted_connection_count_after_the_handshake(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (end, _):
        client = await dial(ports["shell"])
        await client.send(CURVE + command(b"\x05HELLO") + command(b"\x08INITIATE"))
        await until(lambda: bool(end.writers))
        end.writers[0].write(CURVE + command(b"\x07WELCOME") + command(b"\x05READY"))
        await client.receive(len(CURVE + command(b"\x07WELCOME") + command(b"\x05READY")))
        await client.send(command(b"\x07MESSAGE an encrypted message"))
        await until(lambda: relay.sent == 1)


async def test_kernel_usage_requests_do_not_wake_the_kernel(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (end, connection):
        client = await dial(ports["control"])
        await client.send(CLIENT)
        await until(lambda: end.received["control"] == CLIENT)
        end.writers[0].write(KERNEL)
        await client.receive(len(KERNEL))
        connection.state = ConnectionState.QUIESCED
        await client.send(message("usage_request")[1])
        await until(lambda: any(one.held() for one in relay._clients))
        assert not relay.called
        await client.send(message("debug_request")[1])
        await until(lambda: relay.called)
        connection._continue_traffic()


@pytest.mark.parametrize("cut", [1, 1 << 20])
async def test_observing_requests_are_answered_and_not_delivered(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path, cut: int
) -> None:
    calls: list[bool] = []
    relay.on_call = lambda: calls.append(True)
    async with joined(relay, tmp_path) as (end, connection):
        watcher = await dial(ports["iopub"])
        await watcher.send(CLIENT)
        old = await dial(ports["control"])
        await old.send(CLIENT)
        await until(lambda: len(end.writers) == 2 and end.received["control"] == CLIENT)
        for writer in end.writers:
            writer.write(KERNEL)
        await watcher.receive(len(KERNEL))
        await old.receive(len(KERNEL))
        connection.state = ConnectionState.DETACHED
        assert relay.asleep
        new = await dial(ports["control"])
        await new.send(CLIENT)
        await new.receive(len(KERNEL.replace(b"shell", b"control")))
        for client in (old, new):
            for _ in range(2):
                msg_id, request = message("usage_request")
                for start in range(0, len(request), cut):
                    await client.send(request[start : start + cut])
                assert b'"usage_reply"' in (answer := await frames(client, 6))[2]
                assert msg_id.encode() in answer[3] and b'"kernel_memory": 0' in answer[5]
                for state in (b"busy", b"idle"):
                    news = await frames(watcher, 7)
                    assert news[0] == b"kernel.status" and msg_id.encode() in news[4] and state in news[6]
        forged = message("usage_request", key=b"another key")[1]
        await new.send(forged)
        await asyncio.sleep(0.05)
        assert not any(one._has_request for one in relay._clients) and calls == []
        connection.state = ConnectionState.OPEN
        connection._continue_traffic()
        await until(lambda: end.received["control"][len(CLIENT) :].startswith(GREETING))
        end.writers[2].write(KERNEL)
        await until(lambda: end.received["control"] == CLIENT + CLIENT + forged)


async def test_comm_info_request_wakes_the_kernel_if_the_answer_is_not_known(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (end, connection):
        client = await dial(ports["shell"])
        await client.send(CLIENT)
        await until(lambda: end.received["shell"] == CLIENT)
        end.writers[0].write(KERNEL)
        await client.receive(len(KERNEL))
        msg_id, request = message("comm_info_request", target_name="a")
        await client.send(request)
        session = Session(key=KEY)
        parent = {"msg_id": msg_id, "msg_type": "comm_info_request"}
        answer = session.msg("comm_info_reply", {"comms": {"one": {"target_name": "a"}}}, parent=parent)
        end.writers[0].write(encode(session.serialize(answer)))
        assert b'"one"' in (await frames(client, 6))[5]
        connection.state = ConnectionState.DETACHED
        await client.send(message("comm_info_request", target_name="a")[1])
        assert b'"one"' in (await frames(client, 6))[5]
        assert not relay.called
        await client.send(message("comm_info_request", target_name="b")[1])
        await until(lambda: relay.called)


async def frames(client: Any, count: int) -> list[bytes]:
    """Receive the frames of one message."""
    found = []
    for _ in range(count):
        flags, short = await client.receive(2)
        size = short if not flags & 2 else int.from_bytes(bytes([short]) + await client.receive(7), "big")
        found.append(await client.receive(size) if size else b"")
    return found


async def test_client_of_a_hibernated_kernel_gets_its_handshake(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (end, connection):
        connection.state = ConnectionState.QUIESCED
        client = await dial(ports["shell"])
        await client.send(CLIENT)
        assert await client.receive(len(KERNEL)) == KERNEL
        assert not relay.called
        msg_id, request = message()
        await client.send(request)
        await until(lambda: relay.called)
        connection._continue_traffic()
        await until(lambda: end.received["shell"] == GREETING)
        end.writers[0].write(KERNEL)  # the kernel's handshake; the relay has already sent one to the client
        await until(lambda: end.received["shell"] == CLIENT + request)
        end.writers[0].write(reply(msg_id))
        assert await client.receive(len(reply(msg_id)))
        assert not relay.activity.busy


async def test_held_requests_are_answered_without_the_handshake(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (end, connection):
        connection.state = ConnectionState.QUIESCED
        client = await dial(ports["shell"])
        msg_id, request = message()
        await client.send(CLIENT + request)
        await client.receive(len(KERNEL))
        await until(lambda: relay.called)
        held: list[bytes] = []

        def answer(data: bytes) -> tuple[bytes, bytes]:
            held.append(data)
            return reply(msg_id), b""

        relay.answer(answer)
        assert held == [request]
        await client.receive(len(reply(msg_id)))
        assert not relay.called and not relay.activity.busy
        connection._continue_traffic()
        await until(lambda: end.received["shell"] == GREETING)
        end.writers[0].write(KERNEL)
        await until(lambda: end.received["shell"] == CLIENT)


async def test_cell_continues_after_its_client_disconnects(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (end, connection):
        client = await dial(ports["shell"])
        msg_id, request = message()
        await client.send(CLIENT + request)
        await until(lambda: len(end.received["shell"]) == len(CLIENT + request))
        end.writers[0].write(KERNEL)
        await client.receive(len(KERNEL))
        await client.close()
        await until(lambda: not relay._clients)
        assert relay.activity.busy and relay.waited_for and end.closed == 0
        end.writers[0].write(reply(msg_id))
        await until(lambda: not relay.activity.busy and not relay.waited_for)
        await until(lambda: end.closed == 1 and not connection._streams and not relay.lingering)


async def test_client_without_requests_is_disconnected_from_the_kernel(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (end, _):
        client = await dial(ports["shell"])
        await client.send(CLIENT + message("comm_msg")[1])
        await client.close()
        await until(lambda: end.closed == 1)
        assert not relay.lingering


async def test_reconnected_client_replaces_its_old_connection(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    named = GREETING + command(ready("shell").replace(b"ROUTER", b"DEALER") + b"\x08Identity\x00\x00\x00\x02me")
    async with joined(relay, tmp_path) as (end, _):
        client = await dial(ports["shell"])
        await client.send(named + message()[1])
        await until(lambda: relay.activity.busy)
        await client.close()
        await until(lambda: len(relay.lingering) == 1)
        again = await dial(ports["shell"])
        await again.send(named)
        await until(lambda: end.closed == 1 and not relay.lingering)
        assert relay.activity.busy


async def test_number_of_lingering_streams_is_limited(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "MAX_LINGERING", 2)
    async with joined(relay, tmp_path) as (end, _):
        for _ in range(4):
            client = await dial(ports["shell"])
            await client.send(CLIENT + message()[1])
            await client.close()
        await until(lambda: end.closed == 2)
        assert len(relay.lingering) == 2 and relay.activity.busy


async def test_published_message_waits_for_the_end_of_the_kernels_message(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (end, _):
        client = await dial(ports["iopub"])
        await until(lambda: len(end.writers) == 1)
        first, second = b"\x01\x03abc", b"\x00\x03def"
        end.writers[0].write(KERNEL + first)
        assert await client.receive(len(KERNEL + first)) == KERNEL + first
        relay.publish(b"\x00\x06notice")
        end.writers[0].write(second)
        assert await client.receive(len(second)) == second
        assert await client.receive(8) == b"\x00\x06notice"
        relay.publish(b"\x00\x05again")
        assert await client.receive(7) == b"\x00\x05again"


@pytest.mark.parametrize("hidden", [{"silent": True}, {"silent": False, "store_history": False}])
async def test_first_cell_of_the_user_is_noted_once(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path, hidden: dict[str, bool]
) -> None:
    noted: list[str] = []
    relay.on_cell = lambda header: noted.append(header["msg_id"])
    async with joined(relay, tmp_path):
        client = await dial(ports["shell"])
        first, second = message(code="1" * 100_000), message(code="2")
        await client.send(CLIENT + message(code="0", **hidden)[1] + first[1] + second[1])
        await until(lambda: relay.sent == 3)
        assert noted == [first[0]]


async def test_too_large_message_is_not_passed_on(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    refused: list[str] = []
    relay.max_message_size, relay.on_oversized = 1 << 20, refused.append
    async with joined(relay, tmp_path) as (end, _):
        client = await dial(ports["iopub"])
        await until(lambda: len(end.writers) == 1)
        end.writers[0].write(KERNEL)
        await client.receive(len(KERNEL))
        end.writers[0].write(b"\x02" + (1 << 21).to_bytes(8, "big"))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.receive(9)
        assert refused == ["iopub"]
        await until(lambda: not relay._clients)


async def test_endless_multipart_message_is_cut_off(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    refused: list[str] = []
    relay.max_message_size, relay.on_oversized = 100 * FRAME_COST, refused.append
    async with joined(relay, tmp_path) as (end, _):
        client = await dial(ports["iopub"])
        await until(lambda: len(end.writers) == 1)
        end.writers[0].write(KERNEL + b"\x01\x00" * 99)
        await client.receive(len(KERNEL) + 99 * 2)
        end.writers[0].write(b"\x01\x00" * 100)
        await until(lambda: refused == ["iopub"])


async def test_unread_heartbeats_are_dropped(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with joined(relay, tmp_path) as (_, connection):
        connection.state = ConnectionState.QUIESCED
        client = await dial(ports["hb"])
        client._writer.transport.set_write_buffer_limits(1 << 16)
        beat = encode([b"", b"x" * 60_000])
        await client.send(GREETING + command(ready("hb")))
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 1000:
                await asyncio.wait_for(client.send(beat), 3)
                sent += 1
        (connection,) = relay._clients
        assert connection._transport.get_write_buffer_size() < 1 << 20
        client._writer.transport.abort()


async def test_other_users_cannot_wake_the_kernel_or_use_up_its_connections(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    relay.on_call = lambda: calls.append(None)
    monkeypatch.setattr(relay_module, "MAX_FOREIGN", 3)
    monkeypatch.setattr(relay_client, "trusted_peer", lambda connection: False)
    async with joined(relay, tmp_path) as (_, connection):
        connection.state = ConnectionState.QUIESCED
        foreign = [await dial(ports["shell"]) for _ in range(4)]
        await until(lambda: len(relay._clients) == 3)
        await foreign[0].send(GREETING)
        await foreign[0].send(b"x" * 200_000)
        await until(lambda: any(one._held and len(one._held.waiting) > 1 << 16 for one in relay._clients))
        assert not relay.called and calls == []
        monkeypatch.setattr(relay_client, "trusted_peer", lambda connection: True)
        own = await dial(ports["shell"])
        await own.send(CLIENT + message()[1])
        await until(lambda: relay.called)


async def test_zeromq_client_of_hibernated_kernel_gets_replies(relay: ChannelRelay, tmp_path: Path) -> None:
    """ZeroMQ sockets on both sides; the relay answers the handshake."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/shell")
    ports = await relay.reserve_tcp(IP, ANY)
    await relay.listen()
    async with real_guest() as (connection, _):
        relay.connect(connection, dict.fromkeys(CHANNELS, f"unix:{tmp_path}/shell"), SIGNING)
        connection.state = ConnectionState.QUIESCED
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://{IP}:{ports['shell']}")
        session = Session(key=KEY)
        request = session.msg("execute_request", {"code": "x" * 300_000})
        await dealer.send_multipart(session.serialize(request))
        await until(lambda: relay.called)
        connection._continue_traffic()
        identity, *_ = await asyncio.wait_for(router.recv_multipart(), LIMIT)
        answer = Session(key=KEY).msg("execute_reply", {}, parent=request["header"])
        await router.send_multipart([identity, *Session(key=KEY).serialize(answer)])
        received = await asyncio.wait_for(dealer.recv_multipart(), LIMIT)
        assert session.deserialize(session.feed_identities(received)[1])["parent_header"]["msg_id"] == request["msg_id"]
        await until(lambda: not relay.activity.busy)
    context.destroy(linger=0)


# -- the user at the other end ---------------------------------------------------------------------------------------

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
                    child.communicate()  # Linux shows closed connections as root's
                    assert peer_uid(accepted) is None
                    assert not trusted_peer(accepted)
            finally:
                child.communicate()
