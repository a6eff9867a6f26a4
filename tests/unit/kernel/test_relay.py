"""Test ChannelRelay with real sockets on both sides."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tracemalloc
from pathlib import Path

import pytest
from guests import LIMIT, descriptors, echo, real_guest
from relays import ANY, IP, Dial, kernel, until

from sandbox_provisioner.errors import LinkClosedError, SandboxError
from sandbox_provisioner.guest.frames import WINDOW
from sandbox_provisioner.kernel import relay as relay_module
from sandbox_provisioner.kernel.relay import CHANNELS, ChannelRelay
from sandbox_provisioner.kernel.relay_client import MAX_EARLY
from sandbox_provisioner.mux.connection import ConnectionState

pytestmark = pytest.mark.filterwarnings("error")


# -- listening -------------------------------------------------------------------------------------------------


async def test_reserved_ports_refuse_connections_until_the_relay_listens(relay: ChannelRelay) -> None:
    ports = await relay.reserve_tcp(IP, ANY)
    assert set(ports) == set(CHANNELS)
    assert len(set(ports.values())) == 5
    for port in ports.values():
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(IP, port)


async def test_ports_are_on_loopback_only(ports: dict[str, int], relay: ChannelRelay) -> None:
    addresses = {server.sockets[0].getsockname() for server in relay._servers}
    assert addresses == {(IP, port) for port in ports.values()}


async def test_ports_can_be_on_ipv6_loopback(relay: ChannelRelay, dial: Dial) -> None:
    ports = await relay.reserve_tcp("::1", ANY)
    await relay.listen()
    _, writer = await asyncio.open_connection("::1", ports["shell"])
    writer.close()
    await writer.wait_closed()


@pytest.mark.user
async def test_reserved_ports_are_kept(ports: dict[str, int], relay: ChannelRelay, dial: Dial) -> None:
    await dial(ports["hb"])
    await until(lambda: len(relay._clients) == 1)
    assert await relay.reserve_tcp(IP, ports) == ports
    await relay.listen()
    assert len(relay._clients) == 1


async def test_new_ports_replace_the_old_ones(ports: dict[str, int], relay: ChannelRelay) -> None:
    new = await relay.reserve_tcp(IP, ANY)
    assert not set(new.values()) & set(ports.values())
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(IP, ports["shell"])


async def test_error_names_a_port_in_use_and_no_port_stays_bound(relay: ChannelRelay) -> None:
    before = descriptors(os.getpid())
    with socket.create_server((IP, 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(SandboxError, match=rf"stdin channel .*{IP}:{taken}: Address already in use"):
            await relay.reserve_tcp(IP, ANY | {"stdin": taken})
    assert descriptors(os.getpid()) <= before
    assert await relay.reserve_tcp(IP, ANY)


async def test_closed_port_can_be_bound_again_at_once(ports: dict[str, int], relay: ChannelRelay, dial: Dial) -> None:
    await dial(ports["shell"])
    await until(lambda: len(relay._clients) == 1)
    await relay.close()
    assert await relay.reserve_tcp(IP, ports) == ports
    await relay.listen()
    await dial(ports["shell"])


def paths_in(folder: Path) -> dict[str, str]:
    return {channel: str(folder / f"ipc-{number}") for number, channel in enumerate(CHANNELS, 1)}


async def test_ipc_sockets_are_private_and_removed_on_close(relay: ChannelRelay, tmp_path: Path, dial: Dial) -> None:
    paths = paths_in(tmp_path)
    await relay.reserve_ipc(paths)
    await relay.listen()
    for path in paths.values():
        found = Path(path).stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o600
        await dial(path)
    await relay.close()
    assert list(tmp_path.iterdir()) == []


async def test_leftover_ipc_socket_is_replaced(relay: ChannelRelay, tmp_path: Path, dial: Dial) -> None:
    paths = paths_in(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(paths["iopub"])
    await relay.reserve_ipc(paths)
    await relay.listen()
    await dial(paths["iopub"])


async def test_ipc_sockets_are_kept_and_missing_ones_are_created_again(
    relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    paths = paths_in(tmp_path)
    await relay.reserve_ipc(paths)
    await relay.listen()
    held = list(relay._servers)
    await relay.reserve_ipc(paths)
    await relay.listen()
    assert relay._servers == held
    Path(paths["shell"]).unlink()
    await relay.reserve_ipc(paths)
    await relay.listen()
    await dial(paths["shell"])
    await dial(paths["hb"])


async def test_error_names_an_invalid_path_and_no_socket_stays(relay: ChannelRelay, tmp_path: Path) -> None:
    paths = paths_in(tmp_path) | {"control": str(tmp_path / "missing" / "ipc-4")}
    with pytest.raises(SandboxError, match=r"control channel .*missing/ipc-4: No such file or directory"):
        await relay.reserve_ipc(paths)
    assert list(tmp_path.iterdir()) == []


# -- joining ---------------------------------------------------------------------------------------------------


async def test_each_channel_leads_to_its_target(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    async def name_yourself(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(Path(writer.get_extra_info("sockname")).name.encode())

    async with kernel(tmp_path, name_yourself) as (connection, targets):
        relay.connect(connection, targets)
        for channel, port in ports.items():
            assert await (await dial(port)).rest() == channel.encode()


async def test_early_clients_wait_for_the_kernel(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    clients = [await dial(port) for port in ports.values() for _ in range(5)]
    for client in clients:
        await client.send(b"early")
    await until(lambda: len(relay._clients) == len(clients))
    async with kernel(tmp_path) as (connection, targets):
        relay.connect(connection, targets)
        for client in clients:
            assert await client.receive(5) == b"early"
            await client.send(b"late")
            assert await client.receive(4) == b"late"


async def test_early_bytes_beyond_the_limit_are_not_lost(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    data = os.urandom(1 << 20) * 16
    client = await dial(ports["shell"])
    sending = asyncio.create_task(client.send(data))
    await until(lambda: any(len(early._early) >= MAX_EARLY for early in relay._clients))
    assert not sending.done()
    assert sum(len(early._early) for early in relay._clients) < WINDOW
    async with kernel(tmp_path) as (connection, targets):
        relay.connect(connection, targets)
        assert await client.receive(len(data)) == data
        await sending


async def test_large_transfers_in_both_directions_are_exact(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    data = os.urandom(1 << 20) * 12
    async with kernel(tmp_path) as (connection, targets):
        relay.connect(connection, targets)
        clients = [await dial(ports["shell"]), await dial(ports["iopub"])]
        sending = [asyncio.create_task(client.send(data)) for client in clients]
        for client in clients:
            assert await client.receive(len(data)) == data
        await asyncio.gather(*sending)


async def test_simultaneous_clients_get_their_own_bytes(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    async with kernel(tmp_path) as (connection, targets):
        relay.connect(connection, targets)
        clients = {os.urandom(4) * 2500: await dial(port) for port in ports.values() for _ in range(40)}
        await asyncio.gather(*(client.send(data) for data, client in clients.items()))
        for data, client in clients.items():
            assert await client.receive(len(data)) == data


async def test_client_that_does_not_read_uses_bounded_memory(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    block = os.urandom(1 << 20)

    async def flood_or_echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(5) == b"flood":
            for _ in range(24):
                writer.write(block)
                await writer.drain()
        await echo(reader, writer)

    async with kernel(tmp_path, flood_or_echo) as (connection, targets):
        relay.connect(connection, targets)
        brisk = await dial(ports["shell"])
        await brisk.send(b"hello")
        tracemalloc.start()
        sullen = socket.create_connection((IP, ports["iopub"]))
        sullen.send(b"flood")
        await until(lambda: any(client._uncredited > WINDOW // 2 for client in relay._clients))
        for number in range(200):
            message = b"message %d " % number * 100
            await brisk.send(message)
            assert await brisk.receive(len(message)) == message
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sum(client._uncredited for client in relay._clients) <= WINDOW
        assert peak < 4 * WINDOW + 2 * len(block)  # the stream's window, and the bytes in this test's own server
        received = await asyncio.to_thread(read_exactly, sullen, 24 * len(block))
        sullen.close()
        assert received == block * 24


def read_exactly(sock: socket.socket, amount: int) -> bytes:
    data = bytearray()
    while len(data) < amount:
        data += sock.recv(1 << 20)
    return bytes(data)


# -- ending ----------------------------------------------------------------------------------------------------


async def test_disconnect_before_kernel_start_frees_socket(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial
) -> None:
    held = descriptors(os.getpid())
    for _ in range(3):
        clients = [await dial(port) for port in ports.values()]
        for client in clients:
            await client.send(b"greeting")
        await until(lambda: len(relay._clients) == 5)
        for client in clients:
            await client.close()
        await until(lambda: not relay._clients)
    assert descriptors(os.getpid()) <= held


async def test_disconnect_before_target_listens_frees_stream(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    async with real_guest() as (connection, init):
        held = descriptors(init.pid)
        relay.connect(connection, {channel: f"unix:{tmp_path}/{channel}" for channel in CHANNELS})
        for _ in range(20):
            client = await dial(ports["shell"])
            await client.send(b"greeting")
            await client.close()
        await until(lambda: not relay._clients and not connection._streams)
        assert descriptors(init.pid) == held


async def test_disconnected_client_is_disconnected_from_the_kernel(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    noticed = asyncio.Event()

    async def notice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"bye"
        noticed.set()

    async with kernel(tmp_path, notice) as (connection, targets):
        relay.connect(connection, targets)
        client = await dial(ports["control"])
        await client.send(b"bye")
        await client.close()
        await asyncio.wait_for(noticed.wait(), LIMIT)
        await until(lambda: not relay._clients and not connection._streams)


async def test_bytes_sent_before_a_disconnect_reach_the_kernel(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    """The kernel reads slowly; closing the socket does not discard bytes that were sent."""
    data = os.urandom(WINDOW - 1)
    arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    reading = asyncio.Event()

    async def read_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reading.wait()
        arrived.set_result(await reader.read())

    async with kernel(tmp_path, read_slowly) as (connection, targets):
        relay.connect(connection, targets)
        client = await dial(ports["shell"])
        client._writer.write(data)
        client._writer.close()
        await until(lambda: bool(connection._streams))
        await until(lambda: not relay._clients)
        await connection.quiesce()  # until the guest has all bytes and has noticed the disconnect
        await connection.resume()
        reading.set()
        assert await asyncio.wait_for(arrived, LIMIT) == data


async def test_client_gets_all_bytes_before_the_kernels_close(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    data = os.urandom(1 << 20) * 4

    async def last_words(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2)
        writer.write(data)
        await writer.drain()

    async with kernel(tmp_path, last_words) as (connection, targets):
        relay.connect(connection, targets)
        client = await dial(ports["iopub"])
        await client.send(b"go")
        assert await client.rest() == data
        await asyncio.wait_for(relay.drained(), LIMIT)


async def test_next_kernel_serves_the_same_ports(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    for generation in ("one", "two", "three"):
        folder = tmp_path / generation
        folder.mkdir()
        early = await dial(ports["shell"])
        await until(lambda: len(relay._clients) == 1)
        async with kernel(folder) as (connection, targets):
            relay.connect(connection, targets)
            late = await dial(ports["shell"])
            for client in (early, late):
                await client.send(generation.encode())
                assert await client.receive(len(generation)) == generation.encode()
            relay.disconnect()
            for client in (early, late):
                assert await client.rest() == b""
            await until(lambda: not relay._clients)


async def test_lost_kernel_disconnects_its_clients_but_listeners_stay(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    async with kernel(tmp_path) as (connection, targets):
        relay.connect(connection, targets)
        client = await dial(ports["shell"])
        await client.send(b"x")
        await client.receive(1)
        connection.close(LinkClosedError("it crashed."))
        assert await client.rest() == b""
        held = await dial(ports["shell"])
        await held.send(b"patience")
        await until(lambda: len(relay._clients) == 1)
    folder = tmp_path / "next"
    folder.mkdir()
    async with kernel(folder) as (connection, targets):
        relay.connect(connection, targets)
        assert await held.receive(8) == b"patience"


async def test_close_does_not_wait_for_a_client_that_does_not_read(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(24 << 20))
        await reader.read()

    async with kernel(tmp_path, flood) as (connection, targets):
        relay.connect(connection, targets)
        with socket.socket() as client_that_does_not_read:
            client_that_does_not_read.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client_that_does_not_read.connect((IP, ports["iopub"]))
            await until(lambda: any(client._uncredited > WINDOW // 2 for client in relay._clients))
            await asyncio.wait_for(relay.close(), LIMIT)
            await until(lambda: not relay._clients)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(IP, ports["iopub"])


async def test_relay_can_be_closed_twice(ports: dict[str, int], relay: ChannelRelay, dial: Dial) -> None:
    client = await dial(ports["shell"])
    await until(lambda: len(relay._clients) == 1)
    await relay.close()
    await relay.close()
    assert await client.rest() == b""


# -- limits ----------------------------------------------------------------------------------------------------


async def test_clients_beyond_the_limit_are_refused_until_others_leave(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "MAX_CLIENTS", 10)
    admitted = [await dial(ports["shell"]) for _ in range(10)]
    await until(lambda: len(relay._clients) == 10)
    try:
        assert await (await dial(ports["shell"])).rest() == b""
    except ConnectionResetError:
        pass
    await admitted[0].close()
    await until(lambda: len(relay._clients) == 9)
    await dial(ports["shell"])
    await until(lambda: len(relay._clients) == 10)


async def test_client_is_refused_without_a_free_stream(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox_provisioner.mux.stream.MAX_STREAMS", 2)
    async with kernel(tmp_path) as (connection, targets):
        relay.connect(connection, targets)
        clients = [await dial(ports["shell"]) for _ in range(2)]
        for client in clients:
            await client.send(b"x")
            await client.receive(1)
        try:
            assert await (await dial(ports["shell"])).rest() == b""
        except ConnectionResetError:
            pass


# -- pauses for checkpoints ------------------------------------------------------------------------------------


async def test_clients_do_not_notice_a_pause_of_the_connection(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    data = os.urandom(1 << 20) * 6
    async with kernel(tmp_path) as (connection, targets):
        relay.connect(connection, targets)
        client = await dial(ports["iopub"])
        sending = asyncio.create_task(client.send(data))
        receiving = asyncio.create_task(client.receive(len(data)))
        for _ in range(10):
            await asyncio.wait_for(connection.quiesce(), LIMIT)
            await asyncio.wait_for(connection.resume(), LIMIT)
        assert await receiving == data
        await sending


async def test_clients_that_connect_or_leave_during_a_pause_are_handled(
    ports: dict[str, int], relay: ChannelRelay, tmp_path: Path, dial: Dial
) -> None:
    async with kernel(tmp_path) as (connection, targets):
        relay.connect(connection, targets)
        staying = await dial(ports["shell"])
        await staying.send(b"x")
        await staying.receive(1)
        await asyncio.wait_for(connection.quiesce(), LIMIT)
        newcomer, passing = await dial(ports["shell"]), await dial(ports["hb"])
        for client in (newcomer, passing, staying):
            await client.send(b"patience")
        await passing.close()
        await asyncio.wait_for(connection.resume(), LIMIT)
        for client in (newcomer, staying):
            assert await client.receive(8) == b"patience"
        await until(lambda: len(connection._streams) == len(relay._clients) == 2)


GREETING, READY = bytes(64), b"\x04\x06\x05READY"
QUESTION = b"\x01\x01a\x00\x01b"


@pytest.mark.parametrize("channel", ["shell", "control", "stdin"])
async def test_relay_awaits_kernel_until_reaction_to_request(
    channel: str, ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with kernel(tmp_path) as (connection, targets):
        client, listener = await dial(ports[channel]), await dial(ports["iopub"])
        relay.connect(connection, targets)
        await client.send(GREETING)
        await client.receive(len(GREETING))
        await client.send(READY)
        await client.receive(len(READY))
        assert not relay.waited_for
        connection.state = ConnectionState.QUIESCED
        await client.send(QUESTION * 3)
        await until(lambda: relay.sent == 3)
        assert relay.waited_for
        connection._continue_traffic()
        await client.receive(3 * len(QUESTION))
        assert not relay.waited_for
        connection.state = ConnectionState.QUIESCED
        await client.send(QUESTION)
        await until(lambda: relay.sent == 4)
        connection.state = ConnectionState.OPEN
        await listener.send(GREETING + READY)
        await listener.receive(len(GREETING + READY))
        assert relay.waited_for  # a handshake does not count as a reaction of the kernel
        await listener.send(QUESTION)  # the guest echoes it, which counts as a published message
        await listener.receive(len(QUESTION))
        assert (relay.sent, relay.answered) == (4, 4)


async def test_early_request_counts_once(
    ports: dict[str, int], relay: ChannelRelay, dial: Dial, tmp_path: Path
) -> None:
    async with kernel(tmp_path) as (connection, targets):
        client = await dial(ports["shell"])
        await client.send(GREETING + READY + QUESTION)
        await until(lambda: any(early._early for early in relay._clients))
        relay.connect(connection, targets)
        assert relay.sent == 1
        await client.send(QUESTION)
        await client.receive(len(GREETING + READY + QUESTION + QUESTION))
        assert (relay.sent, relay.answered) == (2, 2)
