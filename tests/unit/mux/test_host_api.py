"""Requests from a scripted guest to the host."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from guests import (
    LIMIT,
    ScriptedGuest,
    control,
    scripted_guest,
)

from sandbox_provisioner.errors import LinkClosedError, ProtocolError
from sandbox_provisioner.guest.host_api import MAX_OPEN
from sandbox_provisioner.mux import host_api

pytestmark = pytest.mark.filterwarnings("error")


async def send_requests(guest: ScriptedGuest, *numbers: int) -> list[tuple[int, dict[str, Any]]]:
    """Send requests with these numbers. Return the requests that reach the listener."""
    received: list[tuple[int, dict[str, Any]]] = []
    guest.connection.host_api.listen(lambda number, request: received.append((number, request)))
    await guest.send(*(control({"op": "ask", "number": number, "request": {"op": "status"}}) for number in numbers))
    async with asyncio.timeout(LIMIT):
        while len(received) < len(numbers) and not guest.connection.error:
            await asyncio.sleep(0)
    return received


async def test_request_is_answered_once() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        assert await send_requests(guest, 7) == [(7, {"op": "status"})]
        for answer in ({"first": 1}, {"second": 2}):
            guest.connection.host_api.answer(7, answer)
        assert await guest.expect_control("answer") == {"op": "answer", "number": 7, "answer": {"first": 1}}
        await guest.say(op="answered", number=7)
        guest.connection.host_api.answer(8, {"not": "requested"})
        assert await send_requests(guest, 7)
        assert guest.arrived() == []


async def test_request_without_listener_is_refused_after_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_api, "LISTENER_WAIT", 0.01)
    async with scripted_guest() as guest:
        await guest.hello()
        await guest.say(op="ask", number=1, request={"op": "status"})
        assert (await guest.expect_control("answer"))["answer"] == host_api.NO_LISTENER


async def test_request_before_listener_waits() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        await guest.say(op="ask", number=1, request={"op": "early"})
        async with asyncio.timeout(LIMIT):
            while not guest.connection.host_api._early:
                await asyncio.sleep(0)
        assert await send_requests(guest) == [(1, {"op": "early"})]
        guest.connection.host_api._refuse_early()  # concerns only requests without a listener
        guest.connection.host_api.answer(1, {"slow": "but sure"})
        assert (await guest.expect_control("answer"))["answer"] == {"slow": "but sure"}


async def test_request_is_open_until_answer_is_confirmed() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        await send_requests(guest, *range(1, MAX_OPEN + 1))
        guest.connection.host_api.answer(1, {})
        await guest.expect_control("answer")
        await guest.say(op="answered", number=1)
        assert await send_requests(guest, 1)
        for number in range(1, MAX_OPEN + 1):
            guest.connection.host_api.answer(number, {})
        await guest.say(op="ask", number=MAX_OPEN + 1, request={})
        assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError


async def test_request_number_in_use_closes_connection() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        await send_requests(guest, 3, 3)
        assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError


async def test_request_before_hello_closes_connection() -> None:
    async with scripted_guest() as guest:
        await guest.say(op="ask", number=1, request={})
        assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError


async def test_answer_waits_for_hibernated_guest_without_waking_it() -> None:
    async with scripted_guest() as guest:
        connection = guest.connection
        await guest.hello()
        await send_requests(guest, 1)
        await guest.quiesce()
        connection.host_api.answer(1, {"it": "is so"})
        assert not connection.control_waits
        connection.detach()
        guest.close()
        await guest.attach()
        resuming = asyncio.create_task(connection.resume())
        await guest.expect_control("resume")
        assert guest.arrived() == []
        await guest.say(op="resumed")
        await asyncio.wait_for(resuming, LIMIT)
        assert (await guest.expect_control("answer"))["answer"] == {"it": "is so"}


async def test_answer_after_close_is_dropped() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        await send_requests(guest, 1)
        guest.connection.close(LinkClosedError("it ended."))
        guest.connection.host_api.answer(1, {})
        assert guest.arrived() == []
