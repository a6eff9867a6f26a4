"""PID 1 as a whole: its imports, its exit, the quiesced state and its confinement. It runs as a child on the host."""

from __future__ import annotations

import ast
import asyncio
import signal
import sys
from pathlib import Path

import pytest
from guests import ENV, LIMIT, Tap, echo, finished, python, server, shell

from sandbox_provisioner.gvisor.bundle import GUEST
from sandbox_provisioner.mux.connection import GuestConnection
from sandbox_provisioner.process import LocalProcess

pytestmark = pytest.mark.filterwarnings("error")


def test_guest_imports_only_standard_library() -> None:
    own = {path.stem for path in GUEST.glob("*.py")}
    for path in GUEST.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names) | own


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD])
async def test_signals_do_not_end_pid_1(connection: GuestConnection, init: LocalProcess, signum: int) -> None:
    init.send_signal(signum)
    assert await finished(await shell(connection, "echo alive")) == (0, b"alive\n", b"")


async def test_pid_1_exits_when_host_closes_pipe(connection: GuestConnection, init: LocalProcess) -> None:
    process = await connection.spawn(["cat"], ENV, "/")
    connection.detach()
    assert await asyncio.wait_for(init.wait(), LIMIT) == 0
    assert process.returncode is None


async def test_stream_to_unknown_process_is_reset(connection: GuestConnection) -> None:
    for target in ("process:77:output", "process:77:errors", "nonsense"):
        assert await Tap(connection.open(target)).end() == b""
    assert await finished(await shell(connection, "echo alive")) == (0, b"alive\n", b"")


# -- quiesced --------------------------------------------------------------------------------------------------


async def test_output_is_complete_and_ordered_after_many_quiesces(connection: GuestConnection) -> None:
    total = 30_000
    process = await shell(connection, f"seq 1 {total}; seq 1 {total} >&2")
    reading = asyncio.create_task(finished(process))
    for _ in range(10):
        await asyncio.wait_for(connection.quiesce(), LIMIT)
        await asyncio.wait_for(connection.resume(), LIMIT)
    expected = b"".join(b"%d\n" % number for number in range(1, total + 1))
    assert await reading == (0, expected, expected)


async def test_exit_while_quiesced_is_reported_after_resume(connection: GuestConnection) -> None:
    process = await shell(connection, "read line; echo done; exit 5")
    await process.write(b"go\n")
    await asyncio.wait_for(connection.quiesce(), LIMIT)
    await asyncio.wait_for(connection.resume(), LIMIT)
    assert await finished(process) == (5, b"done\n", b"")


async def test_bytes_around_quiesce_arrive_in_order(connection: GuestConnection, tmp_path: Path) -> None:
    async with server(tmp_path / "echo", echo) as target:
        tap = Tap(connection.open(target))
        tap.stream.write(b"in time")
        await asyncio.wait_for(connection.quiesce(), LIMIT)
        tap.stream.write(b" and after")
        await asyncio.wait_for(connection.resume(), LIMIT)
        assert await tap.size(17) == b"in time and after"
        tap.stream.reset()
        await tap.end()


# -- confinement -----------------------------------------------------------------------------------------------


async def test_user_namespace_is_refused_but_threads_and_subprocesses_work(connection: GuestConnection) -> None:
    status, _, err = await finished(await shell(connection, "unshare --user true"))
    assert status != 0
    assert b"Operation not permitted" in err
    threads = (
        "import subprocess, threading; threading.Thread(target=print, args=['thread']).start(); subprocess.run('true')"
    )
    assert await finished(await python(connection, threads)) == (0, b"thread\n", b"")
