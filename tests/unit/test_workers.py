"""Test worker threads: control calls do not wait for bulk calls, and the interpreter's exit waits for neither."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from sandbox_provisioner import workers
from sandbox_provisioner.workers import BULK, CONTROL, Workers, bulk, control, finished

LIMIT = 20


@pytest.fixture
def few() -> Iterator[Workers]:
    """A group of at most two threads. Fails if one is left after the test."""
    few = Workers("few", 2)
    yield few
    few.retire()
    for thread in threading.enumerate():
        if thread.name == "few":
            thread.join(60)
    assert "few" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """End the threads after the test, because other tests count threads."""
    yield
    for group in (BULK, CONTROL):
        group.retire()


async def test_run_passes_results_errors_and_context(few: Workers) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(1)
    assert await few.run(lambda number: (number, variable.get()), 2) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        await few.run(lambda: 1 / 0)


async def test_no_more_threads_than_allowed(few: Workers) -> None:
    gate, names = threading.Event(), set()

    def work(number: int) -> int:
        names.add(threading.get_ident())
        gate.wait(LIMIT)
        return number

    jobs = [asyncio.create_task(few.run(work, number)) for number in range(5)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*jobs) == [0, 1, 2, 3, 4]
    assert len(names) <= 2


async def test_function_cancelled_before_it_begins_is_not_called(few: Workers) -> None:
    gate, called = threading.Event(), threading.Event()
    busy = [asyncio.create_task(few.run(gate.wait, LIMIT)) for _ in range(2)]
    waiting = asyncio.create_task(few.run(called.set))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await asyncio.gather(*busy)
    assert not called.is_set()


async def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE", 0.01)
    brief = Workers("brief", 2)
    await brief.run(int)
    async with asyncio.timeout(LIMIT):
        while "brief" in [thread.name for thread in threading.enumerate()]:
            await asyncio.sleep(0.01)
    assert await brief.run(lambda: 1) == 1


async def test_control_does_not_wait_for_bulk_work() -> None:
    gate = threading.Event()
    uploads = [asyncio.create_task(bulk(gate.wait, LIMIT)) for _ in range(3 * BULK._most)]
    await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT / 2):
        assert await control(lambda: "killed") == "killed"
    gate.set()
    assert all(await asyncio.gather(*uploads))


async def test_finished_waits_for_the_work_when_cancelled() -> None:
    go_on, ended = asyncio.Event(), []

    async def work() -> None:
        await go_on.wait()
        ended.append(True)

    caller = asyncio.create_task(finished(work()))
    for _ in range(2):
        await asyncio.sleep(0)
        caller.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True]


def test_exit_does_not_wait_and_a_forked_child_has_its_own_threads() -> None:
    code = """
        import asyncio, os, sys, threading
        from sandbox_provisioner.workers import BULK, bulk
        BULK.submit(threading.Event().wait)
        child = os.fork()
        if not child:
            assert asyncio.run(bulk(lambda: 1)) == 1
            os._exit(0)
        sys.exit(os.waitpid(child, 0)[1])
        """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], timeout=LIMIT, capture_output=True, text=True, env=os.environ
    )
    assert (ended.returncode, ended.stderr) == (0, "")
