"""Test GVisorSandbox with the real runsc: start, execute, checkpoint, restore and delete, and failures of each.

If a failure cannot be caused otherwise, a script replaces runsc: one command fails, and all others call the real runsc.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from guests import LIMIT, Tap
from leftovers import leftovers

from sandbox_provisioner.errors import GuestError, LinkClosedError, ProtocolError, RunscError, SandboxError, StateError
from sandbox_provisioner.guest.frames import CONTROL, VERSION, encode
from sandbox_provisioner.gvisor import container, pause
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.runtime_dir import kill_processes
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox
from sandbox_provisioner.gvisor.state import State
from sandbox_provisioner.mux.process import GuestProcess

pytestmark = [pytest.mark.runsc, pytest.mark.filterwarnings("error"), pytest.mark.debian, pytest.mark.user]
LONG = 60
"""Timeout in seconds for a sandbox on a busy machine."""

Make = Callable[..., GVisorSandbox]


@pytest.fixture
async def make(spec: BundleSpec, runsc: Runsc) -> AsyncIterator[Make]:
    """Create sandboxes, and delete them after the test. Fails if a descriptor is left."""
    before = psutil.Process().num_fds()
    made: list[GVisorSandbox] = []

    def make(runsc: Runsc = runsc, spec: BundleSpec = spec) -> GVisorSandbox:
        made.append(GVisorSandbox(f"box-{len(made)}", spec, runsc))
        return made[-1]

    yield make
    for sandbox in made:
        await asyncio.wait_for(sandbox.delete(), LONG)
    assert psutil.Process().num_fds() <= before


@pytest.fixture
async def sandbox(make: Make) -> GVisorSandbox:
    """A running sandbox."""
    sandbox = make()
    await asyncio.wait_for(sandbox.start(), LONG)
    return sandbox


class StandIn:
    """The real runsc, except that its command ``word`` runs ``instead`` while ``failing`` is True."""

    def __init__(self, folder: Path, real: Runsc, word: str, instead: str) -> None:
        self._flag = folder / "failing"
        path = folder / "runsc"
        path.write_text(
            f'#!/bin/sh\nfor word in "$@"; do\n'
            f'if [ "$word" = {word} ] && [ -e "{self._flag}" ]; then\n{instead}\nfi\n'
            f'done\nexec "{real.path}" "$@"\n'
        )
        path.chmod(0o755)
        self.runsc = Runsc(path, real.version)
        self.failing = True

    @property
    def failing(self) -> bool:
        return self._flag.exists()

    @failing.setter
    def failing(self, value: bool) -> None:
        if value:
            self._flag.touch()
        else:
            self._flag.unlink()


StandInMaker = Callable[..., StandIn]


@pytest.fixture
def stand_in(tmp_path: Path, runsc: Runsc) -> StandInMaker:
    def stand_in(word: str, instead: str = "echo 'the disk is made of cheese' >&2; exit 7") -> StandIn:
        return StandIn(tmp_path, runsc, word, instead)

    return stand_in


async def finished(process: GuestProcess) -> tuple[int, bytes, bytes]:
    out, err = await asyncio.wait_for(process.read(), LONG)
    return await asyncio.wait_for(process.wait(), LONG), out, err


async def line(process: GuestProcess) -> bytes:
    found = b""
    async with asyncio.timeout(LONG):
        async for piece in process.stream():
            found += piece.data
            if found.endswith(b"\n"):
                break
    return found


async def python(sandbox: GVisorSandbox, code: str) -> GuestProcess:
    return await sandbox.execute([sandbox.spec.python, "-u", "-c", textwrap.dedent(code)])


async def assert_usable(sandbox: GVisorSandbox) -> None:
    assert sandbox.state == State.RUNNING
    assert await finished(await sandbox.execute(["sh", "-c", "echo usable"])) == (0, b"usable\n", b"")


# -- starting --------------------------------------------------------------------------------------------------


async def test_start_and_delete(make: Make, runtime: Path) -> None:
    sandbox = make()
    assert (sandbox.state, sandbox.container_id) == (State.INITIALIZED, "")
    await sandbox.start()
    assert sandbox.container_id
    await assert_usable(sandbox)
    assert leftovers(runtime)
    await sandbox.delete()
    assert sandbox.state == State.STOPPED
    assert leftovers(runtime) == []


async def test_illegal_actions_are_refused_without_effect(make: Make, tmp_path: Path) -> None:
    image = tmp_path / "image"
    sandbox = make()
    for refused in (sandbox.execute(["true"]), sandbox.checkpoint(image)):
        with pytest.raises(StateError, match=r"box-0: it is initialized"):
            await refused
    await sandbox.start()
    container = sandbox.container_id
    for again in (sandbox.start(), sandbox.restore(image)):
        with pytest.raises(StateError, match=r"box-0: it is running"):
            await again
    assert sandbox.container_id == container
    await assert_usable(sandbox)
    await sandbox.delete()
    for late in (sandbox.start(), sandbox.restore(image), sandbox.checkpoint(image), sandbox.execute(["true"])):
        with pytest.raises(StateError, match=r"box-0: it is stopped"):
            await late


FAILURES = {
    "it says why": ("echo 'the disk is made of cheese' >&2; exit 7", "cheese", 7),
    "it says why long after it closed its output": (
        "exec >&- <&-; sleep 0.3; echo 'the disk is made of cheese' >&2; exit 7",
        "cheese",
        7,
    ),
    "it says a lot": ("seq 1 200000 >&2; echo 'the disk is made of cheese' >&2; exit 7", "cheese", 7),
    "it says nothing": ("exit 9", "no reason", 9),
    "it is killed": ("kill -9 $$", "no reason", -9),
    "it leaves a child that keeps its outputs": (
        "echo 'the disk is made of cheese' >&2; sleep 2 & exit 7",
        "cheese",
        7,
    ),
}


@pytest.mark.parametrize(("instead", "words", "status"), FAILURES.values(), ids=FAILURES.keys())
async def test_failed_start_reports_the_reason_and_leaves_nothing(
    make: Make, stand_in: StandInMaker, runtime: Path, instead: str, words: str, status: int
) -> None:
    sandbox = make(stand_in("run", instead).runsc)
    with pytest.raises(RunscError, match=words) as failure:
        await asyncio.wait_for(sandbox.start(), LIMIT)
    assert failure.value.returncode == status
    assert len(str(failure.value)) < 5000
    assert sandbox.state == State.FAILED
    assert leftovers(runtime) == []


async def test_start_with_a_missing_runsc_fails(make: Make, runtime: Path) -> None:
    sandbox = make(Runsc(Path("/no/such/runsc"), "release-20260101.0"))
    with pytest.raises(SandboxError, match="/no/such/runsc"):
        await asyncio.wait_for(sandbox.start(), LIMIT)
    assert sandbox.state == State.FAILED
    assert leftovers(runtime) == []


async def test_start_with_a_missing_mount_source_names_it(
    make: Make, spec: BundleSpec, tmp_path: Path, runtime: Path
) -> None:
    missing = str(tmp_path / "gone")
    sandbox = make(spec=replace(spec, mounts=(*spec.mounts, Mount(missing, "/data"))))
    with pytest.raises(SandboxError, match=missing):
        await asyncio.wait_for(sandbox.start(), LIMIT)
    assert sandbox.state == State.FAILED
    assert leftovers(runtime) == []


async def test_start_with_a_missing_python_names_it(make: Make, spec: BundleSpec, runtime: Path) -> None:
    sandbox = make(spec=replace(spec, python="/opt/no/such/python"))
    with pytest.raises(RunscError, match="/opt/no/such/python"):
        await asyncio.wait_for(sandbox.start(), LIMIT)
    assert leftovers(runtime) == []


async def test_start_times_out(
    make: Make, stand_in: StandInMaker, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "START_TIMEOUT", 0.3)
    mark = f"1000.{os.getpid()}"
    sandbox = make(stand_in("run", f"echo 'still thinking' >&2; sleep {mark}").runsc)
    with pytest.raises(RunscError, match=r"did not answer in time: still thinking"):
        await asyncio.wait_for(sandbox.start(), LIMIT)
    assert leftovers(runtime) == []
    assert not any(mark in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


async def test_cancelled_start_leaves_nothing(make: Make, runtime: Path) -> None:
    sandbox = make()
    starting = asyncio.create_task(sandbox.start())
    while not any(word.startswith("process") for word in leftovers(runtime)):
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, LIMIT)
    assert sandbox.state == State.FAILED
    assert leftovers(runtime) == []


@pytest.mark.parametrize("hanging", [False, True], ids=["one that would succeed", "one that hangs"])
async def test_delete_during_a_start(
    make: Make, stand_in: StandInMaker, tmp_path: Path, runtime: Path, hanging: bool
) -> None:
    os.mkfifo(tmp_path / "never")
    sandbox = make(stand_in("run", f"read word < {tmp_path}/never" if hanging else ":").runsc)
    starting = asyncio.create_task(sandbox.start())
    while not any(word.startswith("process") for word in leftovers(runtime)):
        await asyncio.sleep(0.01)
    deleting = asyncio.create_task(sandbox.delete())
    done, _ = await asyncio.wait({deleting}, timeout=LIMIT)
    if not done:
        starting.cancel()
        pytest.fail("delete waits for a start that hangs")
    assert sandbox.state == State.STOPPED
    assert leftovers(runtime) == []
    await asyncio.wait({starting}, timeout=LIMIT)
    assert starting.done()
    assert starting.exception() is None or isinstance(starting.exception(), SandboxError)


async def test_paths_with_spaces_and_accents(
    make: Make, spec: BundleSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder = tmp_path / "run å b", tmp_path / "nötebook s"
    place.mkdir(mode=0o700)
    folder.mkdir()
    monkeypatch.setenv("SANDBOX_RUNTIME_DIR", str(place))
    sandbox = make(spec=replace(spec, mounts=(*spec.mounts, Mount(str(folder), str(folder), True))))
    await sandbox.start()
    assert await finished(await sandbox.execute(["touch", "ünicode"], cwd=str(folder))) == (0, b"", b"")
    assert (folder / "ünicode").exists()
    image = folder / "ïmage"
    await sandbox.checkpoint(image)
    await sandbox.restore(image)
    await assert_usable(sandbox)
    await sandbox.delete()
    assert leftovers(place / "jupyter-sandbox") == []


async def test_several_sandboxes_at_once(make: Make) -> None:
    sandboxes = [make() for _ in range(4)]
    await asyncio.wait_for(asyncio.gather(*(sandbox.start() for sandbox in sandboxes)), LONG)
    assert len({sandbox.container_id for sandbox in sandboxes}) == 4
    await sandboxes[0].delete()
    for sandbox in sandboxes[1:]:
        await assert_usable(sandbox)


# -- executing -------------------------------------------------------------------------------------------------


async def test_commands_have_stdin_stdout_stderr_and_status(sandbox: GVisorSandbox) -> None:
    commands = [await sandbox.execute(["sh", "-c", f"read x; echo $x; echo e{n} >&2; exit {n}"]) for n in range(8)]
    for number, command in enumerate(commands):
        await command.write(b"word %d\n" % number)
    answers = await asyncio.gather(*map(finished, commands))
    assert answers == [(n, b"word %d\n" % n, b"e%d\n" % n) for n in range(8)]


async def test_large_input_and_output_pass_unchanged(sandbox: GVisorSandbox) -> None:
    data = os.urandom(1 << 20) * 5
    cat = await sandbox.execute(["cat"])

    async def send() -> None:
        for position in range(0, len(data), 200_000):
            await cat.write(data[position : position + 200_000])
        cat.close_stdin()

    sending = asyncio.create_task(send())
    status, out, _ = await finished(cat)
    await sending
    assert (status, out == data) == (0, True)
    quiet = await sandbox.execute(["head", "-c", "3000000", "/dev/zero"], stdin=False)
    assert await finished(quiet) == (0, bytes(3_000_000), b"")


async def test_commands_can_be_signalled_and_stopped(sandbox: GVisorSandbox) -> None:
    sleeper = await sandbox.execute(["sleep", "1000"])
    sleeper.send_signal(signal.SIGUSR1)
    assert (await finished(sleeper))[0] == -signal.SIGUSR1
    polite = await sandbox.execute(["sh", "-c", "trap 'exit 42' TERM; echo ready; while :; do sleep 0.05; done"])
    await line(polite)
    assert await asyncio.wait_for(polite.stop(grace=LIMIT), LIMIT) == 42
    stubborn = await sandbox.execute(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"])
    await line(stubborn)
    assert await asyncio.wait_for(stubborn.stop(grace=0.1), LIMIT) == -signal.SIGKILL
    await assert_usable(sandbox)


async def test_command_that_cannot_be_executed_reports_the_reason(sandbox: GVisorSandbox) -> None:
    with pytest.raises(GuestError, match=r"No such file or directory: no-such-program"):
        await sandbox.execute(["no-such-program"])
    with pytest.raises(GuestError, match=r"No such file or directory: /no/such/folder"):
        await sandbox.execute(["true"], cwd="/no/such/folder")
    await assert_usable(sandbox)


async def test_command_gets_its_environment_folder_and_files(sandbox: GVisorSandbox) -> None:
    process = await sandbox.execute(
        ["sh", "-c", "pwd; echo $PATH; echo $EXTRA; cat /run/new/file; stat -c %a /run/new/file"],
        env={"EXTRA": "tëxt"},
        files={"/run/new/file": "cöntent\n"},
    )
    _, out, err = await finished(process)
    environment = sandbox.spec.environment
    assert out.decode().splitlines() == [sandbox.spec.home, environment["PATH"], "tëxt", "cöntent", "600"]
    assert err == b""
    elsewhere = await sandbox.execute(["pwd"], cwd="/tmp")
    assert (await finished(elsewhere))[1] == b"/tmp\n"


async def test_pid_1_reaps_orphaned_processes(sandbox: GVisorSandbox) -> None:
    orphaned = await sandbox.execute(["sh", "-c", "(setsid sleep 0.05 &) ; (setsid sleep 0.05 &)"])
    assert (await finished(orphaned))[0] == 0
    status = await python(
        sandbox,
        """
        import os, time
        def stats():
            for entry in filter(str.isdecimal, os.listdir("/proc")):
                try: yield open(f"/proc/{entry}/stat").read()
                except OSError: pass
        while any(") Z " in stat or "sleep" in stat for stat in stats()): time.sleep(0.02)
        print(sorted(stat.split()[0] for stat in stats())[0])
        """,
    )
    assert await finished(status) == (0, b"1\n", b"")


# -- checkpoint and restore ------------------------------------------------------------------------------------

COUNTER = """
    import sys
    total = 0
    for line in sys.stdin:
        total += int(line)
        print(total, flush=True)
    """


async def add(counter: GuestProcess, number: int) -> int:
    await asyncio.wait_for(counter.write(b"%d\n" % number), LIMIT)
    return int(await line(counter))


async def test_restore_in_the_same_object_continues_the_processes(
    sandbox: GVisorSandbox, tmp_path: Path, runtime: Path
) -> None:
    counter = await python(sandbox, COUNTER)
    assert await add(counter, 5) == 5
    containers = [sandbox.container_id]
    for cycle in range(2):
        image = tmp_path / f"image{cycle}"
        await asyncio.wait_for(sandbox.checkpoint(image), LONG)
        assert sandbox.state == State.CHECKPOINTED
        assert leftovers(runtime) == []
        assert counter.returncode is None
        with pytest.raises(StateError, match="checkpointed"):
            await sandbox.execute(["true"])
        await asyncio.wait_for(sandbox.restore(image), LONG)
        assert await add(counter, 10) == 15 + 10 * cycle
        containers.append(sandbox.container_id)
        await assert_usable(sandbox)
    assert len(set(containers)) == 3
    counter.close_stdin()
    assert (await finished(counter))[0] == 0


async def test_image_is_private_to_its_user(sandbox: GVisorSandbox, tmp_path: Path) -> None:
    image = tmp_path / "deep" / "image"
    before = os.umask(0)
    try:
        await sandbox.checkpoint(image)
    finally:
        os.umask(before)
    assert stat.S_IMODE(image.stat().st_mode) == 0o700
    assert "checkpoint.img" in {path.name for path in image.iterdir()}
    assert list(image.parent.iterdir()) == [image]


async def test_checkpoints_neither_lose_nor_repeat_output(sandbox: GVisorSandbox, tmp_path: Path) -> None:
    """Each line that is written to ``cat`` during several checkpoints comes back exactly once."""
    total = 4000
    printer = await python(
        sandbox,
        f"""
        import sys, time
        for number in range({total}):
            print(number)
            print(number, file=sys.stderr)
            if number % 100 == 0: time.sleep(0.01)
        """,
    )
    cat = await sandbox.execute(["cat"])
    reading = asyncio.gather(finished(printer), finished(cat))

    async def feed() -> None:
        for number in range(total):
            await cat.write(b"%d\n" % number)
            if number % 100 == 0:
                await asyncio.sleep(0.01)
        cat.close_stdin()

    feeding = asyncio.create_task(feed())
    for cycle in range(3):
        await asyncio.sleep(0.05)
        await asyncio.wait_for(sandbox.checkpoint(tmp_path / f"image{cycle}"), LONG)
        await asyncio.wait_for(sandbox.restore(tmp_path / f"image{cycle}"), LONG)
    expected = b"".join(b"%d\n" % number for number in range(total))
    (status, out, err), fed = await asyncio.wait_for(reading, LONG)
    await feeding
    assert (status, out, err) == (0, expected, expected)
    assert fed == (0, expected, b"")


async def test_connections_continue_after_a_checkpoint(sandbox: GVisorSandbox, tmp_path: Path) -> None:
    await python(
        sandbox,
        """
        import socketserver
        class Echo(socketserver.StreamRequestHandler):
            def handle(self):
                for line in self.rfile: self.wfile.write(line)
        socketserver.ThreadingUnixStreamServer("/run/echo", Echo).serve_forever()
        """,
    )
    tap = Tap(sandbox.connection.open("unix:/run/echo"))
    tap.stream.write(b"before ")
    await sandbox.checkpoint(tmp_path / "image")
    tap.stream.write(b"while it sleeps ")
    early = Tap(sandbox.connection.open("unix:/run/echo"))
    early.stream.write(b"a newcomer\n")
    await sandbox.restore(tmp_path / "image")
    tap.stream.write(b"after\n")
    assert await tap.size(29) == b"before while it sleeps after\n"
    assert await early.size(11) == b"a newcomer\n"


async def test_restore_in_another_object_adopts_the_processes(make: Make, tmp_path: Path) -> None:
    image = tmp_path / "image"
    first = make()
    await first.start()
    counter = await python(first, COUNTER)
    assert await add(counter, 7) == 7
    await first.checkpoint(image)
    await first.delete()
    assert counter.returncode is not None

    heirs = [make(), make()]
    for bonus, heir in enumerate(heirs):
        await asyncio.wait_for(heir.restore(image), LONG)
        adopted = heir.connection.process(counter.number)
        assert adopted is not None
        assert await add(adopted, bonus) == 7 + bonus
        fresh = await heir.execute(["sh", "-c", "exit 3"])
        assert fresh.number != adopted.number
        assert (await finished(fresh))[0] == 3
        adopted.close_stdin()
        assert (await finished(adopted))[0] == 0
    assert heirs[0].container_id != heirs[1].container_id


async def test_requests_during_a_checkpoint_are_done_after_the_restore(sandbox: GVisorSandbox, tmp_path: Path) -> None:
    image = tmp_path / "image"
    sleeper = await sandbox.execute(["sleep", "1000"])
    checkpointing = asyncio.create_task(sandbox.checkpoint(image))
    asked: list[asyncio.Task[GuestProcess]] = []
    while not checkpointing.done():
        if len(asked) < 5 and sandbox.state == State.RUNNING:
            asked.append(asyncio.create_task(sandbox.execute(["echo", str(len(asked))])))
        sleeper.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.02)
    await checkpointing
    await asyncio.wait_for(sandbox.restore(image), LONG)
    for number, task in enumerate(asked):
        assert await finished(await asyncio.wait_for(task, LONG)) == (0, b"%d\n" % number, b"")
    assert (await finished(sleeper))[0] == -signal.SIGTERM


@pytest.mark.parametrize("step", ["pause", "checkpoint"])
async def test_failed_checkpoint_leaves_the_sandbox_running_and_no_image(
    make: Make, stand_in: StandInMaker, tmp_path: Path, step: str
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    fake = stand_in(step)
    sandbox = make(fake.runsc)
    await sandbox.start()
    container = sandbox.container_id
    counter = await python(sandbox, COUNTER)
    for attempt in range(1, 3):
        with pytest.raises(RunscError, match="made of cheese") as failure:
            await asyncio.wait_for(sandbox.checkpoint(images / "image"), LONG)
        assert failure.value.returncode == 7
        assert step in failure.value.argv
        assert sandbox.container_id == container
        assert list(images.iterdir()) == []
        assert await add(counter, 1) == attempt
        await assert_usable(sandbox)
    fake.failing = False
    await sandbox.checkpoint(images / "image")
    await sandbox.restore(images / "image")
    assert await add(counter, 1) == 3


async def test_failed_resume_of_a_paused_sandbox_is_repeated(
    make: Make, stand_in: StandInMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse() -> None:
        raise SandboxError("storage is down")

    fake = stand_in("resume")
    sandbox = make(fake.runsc)
    await sandbox.start()
    counter = await python(sandbox, COUNTER)
    failing = asyncio.create_task(sandbox.checkpoint(tmp_path / "image", refuse))
    async with asyncio.timeout(LONG):
        while "is paused and not saved" not in caplog.text:
            await asyncio.sleep(0.05)
    fake.failing = False
    with pytest.raises(SandboxError, match="storage is down"):
        await asyncio.wait_for(failing, LONG)
    assert await add(counter, 1) == 1


async def test_checkpoint_does_not_overwrite_an_image(sandbox: GVisorSandbox, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    (image / "precious").touch()
    with pytest.raises(SandboxError, match="exists already"):
        await sandbox.checkpoint(image)
    assert [path.name for path in image.iterdir()] == ["precious"]
    await assert_usable(sandbox)


async def test_checkpoint_to_an_unwritable_folder_leaves_the_sandbox_running(
    sandbox: GVisorSandbox, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SandboxError, match="file"):
        await asyncio.wait_for(sandbox.checkpoint(tmp_path / "file" / "image"), LONG)
    await assert_usable(sandbox)


async def test_cancelled_checkpoint_leaves_the_sandbox_running(
    make: Make, stand_in: StandInMaker, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    begun = tmp_path / "begun"
    sandbox = make(stand_in("checkpoint", f"touch {begun}; sleep 1000").runsc)
    await sandbox.start()
    checkpointing = asyncio.create_task(sandbox.checkpoint(images / "image"))
    while not begun.exists():
        await asyncio.sleep(0.01)
    checkpointing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(checkpointing, LONG)
    assert list(images.iterdir()) == []
    await assert_usable(sandbox)


@pytest.mark.parametrize("action", [GVisorSandbox.checkpoint, GVisorSandbox.copy])
async def test_cancellation_after_the_write_leaves_no_image(
    sandbox: GVisorSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: Callable[..., Awaitable[None]]
) -> None:
    images = tmp_path / "images"
    begun, proceed, rename = threading.Event(), threading.Event(), Path.rename

    def slow_rename(path: Path, target: Path) -> Path:
        if target == images / "image":
            begun.set()
            assert proceed.wait(LONG)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", slow_rename)
    saving = asyncio.ensure_future(action(sandbox, images / "image"))
    assert await asyncio.to_thread(begun.wait, LONG)
    saving.cancel()
    await asyncio.sleep(0)
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(saving, LONG)
    assert list(images.iterdir()) == []
    await assert_usable(sandbox)


async def test_sandbox_that_is_killed_during_a_checkpoint_fails(
    make: Make, stand_in: StandInMaker, tmp_path: Path, runtime: Path
) -> None:
    begun, never = tmp_path / "begun", tmp_path / "never"
    os.mkfifo(never)
    sandbox = make(stand_in("checkpoint", f"touch {begun}; read word < {never}").runsc)
    await sandbox.start()
    sleeper = await sandbox.execute(["sleep", "1000"])
    checkpointing = asyncio.create_task(sandbox.checkpoint(tmp_path / "image"))
    while not begun.exists():
        await asyncio.sleep(0.01)
    assert sandbox._container and sandbox._container.folder
    kill_processes(sandbox._container.folder.state)
    with pytest.raises(SandboxError):
        await asyncio.wait_for(checkpointing, LONG)
    assert sandbox.state == State.FAILED
    assert not (tmp_path / "image").exists()
    assert leftovers(runtime) == []
    assert await asyncio.wait_for(sleeper.wait(), LIMIT) == -signal.SIGKILL


async def test_sandbox_that_is_killed_while_its_image_is_stored_is_saved(
    sandbox: GVisorSandbox, tmp_path: Path, runtime: Path
) -> None:
    counter = await python(sandbox, COUNTER)
    assert await add(counter, 5) == 5

    async def commit() -> None:
        assert sandbox._container and sandbox._container.folder and sandbox._container.main
        kill_processes(sandbox._container.folder.state)
        await sandbox._container.main.wait()
        await asyncio.sleep(0.5)  # the pipe is closed

    await asyncio.wait_for(sandbox.checkpoint(tmp_path / "image", commit), LONG)
    assert sandbox.state == State.CHECKPOINTED
    assert counter.returncode is None
    assert leftovers(runtime) == []
    await asyncio.wait_for(sandbox.restore(tmp_path / "image"), LONG)
    assert await add(counter, 10) == 15


async def test_delete_during_a_checkpoint(make: Make, stand_in: StandInMaker, tmp_path: Path, runtime: Path) -> None:
    begun, never = tmp_path / "begun", tmp_path / "never"
    os.mkfifo(never)
    sandbox = make(stand_in("checkpoint", f"touch {begun}; read word < {never}").runsc)
    await sandbox.start()
    checkpointing = asyncio.create_task(sandbox.checkpoint(tmp_path / "images" / "image"))
    while not begun.exists():
        await asyncio.sleep(0.01)
    deleting = asyncio.create_task(sandbox.delete())
    done, _ = await asyncio.wait({deleting}, timeout=LIMIT)
    if not done:
        checkpointing.cancel()
        pytest.fail("delete waits for a checkpoint that hangs")
    with pytest.raises(SandboxError):
        await asyncio.wait_for(checkpointing, LIMIT)
    assert sandbox.state == State.STOPPED
    assert leftovers(runtime) == []
    assert list((tmp_path / "images").iterdir()) == []


@pytest.mark.parametrize("fresh", [False, True], ids=["the same object", "another object"])
async def test_failed_restore_can_be_repeated(
    make: Make, stand_in: StandInMaker, tmp_path: Path, runtime: Path, fresh: bool
) -> None:
    image = tmp_path / "image"
    fake = stand_in("restore")
    sandbox = make(fake.runsc)
    await sandbox.start()
    counter: GuestProcess | None = await python(sandbox, COUNTER)
    assert counter
    assert await add(counter, 3) == 3
    number = counter.number
    await sandbox.checkpoint(image)
    files = {path.name: path.stat().st_size for path in image.iterdir()}
    if fresh:
        await sandbox.delete()
        sandbox = make(fake.runsc)
    state = sandbox.state
    for _ in range(2):
        with pytest.raises(RunscError, match="made of cheese"):
            await asyncio.wait_for(sandbox.restore(image), LONG)
        assert sandbox.state == state
        assert leftovers(runtime) == []
    with pytest.raises(SandboxError):
        await asyncio.wait_for(sandbox.restore(tmp_path / "missing"), LONG)
    assert sandbox.state == state
    assert {path.name: path.stat().st_size for path in image.iterdir()} == files
    fake.failing = False
    await asyncio.wait_for(sandbox.restore(image), LONG)
    counter = sandbox.connection.process(number) if fresh else counter
    assert counter
    assert await add(counter, 4) == 7


async def test_restore_of_a_damaged_image_reports_the_reason(
    sandbox: GVisorSandbox, tmp_path: Path, runtime: Path
) -> None:
    image, whole = tmp_path / "image", tmp_path / "whole"
    await sandbox.checkpoint(image)
    data = (image / "checkpoint.img").read_bytes()
    (image / "checkpoint.img").write_bytes(data[: len(data) // 2])
    with pytest.raises(RunscError) as failure:
        await asyncio.wait_for(sandbox.restore(image), LONG)
    assert failure.value.output
    assert sandbox.state == State.CHECKPOINTED
    assert leftovers(runtime) == []
    (image / "checkpoint.img").write_bytes(data)
    image.rename(whole)
    await asyncio.wait_for(sandbox.restore(whole), LONG)
    await assert_usable(sandbox)


# -- hostile guests: a script replaces both runsc and PID 1 -------------------------------------------------------


def scripted(folder: Path, real: Runsc, code: str) -> Runsc:
    """Return a runsc whose ``run`` is a guest that sends hello, then runs ``code``. Other commands do nothing."""
    hello = encode(CONTROL, 0, json.dumps({"op": "hello", "version": VERSION, "processes": []}).encode())
    path = folder / "runsc"
    path.write_text(
        f"#!{sys.executable}\nimport os, signal, sys\nif 'run' not in sys.argv: sys.exit()\n"
        f"os.write(1, {hello!r})\n{textwrap.dedent(code)}\n"
    )
    path.chmod(0o755)
    return Runsc(path, real.version)


async def test_checkpoint_of_a_guest_that_does_not_quiesce_times_out(
    make: Make, runsc: Runsc, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause, "QUIESCE_TIMEOUT", 0.2)
    monkeypatch.setattr(pause, "RESUME_TIMEOUT", 0.2)
    sandbox = make(scripted(tmp_path, runsc, "while os.read(0, 1 << 16): pass\nsignal.pause()"))
    await sandbox.start()
    with pytest.raises(SandboxError, match="did not stop its traffic"):
        await asyncio.wait_for(sandbox.checkpoint(tmp_path / "image"), LIMIT)
    assert sandbox.state == State.FAILED
    assert not (tmp_path / "image").exists()
    assert leftovers(runtime) == []


async def end_noticed(sandbox: GVisorSandbox) -> None:
    async with asyncio.timeout(LIMIT):
        while sandbox.state == State.RUNNING:
            await asyncio.sleep(0.01)


async def test_guest_that_violates_the_protocol_is_killed(
    make: Make, runsc: Runsc, tmp_path: Path, runtime: Path
) -> None:
    sandbox = make(scripted(tmp_path, runsc, "os.read(0, 1)\nos.write(1, b'\\xff' * 100)\nwhile True: signal.pause()"))
    await sandbox.start()
    with pytest.raises(ProtocolError):
        await asyncio.wait_for(sandbox.execute(["true"]), LIMIT)
    await end_noticed(sandbox)
    assert sandbox.state == State.STOPPED
    assert not [word for word in leftovers(runtime) if word.startswith("process")]
    with pytest.raises(StateError):
        await sandbox.execute(["true"])


async def test_guest_with_another_protocol_version_does_not_start(
    make: Make, runsc: Runsc, tmp_path: Path, runtime: Path
) -> None:
    other = encode(CONTROL, 0, json.dumps({"op": "hello", "version": VERSION + 1, "processes": []}).encode())
    path = tmp_path / "runsc"
    path.write_text(f"#!{sys.executable}\nimport os, signal\nos.write(1, {other!r})\nwhile True: signal.pause()\n")
    path.chmod(0o755)
    sandbox = make(Runsc(path, runsc.version))
    with pytest.raises(SandboxError, match=f"version {VERSION + 1}"):
        await asyncio.wait_for(sandbox.start(), LIMIT)
    assert leftovers(runtime) == []


# -- the end ---------------------------------------------------------------------------------------------------


async def test_unexpected_exit_is_noticed(sandbox: GVisorSandbox, runtime: Path) -> None:
    sleeper = await sandbox.execute(["sleep", "1000"])
    assert sandbox._container and sandbox._container.folder
    kill_processes(sandbox._container.folder.state)
    await end_noticed(sandbox)
    assert sandbox.state == State.STOPPED
    assert await asyncio.wait_for(sleeper.wait(), LIMIT) == -signal.SIGKILL
    assert await asyncio.wait_for(sleeper.read(), LIMIT) == (b"", b"")
    with pytest.raises(StateError, match="stopped"):
        await sandbox.execute(["true"])
    await asyncio.wait_for(sandbox.delete(), LIMIT)
    assert leftovers(runtime) == []


async def test_delete_ends_pending_waits(sandbox: GVisorSandbox) -> None:
    sleeper = await sandbox.execute(["sleep", "1000"])
    waiting, reading = asyncio.create_task(sleeper.wait()), asyncio.create_task(sleeper.read())
    await asyncio.gather(sandbox.delete(), sandbox.delete())
    assert await asyncio.wait_for(waiting, LIMIT) == -signal.SIGKILL
    assert await asyncio.wait_for(reading, LIMIT) == (b"", b"")
    assert isinstance(sandbox.connection.error, LinkClosedError)


@pytest.mark.parametrize("state", State)
async def test_delete_works_in_every_state_and_can_be_repeated(
    make: Make, stand_in: StandInMaker, tmp_path: Path, runtime: Path, state: State
) -> None:
    fake = stand_in("run")
    sandbox = make(fake.runsc)
    if state == State.FAILED:
        with pytest.raises(RunscError):
            await sandbox.start()
    elif state != State.INITIALIZED:
        fake.failing = False
        await sandbox.start()
    if state == State.CHECKPOINTED:
        await sandbox.checkpoint(tmp_path / "image")
    elif state == State.STOPPED:
        await sandbox.delete()
    assert sandbox.state == state
    for _ in range(2):
        await asyncio.wait_for(sandbox.delete(), LIMIT)
        assert sandbox.state == State.STOPPED
        assert leftovers(runtime) == []
    assert (tmp_path / "image").exists() is (state == State.CHECKPOINTED)
