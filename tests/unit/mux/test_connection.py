"""GuestConnection: streams and processes over one pipe, with a real guest and with a scripted one that breaks rules.

The real guest is the sandbox's own init, run as a plain child on the host. The scripted one is a pipe into which a
test writes every byte itself: the host's side is what is under test here, and it must stand anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
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
    descriptors,
    echo,
    pour,
    real_guest,
    scripted_guest,
    server,
)

from sandbox_provisioner.errors import GuestError, LinkClosedError, ProtocolError
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
from sandbox_provisioner.guest.host_api import MAX_OPEN, MAX_REQUEST
from sandbox_provisioner.mux import host_api
from sandbox_provisioner.mux.connection import GuestConnection
from sandbox_provisioner.mux.process import GuestProcess
from sandbox_provisioner.mux.stream import MAX_REFUSED, MAX_STREAMS

pytestmark = pytest.mark.filterwarnings("error")


# -- two guests ------------------------------------------------------------------------------------------------


# -- streams ---------------------------------------------------------------------------------------------------


async def test_a_stream_carries_bytes_to_a_unix_socket_and_back(tmp_path: Path) -> None:
    async with server(tmp_path / "echo", echo) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        tap.stream.write(b"there and back")
        assert await tap.size(14) == b"there and back"


async def test_a_stream_carries_bytes_to_a_tcp_port_and_back() -> None:
    async with server(0, echo) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        tap.stream.write(b"there and back")
        assert await tap.size(14) == b"there and back"


async def test_large_transfers_both_ways_at_once_are_exact(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 16
    async with server(tmp_path / "echo", echo) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        await pour(tap.stream, data)
        assert hashlib.sha256(await tap.size(len(data))).digest() == hashlib.sha256(data).digest()


async def test_many_streams_at_once_are_kept_apart(tmp_path: Path) -> None:
    async with server(tmp_path / "echo", echo) as target, real_guest() as (connection, _):
        taps = {os.urandom(8) * 5000: Tap(connection.open(target)) for _ in range(150)}
        for data, tap in taps.items():
            tap.stream.write(data)
        for data, tap in taps.items():
            assert await tap.size(len(data)) == data


async def test_a_stream_may_be_opened_and_written_to_before_its_target_listens(tmp_path: Path) -> None:
    async with real_guest() as (connection, _):
        tap = Tap(connection.open(f"unix:{tmp_path / 'late'}"))
        tap.stream.write(b"early bird")
        await Tap(connection.open("process:99:output")).end()  # the guest has seen the first OPEN by now
        async with server(tmp_path / "late", echo):
            assert await tap.size(10) == b"early bird"
            tap.stream.reset()


async def test_a_target_that_accepts_nobody_delays_nobody_else(tmp_path: Path) -> None:
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
                pytest.fail("PID 1 waits for a socket that accepts nobody")


async def test_a_stream_that_is_not_consumed_stops_at_the_window_and_delays_nobody(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 4

    async def gush(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await reader.read()

    async with (
        server(tmp_path / "g", gush) as gusher,
        server(tmp_path / "e", echo) as e,
        real_guest() as (connection, _),
    ):
        slow, brisk = Tap(connection.open(gusher), consume=False), Tap(connection.open(e))
        await slow.size(WINDOW)
        await pour(brisk.stream, data)
        assert await brisk.size(len(data)) == data
        assert len(slow.data) == WINDOW
        slow._consume = True
        slow.stream.consumed(WINDOW)
        assert await slow.size(len(data)) == data


async def test_a_target_that_does_not_read_is_owed_no_more_than_the_window(tmp_path: Path) -> None:
    reading = asyncio.Event()

    async def sullen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reading.wait()
        await echo(reader, writer)

    async with (
        server(tmp_path / "s", sullen) as target,
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


async def test_a_target_that_closes_ends_the_stream_after_its_last_byte(tmp_path: Path) -> None:
    data = os.urandom(300_000)

    async def last_words(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    async with server(tmp_path / "s", last_words) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        assert await tap.end() == data
        assert tap.ended == 1


async def test_a_reset_closes_the_connection_in_the_sandbox(tmp_path: Path) -> None:
    hung_up = asyncio.Event()

    async def notice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await reader.read()
        hung_up.set()

    async with server(tmp_path / "s", notice) as target, real_guest() as (connection, _):
        tap = Tap(connection.open(target))
        await tap.size(5)
        tap.stream.reset()
        await asyncio.wait_for(hung_up.wait(), LIMIT)
        await tap.end()
        tap.stream.write(b"into the void")
        tap.stream.reset()


async def test_ended_streams_are_forgotten_on_both_sides(tmp_path: Path) -> None:
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


async def test_there_is_a_limit_to_streams() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        for _ in range(MAX_STREAMS):
            guest.connection.open("unix:/x")
        with pytest.raises(GuestError, match=str(MAX_STREAMS)):
            guest.connection.open("unix:/x")


# -- quiesce and resume ----------------------------------------------------------------------------------------


async def test_quiescing_again_and_again_loses_nothing_in_either_direction(tmp_path: Path) -> None:
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


async def test_while_quiet_nothing_at_all_is_sent_and_afterwards_everything() -> None:
    """Between the guest's "quiesced" and the end of the sandbox, a byte in the pipe would be a byte lost."""
    async with scripted_guest() as guest:
        await guest.hello()
        connection = guest.connection
        stream = connection.open("unix:/early")
        await guest.expect(OPEN, 1)
        spawning = asyncio.create_task(connection.spawn(["sleep"], {}, "/"))
        number = (await guest.told("spawn"))["process"]
        await guest.say(op="started", process=number)
        process = await spawning
        await guest.send(*(encode(DATA, 1, bytes(MAX_PAYLOAD)) for _ in range(4)))
        await quiesce(guest)
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
        await guest.told("resume")
        await guest.say(op="resumed")
        await resuming
        await asyncio.sleep(0.01)
        frames = guest.arrived()
        assert (DATA, stream.number, b"held") in frames
        assert (CREDIT, stream.number, AMOUNT.pack(WINDOW)) in frames
        assert frames.index((OPEN, late.number, b"unix:/late")) < frames.index((DATA, late.number, b"also held"))
        told = [json.loads(payload)["op"] for kind, _, payload in frames if kind == CONTROL]
        assert sorted(told) == ["signal", "spawn"]
        another.cancel()


async def test_streams_live_on_over_a_change_of_pipes() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        kept, ending = guest.connection.open("unix:/kept"), guest.connection.open("unix:/ending")
        tap = Tap(kept)
        await quiesce(guest)
        guest.connection.detach()
        guest.close()
        kept.write(b"written while nobody was there")
        ending.reset()
        opened = guest.connection.open("unix:/opened")
        await guest.attach()
        resuming = asyncio.create_task(guest.connection.resume())
        await guest.told("resume")
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


async def test_an_answer_that_comes_after_the_patience_has_ended_is_no_crime() -> None:
    """A guest that was merely slow to come to rest must not lose its sandbox for it."""
    async with scripted_guest() as guest:
        await guest.hello()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guest.connection.quiesce(), 0.01)
        resuming = asyncio.create_task(guest.connection.resume())
        await guest.told("quiesce")
        await guest.say(op="quiesced")
        await guest.told("resume")
        await guest.say(op="resumed")
        await asyncio.wait_for(resuming, LIMIT)
        assert not guest.connection.error
        await quiesce(guest)


async def quiesce(guest: ScriptedGuest) -> None:
    resting = asyncio.create_task(guest.connection.quiesce())
    while (await guest.frame())[0] != CONTROL:
        pass
    await guest.say(op="quiesced")
    await asyncio.wait_for(resting, LIMIT)


# -- a guest that ends -----------------------------------------------------------------------------------------


async def test_the_end_of_the_guest_is_told_to_everybody_once(tmp_path: Path) -> None:
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
        await assert_useless(connection, process)


async def assert_useless(connection: GuestConnection, process: GuestProcess) -> None:
    """Everything that is asked of a lost connection is refused, and nothing hangs."""
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
async def test_whoever_waits_for_a_guest_that_goes_away_hears_of_it(pending: str) -> None:
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
async def test_a_pipe_that_breaks_during_a_restore_is_the_restores_failure_and_the_next_may_succeed(
    fresh: bool,
) -> None:
    async with scripted_guest() as guest:
        connection = guest.connection
        if not fresh:
            await guest.hello()
            await quiesce(guest)
            connection.detach()
            guest.close()
            await guest.attach()
        attempt = asyncio.create_task(connection.reattach() if fresh else connection.resume())
        await asyncio.sleep(0)
        await guest.send(encode(CONTROL, 0, b"{}")[:5])  # a sandbox that dies in the middle of a word
        guest.close()
        await asyncio.sleep(0.01)
        assert not attempt.done()
        attempt.cancel()
        connection.detach()
        assert not connection.error
        await guest.attach()
        again = asyncio.create_task(connection.reattach() if fresh else connection.resume())
        await guest.told("adopt" if fresh else "resume")
        await guest.say(**({"op": "hello", "version": VERSION, "processes": [4]} if fresh else {"op": "resumed"}))
        await asyncio.wait_for(again, LIMIT)
        assert bool(connection.process(4)) is fresh


# -- a guest that breaks the rules -----------------------------------------------------------------------------


async def situation(guest: ScriptedGuest) -> tuple[Tap, GuestProcess]:
    """Stream 1 is open and was sent 5 bytes, stream 3 is over, process 1 runs (streams 5 and 7); nobody reads it."""
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
BREACHES: dict[str, bytes] = {
    "kind 0": HEADER.pack(0, 1, 0),
    "kind 7": HEADER.pack(7, 1, 0),
    "kind 255": HEADER.pack(255, 2**32 - 1, 2**32 - 1),
    "a length beyond the limit": HEADER.pack(DATA, 1, MAX_PAYLOAD + 1),
    "the longest length": HEADER.pack(CONTROL, 0, 2**32 - 1),
    "one byte more than the window": FULL * (WINDOW // MAX_PAYLOAD) + encode(DATA, 1, b"x"),
    "data without bytes": encode(DATA, 1),
    "data for a stream that is over": encode(DATA, 3, b"x"),
    "data for a stream that never was": encode(DATA, 9, b"x"),
    "data for the guest's own numbers": encode(DATA, 2, b"x"),
    "data for the connection itself": encode(DATA, 0, b"x"),
    "data after an end": encode(EOF, 1) + encode(DATA, 1, b"x"),
    "a second end": encode(EOF, 1) * 2,
    "an end for a stream that never was": encode(EOF, 99),
    "a reset for a stream that never was": encode(RESET, 9),
    "an end of the connection itself": encode(EOF, 0),
    "credit for bytes never sent": encode_credit(1, WINDOW // 4),
    "credit that overflows": encode_credit(1, 2**32 - 1),
    "credit where nothing was sent": encode_credit(5, WINDOW // 4),
    "no credit at all": encode_credit(1, 0),
    "credit of three bytes": encode(CREDIT, 1, b"abc"),
    "credit of five bytes": encode(CREDIT, 1, b"abcde"),
    "credit for a stream that never was": encode_credit(9, WINDOW // 4),
    "credit for the connection itself": encode_credit(0, WINDOW // 4),
    "credit in crumbs": encode_credit(1, 1) * 5,
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
    "a message that is nothing": control(None),
    "a message without op": control({}),
    "a message with many levels": encode(CONTROL, 0, DEEP),
    "a message of one huge number": encode(CONTROL, 0, b'{"op": ' + b"9" * 200_000 + b"}"),
    "an op that there is not": control({"op": "please"}),
    "an op of a strange type": control({"op": {"op": 1}}),
    "an op without end": control({"op": "\u2028" * 40_000}),
    "a second hello": control({"op": "hello", "version": VERSION, "processes": []}),
    "quiesced without a question": control({"op": "quiesced"}),
    "resumed without a question": control({"op": "resumed"}),
    "a hook that nobody called": control({"op": "hooked", "trouble": ""}),
    "a start that nobody asked for": control({"op": "started", "process": 2}),
    "a start for the second time": control({"op": "started", "process": 1}),
    "a failure after the start": control({"op": "failed", "process": 1, "errno": 2, "filename": "x"}),
    "the end of a process that never was": control({"op": "exited", "process": 2, "status": 0}),
    "the end of a process twice": control({"op": "exited", "process": 1, "status": 0}) * 2,
    "an end without a status": control({"op": "exited", "process": 1}),
    "an end with a status beyond all bounds": control({"op": "exited", "process": 1, "status": 10**30}),
    "an end with a status of text": control({"op": "exited", "process": 1, "status": "fine"}),
    "an end with a status that is no number": control({"op": "exited", "process": 1, "status": float("nan")}),
    "an end with an infinite status": control({"op": "exited", "process": 1, "status": float("inf")}),
    "an ask without a number": control({"op": "ask", "request": {}}),
    "an ask without a request": control({"op": "ask", "number": 1}),
    "an ask with a number of text": control({"op": "ask", "number": "1", "request": {}}),
    "an ask with a number that is true": control({"op": "ask", "number": True, "request": {}}),
    "an ask with a number that is a list": control({"op": "ask", "number": [1], "request": {}}),
    "an ask with a negative number": control({"op": "ask", "number": -1, "request": {}}),
    "an ask with a number beyond all bounds": control({"op": "ask", "number": 2**31, "request": {}}),
    "an ask for a list": control({"op": "ask", "number": 1, "request": []}),
    "an ask for nothing": control({"op": "ask", "number": 1, "request": None}),
    "an ask that is too large": control({"op": "ask", "number": 1, "request": {"op": "x" * MAX_REQUEST}}),
    "a flood of asks": b"".join(control({"op": "ask", "number": n, "request": {}}) for n in range(1, 1000)),
    "an answer that nobody gave": control({"op": "answered", "number": 1}),
    "an answer without a number": control({"op": "answered"}),
    "an answer with a number that is a list": control({"op": "answered", "number": [1]}),
    "a process named by a list": control({"op": "exited", "process": [1], "status": 0}),
    "a process named by nothing": control({"op": "exited", "process": None, "status": 0}),
}


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES.keys())
async def test_a_breach_costs_the_guest_its_link_and_nobody_anything_else(breach: bytes) -> None:
    async with scripted_guest() as guest:
        tap, process = await situation(guest)
        await guest.send(breach)
        error = await asyncio.wait_for(guest.lost, LIMIT)
        assert type(error) is ProtocolError
        assert guest.connection.error is error
        assert len(str(error)) < 1000
        assert tap.ended == 1
        assert len(tap.data) <= WINDOW
        await asyncio.wait_for(process.wait(), LIMIT)
        await asyncio.wait_for(process.read(), LIMIT)
        await assert_useless(guest.connection, process)


HELLOS: dict[str, dict[str, Any]] = {
    "no version": {"processes": []},
    "another version": {"version": VERSION + 1, "processes": []},
    "a version without end": {"version": "v" * 200_000, "processes": []},
    "no processes": {"version": VERSION},
    "processes that are a number": {"version": VERSION, "processes": 5},
    "processes that are names": {"version": VERSION, "processes": ["one"]},
    "a process with a negative number": {"version": VERSION, "processes": [-1]},
    "a process with a huge number": {"version": VERSION, "processes": [2**31]},
    "more processes than streams": {"version": VERSION, "processes": list(range(1, MAX_STREAMS))},
    "one process again and again": {"version": VERSION, "processes": [1] * MAX_STREAMS},
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS.keys())
async def test_a_first_word_that_makes_no_sense_is_the_last(hello: dict[str, Any]) -> None:
    async with scripted_guest() as guest:
        adopting = asyncio.create_task(guest.connection.reattach())
        await asyncio.sleep(0)
        await guest.say(op="hello", **hello)
        with pytest.raises(ProtocolError):
            await asyncio.wait_for(adopting, LIMIT)
        assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError
        assert len(str(guest.connection.error)) < 1000


async def test_a_fresh_guest_has_no_processes() -> None:
    """Only one that was restored can bring any; PID 1 of a fresh sandbox was given none."""
    async with scripted_guest() as guest:
        greeted = asyncio.create_task(guest.connection.greeted())
        await guest.say(op="hello", version=VERSION, processes=[1])
        with pytest.raises(ProtocolError):
            await asyncio.wait_for(greeted, LIMIT)


@pytest.mark.parametrize("early", [encode(DATA, 1, b"x"), control({"op": "resumed"}), encode_credit(1, 1)])
async def test_a_guest_that_does_not_say_hello_first_is_not_listened_to(early: bytes) -> None:
    async with scripted_guest() as guest:
        await guest.send(early)
        assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError


async def test_a_few_refused_streams_are_answered_and_forgiven() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        for number in range(2, 2 * MAX_REFUSED, 2):
            await guest.send(encode(OPEN, number, b"file:/etc/shadow"))
            await guest.expect(RESET, number)
        assert not guest.connection.error


async def test_frames_that_crossed_our_own_reset_are_no_breach() -> None:
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


# -- what a guest asks for -------------------------------------------------------------------------------------


async def asking(guest: ScriptedGuest, *numbers: int) -> list[tuple[int, dict[str, Any]]]:
    """Ask under these numbers; what arrived of it."""
    asked: list[tuple[int, dict[str, Any]]] = []
    guest.connection.host_api.listen(lambda number, request: asked.append((number, request)))
    await guest.send(*(control({"op": "ask", "number": number, "request": {"op": "status"}}) for number in numbers))
    async with asyncio.timeout(LIMIT):
        while len(asked) < len(numbers) and not guest.connection.error:
            await asyncio.sleep(0)
    return asked


async def test_an_ask_is_answered_under_its_number_and_once() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        assert await asking(guest, 7) == [(7, {"op": "status"})]
        for answer in ({"first": 1}, {"second": 2}):
            guest.connection.host_api.answer(7, answer)
        assert await guest.told("answer") == {"op": "answer", "number": 7, "answer": {"first": 1}}
        await guest.say(op="answered", number=7)
        guest.connection.host_api.answer(8, {"nobody": "asked"})
        assert await asking(guest, 7)
        assert guest.arrived() == []


async def test_where_nobody_answers_asks_that_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_api, "LISTENER_WAIT", 0.01)
    async with scripted_guest() as guest:
        await guest.hello()
        await guest.say(op="ask", number=1, request={"op": "status"})
        assert (await guest.told("answer"))["answer"] == host_api.NO_LISTENER


async def test_an_ask_that_comes_before_somebody_answers_asks_waits() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        await guest.say(op="ask", number=1, request={"op": "early"})
        async with asyncio.timeout(LIMIT):
            while not guest.connection.host_api._early:
                await asyncio.sleep(0)
        assert await asking(guest) == [(1, {"op": "early"})]
        guest.connection.host_api._refuse_early()  # which comes later, and is for those that nobody has taken on
        guest.connection.host_api.answer(1, {"slow": "but sure"})
        assert (await guest.told("answer"))["answer"] == {"slow": "but sure"}


async def test_an_ask_is_open_until_its_answer_has_arrived() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        await asking(guest, *range(1, MAX_OPEN + 1))
        guest.connection.host_api.answer(1, {})
        await guest.told("answer")
        await guest.say(op="answered", number=1)
        assert await asking(guest, 1)
        for number in range(1, MAX_OPEN + 1):
            guest.connection.host_api.answer(number, {})
        await guest.say(op="ask", number=MAX_OPEN + 1, request={})
        assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError


async def test_a_number_in_use_cannot_be_asked_under() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        await asking(guest, 3, 3)
        assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError


async def test_nothing_can_be_asked_before_the_first_word() -> None:
    async with scripted_guest() as guest:
        await guest.say(op="ask", number=1, request={})
        assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError


async def test_an_answer_to_one_that_sleeps_waits_for_it_and_is_no_reason_to_wake_it() -> None:
    async with scripted_guest() as guest:
        connection = guest.connection
        await guest.hello()
        await asking(guest, 1)
        await quiesce(guest)
        connection.host_api.answer(1, {"it": "is so"})
        assert not connection.control_waits
        connection.detach()
        guest.close()
        await guest.attach()
        resuming = asyncio.create_task(connection.resume())
        await guest.told("resume")
        assert guest.arrived() == []
        await guest.say(op="resumed")
        await asyncio.wait_for(resuming, LIMIT)
        assert (await guest.told("answer"))["answer"] == {"it": "is so"}


async def test_an_answer_to_one_that_is_gone_is_dropped() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        await asking(guest, 1)
        guest.connection.close(LinkClosedError("it ended."))
        guest.connection.host_api.answer(1, {})
        assert guest.arrived() == []


# -- what a guest can make us keep -----------------------------------------------------------------------------


@asynccontextmanager
async def growth_below(limit: int) -> AsyncIterator[None]:
    """Python's memory may not have grown by more than this, at its highest."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before < limit
    finally:
        tracemalloc.stop()


async def test_output_in_crumbs_that_nobody_reads_costs_its_bytes_and_not_an_object_each() -> None:
    crumbs = 30_000
    async with scripted_guest() as guest:
        _, process = await situation(guest)
        flood = encode(DATA, 5, b"x") * crumbs
        async with growth_below(1_500_000):
            await guest.send(flood)
            while process._size < crumbs and not guest.connection.error:
                await asyncio.sleep(0)
        assert not guest.connection.error
        guest.connection.close(LinkClosedError("the test is over."))
        assert await process.read() == (b"x" * crumbs, b"")


async def test_output_that_nobody_reads_costs_the_window() -> None:
    async with scripted_guest() as guest:
        _, process = await situation(guest)
        flood = encode(DATA, 5, bytes(MAX_PAYLOAD)) * 40
        async with growth_below(4 * WINDOW):
            await guest.send(flood)
            assert type(await asyncio.wait_for(guest.lost, LIMIT)) is ProtocolError
        assert process._size <= WINDOW


async def test_a_guest_that_reads_nothing_costs_the_window_for_each_stream() -> None:
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


async def test_a_frame_that_never_ends_costs_its_length() -> None:
    async with scripted_guest() as guest:
        await situation(guest)
        async with growth_below(4 * MAX_PAYLOAD):
            await guest.send(HEADER.pack(DATA, 1, MAX_PAYLOAD))
            for _ in range(MAX_PAYLOAD // 1024 - 1):
                await guest.send(bytes(1024))
        assert not guest.connection.error


async def test_a_guest_that_talks_on_without_reading_costs_next_to_nothing() -> None:
    """It draws credit for what it sends and never takes it: that is all that waits for it here."""
    async with scripted_guest() as guest:
        await guest.hello()
        tap = Tap(guest.connection.open("unix:/x"))
        frame = encode(DATA, 1, bytes(MAX_PAYLOAD))
        async with growth_below(8 * MAX_PAYLOAD):
            for _ in range(300):
                await guest.send(frame)
                tap.data.clear()
        assert not guest.connection.error


async def test_the_loop_goes_on_turning_under_a_flood() -> None:
    """However the guest fills the pipe, everybody else on the loop gets their turn between two readings of it."""
    async with scripted_guest() as guest:
        _, process = await situation(guest)
        sending = asyncio.create_task(guest.send(encode(DATA, 5, b"x") * 200_000))
        turns = 0
        while not sending.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 20
        assert not guest.connection.error
        assert process._size > 0
