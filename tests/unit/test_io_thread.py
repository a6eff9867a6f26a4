"""Test the I/O thread: all holders share it, any loop can use it, and it ends with its last holder."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import psutil
import pytest

from sandbox_provisioner.io_thread import IOThread

pytestmark = pytest.mark.filterwarnings("error")
LIMIT = 20


async def nothing() -> None:
    """Do nothing. Used as ``at_exit`` by holders that need none."""


@pytest.fixture
def io() -> Iterator[IOThread]:
    """An I/O thread that is closed after the test."""
    before = psutil.Process().num_fds(), threading.active_count()
    io = IOThread()
    yield io
    io.close()
    assert psutil.Process().num_fds() <= before[0]
    assert threading.active_count() <= before[1]


async def where() -> tuple[threading.Thread, asyncio.AbstractEventLoop]:
    return threading.current_thread(), asyncio.get_running_loop()


def test_no_thread_without_a_holder(io: IOThread) -> None:
    before = threading.active_count()
    assert not io.held_by("me")
    io.hold("me", nothing)
    assert io.held_by("me")
    assert threading.active_count() == before + 1
    asyncio.run(io.release("me"))
    assert not io.held_by("me")
    assert threading.active_count() == before


def test_run_without_a_holder_raises(io: IOThread) -> None:
    with pytest.raises(RuntimeError, match="hold"):
        asyncio.run(io.run(where()))


def test_holders_share_one_thread_and_the_last_one_ends_it(io: IOThread) -> None:
    io.hold("one", nothing)
    io.hold("two", nothing)
    thread, _ = asyncio.run(io.run(where()))
    asyncio.run(io.release("one"))
    assert asyncio.run(io.run(where()))[0] is thread
    asyncio.run(io.release("two"))
    assert not thread.is_alive()


def test_thread_can_be_held_again(io: IOThread) -> None:
    threads = []
    for _ in range(3):
        io.hold("me", nothing)
        threads.append(asyncio.run(io.run(where()))[0])
        asyncio.run(io.release("me"))
    assert len(set(threads)) == 3


def test_hold_and_release_can_be_repeated(io: IOThread) -> None:
    io.hold("me", nothing)
    io.hold("me", nothing)
    asyncio.run(io.release("me"))
    asyncio.run(io.release("me"))
    asyncio.run(io.release("nobody"))
    assert not io.held_by("me")


def test_run_from_many_loops_and_threads(io: IOThread) -> None:
    io.hold("me", nothing)
    found: list[tuple[threading.Thread, asyncio.AbstractEventLoop]] = []
    callers = [threading.Thread(target=lambda: found.append(asyncio.run(io.run(where())))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(LIMIT)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_work_continues_between_calls(io: IOThread) -> None:
    """A task of one call continues while the caller's loop does not run."""
    io.hold("me", nothing)
    done = threading.Event()

    async def later() -> None:
        await asyncio.sleep(0.01)
        done.set()

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(later())

    task = asyncio.run(io.run(begin()))
    assert done.wait(LIMIT)
    asyncio.run(io.release("me"))
    assert task.done()


def test_run_returns_results_and_raises_errors(io: IOThread) -> None:
    async def fail() -> None:
        raise KeyError("reason")

    io.hold("me", nothing)
    with pytest.raises(KeyError, match="reason"):
        asyncio.run(io.run(fail()))


async def test_cancelling_the_caller_cancels_the_work(io: IOThread) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    io.hold("me", nothing)
    caller = asyncio.create_task(io.run(endless()))
    await asyncio.to_thread(begun.wait, LIMIT)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert await asyncio.to_thread(cancelled.wait, LIMIT)
    await io.release("me")


async def test_cancelled_caller_waits_for_cleanup(io: IOThread) -> None:
    begun, cleaning, clean, cleaned = (threading.Event() for _ in range(4))

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await asyncio.to_thread(clean.wait, LIMIT)
            cleaned.set()

    io.hold("me", nothing)
    caller = asyncio.create_task(io.run(endless()))
    await asyncio.to_thread(begun.wait, LIMIT)
    caller.cancel()
    await asyncio.to_thread(cleaning.wait, LIMIT)
    caller.cancel()  # a second cancellation changes nothing
    await asyncio.sleep(0)
    clean.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert cleaned.is_set()
    await io.release("me")


async def test_cancelled_before_it_began_is_not_run(io: IOThread) -> None:
    io.hold("me", nothing)
    caller = asyncio.create_task(io.run(asyncio.sleep(LIMIT)))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await io.release("me")


async def test_release_does_not_block_the_callers_loop(io: IOThread) -> None:
    """Here the thread ends only while the caller's loop runs: a release that blocks the loop would never return."""
    begun, free = threading.Event(), threading.Event()

    async def stubborn() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(free.wait, LIMIT)

    io.hold("me", nothing)
    work = asyncio.create_task(io.run(stubborn()))
    await asyncio.to_thread(begun.wait, LIMIT)
    releasing = asyncio.create_task(io.release("me"))
    await asyncio.sleep(0)
    assert not releasing.done()
    free.set()
    await releasing
    with pytest.raises(asyncio.CancelledError):
        await work


def test_end_of_the_thread_cancels_its_tasks(io: IOThread) -> None:
    ended = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def begin() -> asyncio.Task[None]:
        task = asyncio.create_task(endless())
        await asyncio.sleep(0)
        return task

    io.hold("me", nothing)
    task = asyncio.run(io.run(begin()))
    asyncio.run(io.release("me"))
    assert ended.is_set()
    assert task.cancelled()


def test_close_calls_at_exit_of_every_holder_in_the_thread(io: IOThread) -> None:
    ended: list[tuple[str, str]] = []

    def end(name: str) -> None:
        async def at_exit() -> None:
            ended.append((name, threading.current_thread().name))
            if name == "two":
                raise RuntimeError("a failing at_exit does not prevent the others")

        io.hold(name, at_exit)

    for name in ("one", "two", "three"):
        end(name)
    io.close()
    assert sorted(ended) == [("one", "sandbox-io"), ("three", "sandbox-io"), ("two", "sandbox-io")]
    assert not any(io.held_by(name) for name in ("one", "two", "three"))
    io.close()


def test_concurrent_hold_and_release(io: IOThread) -> None:
    failures: list[Exception] = []

    def visit(name: str) -> None:
        try:
            for _ in range(20):
                io.hold(name, nothing)
                assert asyncio.run(io.run(where()))[0].name == "sandbox-io"
                asyncio.run(io.release(name))
        except Exception as error:
            failures.append(error)

    visitors = [threading.Thread(target=visit, args=(f"visitor {number}",)) for number in range(6)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join(LIMIT)
    assert failures == []
    assert not any(visitor.is_alive() for visitor in visitors)


# -- the one thread of the package, in interpreters of their own -----------------------------------------------


def interpreter(code: str) -> subprocess.CompletedProcess[str]:
    begin = """
        import asyncio, os, sys, threading
        from sandbox_provisioner.io_thread import IO
        async def where(): return threading.current_thread().name
        async def nothing(): pass
        """
    program = textwrap.dedent(begin) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=3 * LIMIT,
    )


def test_exit_of_the_interpreter_calls_at_exit() -> None:
    ended = interpreter(
        """
        async def at_exit(): print("given back")
        IO.hold("me", at_exit)
        print(asyncio.run(IO.run(where())))
        """
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "sandbox-io\ngiven back\n", "")


def test_exit_of_the_interpreter_does_not_wait_for_ever() -> None:
    ended = interpreter(
        """
        import sandbox_provisioner.io_thread as module
        module.EXIT_DEADLINE = 0.1
        async def at_exit(): await asyncio.Event().wait()
        IO.hold("me", at_exit)
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_forked_child_has_its_own_thread() -> None:
    ended = interpreter(
        """
        async def at_exit(): print("parent gives back", flush=True)
        IO.hold("parent", at_exit)
        child = os.fork()
        if not child:
            assert not IO.held_by("parent")
            IO.hold("child", nothing)
            print("child", asyncio.run(IO.run(where())), flush=True)
            asyncio.run(IO.release("child"))
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("parent", asyncio.run(IO.run(where())), flush=True)
        """
    )
    assert ended.stderr == ""
    assert ended.stdout == "child sandbox-io\nparent sandbox-io\nparent gives back\n"
    assert ended.returncode == 0


def test_fork_while_the_guard_is_locked() -> None:
    ended = interpreter(
        """
        IO._guard.acquire()
        child = os.fork()
        if not child:
            IO.hold("child", nothing)
            print(asyncio.run(IO.run(where())), flush=True)
            asyncio.run(IO.release("child"))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        IO._guard.release()
        sys.exit(status)
        """
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "sandbox-io\n", "")


def test_interrupted_server_calls_at_exit() -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from sandbox_provisioner.io_thread import IO
        async def at_exit(): print("given back", flush=True)
        IO.hold("me", at_exit)
        try:
            print("ready", flush=True)
            time.sleep(1000)
        except KeyboardInterrupt:
            sys.exit(3)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGINT)
    rest, _ = child.communicate(timeout=LIMIT)
    assert (child.returncode, rest) == (3, "given back\n")
