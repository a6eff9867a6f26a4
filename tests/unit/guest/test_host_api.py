"""Requests from processes through PID 1, which runs as a child on the host."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from guests import LIMIT, descriptors, finished, real_guest, shell

from sandbox_provisioner.guest.host_api import MAX_OPEN, MAX_REQUEST
from sandbox_provisioner.mux.connection import GuestConnection
from sandbox_provisioner.process import LocalProcess

pytestmark = pytest.mark.filterwarnings("error")


class Requests:
    """A PID 1 with a socket for requests, and a host that records the requests that arrive."""

    def __init__(self, connection: GuestConnection, init: LocalProcess, path: Path) -> None:
        self.connection, self.init, self.path = connection, init, path
        self.received: list[tuple[int, dict[str, Any]]] = []
        connection.host_api.listen(lambda number, request: self.received.append((number, request)))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.path)

    async def ask(self, request: bytes) -> Any:
        """Send a request as a process in the sandbox does, and return the answer."""
        loop, answer = asyncio.get_running_loop(), b""
        with socket.socket(socket.AF_UNIX) as peer:
            peer.setblocking(False)
            async with asyncio.timeout(LIMIT):
                await loop.sock_connect(peer, str(self.path))
                with suppress(ConnectionError):  # PID 1 may refuse the request before it is sent completely
                    await loop.sock_sendall(peer, request)
                    peer.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    while piece := await loop.sock_recv(peer, 1000):
                        answer += piece
        return json.loads(answer)

    async def until_received(self, count: int) -> None:
        async with asyncio.timeout(LIMIT):
            while len(self.received) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
async def requests(tmp_path: Path) -> AsyncIterator[Requests]:
    async with real_guest(tmp_path / "run" / "sandbox") as (connection, init):
        yield Requests(connection, init, tmp_path / "run" / "sandbox")


async def test_request_reaches_host_and_answer_returns(requests: Requests) -> None:
    request, answer = {"op": "status", "word": "\u00e9"}, {"large": "x" * 16_000}
    for number in (1, 2):
        asking = asyncio.create_task(requests.ask(json.dumps(request).encode()))
        await requests.until_received(number)
        requests.connection.host_api.answer(number, answer)
        assert await asking == answer
    assert requests.received == [(1, request), (2, request)]


async def test_large_answer_waits_for_reader(requests: Requests) -> None:
    reader, writer = await requests.connect()
    writer.write(b"{}")
    writer.write_eof()
    await requests.until_received(1)
    requests.connection.host_api.answer(1, {"large": "x" * 250_000})
    assert await finished(await shell(requests.connection, "echo alive")) == (0, b"alive\n", b"")
    assert len(await asyncio.wait_for(reader.read(), LIMIT)) > 250_000
    writer.close()


MALFORMED = {
    "empty": b"",
    "incomplete": b'{"op"',
    "a list": b"[]",
    "a number": b"1",
    "not UTF-8": b"\xff\xfe\xfd",
    "deeply nested": b"[" * MAX_REQUEST,
    "too large": b'{"op": "' + b"x" * MAX_REQUEST + b'"}',
    "far too large": b"x" * 1_000_000,
    "too large for the host": json.dumps({"op": "\u20ac" * 1000}, ensure_ascii=False).encode(),
}


@pytest.mark.parametrize("request_bytes", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_request_is_refused_by_pid_1(requests: Requests, request_bytes: bytes) -> None:
    assert "The request is" in (await requests.ask(request_bytes))["problem"]
    assert requests.received == []
    assert not requests.connection.error


async def test_number_of_open_requests_is_limited(requests: Requests) -> None:
    waiting = [asyncio.create_task(requests.ask(b"{}")) for _ in range(MAX_OPEN)]
    await requests.until_received(MAX_OPEN)
    assert "Too many requests at once" in (await requests.ask(b"{}"))["problem"]
    requests.connection.host_api.answer(3, {"done": 3})
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [{"done": 3}]
    one_more = asyncio.create_task(requests.ask(b"{}"))
    await requests.until_received(MAX_OPEN + 1)
    for number, _ in requests.received:
        requests.connection.host_api.answer(number, {})
    assert await one_more == {}
    assert not requests.connection.error


async def test_closed_connection_leaves_no_descriptor(requests: Requests) -> None:
    async with real_guest() as (_, other):
        unused = descriptors(other.pid)
    for number in range(1, MAX_OPEN + 2):
        _, writer = await requests.connect()
        writer.write(b"{}")
        writer.write_eof()
        await requests.until_received(number)
        writer.close()
        requests.connection.host_api.answer(number, {"large": "x" * 250_000})
        async with asyncio.timeout(LIMIT):
            while descriptors(requests.init.pid) > unused + 1:  # one descriptor is the listening socket
                await asyncio.sleep(0.01)
    assert not requests.connection.error


async def test_request_while_quiesced_is_forwarded_after_resume(requests: Requests) -> None:
    before = asyncio.create_task(requests.ask(b'{"op": "before"}'))
    await requests.until_received(1)
    await asyncio.wait_for(requests.connection.quiesce(), LIMIT)
    during = asyncio.create_task(requests.ask(b'{"op": "during"}'))
    await asyncio.sleep(0.2)
    assert len(requests.received) == 1
    requests.connection.host_api.answer(1, {"to": "before"})
    await asyncio.wait_for(requests.connection.resume(), LIMIT)
    assert await before == {"to": "before"}
    await requests.until_received(2)
    requests.connection.host_api.answer(2, {"to": "during"})
    assert await during == {"to": "during"}
