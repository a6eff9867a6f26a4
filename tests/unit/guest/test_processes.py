"""Processes that PID 1 starts, signals and reaps. PID 1 runs as a child on the host."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
from pathlib import Path

import pytest
from guests import ENV, LIMIT, descriptors, finished, first_line, python, shell

from sandbox_provisioner.errors import GuestError
from sandbox_provisioner.guest.frames import MAX_PAYLOAD, WINDOW
from sandbox_provisioner.mux.connection import GuestConnection
from sandbox_provisioner.process import LocalProcess

pytestmark = pytest.mark.filterwarnings("error")


async def test_output_and_status_are_returned(connection: GuestConnection) -> None:
    process = await shell(connection, "echo out; echo err >&2; exit 7")
    assert await finished(process) == (7, b"out\n", b"err\n")


@pytest.mark.parametrize("status", [0, 1, 127, 255])
async def test_exit_status(connection: GuestConnection, status: int) -> None:
    assert (await finished(await shell(connection, f"exit {status}")))[0] == status


async def test_status_of_killed_child_is_negative(connection: GuestConnection) -> None:
    assert (await finished(await shell(connection, "kill -9 $$")))[0] == -signal.SIGKILL


async def test_stdin_is_received_and_closed(connection: GuestConnection) -> None:
    process = await connection.spawn(["cat"], ENV, "/")
    await process.write(b"one ")
    await process.write(b"two")
    process.close_stdin()
    assert await finished(process) == (0, b"one two", b"")
    with pytest.raises(BrokenPipeError):
        await process.write(b"three")


async def test_without_stdin(connection: GuestConnection) -> None:
    process = await connection.spawn(["cat"], ENV, "/", stdin=False)
    assert await finished(process) == (0, b"", b"")
    with pytest.raises(BrokenPipeError):
        await process.write(b"nowhere")


async def test_write_after_child_closed_stdin_is_discarded(connection: GuestConnection) -> None:
    process = await python(connection, "import os; os.close(0); print('closed'); os.read(os.pipe()[0], 1)")
    assert await first_line(process) == b"closed\n"
    for _ in range(2 * WINDOW // 100_000):
        await asyncio.wait_for(process.write(bytes(100_000)), LIMIT)
    assert await process.stop(grace=LIMIT) == -signal.SIGTERM


async def test_large_stdin_and_stdout(connection: GuestConnection) -> None:
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
async def test_output_larger_than_window(connection: GuestConnection, output: int, stdin: bool) -> None:
    amount = 3 * WINDOW
    code = f"import os\nleft = {amount}\nwhile left: left -= os.write({output}, bytes(left))"
    process = await python(connection, code, stdin)
    status, *outputs = await finished(process)
    assert status == 0
    assert outputs[output - 1] == bytes(amount)


async def test_process_whose_output_is_not_read_does_not_delay_others(connection: GuestConnection) -> None:
    amount = 4 * WINDOW
    stalled = await python(connection, f"import os\nleft = {amount}\nwhile left: left -= os.write(1, bytes(left))")
    assert await finished(await shell(connection, "echo brisk")) == (0, b"brisk\n", b"")
    while stalled._size < WINDOW:
        await asyncio.sleep(0.01)
    assert await finished(await shell(connection, "echo still brisk")) == (0, b"still brisk\n", b"")
    assert stalled._size == WINDOW
    assert stalled.returncode is None
    assert await finished(stalled) == (0, bytes(amount), b"")


async def test_several_processes_at_once(connection: GuestConnection) -> None:
    processes = [await shell(connection, f"read word; echo $word {number}; exit {number}") for number in range(20)]
    for process in reversed(processes):
        await process.write(b"number\n")
    answers = await asyncio.gather(*map(finished, processes))
    assert answers == [(number, f"number {number}\n".encode(), b"") for number in range(20)]


async def test_environment_and_working_folder(connection: GuestConnection, tmp_path: Path) -> None:
    process = await connection.spawn(["/bin/sh", "-c", "pwd; exec /usr/bin/env"], {"ONLY": "tëxt"}, str(tmp_path))
    _, out, _ = await finished(process)
    lines = out.decode().splitlines()
    assert lines[0] == str(tmp_path)
    assert {item for item in lines[1:] if not item.startswith(("PWD=", "OLDPWD=", "SHLVL=", "_="))} == {"ONLY=tëxt"}


async def test_program_is_found_on_path_of_its_environment(connection: GuestConnection, tmp_path: Path) -> None:
    program = tmp_path / "mine"
    program.write_text("#!/bin/sh\necho found")
    program.chmod(0o755)
    assert await finished(await connection.spawn(["mine"], {"PATH": str(tmp_path)}, "/")) == (0, b"found\n", b"")


async def test_arguments_that_are_not_utf8(connection: GuestConnection) -> None:
    strange = os.fsdecode(b"\xff\xfe")
    assert await finished(await connection.spawn(["printf", "%s", strange], ENV, "/")) == (0, b"\xff\xfe", b"")


async def test_child_inherits_only_standard_descriptors(connection: GuestConnection) -> None:
    process = await python(connection, "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])")
    assert await finished(process) == (0, b"[0, 1, 2]\n", b"")


async def test_child_inherits_no_signal_settings(connection: GuestConnection) -> None:
    process = await shell(connection, "grep -E 'Sig(Blk|Ign)' /proc/self/status", stdin=False)
    _, out, _ = await finished(process)
    ordinary = (1 << 31) - 1  # without the C library's own signals, which this test run inherits
    assert [int(item.split()[1], 16) & ordinary for item in out.splitlines()] == [0, 0]


async def test_files_are_written_before_start_for_owner_only(connection: GuestConnection, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "connection.json"
    process = await connection.spawn(["cat", str(path)], ENV, "/", files={str(path): "sëcret"})
    assert await finished(process) == (0, "sëcret".encode(), b"")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


# -- failed starts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "cwd", "number", "name"),
    [
        (["no-such-program"], "/", errno.ENOENT, "no-such-program"),
        (["/no/such/program"], "/", errno.ENOENT, "/no/such/program"),
        (["/proc/self/status"], "/", errno.EACCES, "/proc/self/status"),
        (["true"], "/no/such/folder", errno.ENOENT, "/no/such/folder"),
        (["true"], "/proc/self/status", errno.ENOTDIR, "/proc/self/status"),
    ],
    ids=["not on the path", "missing file", "not executable", "missing folder", "folder is a file"],
)
async def test_failed_start_gives_reason_and_path(
    connection: GuestConnection, argv: list[str], cwd: str, number: int, name: str
) -> None:
    with pytest.raises(GuestError) as refusal:
        await asyncio.wait_for(connection.spawn(argv, ENV, cwd), LIMIT)
    assert refusal.value.errno == number
    assert os.strerror(number) in str(refusal.value)
    assert name in str(refusal.value)


async def test_unwritable_file_is_named(connection: GuestConnection, tmp_path: Path) -> None:
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
        "file that is not UTF-8", "no argument", "empty program", "larger than a frame",
    ],
)  # fmt: skip
async def test_invalid_request_is_refused_and_pid_1_continues(
    connection: GuestConnection, argv: list[str], env: dict[str, str], cwd: str, files: dict[str, str]
) -> None:
    with pytest.raises((GuestError, ValueError)):
        await asyncio.wait_for(connection.spawn(argv, env, cwd, files=files), LIMIT)
    assert await finished(await shell(connection, "echo alive")) == (0, b"alive\n", b"")


# -- signals ---------------------------------------------------------------------------------------------------


async def test_signal_reaches_process_group(connection: GuestConnection) -> None:
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
    assert await first_line(process) == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert await finished(process) == (0, f"interrupted {-signal.SIGINT}\n".encode(), b"")


async def test_stop_sends_sigterm(connection: GuestConnection) -> None:
    process = await shell(connection, "trap 'exit 42' TERM; echo ready; while :; do sleep 0.05; done")
    assert await first_line(process) == b"ready\n"
    assert await asyncio.wait_for(process.stop(grace=LIMIT), LIMIT) == 42


async def test_stop_sends_sigkill_after_grace(connection: GuestConnection) -> None:
    process = await shell(connection, "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    assert await first_line(process) == b"ready\n"
    assert await asyncio.wait_for(process.stop(grace=0.05), LIMIT) == -signal.SIGKILL


async def test_signal_after_exit_does_nothing(connection: GuestConnection) -> None:
    process = await shell(connection, "exit 3")
    assert (await finished(process))[0] == 3
    process.send_signal(signal.SIGKILL)
    assert await process.stop() == 3
    assert await finished(await shell(connection, "echo alive")) == (0, b"alive\n", b"")


# -- ended processes -------------------------------------------------------------------------------------------


@pytest.mark.user
async def test_ended_processes_leave_no_descriptor_or_stream(connection: GuestConnection, init: LocalProcess) -> None:
    """Covers processes whose stdin was never closed."""
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
        while descriptors(init.pid) != held:  # PID 1 reports the end of a pipe before it closes it
            await asyncio.sleep(0.01)


async def test_children_are_reaped(connection: GuestConnection, init: LocalProcess) -> None:
    for _ in range(10):
        await finished(await shell(connection, "true"))
    _, out, _ = await finished(await shell(connection, f"ps -o stat= --ppid {init.pid}"))
    assert b"Z" not in out


async def test_output_of_daemon_after_exit_of_parent(connection: GuestConnection, tmp_path: Path) -> None:
    signal_to_go = tmp_path / "go"
    os.mkfifo(signal_to_go)
    process = await shell(connection, f"(read word < {signal_to_go}; echo $word) & echo early")
    assert await first_line(process) == b"early\n"
    assert await asyncio.wait_for(process.wait(), LIMIT) == 0
    await asyncio.to_thread(signal_to_go.write_text, "late\n")
    assert await finished(process) == (0, b"late\n", b"")
