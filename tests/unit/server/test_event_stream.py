"""Test the delivery of events to a reader on the server's loop."""

from __future__ import annotations

import asyncio

from sandbox_provisioner.events import EVENT_BUS, Entry, EventKind
from sandbox_provisioner.server.event_stream import MAX_QUEUED, Subscription

SOON = 10.0


def write(name: str) -> None:
    EVENT_BUS.write(Entry(name, EventKind.PROGRESS))


async def test_entries_of_another_thread_keep_their_order() -> None:
    with Subscription() as news:
        await asyncio.to_thread(lambda: [write(str(number)) for number in range(5)])
        assert [entry.sandbox_id for entry in await news.take(SOON)] == ["0", "1", "2", "3", "4"]
        write("later")
        assert [entry.sandbox_id for entry in await news.take(SOON)] == ["later"]


async def test_take_times_out_without_entries() -> None:
    with Subscription() as news:
        assert await news.take(0.01) == []


async def test_slow_reader_loses_oldest_entries() -> None:
    with Subscription() as news:
        await asyncio.to_thread(lambda: [write(str(number)) for number in range(MAX_QUEUED + 10)])
        assert [entry.sandbox_id for entry in await news.take(SOON)] == [
            str(number + 10) for number in range(MAX_QUEUED)
        ]


async def test_closed_subscription_receives_nothing() -> None:
    before = EVENT_BUS._listeners
    with Subscription():
        assert len(EVENT_BUS._listeners) == len(before) + 1
    assert before == EVENT_BUS._listeners


def test_closed_loop_receives_nothing() -> None:
    before = EVENT_BUS._listeners

    async def leave() -> None:
        Subscription().__enter__()

    asyncio.run(leave())
    write("to nobody")
    assert before == EVENT_BUS._listeners
