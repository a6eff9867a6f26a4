"""Test that a kernel that refuses to be saved is saved anyway, or ended, when the server stops."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from kernels import run
from servers import Server, answers

from sandbox_provisioner.errors import UnresponsiveError
from sandbox_provisioner.gvisor import pause
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc, find
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox
from sandbox_provisioner.gvisor.state import State

LONG = 60
DEADLINE = "--SandboxKernelManager.hibernate_deadline=30"
MANAGER = "--ServerApp.kernel_manager_class=sandbox_provisioner.server.kernel_manager.SandboxKernelManager"

STALLED_SAVEPOINTS = """
import subprocess, sys
open('/tmp/stall.py', 'w').write('''
import os, signal, socket, threading, time
def ask():
    number = 0
    while True:
        number += 1
        try:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect("/run/jupyter/sandbox")
                peer.sendall(b'{"op": "savepoint", "name": "s%d"}' % number)
                peer.shutdown(socket.SHUT_WR)
                peer.recv(9999)
        except OSError:
            time.sleep(0.1)
for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
while True:
    time.sleep(0.005)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in (1, os.getpid()):
            try:
                if "open_files" in open(f"/proc/{entry}/cmdline").read():
                    os.kill(int(entry), signal.SIGSTOP)
            except OSError:
                pass
''')
subprocess.Popen([sys.executable, "/tmp/stall.py"], start_new_session=True)
import time; time.sleep(3)
"""

MEDDLE = """
import subprocess, sys
open('/tmp/meddle.py', 'w').write('''
import os, signal, time
held = []
def find():
    while True:
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) not in (1, os.getpid()):
                try:
                    if "open_files" in open(f"/proc/{entry}/cmdline").read():
                        yield int(entry)
                except OSError:
                    pass
        time.sleep(0.02)
for tool in find():
    try:
        ACTION
    except OSError:
        pass
''')
subprocess.Popen([sys.executable, "/tmp/meddle.py"], start_new_session=True)
import time; time.sleep(3)
"""
"""Start a program that does something to the tool which lists the files in use. The tool itself is read-only."""
FORGE = (
    "pipe = os.open(f'/proc/{tool}/fd/1', os.O_WRONLY); os.write(pipe, b'nonsense' * 100); os.close(pipe); "
    "os.kill(tool, signal.SIGKILL)"
)
HOLD = (
    "os.kill(tool, signal.SIGSTOP); "
    "held += [os.open(f'/proc/{tool}/fd/{number}', os.O_WRONLY) for number in (1, 2) if len(held) < 100]"
)
SLOW_HOOK = """
def sandbox_after_restore():
    time.sleep(25)
"""

REFUSALS = {
    "pipe that is held and slow hook": MEDDLE.replace("ACTION", HOLD) + SLOW_HOOK,
    "savepoints that never end": STALLED_SAVEPOINTS,
    "no list of files": MEDDLE.replace("ACTION", "os.kill(tool, signal.SIGSTOP)"),
    "forged list of files": MEDDLE.replace("ACTION", FORGE),
}

Sandboxed = Callable[..., str]
Serve = Callable[..., Server]


def sandboxes(runtime: Path) -> list[int]:
    """Return the sandbox processes that use this runtime folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(f"--root={runtime}/" in part for part in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def failing_runsc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a runsc whose checkpoints fail with the text of a file while that file exists. Return the file."""
    words, script = tmp_path / "words", tmp_path / "runsc"
    real = find().path
    script.write_text(
        "#!/bin/sh\n"
        f'for word; do [ "$word" = checkpoint ] && [ -e {words} ] && {{ cat {words} >&2; exit 128; }}; done\n'
        f'exec {real} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("SANDBOX_RUNSC", str(script))
    return words


def open_refusing(server: Server, kernel: str, refusal: str) -> None:
    """Open a notebook, set a variable in its kernel, and make the kernel refuse to be saved."""
    status, session = server.open_notebook(kernel)
    assert status == 201, session
    client = server.client(session["kernel"]["id"])
    assert answers(client)
    run(client, "x = 42")
    run(client, refusal)
    client.stop_channels()


def reopened(server: Server, kernel: str) -> str:
    """Open the notebook again, and return the value of the variable in its kernel."""
    status, session = server.open_notebook(kernel)
    assert status == 201, session
    client: BlockingKernelClient = server.client(session["kernel"]["id"])
    try:
        assert answers(client)
        return run(client, "print(globals().get('x'))").strip()
    finally:
        client.stop_channels()


@pytest.mark.parametrize("refusal", REFUSALS)
def test_kernel_that_refuses_is_saved_when_the_server_stops(
    refusal: str, serve: Serve, sandboxed: Sandboxed, runtime: Path
) -> None:
    kernel = sandboxed()
    server = serve(MANAGER, DEADLINE)
    open_refusing(server, kernel, REFUSALS[refusal])
    server.stop()
    assert sandboxes(runtime) == []
    assert "did not prepare for its save" in server.log.read_text()
    assert reopened(serve(MANAGER, DEADLINE), kernel) == "42"


def test_kernel_that_refuses_and_cannot_be_saved_is_ended(
    serve: Serve, sandboxed: Sandboxed, runtime: Path, failing_runsc: Path
) -> None:
    kernel = sandboxed()
    server = serve(MANAGER, DEADLINE)
    open_refusing(server, kernel, REFUSALS["forged list of files"])
    failing_runsc.write_text("checkpoint failed: the sandbox is in a state that cannot be saved")
    server.stop()
    assert sandboxes(runtime) == []
    said = server.log.read_text()
    assert "is ended without being saved" in said
    assert "in a state that cannot be saved" in said


def test_kernel_that_refuses_to_be_saved_survives_full_disk(
    serve: Serve, sandboxed: Sandboxed, runtime: Path, failing_runsc: Path
) -> None:
    kernel = sandboxed()
    server = serve(MANAGER, DEADLINE)
    open_refusing(server, kernel, REFUSALS["forged list of files"])
    failing_runsc.write_text("checkpoint failed: write pages.img: no space left on device")
    server.stop()
    assert sandboxes(runtime) != []
    assert "keeps running" in server.log.read_text()
    failing_runsc.unlink()
    assert reopened(serve(MANAGER, DEADLINE), kernel) == "42"


MANY_MAPPED_FILES = """
import mmap
maps = []
for number in range(40):
    with open(f'sparse{number}', 'w+b') as file:
        file.truncate((1 << 30) - 1)
        maps.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE))
"""


def test_many_large_mapped_files_do_not_hold_up_a_stop(serve: Serve, sandboxed: Sandboxed, runtime: Path) -> None:
    kernel = sandboxed()
    server = serve(MANAGER, DEADLINE)
    open_refusing(server, kernel, MANY_MAPPED_FILES)
    server.stop()
    assert sandboxes(runtime) == []
    assert "did not prepare for its save" not in server.log.read_text()
    assert reopened(serve(MANAGER, DEADLINE), kernel) == "42"


async def stop_init(sandbox: GVisorSandbox) -> None:
    """Stop PID 1 from a process in the sandbox, and wait until PID 1 no longer answers."""
    code = "import os, signal; os.kill(1, signal.SIGSTOP)"
    with pytest.raises(TimeoutError):
        for _ in range(LONG):
            await asyncio.wait_for(sandbox.execute([sandbox.spec.python, "-I", "-c", code]), 2)


@pytest.mark.usefixtures("unprotected_init")
async def test_sandbox_with_a_stopped_pid_1_is_saved(
    spec: BundleSpec, runsc: Runsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause, "QUIESCE_TIMEOUT", 1.0)
    sandbox = GVisorSandbox("stopped", replace(spec, outlives=True), runsc)
    await sandbox.start()
    try:
        await stop_init(sandbox)
        await sandbox.checkpoint(tmp_path / "image", force=True)
        assert sandbox.state == State.CHECKPOINTED
        assert os.listdir(tmp_path / "image")
        with pytest.raises(Exception, match="saved while it did not respond"):
            await sandbox.restore(tmp_path / "image")
    finally:
        await sandbox.delete()


@pytest.mark.usefixtures("unprotected_init")
async def test_stopped_init_is_an_error_for_a_savepoint(
    spec: BundleSpec, runsc: Runsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause, "QUIESCE_TIMEOUT", 1.0)
    monkeypatch.setattr(pause, "RESUME_TIMEOUT", 1.0)
    sandbox = GVisorSandbox("stopped", replace(spec, outlives=True), runsc)
    await sandbox.start()
    try:
        await stop_init(sandbox)
        with pytest.raises(UnresponsiveError, match="did not stop its traffic"):
            await sandbox.copy(tmp_path / "image")
        assert not (tmp_path / "image").exists()
    finally:
        await sandbox.delete()


@pytest.mark.usefixtures("unprotected_init")
async def test_slow_init_gets_time_to_resume(
    spec: BundleSpec,
    runsc: Runsc,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pause, "QUIESCE_TIMEOUT", 0.2)
    sandbox = GVisorSandbox("slow", spec, runsc)
    await sandbox.start()
    code = "import os, signal, time; os.kill(1, signal.SIGSTOP); time.sleep(4); os.kill(1, signal.SIGCONT)"
    try:
        await sandbox.execute([sandbox.spec.python, "-I", "-c", code])
        for number in range(LONG):  # the signal stops PID 1 before or during one of these checkpoints
            with suppress(UnresponsiveError):
                await asyncio.wait_for(sandbox.copy(tmp_path / str(number)), LONG)
            if "so its state could not be saved yet" in caplog.text:
                break
        assert "so its state could not be saved yet" in caplog.text
        assert sandbox.state == State.RUNNING
        hello = await sandbox.execute([sandbox.spec.python, "-I", "-c", "print('hello')"])
        assert (await asyncio.wait_for(hello.read(), LONG))[0] == b"hello\n"
    finally:
        await sandbox.delete()


@pytest.mark.usefixtures("unprotected_init")
async def test_server_stop_saves_a_stopped_init_during_a_savepoint(
    spec: BundleSpec,
    runsc: Runsc,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pause, "QUIESCE_TIMEOUT", 1.0)
    sandbox = GVisorSandbox("stopped", replace(spec, outlives=True), runsc)
    await sandbox.start()
    try:
        await stop_init(sandbox)
        copying = asyncio.create_task(sandbox.copy(tmp_path / "copy"))
        async with asyncio.timeout(LONG):
            while "so its state could not be saved yet" not in caplog.text:
                await asyncio.sleep(0.05)
        sandbox.hurry()
        with pytest.raises(UnresponsiveError, match="did not stop its traffic"):
            await asyncio.wait_for(copying, LONG)
        await sandbox.checkpoint(tmp_path / "image", force=True)
        assert sandbox.state == State.CHECKPOINTED
        assert os.listdir(tmp_path / "image")
    finally:
        await sandbox.delete()
