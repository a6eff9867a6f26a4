"""The guest's init, run as a child on the host: it starts, feeds, signals and reaps, and never dies of a request."""

from __future__ import annotations

import ast
import asyncio
import errno
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from guests import ENV, LIMIT, Tap, descriptors, echo, real_guest, server

from sandbox_provisioner.errors import GuestError
from sandbox_provisioner.guest.frames import MAX_PAYLOAD, WINDOW
from sandbox_provisioner.guest.host_api import MAX_OPEN, MAX_REQUEST
from sandbox_provisioner.gvisor.bundle import GUEST
from sandbox_provisioner.mux.connection import GuestConnection
from sandbox_provisioner.mux.process import GuestProcess
from sandbox_provisioner.process import LocalProcess

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
async def guest() -> AsyncIterator[tuple[GuestConnection, LocalProcess]]:
    async with real_guest() as pair:
        yield pair


@pytest.fixture
def connection(guest: tuple[GuestConnection, LocalProcess]) -> GuestConnection:
    return guest[0]


@pytest.fixture
def init(guest: tuple[GuestConnection, LocalProcess]) -> LocalProcess:
    return guest[1]


async def python(connection: GuestConnection, code: str, stdin: bool = True) -> GuestProcess:
    return await asyncio.wait_for(connection.spawn([sys.executable, "-u", "-c", code], ENV, "/", stdin=stdin), LIMIT)


async def shell(connection: GuestConnection, command: str, stdin: bool = True) -> GuestProcess:
    return await asyncio.wait_for(connection.spawn(["sh", "-c", command], ENV, "/", stdin=stdin), LIMIT)


async def finished(process: GuestProcess) -> tuple[int, bytes, bytes]:
    out, err = await asyncio.wait_for(process.read(), LIMIT)
    return await asyncio.wait_for(process.wait(), LIMIT), out, err


async def line(process: GuestProcess) -> bytes:
    found = b""
    async with asyncio.timeout(LIMIT):
        async for piece in process.stream():
            found += piece.data
            if found.endswith(b"\n"):
                break
    return found


# -- what it is made of ----------------------------------------------------------------------------------------


def test_it_needs_nothing_but_the_standard_library() -> None:
    own = {path.stem for path in GUEST.glob("*.py")}
    for path in GUEST.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names) | own


# -- processes -------------------------------------------------------------------------------------------------


async def test_stdout_stderr_and_the_status_come_back(connection: GuestConnection) -> None:
    process = await shell(connection, "echo out; echo err >&2; exit 7")
    assert await finished(process) == (7, b"out\n", b"err\n")


@pytest.mark.parametrize("status", [0, 1, 127, 255])
async def test_every_exit_status_is_the_childs(connection: GuestConnection, status: int) -> None:
    assert (await finished(await shell(connection, f"exit {status}")))[0] == status


async def test_a_child_that_is_killed_has_a_negative_status(connection: GuestConnection) -> None:
    assert (await finished(await shell(connection, "kill -9 $$")))[0] == -signal.SIGKILL


async def test_stdin_arrives_and_ends(connection: GuestConnection) -> None:
    process = await connection.spawn(["cat"], ENV, "/")
    await process.write(b"one ")
    await process.write(b"two")
    process.close_stdin()
    assert await finished(process) == (0, b"one two", b"")
    with pytest.raises(BrokenPipeError):
        await process.write(b"three")


async def test_without_stdin_the_child_reads_nothing(connection: GuestConnection) -> None:
    process = await connection.spawn(["cat"], ENV, "/", stdin=False)
    assert await finished(process) == (0, b"", b"")
    with pytest.raises(BrokenPipeError):
        await process.write(b"nowhere")


async def test_a_child_that_closes_stdin_early_costs_the_writer_nothing(connection: GuestConnection) -> None:
    process = await python(connection, "import os; os.close(0); print('closed'); os.read(os.pipe()[0], 1)")
    assert await line(process) == b"closed\n"
    for _ in range(2 * WINDOW // 100_000):
        await asyncio.wait_for(process.write(bytes(100_000)), LIMIT)
    assert await process.stop(grace=LIMIT) == -signal.SIGTERM


async def test_many_megabytes_pass_both_ways_unchanged(connection: GuestConnection) -> None:
    data = os.urandom(1 << 20) * 8
    process = await connection.spawn(["cat"], ENV, "/")

    async def send() -> None:
        for position in range(0, len(data), 300_000):
            await process.write(data[position : position + 300_000])
        process.close_stdin()

    sending = asyncio.create_task(send())
    status, out, err = await finished(process)
    await sending
    assert (status, out == data, err) == (0, True, b"")


@pytest.mark.parametrize("stdin", [True, False], ids=["with stdin", "without stdin"])
@pytest.mark.parametrize("output", [1, 2], ids=["stdout", "stderr"])
async def test_more_than_a_window_comes_out_of_either_output(
    connection: GuestConnection, output: int, stdin: bool
) -> None:
    amount = 3 * WINDOW
    code = f"import os\nleft = {amount}\nwhile left: left -= os.write({output}, bytes(left))"
    process = await python(connection, code, stdin)
    status, *outputs = await finished(process)
    assert status == 0
    assert outputs[output - 1] == bytes(amount)


async def test_a_child_whose_output_nobody_reads_waits_and_delays_nobody(connection: GuestConnection) -> None:
    amount = 4 * WINDOW
    stalled = await python(connection, f"import os\nleft = {amount}\nwhile left: left -= os.write(1, bytes(left))")
    assert await finished(await shell(connection, "echo brisk")) == (0, b"brisk\n", b"")
    while stalled._size < WINDOW:
        await asyncio.sleep(0.01)
    assert await finished(await shell(connection, "echo still brisk")) == (0, b"still brisk\n", b"")
    assert stalled._size == WINDOW
    assert stalled.returncode is None
    assert await finished(stalled) == (0, bytes(amount), b"")


async def test_several_at_once_are_kept_apart(connection: GuestConnection) -> None:
    processes = [await shell(connection, f"read word; echo $word {number}; exit {number}") for number in range(20)]
    for process in reversed(processes):
        await process.write(b"number\n")
    answers = await asyncio.gather(*map(finished, processes))
    assert answers == [(number, f"number {number}\n".encode(), b"") for number in range(20)]


async def test_the_environment_and_the_folder_are_the_given_ones(connection: GuestConnection, tmp_path: Path) -> None:
    process = await connection.spawn(["/bin/sh", "-c", "pwd; exec /usr/bin/env"], {"ONLY": "tëxt"}, str(tmp_path))
    _, out, _ = await finished(process)
    lines = out.decode().splitlines()
    assert lines[0] == str(tmp_path)
    assert {item for item in lines[1:] if not item.startswith(("PWD=", "OLDPWD=", "SHLVL=", "_="))} == {"ONLY=tëxt"}


async def test_the_program_is_found_on_the_path_of_its_own_environment(
    connection: GuestConnection, tmp_path: Path
) -> None:
    program = tmp_path / "mine"
    program.write_text("#!/bin/sh\necho found")
    program.chmod(0o755)
    assert await finished(await connection.spawn(["mine"], {"PATH": str(tmp_path)}, "/")) == (0, b"found\n", b"")


async def test_bytes_that_are_no_text_pass_in_arguments(connection: GuestConnection) -> None:
    strange = os.fsdecode(b"\xff\xfe")
    assert await finished(await connection.spawn(["printf", "%s", strange], ENV, "/")) == (0, b"\xff\xfe", b"")


async def test_the_child_has_no_descriptor_but_its_own_three(connection: GuestConnection) -> None:
    process = await python(connection, "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])")
    assert await finished(process) == (0, b"[0, 1, 2]\n", b"")


async def test_the_child_ignores_and_blocks_no_signal(connection: GuestConnection) -> None:
    process = await shell(connection, "grep -E 'Sig(Blk|Ign)' /proc/self/status", stdin=False)
    _, out, _ = await finished(process)
    ordinary = (1 << 31) - 1  # above are the C library's own, which are as this test run inherited them
    assert [int(item.split()[1], 16) & ordinary for item in out.splitlines()] == [0, 0]


async def test_files_are_written_first_and_for_this_user_only(connection: GuestConnection, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "connection.json"
    process = await connection.spawn(["cat", str(path)], ENV, "/", files={str(path): "sëcret"})
    assert await finished(process) == (0, "sëcret".encode(), b"")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


# -- what cannot be started ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "cwd", "number", "name"),
    [
        (["no-such-program"], "/", errno.ENOENT, "no-such-program"),
        (["/no/such/program"], "/", errno.ENOENT, "/no/such/program"),
        (["/proc/self/status"], "/", errno.EACCES, "/proc/self/status"),
        (["true"], "/no/such/folder", errno.ENOENT, "/no/such/folder"),
        (["true"], "/proc/self/status", errno.ENOTDIR, "/proc/self/status"),
    ],
    ids=["not on the path", "not there", "not executable", "no folder", "a folder that is a file"],
)
async def test_what_cannot_be_started_says_why(
    connection: GuestConnection, argv: list[str], cwd: str, number: int, name: str
) -> None:
    with pytest.raises(GuestError) as refusal:
        await asyncio.wait_for(connection.spawn(argv, ENV, cwd), LIMIT)
    assert refusal.value.errno == number
    assert os.strerror(number) in str(refusal.value)
    assert name in str(refusal.value)


async def test_a_file_that_cannot_be_written_says_which(connection: GuestConnection, tmp_path: Path) -> None:
    with pytest.raises(GuestError, match=str(tmp_path)) as refusal:
        await asyncio.wait_for(connection.spawn(["true"], ENV, "/", files={str(tmp_path): "a folder"}), LIMIT)
    assert refusal.value.errno == errno.EISDIR


@pytest.mark.parametrize(
    ("argv", "env", "cwd", "files"),
    [
        (["echo", "a\0b"], ENV, "/", {}),
        (["true"], {"A": "b\0c"}, "/", {}),
        (["true"], {"A=B": "c"}, "/", {}),
        (["true"], ENV, "/\0", {}),
        (["true"], ENV, "/", {"/tmp/a\0b": ""}),
        (["true"], ENV, "/", {"relative": "text"}),
        (["true"], ENV, "/", {"/tmp/surrogate": "\udcff"}),
        ([], ENV, "/", {}),
        ([""], ENV, "/", {}),
        (["true", "x" * MAX_PAYLOAD], ENV, "/", {}),
    ],
    ids=[
        "nul in argument", "nul in variable", "name with =", "nul in folder", "nul in file name", "relative file",
        "file that is no text", "no argument", "empty program", "larger than a frame",
    ],
)  # fmt: skip
async def test_a_request_that_makes_no_sense_is_refused_and_pid_1_lives(
    connection: GuestConnection, argv: list[str], env: dict[str, str], cwd: str, files: dict[str, str]
) -> None:
    with pytest.raises((GuestError, ValueError)):
        await asyncio.wait_for(connection.spawn(argv, env, cwd, files=files), LIMIT)
    assert await finished(await shell(connection, "echo alive")) == (0, b"alive\n", b"")


# -- signals ---------------------------------------------------------------------------------------------------


async def test_a_signal_goes_to_the_whole_process_group(connection: GuestConnection) -> None:
    process = await python(
        connection,
        "import signal, subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "try:\n"
        "    print('ready')\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', child.wait())",
    )
    assert await line(process) == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert await finished(process) == (0, f"interrupted {-signal.SIGINT}\n".encode(), b"")


async def test_stop_is_polite_first(connection: GuestConnection) -> None:
    process = await shell(connection, "trap 'exit 42' TERM; echo ready; while :; do sleep 0.05; done")
    assert await line(process) == b"ready\n"
    assert await asyncio.wait_for(process.stop(grace=LIMIT), LIMIT) == 42


async def test_stop_is_forceful_after_the_grace(connection: GuestConnection) -> None:
    process = await shell(connection, "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    assert await line(process) == b"ready\n"
    assert await asyncio.wait_for(process.stop(grace=0.05), LIMIT) == -signal.SIGKILL


async def test_a_signal_after_the_end_harms_nobody(connection: GuestConnection) -> None:
    process = await shell(connection, "exit 3")
    assert (await finished(process))[0] == 3
    process.send_signal(signal.SIGKILL)
    assert await process.stop() == 3
    assert await finished(await shell(connection, "echo alive")) == (0, b"alive\n", b"")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD])
async def test_init_itself_is_not_ended_by_a_signal(
    connection: GuestConnection, init: LocalProcess, signum: int
) -> None:
    init.send_signal(signum)
    assert await finished(await shell(connection, "echo alive")) == (0, b"alive\n", b"")


# -- what is left ----------------------------------------------------------------------------------------------


@pytest.mark.user
async def test_processes_that_ended_leave_no_descriptor_and_no_stream(
    connection: GuestConnection, init: LocalProcess
) -> None:
    """Also those whose stdin nobody ever closed."""
    held = descriptors(init.pid)
    for number in range(30):
        process = await shell(connection, "echo out; echo err >&2", stdin=bool(number % 3))
        assert await finished(process) == (0, b"out\n", b"err\n")
        with pytest.raises(GuestError):
            await connection.spawn(["no-such-program"], ENV, "/")
    assert await finished(await shell(connection, "exit 0", stdin=False)) == (0, b"", b"")
    assert connection._streams == {}
    assert connection._processes == {}
    async with asyncio.timeout(LIMIT):
        while descriptors(init.pid) != held:  # it says that a pipe has ended, and then closes it
            await asyncio.sleep(0.01)


async def test_there_are_no_zombies(connection: GuestConnection, init: LocalProcess) -> None:
    for _ in range(10):
        await finished(await shell(connection, "true"))
    _, out, _ = await finished(await shell(connection, f"ps -o stat= --ppid {init.pid}"))
    assert b"Z" not in out


async def test_a_daemon_keeps_the_output_open_after_its_parent(connection: GuestConnection, tmp_path: Path) -> None:
    signal_to_go = tmp_path / "go"
    os.mkfifo(signal_to_go)
    process = await shell(connection, f"(read word < {signal_to_go}; echo $word) & echo early")
    assert await line(process) == b"early\n"
    assert await asyncio.wait_for(process.wait(), LIMIT) == 0
    await asyncio.to_thread(signal_to_go.write_text, "late\n")
    assert await finished(process) == (0, b"late\n", b"")


async def test_init_ends_when_the_host_goes_away(connection: GuestConnection, init: LocalProcess) -> None:
    process = await connection.spawn(["cat"], ENV, "/")
    connection.detach()
    assert await asyncio.wait_for(init.wait(), LIMIT) == 0
    assert process.returncode is None


async def test_a_stream_to_a_process_that_there_is_not_is_refused(connection: GuestConnection) -> None:
    for target in ("process:77:output", "process:77:errors", "nonsense"):
        assert await Tap(connection.open(target)).end() == b""
    assert await finished(await shell(connection, "echo alive")) == (0, b"alive\n", b"")


# -- quiesce ---------------------------------------------------------------------------------------------------


async def test_numbered_lines_come_once_and_in_order_through_many_quiet_times(connection: GuestConnection) -> None:
    total = 30_000
    process = await shell(connection, f"seq 1 {total}; seq 1 {total} >&2")
    reading = asyncio.create_task(finished(process))
    for _ in range(10):
        await asyncio.wait_for(connection.quiesce(), LIMIT)
        await asyncio.wait_for(connection.resume(), LIMIT)
    expected = b"".join(b"%d\n" % number for number in range(1, total + 1))
    assert await reading == (0, expected, expected)


async def test_an_exit_during_the_quiet_time_is_told_afterwards(connection: GuestConnection) -> None:
    process = await shell(connection, "read line; echo done; exit 5")
    await process.write(b"go\n")
    await asyncio.wait_for(connection.quiesce(), LIMIT)
    await asyncio.wait_for(connection.resume(), LIMIT)
    assert await finished(process) == (5, b"done\n", b"")


async def test_what_was_written_before_the_quiet_time_is_in_the_sandbox(
    connection: GuestConnection, tmp_path: Path
) -> None:
    async with server(tmp_path / "echo", echo) as target:
        tap = Tap(connection.open(target))
        tap.stream.write(b"in time")
        await asyncio.wait_for(connection.quiesce(), LIMIT)
        tap.stream.write(b" and after")
        await asyncio.wait_for(connection.resume(), LIMIT)
        assert await tap.size(17) == b"in time and after"
        tap.stream.reset()
        await tap.end()


# -- asks ------------------------------------------------------------------------------------------------------


class Answering:
    """A guest with a socket for asks, and what it passed on of them."""

    def __init__(self, connection: GuestConnection, init: LocalProcess, path: Path) -> None:
        self.connection, self.init, self.path = connection, init, path
        self.asked: list[tuple[int, dict[str, Any]]] = []
        connection.host_api.listen(lambda number, request: self.asked.append((number, request)))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.path)

    async def ask(self, said: bytes) -> Any:
        """Say this, and return the answer."""
        loop, answer = asyncio.get_running_loop(), b""
        with socket.socket(socket.AF_UNIX) as peer:
            peer.setblocking(False)
            async with asyncio.timeout(LIMIT):
                await loop.sock_connect(peer, str(self.path))
                with suppress(ConnectionError):  # it may be refused in the middle of its words
                    await loop.sock_sendall(peer, said)
                    peer.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    while piece := await loop.sock_recv(peer, 1000):
                        answer += piece
        return json.loads(answer)

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(LIMIT):
            while len(self.asked) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
async def answering(tmp_path: Path) -> AsyncIterator[Answering]:
    async with real_guest(tmp_path / "run" / "sandbox") as (connection, init):
        yield Answering(connection, init, tmp_path / "run" / "sandbox")


async def test_an_ask_goes_to_the_host_and_its_answer_comes_back(answering: Answering) -> None:
    request, answer = {"op": "status", "word": "\u00e9"}, {"large": "x" * 16_000}
    for number in (1, 2):
        asking = asyncio.create_task(answering.ask(json.dumps(request).encode()))
        await answering.until_asked(number)
        answering.connection.host_api.answer(number, answer)
        assert await asking == answer
    assert answering.asked == [(1, request), (2, request)]


async def test_an_answer_that_is_larger_than_a_socket_waits_for_its_reader(answering: Answering) -> None:
    reader, writer = await answering.connect()
    writer.write(b"{}")
    writer.write_eof()
    await answering.until_asked(1)
    answering.connection.host_api.answer(1, {"large": "x" * 250_000})
    assert await finished(await shell(answering.connection, "echo alive")) == (0, b"alive\n", b"")
    assert len(await asyncio.wait_for(reader.read(), LIMIT)) > 250_000
    writer.close()


NO_REQUESTS = {
    "nothing": b"",
    "half of one": b'{"op"',
    "a list": b"[]",
    "a number": b"1",
    "no text": b"\xff\xfe\xfd",
    "many levels": b"[" * MAX_REQUEST,
    "too large": b'{"op": "' + b"x" * MAX_REQUEST + b'"}',
    "too large by far": b"x" * 1_000_000,
    "too large for the host": json.dumps({"op": "\u20ac" * 1000}, ensure_ascii=False).encode(),
}


@pytest.mark.parametrize("said", NO_REQUESTS.values(), ids=NO_REQUESTS.keys())
async def test_what_is_no_request_is_refused_by_pid_1_itself(answering: Answering, said: bytes) -> None:
    assert "The request is" in (await answering.ask(said))["problem"]
    assert answering.asked == []
    assert not answering.connection.error


async def test_more_asks_than_may_be_open_are_refused_until_one_is_answered(answering: Answering) -> None:
    open_ones = [asyncio.create_task(answering.ask(b"{}")) for _ in range(MAX_OPEN)]
    await answering.until_asked(MAX_OPEN)
    assert "Too many requests at once" in (await answering.ask(b"{}"))["problem"]
    answering.connection.host_api.answer(3, {"done": 3})
    done, _ = await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [{"done": 3}]
    one_more = asyncio.create_task(answering.ask(b"{}"))
    await answering.until_asked(MAX_OPEN + 1)
    for number, _ in answering.asked:
        answering.connection.host_api.answer(number, {})
    assert await one_more == {}
    assert not answering.connection.error


async def test_one_that_does_not_wait_for_its_answer_leaves_nothing(answering: Answering) -> None:
    async with real_guest() as (_, other):
        unused = descriptors(other.pid)
    for number in range(1, MAX_OPEN + 2):
        _, writer = await answering.connect()
        writer.write(b"{}")
        writer.write_eof()
        await answering.until_asked(number)
        writer.close()
        answering.connection.host_api.answer(number, {"large": "x" * 250_000})
        async with asyncio.timeout(LIMIT):
            while descriptors(answering.init.pid) > unused + 1:  # the socket that it listens on
                await asyncio.sleep(0.01)
    assert not answering.connection.error


async def test_while_quiet_nothing_is_asked_and_what_was_is_still_answered(answering: Answering) -> None:
    before = asyncio.create_task(answering.ask(b'{"op": "before"}'))
    await answering.until_asked(1)
    await asyncio.wait_for(answering.connection.quiesce(), LIMIT)
    during = asyncio.create_task(answering.ask(b'{"op": "during"}'))
    await asyncio.sleep(0.2)
    assert len(answering.asked) == 1
    answering.connection.host_api.answer(1, {"to": "before"})
    await asyncio.wait_for(answering.connection.resume(), LIMIT)
    assert await before == {"to": "before"}
    await answering.until_asked(2)
    answering.connection.host_api.answer(2, {"to": "during"})
    assert await during == {"to": "during"}


# -- confinement -----------------------------------------------------------------------------------------------


async def test_no_child_can_make_a_user_namespace_and_everything_else_still_works(connection: GuestConnection) -> None:
    status, _, err = await finished(await shell(connection, "unshare --user true"))
    assert status != 0
    assert b"Operation not permitted" in err
    threads = (
        "import subprocess, threading; threading.Thread(target=print, args=['thread']).start(); subprocess.run('true')"
    )
    assert await finished(await python(connection, threads)) == (0, b"thread\n", b"")
