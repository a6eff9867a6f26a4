"""Streams to sockets in the sandbox, through a real PID 1 that runs as a child on the host."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
from pathlib import Path

import pytest
from guests import (
    LIMIT,
    Tap,
    descriptors,
    echo,
    pour,
    real_guest,
    scripted_guest,
    server,
)

from sandbox_provisioner.errors import GuestError
from sandbox_provisioner.guest.frames import (
    WINDOW,
)
from sandbox_provisioner.mux.stream import MAX_STREAMS

pytestmark = pytest.mark.filterwarnings("error")


async def test_unix_socket_round_trip(tmp_path: Path) -> None:
    async with server(tmp_path / "echo", echo) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        tap.stream.write(b"there and back")
        assert await tap.size(14) == b"there and back"


async def test_tcp_port_round_trip() -> None:
    async with server(0, echo) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        tap.stream.write(b"there and back")
        assert await tap.size(14) == b"there and back"


async def test_large_transfers_in_both_directions(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 16
    async with server(tmp_path / "echo", echo) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        await pour(tap.stream, data)
        assert hashlib.sha256(await tap.size(len(data))).digest() == hashlib.sha256(data).digest()


async def test_many_streams_at_once(tmp_path: Path) -> None:
    async with server(tmp_path / "echo", echo) as target, real_guest() as (connection, _):
        taps = {os.urandom(8) * 5000: Tap(connection.open(target)) for _ in range(150)}
        for data, tap in taps.items():
            tap.stream.write(data)
        for data, tap in taps.items():
            assert await tap.size(len(data)) == data


async def test_write_before_target_listens(tmp_path: Path) -> None:
    async with real_guest() as (connection, _):
        tap = Tap(connection.open(f"unix:{tmp_path / 'late'}"))
        tap.stream.write(b"early bird")
        await Tap(connection.open("process:99:output")).end()  # wait until the guest has handled the first OPEN
        async with server(tmp_path / "late", echo):
            assert await tap.size(10) == b"early bird"
            tap.stream.reset()


async def test_full_socket_does_not_delay_other_streams(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(tmp_path / "full"))
        full.listen(0)
        async with server(tmp_path / "echo", echo) as target, real_guest() as (connection, init):
            for _ in range(3):
                connection.open(f"unix:{tmp_path / 'full'}")
            tap = Tap(connection.open(target))
            tap.stream.write(b"still here")
            try:
                assert await tap.size(10) == b"still here"
            except TimeoutError:
                init.send_signal(signal.SIGKILL)
                pytest.fail("PID 1 waits for a socket that accepts no connection")


async def test_unconsumed_stream_stops_at_window_without_delaying_others(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 4

    async def send_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await reader.read()

    async with (
        server(tmp_path / "g", send_all) as source,
        server(tmp_path / "e", echo) as e,
        real_guest() as (connection, _),
    ):
        slow, brisk = Tap(connection.open(source), consume=False), Tap(connection.open(e))
        await slow.size(WINDOW)
        await pour(brisk.stream, data)
        assert await brisk.size(len(data)) == data
        assert len(slow.data) == WINDOW
        slow._consume = True
        slow.stream.consumed(WINDOW)
        assert await slow.size(len(data)) == data


async def test_target_that_does_not_read_receives_at_most_window(tmp_path: Path) -> None:
    reading = asyncio.Event()

    async def read_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reading.wait()
        await echo(reader, writer)

    async with (
        server(tmp_path / "s", read_late) as target,
        server(tmp_path / "e", echo) as e,
        real_guest() as (connection, _),
    ):
        tap, other = Tap(connection.open(target)), Tap(connection.open(e))
        data = os.urandom(1 << 16) * 48
        written = 0
        while tap.stream.ready:
            tap.stream.write(data[written : written + (1 << 16)])
            written += 1 << 16
        other.stream.write(b"no delay")
        assert await other.size(8) == b"no delay"
        reading.set()
        await pour(tap.stream, data[written:])
        assert await tap.size(len(data)) == data


async def test_stream_ends_after_last_byte_of_target(tmp_path: Path) -> None:
    data = os.urandom(300_000)

    async def send_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    async with server(tmp_path / "s", send_and_close) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        assert await tap.end() == data
        assert tap.ended == 1


async def test_reset_closes_connection_in_sandbox(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def wait_for_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await reader.read()
        closed.set()

    async with server(tmp_path / "s", wait_for_close) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        await tap.size(5)
        tap.stream.reset()
        await asyncio.wait_for(closed.wait(), LIMIT)
        await tap.end()
        tap.stream.write(b"into the void")
        tap.stream.reset()


async def test_ended_streams_are_removed_on_both_sides(tmp_path: Path) -> None:
    async with server(tmp_path / "echo", echo) as target, real_guest() as (connection, init):
        held = descriptors(init.pid)
        for _ in range(5):
            taps = [Tap(connection.open(target)) for _ in range(50)]
            for tap in taps:
                tap.stream.write(b"x")
                await tap.size(1)
                tap.stream.reset()
            for tap in taps:
                await tap.end()
        assert connection._streams == {}
        assert descriptors(init.pid) == held


async def test_number_of_streams_is_limited() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        for _ in range(MAX_STREAMS):
            guest.connection.open("unix:/x")
        with pytest.raises(GuestError, match=str(MAX_STREAMS)):
            guest.connection.open("unix:/x")
