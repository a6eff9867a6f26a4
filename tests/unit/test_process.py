"""Process: output as bytes, bounded and never lost; input; the end, polite or not; and no descriptor left."""

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
"""Seconds after which a test that should have ended is taken to hang."""


@pytest.fixture(autouse=True)
async def nothing_stays_open() -> AsyncIterator[None]:
    """Whatever a test does with its child: no descriptor of ours and no child is left."""
    before = descriptors(), psutil.Process().children()
    yield
    assert descriptors().items() <= before[0].items()
    assert psutil.Process().children() == before[1]


def descriptors() -> dict[str, str]:
    return {entry.name: os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


def python(code: str, stdin: int = subprocess.DEVNULL) -> LocalProcess:
    return LocalProcess.start([sys.executable, "-u", "-c", code], stdin=stdin)


async def ended(process: LocalProcess) -> int:
    """Wait for the end of a process that ends by itself, and close our ends of its pipes."""
    status = await asyncio.wait_for(process.wait(), LIMIT)
    process.close()
    return status


async def line(process: LocalProcess) -> bytes:
    """The next line of its output, in however many pieces it comes."""
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


async def test_stdout_and_stderr_come_apart() -> None:
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


async def test_what_is_cut_between_the_bytes_of_a_character_is_put_together_unharmed() -> None:
    text = "é🙂" * 5_000
    process = python(
        "import os\ndata = memoryview(('é🙂' * 5_000).encode())\nwhile data: data = data[os.write(1, data[:4]) :]"
    )
    out, _ = await process.read()
    assert out.decode() == text
    assert await ended(process) == 0


async def test_bytes_that_are_no_text_are_no_special_case() -> None:
    process = python("import os; os.write(1, bytes(range(256))); os.write(2, b'\\xff\\x00')")
    assert await process.read() == (bytes(range(256)), b"\xff\x00")
    assert await ended(process) == 0


async def test_a_second_read_returns_at_once_with_nothing() -> None:
    process = python("print('once')")
    assert await process.read() == (b"once\n", b"")
    assert await asyncio.wait_for(process.read(), LIMIT) == (b"", b"")
    assert await ended(process) == 0
    assert [piece async for piece in process.stream()] == []


async def test_output_can_be_read_after_the_end() -> None:
    process = python("print('kept')")
    assert await asyncio.wait_for(process.wait(), LIMIT) == 0
    assert await process.read() == (b"kept\n", b"")
    process.close()


async def test_two_readers_share_and_lose_nothing() -> None:
    process = python("for i in range(2000): print(i)")
    shares = await asyncio.wait_for(asyncio.gather(process.read(), process.read()), LIMIT)
    lines = b"".join(out for out, _ in shares).split()
    assert sorted(map(int, lines)) == list(range(2000))
    assert await ended(process) == 0


async def test_a_child_that_nobody_reads_is_held_back_and_loses_nothing() -> None:
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


async def test_a_grandchild_keeps_the_output_open_after_the_end() -> None:
    process = python(
        "import subprocess; subprocess.Popen('read line; echo late', shell=True); print('early')", stdin=subprocess.PIPE
    )
    assert await asyncio.wait_for(process.wait(), LIMIT) == 0
    assert await line(process) == b"early\n"
    await process.write(b"go\n")
    assert await process.read() == (b"late\n", b"")
    process.close()


# -- input -----------------------------------------------------------------------------------------------------


async def test_without_stdin_the_child_reads_nothing() -> None:
    process = python("import sys; print(repr(sys.stdin.read()))")
    assert await process.read() == (b"''\n", b"")
    assert await ended(process) == 0


async def test_what_is_written_arrives_byte_for_byte_however_much_it_is() -> None:
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


async def test_writing_to_a_child_that_does_not_read_waits_and_ends_with_it() -> None:
    process = LocalProcess.start(["sleep", "1000"], stdin=subprocess.PIPE)
    writing = asyncio.create_task(process.write(bytes(1 << 20)))
    await asyncio.wait({writing}, timeout=0.1)
    assert not writing.done()
    await process.stop()
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(writing, LIMIT)
    process.close()


async def test_closing_ends_a_write_that_waits() -> None:
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


async def test_writing_after_the_end_or_after_closing_says_so() -> None:
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
async def test_the_exit_status_is_the_childs(status: int) -> None:
    process = python(f"raise SystemExit({status})")
    assert process.returncode is None
    assert await ended(process) == status
    assert process.returncode == status
    assert await process.wait() == status


async def test_a_signal_is_a_negative_status() -> None:
    process = LocalProcess.start(["sleep", "1000"])
    process.send_signal(signal.SIGUSR1)
    assert await ended(process) == -signal.SIGUSR1


async def test_a_cancelled_wait_does_not_disturb_another() -> None:
    process = LocalProcess.start(["cat"], stdin=subprocess.PIPE)
    waiting = asyncio.create_task(process.wait())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.01)
    process.close_stdin()
    assert await asyncio.wait_for(waiting, LIMIT) == 0
    process.close()


async def test_stop_is_polite_first() -> None:
    process = python(
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\nprint('ready')\nsignal.pause()"
    )
    await line(process)
    assert await asyncio.wait_for(process.stop(), LIMIT) == 42
    process.close()


async def test_stop_is_forceful_after_the_grace() -> None:
    process = python(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\nwhile True: signal.pause()"
    )
    await line(process)
    assert await asyncio.wait_for(process.stop(grace=0.05), LIMIT) == -signal.SIGKILL
    process.close()


async def test_stop_reaches_those_that_the_child_started() -> None:
    process = LocalProcess.start(["sh", "-c", "sleep 1000 & echo $!; wait"])
    sleeper = int(await line(process))
    assert is_running(sleeper)
    await process.stop(grace=0)
    await asyncio.wait_for(process.read(), LIMIT)  # ends only when the last of them has closed its output
    async with asyncio.timeout(LIMIT):
        while is_running(sleeper):  # which it does a moment before its end
            await asyncio.sleep(0.01)
    process.close()


async def test_stop_after_the_end_returns_the_status_again() -> None:
    process = python("raise SystemExit(3)")
    assert await process.wait() == 3
    assert await process.stop() == 3
    process.send_signal(signal.SIGTERM)
    process.close()


async def test_close_may_be_called_twice_and_gives_up_what_was_not_read() -> None:
    process = python("print('unread'); input()", stdin=subprocess.PIPE)
    await line(process)
    process.close()
    process.close()
    assert await asyncio.wait_for(process.read(), LIMIT) == (b"", b"")
    assert await process.wait() == 1  # EOFError


async def test_a_ctrl_c_in_the_terminal_is_not_for_the_child() -> None:
    process = python("import os; print(os.getsid(0) == os.getpid() == os.getpgrp())")
    assert await process.read() == (b"True\n", b"")
    assert await ended(process) == 0


async def test_a_program_that_does_not_exist_is_an_error_and_leaves_nothing() -> None:
    with pytest.raises(FileNotFoundError):
        LocalProcess.start(["/no/such/program"])


async def test_the_environment_is_the_given_one() -> None:
    process = LocalProcess.start(["/usr/bin/env"], env={"ONLY": "this"})
    assert await process.read() == (b"ONLY=this\n", b"")
    assert await ended(process) == 0


# -- run: a command from beginning to end ----------------------------------------------------------------------


async def test_run_returns_status_and_both_outputs() -> None:
    assert await LocalProcess.run(["sh", "-c", "echo out; echo err >&2; exit 5"], LIMIT) == (5, b"out\n", b"err\n")


async def test_run_has_a_time_limit_and_leaves_nothing() -> None:
    assert await LocalProcess.run(["sleep", "1000"], 0.05) == (None, b"", b"")


async def test_run_is_not_held_up_by_a_child_that_closes_its_outputs_and_stays() -> None:
    status, _, _ = await LocalProcess.run(["sh", "-c", "exec >&- 2>&-; exec sleep 1000"], 0.2)
    assert status is None


async def test_a_cancelled_run_ends_the_command() -> None:
    mark = f"1000.{os.getpid()}"
    running = asyncio.create_task(LocalProcess.run(["sleep", mark], LIMIT))
    await asyncio.wait({running}, timeout=0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(mark in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


async def test_many_at_once_are_kept_apart() -> None:
    answers = await asyncio.gather(
        *(LocalProcess.run(["sh", "-c", f"echo {number}; exit {number}"], LIMIT) for number in range(20))
    )
    assert answers == [(number, f"{number}\n".encode(), b"") for number in range(20)]


async def test_a_hundred_children_leave_no_descriptor() -> None:
    for _ in range(5):
        await asyncio.gather(*(LocalProcess.run(["true"], LIMIT) for _ in range(20)))


async def test_no_more_descriptors_is_an_error_and_not_a_leak() -> None:
    with pytest.raises(OSError) as refusal:
        LocalProcess.start(["true"], stdin=1 << 20)
    assert refusal.value.errno in (errno.EBADF, errno.EMFILE)
