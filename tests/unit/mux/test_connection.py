"""GuestConnection with a scripted guest that breaks rules, and with a real PID 1 that runs as a child on the host."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from guests import (
    ENV,
    LIMIT,
    ScriptedGuest,
    Tap,
    control,
    echo,
    pour,
    real_guest,
    scripted_guest,
    server,
)

from sandbox_provisioner.errors import LinkClosedError, ProtocolError
from sandbox_provisioner.guest.frames import (
    AMOUNT,
    CONTROL,
    CREDIT,
    DATA,
    EOF,
    HEADER,
    MAX_PAYLOAD,
    OPEN,
    RESET,
    VERSION,
    WINDOW,
    encode,
    encode_credit,
)
from sandbox_provisioner.guest.host_api import MAX_REQUEST
from sandbox_provisioner.mux.connection import GuestConnection
from sandbox_provisioner.mux.process import GuestProcess
from sandbox_provisioner.mux.stream import MAX_REFUSED, MAX_STREAMS

pytestmark = pytest.mark.filterwarnings("error")


# -- quiesce and resume ----------------------------------------------------------------------------------------


async def test_repeated_quiesce_loses_no_bytes(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 6
    async with server(tmp_path / "echo", echo) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        pouring = asyncio.create_task(pour(tap.stream, data))
        for step in range(1, 11):
            await tap.size(step * len(data) // 12)
            await asyncio.wait_for(connection.quiesce(), LIMIT)
            at_rest = len(tap.data)
            await asyncio.sleep(0.01)
            assert len(tap.data) == at_rest
            await asyncio.wait_for(connection.resume(), LIMIT)
        await pouring
        assert await tap.size(len(data)) == data


async def test_frames_are_held_while_quiesced() -> None:
    """A byte that is in the pipe when the sandbox is checkpointed would be lost."""
    async with scripted_guest() as guest:
        await guest.hello()
        connection = guest.connection
        stream = connection.open("unix:/early")
        await guest.expect(OPEN, 1)
        spawning = asyncio.create_task(connection.spawn(["sleep"], {}, "/"))
        number = (await guest.expect_control("spawn"))["process"]
        await guest.say(op="started", process=number)
        process = await spawning
        await guest.send(*(encode(DATA, 1, bytes(MAX_PAYLOAD)) for _ in range(4)))
        await guest.quiesce()
        guest.arrived()

        stream.write(b"held")
        stream.consumed(WINDOW)
        late = connection.open("unix:/late")
        late.write(b"also held")
        process.send_signal(signal.SIGINT)
        another = asyncio.create_task(connection.spawn(["true"], {}, "/"))
        await asyncio.sleep(0.01)
        assert guest.arrived() == []

        resuming = asyncio.create_task(connection.resume())
        await guest.expect_control("resume")
        await guest.say(op="resumed")
        await resuming
        await asyncio.sleep(0.01)
        frames = guest.arrived()
        assert (DATA, stream.number, b"held") in frames
        assert (CREDIT, stream.number, AMOUNT.pack(WINDOW)) in frames
        assert frames.index((OPEN, late.number, b"unix:/late")) < frames.index((DATA, late.number, b"also held"))
        operations = [json.loads(payload)["op"] for kind, _, payload in frames if kind == CONTROL]
        assert sorted(operations) == ["signal", "spawn"]
        another.cancel()


async def test_streams_survive_new_pipes() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        kept, ending = guest.connection.open("unix:/kept"), guest.connection.open("unix:/ending")
        tap = Tap(kept)
        await guest.quiesce()
        guest.connection.detach()
        guest.close()
        kept.write(b"written while nobody was there")
        ending.reset()
        opened = guest.connection.open("unix:/opened")
        await guest.attach()
        resuming = asyncio.create_task(guest.connection.resume())
        await guest.expect_control("resume")
        await guest.say(op="resumed")
        await resuming
        await asyncio.sleep(0.01)
        assert set(guest.arrived()) == {
            (DATA, kept.number, b"written while nobody was there"),
            (RESET, ending.number, b""),
            (OPEN, opened.number, b"unix:/opened"),
        }
        await guest.send(encode(DATA, kept.number, b"back"))
        assert await tap.size(4) == b"back"


async def test_late_quiesced_message_is_accepted() -> None:
    """A slow guest may confirm after the host has given up waiting."""
    async with scripted_guest() as guest:
        await guest.hello()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guest.connection.quiesce(), 0.01)
        resuming = asyncio.create_task(guest.connection.resume())
        await guest.expect_control("quiesce")
        await guest.say(op="quiesced")
        await guest.expect_control("resume")
        await guest.say(op="resumed")
        await asyncio.wait_for(resuming, LIMIT)
        assert not guest.connection.error
        await guest.quiesce()


async def test_quiesce_after_a_forced_checkpoint_lost_the_request() -> None:
    """A guest that did not confirm is checkpointed anyway. The request is not in the image."""
    async with scripted_guest() as guest:
        await guest.hello()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guest.connection.quiesce(), 0.01)
        guest.connection.detach()
        guest.close()
        await guest.attach()
        resuming = asyncio.create_task(guest.connection.resume())
        await guest.expect_control("resume")
        await guest.say(op="resumed")
        await asyncio.wait_for(resuming, LIMIT)
        await guest.quiesce()


# -- a guest that ends -----------------------------------------------------------------------------------------


async def test_end_of_guest_is_reported_once(tmp_path: Path) -> None:
    async with server(tmp_path / "echo", echo) as target, real_guest() as (connection, init):
        lost: list[Exception] = []
        connection.on_closed = lost.append
        tap = Tap(connection.open(target))
        process = await connection.spawn(["cat"], ENV, "/")
        init.send_signal(signal.SIGKILL)
        await tap.end()
        assert await asyncio.wait_for(process.wait(), LIMIT) == -signal.SIGKILL
        assert await asyncio.wait_for(process.read(), LIMIT) == (b"", b"")
        assert tap.ended == 1
        assert [type(error) for error in lost] == [LinkClosedError]
        await require_unusable(connection, process)


async def require_unusable(connection: GuestConnection, process: GuestProcess) -> None:
    """Require that all calls of a closed connection are refused at once."""
    with pytest.raises(LinkClosedError):
        connection.open("unix:/x")
    with pytest.raises(LinkClosedError):
        await connection.spawn(["true"], {}, "/")
    with pytest.raises(LinkClosedError):
        await connection.quiesce()
    with pytest.raises(LinkClosedError):
        await connection.resume()
    with pytest.raises(BrokenPipeError):
        await process.write(b"x")
    process.send_signal(signal.SIGTERM)
    process.close_stdin()
    connection.close(LinkClosedError("again."))
    connection.detach()


@pytest.mark.parametrize("pending", ["greeted", "spawn", "quiesce"])
async def test_end_of_guest_ends_waiting_calls(pending: str) -> None:
    async with scripted_guest() as guest:
        if pending in ("spawn", "quiesce"):
            await guest.hello()
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "greeted": guest.connection.greeted,
            "spawn": lambda: guest.connection.spawn(["true"], {}, "/"),
            "quiesce": guest.connection.quiesce,
        }
        waiting = asyncio.ensure_future(calls[pending]())
        await asyncio.sleep(0)
        os.close(guest._writer)
        guest._writer = os.open(os.devnull, os.O_WRONLY)
        with pytest.raises(LinkClosedError):
            await asyncio.wait_for(waiting, LIMIT)


@pytest.mark.parametrize("fresh", [True, False], ids=["adopt", "resume"])
async def test_broken_pipe_during_restore_allows_another_attempt(
    fresh: bool,
) -> None:
    async with scripted_guest() as guest:
        connection = guest.connection
        if not fresh:
            await guest.hello()
            await guest.quiesce()
            connection.detach()
            guest.close()
            await guest.attach()
        attempt = asyncio.create_task(connection.reattach() if fresh else connection.resume())
        await asyncio.sleep(0)
        await guest.send(encode(CONTROL, 0, b"{}")[:5])  # the sandbox ends in the middle of a frame
        guest.close()
        await asyncio.sleep(0.01)
        assert not attempt.done()
        attempt.cancel()
        connection.detach()
        assert not connection.error
        await guest.attach()
        again = asyncio.create_task(connection.reattach() if fresh else connection.resume())
        await guest.expect_control("adopt" if fresh else "resume")
        await guest.say(**({"op": "hello", "version": VERSION, "processes": [4]} if fresh else {"op": "resumed"}))
        await asyncio.wait_for(again, LIMIT)
        assert bool(connection.process(4)) is fresh


# -- a guest that breaks the rules -----------------------------------------------------------------------------


async def open_streams(guest: ScriptedGuest) -> tuple[Tap, GuestProcess]:
    """Open stream 1 and send 5 bytes on it, end stream 3, and start process 1 (streams 5 and 7) without reading it."""
    await guest.hello()
    tap = Tap(guest.connection.open("unix:/one"), consume=False)
    tap.stream.write(b"12345")
    over = Tap(guest.connection.open("unix:/three"))
    over.stream.reset()
    await guest.send(encode(RESET, 3))
    await over.end()
    spawning = asyncio.create_task(guest.connection.spawn(["x"], {}, "/"))
    await asyncio.sleep(0)
    await guest.say(op="started", process=1)
    process = await asyncio.wait_for(spawning, LIMIT)
    assert sorted(guest.connection._streams) == [1, 5, 7]
    return tap, process


FULL = encode(DATA, 1, bytes(MAX_PAYLOAD))
DEEP = b'{"op":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
VIOLATIONS: dict[str, bytes] = {
    "kind 0": HEADER.pack(0, 1, 0),
    "kind 7": HEADER.pack(7, 1, 0),
    "kind 255": HEADER.pack(255, 2**32 - 1, 2**32 - 1),
    "a length beyond the limit": HEADER.pack(DATA, 1, MAX_PAYLOAD + 1),
    "the longest length": HEADER.pack(CONTROL, 0, 2**32 - 1),
    "one byte more than the window": FULL * (WINDOW // MAX_PAYLOAD) + encode(DATA, 1, b"x"),
    "data without bytes": encode(DATA, 1),
    "data for an ended stream": encode(DATA, 3, b"x"),
    "data for a stream that was never opened": encode(DATA, 9, b"x"),
    "data for a stream number of the guest": encode(DATA, 2, b"x"),
    "data for the connection itself": encode(DATA, 0, b"x"),
    "data after an end": encode(EOF, 1) + encode(DATA, 1, b"x"),
    "a second end": encode(EOF, 1) * 2,
    "an end for a stream that was never opened": encode(EOF, 99),
    "a reset for a stream that was never opened": encode(RESET, 9),
    "an end of the connection itself": encode(EOF, 0),
    "credit for bytes never sent": encode_credit(1, WINDOW // 4),
    "credit that overflows": encode_credit(1, 2**32 - 1),
    "credit for an unused stream": encode_credit(5, WINDOW // 4),
    "no credit at all": encode_credit(1, 0),
    "credit of three bytes": encode(CREDIT, 1, b"abc"),
    "credit of five bytes": encode(CREDIT, 1, b"abcde"),
    "credit for a stream that was never opened": encode_credit(9, WINDOW // 4),
    "credit for the connection itself": encode_credit(0, WINDOW // 4),
    "tiny credits": encode_credit(1, 1) * 5,
    "a flood of late credits": encode_credit(3, 1) * 1000,
    "a flood of late resets": encode(RESET, 3) * 1000,
    "a flood of late ends": encode(EOF, 3) * 1000,
    "a stream with the host's number": encode(OPEN, 9, b"unix:/x"),
    "a stream with a number in use": encode(OPEN, 1, b"unix:/x"),
    "a flood of streams": b"".join(encode(OPEN, 2 * number, b"file:/x") for number in range(1, 1000)),
    "a flood of one stream": encode(OPEN, 2, b"file:/x") * 1000,
    "a message that is not JSON": encode(CONTROL, 0, b"{"),
    "a message that is not text": encode(CONTROL, 0, b"\xff\xfe"),
    "a message that is empty": encode(CONTROL, 0),
    "a message that is a list": control(["op"]),
    "a message that is a string": control("op"),
    "a message that is a number": control(1),
    "a message that is null": control(None),
    "a message without op": control({}),
    "a deeply nested message": encode(CONTROL, 0, DEEP),
    "a message of one huge number": encode(CONTROL, 0, b'{"op": ' + b"9" * 200_000 + b"}"),
    "an unknown op": control({"op": "please"}),
    "an op that is an object": control({"op": {"op": 1}}),
    "an endless op": control({"op": "\u2028" * 40_000}),
    "a second hello": control({"op": "hello", "version": VERSION, "processes": []}),
    "quiesced without a request": control({"op": "quiesced"}),
    "resumed without a request": control({"op": "resumed"}),
    "a hook that was not called": control({"op": "hooked", "trouble": ""}),
    "a start without a request": control({"op": "started", "process": 2}),
    "a second start": control({"op": "started", "process": 1}),
    "a failure after the start": control({"op": "failed", "process": 1, "errno": 2, "filename": "x"}),
    "the end of an unknown process": control({"op": "exited", "process": 2, "status": 0}),
    "the end of a process twice": control({"op": "exited", "process": 1, "status": 0}) * 2,
    "an end without a status": control({"op": "exited", "process": 1}),
    "an end with a huge status": control({"op": "exited", "process": 1, "status": 10**30}),
    "an end with a text as status": control({"op": "exited", "process": 1, "status": "fine"}),
    "an end with NaN as status": control({"op": "exited", "process": 1, "status": float("nan")}),
    "an end with an infinite status": control({"op": "exited", "process": 1, "status": float("inf")}),
    "a request without a number": control({"op": "ask", "request": {}}),
    "a request without a request": control({"op": "ask", "number": 1}),
    "a request with a text as number": control({"op": "ask", "number": "1", "request": {}}),
    "a request with true as number": control({"op": "ask", "number": True, "request": {}}),
    "a request with a list as number": control({"op": "ask", "number": [1], "request": {}}),
    "a request with a negative number": control({"op": "ask", "number": -1, "request": {}}),
    "a request with a huge number": control({"op": "ask", "number": 2**31, "request": {}}),
    "a request that is a list": control({"op": "ask", "number": 1, "request": []}),
    "a request that is null": control({"op": "ask", "number": 1, "request": None}),
    "a request that is too large": control({"op": "ask", "number": 1, "request": {"op": "x" * MAX_REQUEST}}),
    "a flood of requests": b"".join(control({"op": "ask", "number": n, "request": {}}) for n in range(1, 1000)),
    "confirmation of an answer that was not sent": control({"op": "answered", "number": 1}),
    "confirmation without a number": control({"op": "answered"}),
    "confirmation with a list as number": control({"op": "answered", "number": [1]}),
    "a process with a list as number": control({"op": "exited", "process": [1], "status": 0}),
    "a process with null as number": control({"op": "exited", "process": None, "status": 0}),
}


@pytest.mark.parametrize("violation", VIOLATIONS.values(), ids=VIOLATIONS.keys())
async def test_rule_violation_closes_only_this_connection(violation: bytes) -> None:
    async with scripted_guest() as guest:
        tap, process = await open_streams(guest)
        await guest.send(violation)
        error = await asyncio.wait_for(guest.lost, LIMIT)
        assert type(error) is ProtocolError
        assert guest.connection.error is error
        assert len(str(error)) < 1000
        assert tap.ended == 1
        assert len(tap.data) <= WINDOW
        await asyncio.wait_for(process.wait(), LIMIT)
        await asyncio.wait_for(process.read(), LIMIT)
        await require_unusable(guest.connection, process)


HELLOS: dict[str, dict[str, Any]] = {
    "no version": {"processes": []},
    "another version": {"version": VERSION + 1, "processes": []},
    "an endless version": {"version": "v" * 200_000, "processes": []},
    "no processes": {"version": VERSION},
    "processes that are a number": {"version": VERSION, "processes": 5},
    "processes that are names": {"version": VERSION, "processes": ["one"]},
    "a process with a negative number": {"version": VERSION, "processes": [-1]},
    "a process with a huge number": {"version": VERSION, "processes": [2**31]},
    "more processes than streams": {"version": VERSION, "processes": list(range(1, MAX_STREAMS))},
    "one process many times": {"version": VERSION, "processes": [1] * MAX_STREAMS},
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS.keys())
async def test_invalid_hello_closes_connection(hello: dict[str, Any]) -> None:
    async with scripted_guest() as guest:
        adopting = asyncio.create_task(guest.connection.reattach())
        await asyncio.sleep(0)
        await guest.say(op="hello", **hello)
        with pytest.raises(ProtocolError):
            await asyncio.wait_for(adopting, LIMIT)
        assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError
        assert len(str(guest.connection.error)) < 1000


async def test_processes_of_new_guest_are_refused() -> None:
    """Only a restored guest can have processes."""
    async with scripted_guest() as guest:
        greeted = asyncio.create_task(guest.connection.greeted())
        await guest.say(op="hello", version=VERSION, processes=[1])
        with pytest.raises(ProtocolError):
            await asyncio.wait_for(greeted, LIMIT)


@pytest.mark.parametrize("early", [encode(DATA, 1, b"x"), control({"op": "resumed"}), encode_credit(1, 1)])
async def test_message_before_hello_closes_connection(early: bytes) -> None:
    async with scripted_guest() as guest:
        await guest.send(early)
        assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError


async def test_few_streams_of_guest_are_reset() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        for number in range(2, 2 * MAX_REFUSED, 2):
            await guest.send(encode(OPEN, number, b"file:/etc/shadow"))
            await guest.expect(RESET, number)
        assert not guest.connection.error


async def test_frames_sent_before_our_reset_arrived_are_ignored() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        tap = Tap(guest.connection.open("unix:/x"))
        tap.stream.write(bytes(WINDOW))
        tap.stream.reset()
        credit = encode_credit(1, WINDOW // 2)
        await guest.send(encode(DATA, 1, b"late"), credit, encode(RESET, 1), credit)
        await tap.end()
        await asyncio.sleep(0)
        assert not guest.connection.error
        assert tap.data == b""


# -- memory and time that a guest can use ----------------------------------------------------------------------


@asynccontextmanager
async def growth_below(limit: int) -> AsyncIterator[None]:
    """Require that Python's memory grows by less than ``limit`` bytes at any time in the block."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before < limit
    finally:
        tracemalloc.stop()


async def test_unread_single_bytes_use_little_memory() -> None:
    count = 30_000
    async with scripted_guest() as guest:
        _, process = await open_streams(guest)
        flood = encode(DATA, 5, b"x") * count
        async with growth_below(1_500_000):
            await guest.send(flood)
            while process._size < count and not guest.connection.error:
                await asyncio.sleep(0)
        assert not guest.connection.error
        guest.connection.close(LinkClosedError("the test is over."))
        assert await process.read() == (b"x" * count, b"")


async def test_unread_output_uses_at_most_window() -> None:
    async with scripted_guest() as guest:
        _, process = await open_streams(guest)
        flood = encode(DATA, 5, bytes(MAX_PAYLOAD)) * 40
        async with growth_below(4 * WINDOW):
            await guest.send(flood)
            assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError
        assert process._size <= WINDOW


async def test_unread_input_uses_at_most_window_per_stream() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        streams = [guest.connection.open("unix:/x") for _ in range(4)]
        piece = bytes(1 << 16)
        async with growth_below(6 * WINDOW):
            for _ in range(200):
                for stream in streams:
                    if stream.ready:
                        stream.write(piece)
                await asyncio.sleep(0)
        assert not any(stream.ready for stream in streams)
        assert not guest.connection.error


async def test_incomplete_frame_uses_at_most_its_length() -> None:
    async with scripted_guest() as guest:
        await open_streams(guest)
        async with growth_below(4 * MAX_PAYLOAD):
            await guest.send(HEADER.pack(DATA, 1, MAX_PAYLOAD))
            for _ in range(MAX_PAYLOAD // 1024 - 1):
                await guest.send(bytes(1024))
        assert not guest.connection.error


async def test_guest_that_only_sends_uses_little_memory() -> None:
    """Only the credit for its bytes waits in the pipe to it."""
    async with scripted_guest() as guest:
        await guest.hello()
        tap = Tap(guest.connection.open("unix:/x"))
        frame = encode(DATA, 1, bytes(MAX_PAYLOAD))
        async with growth_below(8 * MAX_PAYLOAD):
            for _ in range(300):
                await guest.send(frame)
                tap.data.clear()
        assert not guest.connection.error


async def test_flood_does_not_block_event_loop() -> None:
    """Other callbacks run between two reads of the pipe."""
    async with scripted_guest() as guest:
        _, process = await open_streams(guest)
        sending = asyncio.create_task(guest.send(encode(DATA, 5, b"x") * 200_000))
        turns = 0
        while not sending.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 20
        assert not guest.connection.error
        assert process._size > 0
