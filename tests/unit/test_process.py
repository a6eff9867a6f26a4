"""Test Process: output, input, exit, signals, and that no descriptor is left."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from sandbox_provisioner.process import BUFFER, LocalProcess, Output

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.user]
LIMIT = 30
"""Seconds after which a test counts as hanging."""


@pytest.fixture(autouse=True)
async def nothing_stays_open() -> AsyncIterator[None]:
    """Fail if a test leaves a descriptor or a child."""
    before = descriptors(), psutil.Process().children()
    yield
    assert descriptors().items() <= before[0].items()
    assert psutil.Process().children() == before[1]


def descriptors() -> dict[str, str]:
    return {entry.name: os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


def python(code: str, stdin: int = subprocess.DEVNULL) -> LocalProcess:
    return LocalProcess.start([sys.executable, "-u", "-c", code], stdin=stdin)


async def ended(process: LocalProcess) -> int:
    """Wait for the exit of a process, and close this side of its pipes."""
    status = await asyncio.wait_for(process.wait(), LIMIT)
    process.close()
    return status


async def line(process: LocalProcess) -> bytes:
    """Return the next line of a process's output, which may arrive in several pieces."""
    found = b""
    async for piece in process.stream():
        found += piece.data
        if found.endswith(b"\n"):
            break
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- output ----------------------------------------------------------------------------------------------------


async def test_stdout_and_stderr_are_separate() -> None:
    process = python("import os; os.write(1, b'out'); os.write(2, b'err')")
    assert sorted([piece async for piece in process.stream()]) == [Output("stderr", b"err"), Output("stdout", b"out")]
    assert await ended(process) == 0


async def test_output_is_streamed_while_the_child_runs() -> None:
    process = python("print('first'); input(); print('second')", stdin=subprocess.PIPE)
    assert await line(process) == b"first\n"
    assert process.returncode is None
    await process.write(b"\n")
    assert await process.read() == (b"second\n", b"")
    assert await ended(process) == 0


async def test_character_that_is_split_between_reads_is_unchanged() -> None:
    text = "é🙂" * 5_000
    process = python(
        "import os\ndata = memoryview(('é🙂' * 5_000).encode())\nwhile data: data = data[os.write(1, data[:4]) :]"
    )
    out, _ = await process.read()
    assert out.decode() == text
    assert await ended(process) == 0


async def test_binary_output_is_unchanged() -> None:
    process = python("import os; os.write(1, bytes(range(256))); os.write(2, b'\\xff\\x00')")
    assert await process.read() == (bytes(range(256)), b"\xff\x00")
    assert await ended(process) == 0


async def test_second_read_returns_nothing() -> None:
    process = python("print('once')")
    assert await process.read() == (b"once\n", b"")
    assert await asyncio.wait_for(process.read(), LIMIT) == (b"", b"")
    assert await ended(process) == 0
    assert [piece async for piece in process.stream()] == []


async def test_output_can_be_read_after_the_exit() -> None:
    process = python("print('kept')")
    assert await asyncio.wait_for(process.wait(), LIMIT) == 0
    assert await process.read() == (b"kept\n", b"")
    process.close()


async def test_two_readers_share_the_output() -> None:
    process = python("for i in range(2000): print(i)")
    shares = await asyncio.wait_for(asyncio.gather(process.read(), process.read()), LIMIT)
    lines = b"".join(out for out, _ in shares).split()
    assert sorted(map(int, lines)) == list(range(2000))
    assert await ended(process) == 0


async def test_child_waits_while_its_output_is_not_read() -> None:
    total = 8 * BUFFER
    process = python(
        f"import os\nleft = {total}\nwhile left: left -= os.write(1, b'x' * min(left, 1 << 16)); os.write(2, b'.')"
    )
    while process._size < BUFFER:
        await asyncio.sleep(0.01)
    assert process._size < 2 * BUFFER
    assert is_running(process.pid)
    out, err = await process.read()
    assert out == b"x" * total
    assert set(err) == set(b".")
    assert await ended(process) == 0


async def test_grandchild_keeps_the_output_open() -> None:
    process = python(
        "import subprocess; subprocess.Popen('read line; echo late', shell=True); print('early')", stdin=subprocess.PIPE
    )
    assert await asyncio.wait_for(process.wait(), LIMIT) == 0
    assert await line(process) == b"early\n"
    await process.write(b"go\n")
    assert await process.read() == (b"late\n", b"")
    process.close()


# -- input -----------------------------------------------------------------------------------------------------


async def test_child_without_stdin_reads_nothing() -> None:
    process = python("import sys; print(repr(sys.stdin.read()))")
    assert await process.read() == (b"''\n", b"")
    assert await ended(process) == 0


async def test_large_input_arrives_unchanged() -> None:
    data = os.urandom(1 << 20) * 5
    process = LocalProcess.start(["cat"], stdin=subprocess.PIPE)

    async def send() -> None:
        await process.write(data)
        process.close_stdin()

    sending = asyncio.create_task(send())
    out, err = await asyncio.wait_for(process.read(), LIMIT)
    await sending
    assert (out == data, err) == (True, b"")
    assert await ended(process) == 0


async def test_write_waits_for_the_child_and_ends_with_it() -> None:
    process = LocalProcess.start(["sleep", "1000"], stdin=subprocess.PIPE)
    writing = asyncio.create_task(process.write(bytes(1 << 20)))
    await asyncio.wait({writing}, timeout=0.1)
    assert not writing.done()
    await process.stop()
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(writing, LIMIT)
    process.close()


async def test_close_stdin_ends_a_waiting_write() -> None:
    process = LocalProcess.start(["sleep", "1000"], stdin=subprocess.PIPE)
    writing = asyncio.create_task(process.write(bytes(1 << 20)))
    await asyncio.wait({writing}, timeout=0.1)
    process.close_stdin()
    done, _ = await asyncio.wait({writing}, timeout=LIMIT)
    writing.cancel()
    await process.stop()
    process.close()
    assert done
    assert isinstance(writing.exception(), BrokenPipeError)


async def test_write_to_closed_stdin_raises() -> None:
    process = LocalProcess.start(["true"], stdin=subprocess.PIPE)
    await process.wait()
    with pytest.raises(BrokenPipeError):
        await process.write(b"late")
    process.close()
    with pytest.raises(BrokenPipeError):
        await process.write(b"later")
    without = LocalProcess.start(["true"])
    with pytest.raises(BrokenPipeError):
        await without.write(b"nowhere")
    assert await ended(without) == 0


# -- the end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 77, 255])
async def test_exit_status(status: int) -> None:
    process = python(f"raise SystemExit({status})")
    assert process.returncode is None
    assert await ended(process) == status
    assert process.returncode == status
    assert await process.wait() == status


async def test_signal_is_a_negative_status() -> None:
    process = LocalProcess.start(["sleep", "1000"])
    process.send_signal(signal.SIGUSR1)
    assert await ended(process) == -signal.SIGUSR1


async def test_cancelled_wait_does_not_affect_another() -> None:
    process = LocalProcess.start(["cat"], stdin=subprocess.PIPE)
    waiting = asyncio.create_task(process.wait())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.01)
    process.close_stdin()
    assert await asyncio.wait_for(waiting, LIMIT) == 0
    process.close()


async def test_stop_sends_sigterm_first() -> None:
    process = python(
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\nprint('ready')\nsignal.pause()"
    )
    await line(process)
    assert await asyncio.wait_for(process.stop(), LIMIT) == 42
    process.close()


async def test_stop_sends_sigkill_after_the_grace_time() -> None:
    process = python(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\nwhile True: signal.pause()"
    )
    await line(process)
    assert await asyncio.wait_for(process.stop(grace=0.05), LIMIT) == -signal.SIGKILL
    process.close()


async def test_stop_ends_the_processes_of_the_child() -> None:
    process = LocalProcess.start(["sh", "-c", "sleep 1000 & echo $!; wait"])
    sleeper = int(await line(process))
    assert is_running(sleeper)
    await process.stop(grace=0)
    await asyncio.wait_for(process.read(), LIMIT)  # returns only when the last process has closed its output
    async with asyncio.timeout(LIMIT):
        while is_running(sleeper):  # it closes its output shortly before it exits
            await asyncio.sleep(0.01)
    process.close()


async def test_stop_after_the_exit_returns_the_status() -> None:
    process = python("raise SystemExit(3)")
    assert await process.wait() == 3
    assert await process.stop() == 3
    process.send_signal(signal.SIGTERM)
    process.close()


async def test_close_drops_unread_output_and_can_be_repeated() -> None:
    process = python("print('unread'); input()", stdin=subprocess.PIPE)
    await line(process)
    process.close()
    process.close()
    assert await asyncio.wait_for(process.read(), LIMIT) == (b"", b"")
    assert await process.wait() == 1  # EOFError


async def test_child_does_not_get_ctrl_c() -> None:
    process = python("import os; print(os.getsid(0) == os.getpid() == os.getpgrp())")
    assert await process.read() == (b"True\n", b"")
    assert await ended(process) == 0


async def test_missing_program_raises_and_leaves_nothing() -> None:
    with pytest.raises(FileNotFoundError):
        LocalProcess.start(["/no/such/program"])


async def test_environment_of_the_child() -> None:
    process = LocalProcess.start(["/usr/bin/env"], env={"ONLY": "this"})
    assert await process.read() == (b"ONLY=this\n", b"")
    assert await ended(process) == 0


# -- run: a command from beginning to end ----------------------------------------------------------------------


async def test_run_returns_status_stdout_and_stderr() -> None:
    assert await LocalProcess.run(["sh", "-c", "echo out; echo err >&2; exit 5"], LIMIT) == (5, b"out\n", b"err\n")


async def test_run_times_out_and_leaves_nothing() -> None:
    assert await LocalProcess.run(["sleep", "1000"], 0.05) == (None, b"", b"")


async def test_run_times_out_if_the_child_only_closes_its_outputs() -> None:
    status, _, _ = await LocalProcess.run(["sh", "-c", "exec >&- 2>&-; exec sleep 1000"], 0.2)
    assert status is None


async def test_cancelled_run_ends_the_command() -> None:
    mark = f"1000.{os.getpid()}"
    running = asyncio.create_task(LocalProcess.run(["sleep", mark], LIMIT))
    await asyncio.wait({running}, timeout=0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(mark in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


async def test_many_children_at_once() -> None:
    answers = await asyncio.gather(
        *(LocalProcess.run(["sh", "-c", f"echo {number}; exit {number}"], LIMIT) for number in range(20))
    )
    assert answers == [(number, f"{number}\n".encode(), b"") for number in range(20)]


async def test_children_leave_no_descriptor() -> None:
    for _ in range(5):
        await asyncio.gather(*(LocalProcess.run(["true"], LIMIT) for _ in range(20)))


async def test_start_without_free_descriptors_raises_and_leaks_none() -> None:
    with pytest.raises(OSError) as refusal:
        LocalProcess.start(["true"], stdin=1 << 20)
    assert refusal.value.errno in (errno.EBADF, errno.EMFILE)
