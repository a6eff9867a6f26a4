"""Clients do not notice that a kernel hibernates and wakes, at any moment, under a plain KernelManager."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import zmq
from gcs_server import GCS
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from jupyter_client.session import Session
from kernels import LONG, Notebook, Open
from leftovers import leftovers, listening
from notebooks import until
from servers import READY

from sandbox_provisioner.errors import (
    ConfigurationError,
    CorruptObjectError,
    FencedError,
    IncompatibleError,
    LeaseHeldError,
    SandboxError,
)
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.runtime_dir import runtime_root
from sandbox_provisioner.io_thread import IO
from sandbox_provisioner.kernel.relay import CHANNELS
from sandbox_provisioner.persistence.metadata import Summary
from sandbox_provisioner.persistence.names import metadata_name
from sandbox_provisioner.sandbox import detached, memory, stored_state, user_sandboxes
from sandbox_provisioner.sandbox.manager import SandboxManager

pytestmark = [pytest.mark.runsc, pytest.mark.template_copies]

HANDSHAKE = 20
"""Timeout in seconds, shorter than the time after which ZeroMQ repeats an unanswered handshake."""


@pytest.fixture(scope="module", autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One runtime folder for all tests of this module, because they share a kernel."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_RUNTIME_DIR", str(folder))
        yield runtime_root()
        assert leftovers(folder / "jupyter-sandbox") == []


@pytest.fixture(autouse=True)
def nothing_left(runtime: Path) -> Iterator[None]:
    """Check after each test that no sandbox runs. The shared kernel is hibernated then."""
    yield
    assert leftovers(runtime) == []


@pytest.fixture(scope="module")
def common(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """The kernel that most tests share."""
    folder = tmp_path_factory.mktemp("common")
    specs = KernelSpecManager()
    spec = specs.get_kernel_spec("python3").to_dict()
    spec["metadata"]["kernel_provisioner"] = {"provisioner_name": "sandbox-provisioner"}
    (folder / "kernels" / "common").mkdir(parents=True)
    (folder / "kernels" / "common" / "kernel.json").write_text(json.dumps(spec))
    specs.kernel_dirs = [str(folder / "kernels")]
    km = KernelManager(kernel_name="common", kernel_spec_manager=specs)
    (folder / "notebooks").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(folder / "data"))
        env = {**os.environ, "JPY_SESSION_NAME": str(folder / "notebooks" / "a.ipynb")}
        km.start_kernel(env=env, cwd=str(folder / "notebooks"))
    notebook = Notebook(km, km.client())
    notebook.kc.start_channels()
    notebook.kc.wait_for_ready(timeout=READY)
    yield notebook
    notebook.end()


@pytest.fixture
def notebook(common: Notebook) -> Iterator[Notebook]:
    """The shared kernel, hibernated by the previous test."""
    yield common
    common.drain()
    common.hibernate()


def at_once(*calls: Coroutine[Any, Any, None]) -> None:
    """Run coroutines at the same time."""

    async def run_all() -> None:
        await asyncio.gather(*calls)

    asyncio.run(run_all())


def images(data: Path) -> list[Path]:
    """Return the images of all checkpoints."""
    return list((data / "sandbox" / "storage" / "sandboxes").rglob("pages.img"))


# -- saved during an activity ------------------------------------------------------------------------------------------


def test_printing_loop_loses_no_line(notebook: Notebook) -> None:
    request = notebook.kc.execute(
        "import time\nfor number in range(2000):\n    print(number)\n    time.sleep(0.0005)\nprint('end')"
    )
    text, stops = "", ["\n10\n", "\n1000\n"]
    for piece in notebook.outputs(request):
        text += piece
        if stops and stops[0] in text:
            stops.pop(0)
            notebook.hibernate()
            notebook.wake()
    assert text.split() == [*map(str, range(2000)), "end"]
    assert notebook.reply(request)["status"] == "ok"
    assert not stops


def test_large_output_arrives_complete(notebook: Notebook) -> None:
    chunk = 125_000
    request = notebook.kc.execute(
        f"for part in range(0, {10 * chunk}, {chunk}):\n"
        f"    print(''.join(f'{{number:039d}}\\n' for number in range(part, part + {chunk})), end='', flush=True)"
    )
    pieces, cycles = [], 2
    for piece in notebook.outputs(request):
        pieces.append(piece)
        if cycles:
            cycles -= 1
            notebook.hibernate()
            notebook.wake()
    assert cycles == 0
    assert "".join(pieces) == "".join(f"{number:039d}\n" for number in range(10 * chunk))


def test_large_message_in_transit_arrives_complete(notebook: Notebook) -> None:
    notebook.run("text = ''.join(f'{number:07d}\\n' for number in range(1_500_000))")
    request = notebook.kc.execute("print('now', flush=True); print(text, end='', flush=True)")
    assert notebook.iopub(request)["content"]["execution_state"] == "busy"
    for _ in range(2):
        notebook.hibernate()
        notebook.wake()
    text = "".join(notebook.outputs(request)).removeprefix("now\n")
    assert text == "".join(f"{number:07d}\n" for number in range(1_500_000))


def test_input_prompt_is_answered_after_wake(notebook: Notebook) -> None:
    request = notebook.kc.execute("name = input('who? ')\nprint('hello', name)", allow_stdin=True)
    assert notebook.kc.get_stdin_msg(timeout=LONG)["content"]["prompt"] == "who? "
    notebook.hibernate()
    notebook.kc.input("you")
    assert "".join(notebook.outputs(request)) == "hello you\n"
    assert notebook.reply(request)["status"] == "ok"


ECHO = """
def opened(comm, message):
    @comm.on_msg
    def echo(message):
        comm.send({"echo": message["content"]["data"]["number"]})
get_ipython().kernel.comm_manager.register_target("echo", opened)
"""


def test_comm_messages_arrive_once_in_order(notebook: Notebook) -> None:
    notebook.run(ECHO)
    kc, session = notebook.kc, notebook.kc.session

    def send(kind: str, **content: Any) -> None:
        kc.shell_channel.send(session.msg(kind, {"comm_id": "c", "data": {}, **content}))

    send("comm_open", target_name="echo")
    sent, heard = 0, []
    for cycle in range(4):
        for _ in range(50):
            send("comm_msg", data={"number": sent})
            sent += 1
        if cycle < 3:
            notebook.nap()
    while len(heard) < sent:
        message = kc.get_iopub_msg(timeout=LONG)
        if message["msg_type"] == "comm_msg":
            heard.append(message["content"]["data"]["echo"])
    assert heard == list(range(sent))


def test_kernel_saved_during_start_answers_waiting_client(
    kernelspecs: KernelSpecManager, sandboxed: Callable[..., str], notebook_folder: Path, data: Path
) -> None:
    km = KernelManager(kernel_name=sandboxed(), kernel_spec_manager=kernelspecs)
    km.start_kernel(env={**os.environ, "JPY_SESSION_NAME": str(notebook_folder / "a.ipynb")})
    notebook = Notebook(km, km.client())
    try:
        notebook.kc.start_channels()
        time.sleep(0.3)
        notebook.nap()
        notebook.kc.kernel_info()
        assert notebook.kc.get_shell_msg(timeout=HANDSHAKE)["msg_type"] == "kernel_info_reply"
    finally:
        notebook.end()


# -- hibernated --------------------------------------------------------------------------------------------------------


def test_heartbeats_are_answered_without_wake(notebook: Notebook, runtime: Path) -> None:
    notebook.run("x = 1")
    notebook.kc.hb_channel.unpause()
    notebook.hibernate()
    assert leftovers(runtime) == []
    with zmq.Context() as context, context.socket(zmq.REQ) as newcomer:
        newcomer.linger, newcomer.rcvtimeo = 0, LONG * 1000
        newcomer.connect(notebook.km._make_url("hb"))
        for _ in range(4):
            newcomer.send(b"ping")
            assert newcomer.recv() == b"ping"
            time.sleep(0.5)
            until(notebook.kc.hb_channel.is_beating)  # a heartbeat from before the save is answered after the wake
            assert notebook.km.is_alive()
        assert notebook.asleep
        assert leftovers(runtime) == []
        assert notebook.run("x") == "1"
        newcomer.send(b"ping")
        until(lambda: notebook.kc.hb_channel.is_beating())


def test_first_request_of_a_new_client_is_answered(notebook: Notebook) -> None:
    """Jupyter Server sends such a request only once, on a new connection, and waits a minute for the reply."""
    for _ in range(3):
        notebook.hibernate()
        with notebook.km.connect_shell() as newcomer:
            session = Session(key=notebook.km.session.key)
            request = session.send(newcomer, "kernel_info_request")
            assert newcomer.poll(LONG * 1000)
            reply = session.deserialize(session.feed_identities(newcomer.recv_multipart())[1])
            assert reply["parent_header"]["msg_id"] == request["msg_id"]


def test_requests_during_hibernation_are_answered_in_order(notebook: Notebook) -> None:
    notebook.run("seen = []")
    for _ in range(2):
        notebook.hibernate()
        requests = [notebook.kc.execute(f"seen.append({number}); print(seen)") for number in range(5)]
        for number, request in enumerate(requests):
            assert notebook.reply(request)["status"] == "ok"
            assert "".join(notebook.outputs(request)) == f"{list(range(number + 1))}\n"
        notebook.run("seen.clear()")


def test_each_client_gets_its_own_replies(notebook: Notebook) -> None:
    other = Notebook(notebook.km, BlockingKernelClient())
    other.kc.load_connection_info(notebook.km.get_connection_info())
    other.kc.start_channels()
    other.kc.wait_for_ready(timeout=READY)
    for number in range(3):
        notebook.hibernate()
        requests = [(each, each.kc.execute(f"{number}, {each is other}")) for each in (other, notebook)]
        for each, request in requests:
            assert each.reply(request)["status"] == "ok"
    mine = notebook.kc.execute("print('seen by both')")
    assert "".join(other.outputs(mine)) == "".join(notebook.outputs(mine)) == "seen by both\n"
    other.kc.stop_channels()


def test_control_request_wakes_kernel(notebook: Notebook) -> None:
    notebook.hibernate()
    message = notebook.kc.session.msg("kernel_info_request")
    notebook.kc.control_channel.send(message)
    assert notebook.kc.get_control_msg(timeout=LONG)["msg_type"] == "kernel_info_reply"
    until(lambda: not notebook.asleep)


@pytest.mark.debian
def test_busy_kernel_is_interrupted_while_hibernated(notebook: Notebook) -> None:
    request = notebook.kc.execute("print('begun', flush=True)\nimport time\ntime.sleep(600)")
    outputs = notebook.outputs(request)
    assert next(outputs) == "begun\n"
    notebook.hibernate()
    notebook.km.interrupt_kernel()
    assert list(outputs) == ["KeyboardInterrupt"]
    assert notebook.reply(request)["ename"] == "KeyboardInterrupt"
    assert notebook.run("6 * 7") == "42"


@pytest.mark.debian
def test_interrupt_during_hibernate_is_delivered(notebook: Notebook) -> None:
    request = notebook.kc.execute("print('begun', flush=True)\nimport time\ntime.sleep(600)")
    outputs = notebook.outputs(request)
    assert next(outputs) == "begun\n"
    provisioner = notebook.km.provisioner

    async def interrupt() -> None:
        while not provisioner.sandbox.connection.quiet:
            await asyncio.sleep(0.001)
        await provisioner.send_signal(signal.SIGINT)

    at_once(provisioner.hibernate(), interrupt())
    assert list(outputs) == ["KeyboardInterrupt"]


@pytest.mark.slow
def test_interrupt_reaches_main_thread_after_wake(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("import threading, time")
    notebook.run("for _ in range(400): threading.Thread(target=threading.Event().wait, daemon=True).start()")
    for _ in range(4):
        request = notebook.kc.execute(f"print('begun', flush=True)\ntime.sleep({10 * LONG})")
        outputs = notebook.outputs(request)
        assert next(outputs) == "begun\n"
        notebook.hibernate()
        notebook.km.interrupt_kernel()
        assert list(outputs) == ["KeyboardInterrupt"]
    notebook.end()


def test_request_sent_during_cancelled_hibernate_is_answered(notebook: Notebook) -> None:
    notebook.drain()
    provisioner = notebook.km.provisioner

    async def hibernate_and_cancel() -> str:
        hibernating = asyncio.create_task(provisioner.hibernate())
        while not provisioner._kernel.relay.resting:
            await asyncio.sleep(0.001)
        request = notebook.kc.execute("6 * 7")
        hibernating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hibernating
        return request

    request = asyncio.run(hibernate_and_cancel())
    assert notebook.reply(request)["status"] == "ok"


@pytest.mark.parametrize(
    ("kind", "moment"), [(stored_state.StoredState, "record_restored"), (memory.SandboxMemory, "_restore_image")]
)
def test_wake_cancelled_during_or_after_the_restore_loses_no_state(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, kind: type, moment: str
) -> None:
    notebook.run("x = 40")
    notebook.hibernate()
    provisioner = notebook.km.provisioner
    step, reached = getattr(kind, moment), threading.Event()

    async def watched(self: object, *given: Any) -> None:
        reached.set()
        await asyncio.sleep(0.1)  # the cancellation arrives here
        await step(self, *given)

    async def wake_and_cancel() -> None:
        waking = asyncio.create_task(provisioner.wake())
        await asyncio.to_thread(reached.wait, LONG)
        waking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waking

    monkeypatch.setattr(kind, moment, watched)
    asyncio.run(wake_and_cancel())
    assert notebook.run("x + 2") == "42"


def test_wake_cancelled_at_any_moment_loses_no_state(notebook: Notebook) -> None:
    notebook.run("x = 0")
    provisioner = notebook.km.provisioner
    for turn in range(1, 13):
        notebook.hibernate()
        with suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(provisioner.wake(), turn * 0.03))
        assert notebook.run("x += 1; x") == str(turn)


def test_concurrent_hibernate_and_wake_calls(notebook: Notebook) -> None:
    provisioner = notebook.km.provisioner
    notebook.run("x = 1")
    at_once(provisioner.hibernate(), provisioner.hibernate())
    assert notebook.asleep
    request = notebook.kc.execute("x += 1")
    at_once(provisioner.wake(), provisioner.wake())
    assert not notebook.asleep
    assert notebook.reply(request)["status"] == "ok"
    at_once(provisioner.hibernate(), provisioner.wake(), provisioner.hibernate(), provisioner.wake())
    assert notebook.run("x") == "2"


def test_hibernate_during_wake(notebook: Notebook) -> None:
    notebook.hibernate()
    at_once(notebook.km.provisioner.wake(), notebook.km.provisioner.hibernate())
    assert notebook.asleep


def test_request_larger_than_buffer_arrives_complete(notebook: Notebook) -> None:
    notebook.hibernate()
    assert notebook.run(f"len({'x' * 5_000_000!r})") == "5000000"


TICKS = """
import threading, time, pathlib
def tick():
    while True:
        pathlib.Path("tick").write_text(str(time.time()))
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
"""


@pytest.mark.parametrize("now", [True, False])
def test_shutdown_while_hibernated_leaves_nothing(
    open_notebook: Open, notebook_folder: Path, data: Path, runtime: Path, now: bool
) -> None:
    notebook = open_notebook()
    notebook.run(TICKS)
    until((notebook_folder / "tick").exists)
    notebook.hibernate()
    last = (notebook_folder / "tick").read_text()
    assert images(data)
    notebook.kc.stop_channels()
    notebook.km.shutdown_kernel(now=now)
    assert (notebook_folder / "tick").read_text() == last
    assert not notebook.km.is_alive()
    assert images(data) == leftovers(runtime) == []
    assert open_notebook().run("'tick' in globals()") == "False"


def test_killed_kernel_is_not_alive(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.hibernate()
    asyncio.run(notebook.km.provisioner.send_signal(signal.SIGKILL))
    asyncio.run(asyncio.wait_for(notebook.km.provisioner.wait(), LONG))
    assert not notebook.km.is_alive()


def test_restarted_kernel_is_fresh_and_hibernates(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    for _ in range(2):
        notebook.hibernate()
        notebook.km.restart_kernel()
        notebook.kc.wait_for_ready(timeout=READY)
        assert notebook.run("'x' in globals()") == "False"
        notebook.run("x = 2")
    notebook.hibernate()
    assert notebook.run("x") == "2"


# -- state inside the kernel -------------------------------------------------------------------------------------------

CREATE_STATE = """
import asyncio, os, pathlib, random, socket, subprocess, sys, threading, time

ticks = []
def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()

child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

private = open("/tmp/private", "w+")
private.write("begun")
shared = open("shared.txt", "w")
shared.write("begun")
unlinked = open("/tmp/unlinked", "w+")
os.unlink("/tmp/unlinked")
unlinked.write("kept")

numbers = (number for number in range(100))
next(numbers)

listener = socket.create_server(("127.0.0.1", 0))
caller = socket.create_connection(listener.getsockname())
called, _ = listener.accept()
caller.sendall(b"unread")

async def later(event):
    await event.wait()
    return "came"
event = asyncio.Event()
task = asyncio.ensure_future(later(event))
lock = threading.Lock(); lock.acquire()
dice = random.Random(7)
identity = (os.getpid(), os.getppid(), threading.main_thread().ident, dict(os.environ), os.getcwd())
"""

CHECK_STATE = """
before = len(ticks)
child.stdin.write(b"x"); child.stdin.flush()
assert child.stdout.read(1) == b"x"
private.write(", ended"); private.seek(0)
assert private.read() == "begun, ended"
shared.write(", ended"); shared.close()
assert pathlib.Path("shared.txt").read_text() == "begun, ended"
unlinked.seek(0)
assert unlinked.read() == "kept"
assert list(numbers) == list(range(1, 100))
assert called.recv(6) == b"unread"
called.sendall(b"answer")
assert caller.recv(6) == b"answer"
socket.create_connection(listener.getsockname()).close()
event.set()
assert await task == "came"
assert lock.locked()
assert dice.random() == random.Random(7).random()
assert identity == (os.getpid(), os.getppid(), threading.main_thread().ident, dict(os.environ), os.getcwd())
time.sleep(0.2)
assert len(ticks) > before
"""


def wheel(folder: Path) -> None:
    """Write a package that pip can install without a network."""
    about = "tiny-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as file:
        file.writestr("tiny.py", "value = 7\n")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


@pytest.mark.slow
def test_pip_packages_survive_in_their_kernel_only(open_notebook: Open, notebook_folder: Path) -> None:
    wheel(notebook_folder)
    notebook = open_notebook()
    notebook.run("%pip install --quiet --no-index ./tiny-1.0-py3-none-any.whl")
    assert notebook.run("import tiny\ntiny.value") == "7"
    notebook.hibernate()
    assert notebook.run("import importlib\nimportlib.reload(tiny).value") == "7"
    notebook.run("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import tiny'], check=True)")
    assert importlib.util.find_spec("tiny") is None
    assert open_notebook("b.ipynb").run("import importlib.util\nprint(importlib.util.find_spec('tiny'))") == "None\n"


@pytest.mark.parametrize("reopened", [False, True])
def test_threads_processes_files_sockets_and_generators_survive(open_notebook: Open, reopened: bool) -> None:
    notebook = open_notebook()
    notebook.run(CREATE_STATE)
    notebook.hibernate()
    if reopened:
        notebook.end(keep=True)
        notebook = open_notebook()
    notebook.run(CHECK_STATE)


# -- idle timer --------------------------------------------------------------------------------------------------------


def test_idle_timer_hibernates_only_without_running_cell(open_notebook: Open) -> None:
    notebook = open_notebook(enable_checkpoint_at_idle=True, idle_timeout=1)
    request = notebook.kc.execute("import time\nfor _ in range(20):\n    time.sleep(0.2)")
    assert notebook.iopub(request)["content"]["execution_state"] == "busy"
    while True:
        assert not notebook.asleep
        try:
            message = notebook.kc.get_shell_msg(timeout=0.05)
        except Empty:
            continue
        if message["parent_header"]["msg_id"] == request:
            break
    until(lambda: notebook.asleep)
    assert notebook.km.is_alive()
    assert notebook.run("'it is ' + 'awake'") == "'it is awake'"
    until(lambda: notebook.asleep)


# -- the sandbox of a notebook -----------------------------------------------------------------------------------------


def test_sandbox_without_kernel_is_refused_and_kept(open_notebook: Open, runsc: Runsc, spec: BundleSpec) -> None:
    async def save_without_kernel() -> SandboxManager:
        manager = SandboxManager(user_sandboxes.settings(""), runsc)
        await manager.create("mine", spec)
        await manager.get("mine").start()
        await manager.get("mine").save()
        await manager.close(manager.get("mine"), save=False)
        return manager

    manager = asyncio.run(save_without_kernel())
    with pytest.raises(SandboxError, match="mine was not saved by Jupyter: there is no kernel in it"):
        open_notebook(name="", sandbox_id="mine")
    assert detached.describe_persistent(manager.stores, "mine").checkpoint


def test_sandbox_id_without_notebook(open_notebook: Open) -> None:
    notebook = open_notebook(name="", sandbox_id="mine")
    notebook.run("x = 'mine'")
    notebook.hibernate()
    notebook.end(keep=True)
    notebook = open_notebook(name="another.ipynb", sandbox_id="mine")
    assert notebook.run("x") == "'mine'"


def test_no_notebook_and_no_id_is_ephemeral(open_notebook: Open, data: Path) -> None:
    notebook = open_notebook(name="")
    asyncio.run(notebook.km.provisioner.hibernate())
    assert not notebook.asleep
    notebook.end(keep=True)
    assert not (data / "sandbox" / "storage").exists()


def test_required_bucket_missing_is_refused(
    kernelspecs: KernelSpecManager, sandboxed: Callable[..., str], notebook_folder: Path, data: Path, runtime: Path
) -> None:
    km = KernelManager(kernel_name=sandboxed(gcs_sandbox_id="mine"), kernel_spec_manager=kernelspecs)
    with pytest.raises(ConfigurationError, match="SANDBOX_LOCK_BUCKET and SANDBOX_METADATA_BUCKET") as refusal:
        km.start_kernel()
    assert refusal.value.setting == "SANDBOX_LOCK_BUCKET"
    assert not (data / "sandbox" / "storage").exists()
    assert list(notebook_folder.iterdir()) == leftovers(runtime) == []


# -- failed wakes and restores -----------------------------------------------------------------------------------------


def damage(image: Path) -> None:
    """Change one byte of an image. A second call restores the byte."""
    with image.open("r+b") as file:
        file.seek(image.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_damaged_checkpoint_is_reported_and_kept(open_notebook: Open, data: Path) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    notebook.hibernate()
    notebook.end(keep=True)
    (image,) = images(data)
    damage(image)
    for _ in range(2):
        with pytest.raises(CorruptObjectError, match=r"pages\.img .* is damaged"):
            open_notebook()
        assert images(data) == [image]
    damage(image)
    assert open_notebook().run("x") == "1"


def test_wake_refused_after_mapped_file_changed(open_notebook: Open, notebook_folder: Path) -> None:
    table = notebook_folder / "table"
    table.write_bytes(b"old" * 10000)
    notebook = open_notebook()
    notebook.run("import mmap; file = open('table', 'rb'); table = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)")
    notebook.hibernate()
    table.write_bytes(b"new" * 10000)
    with pytest.raises(IncompatibleError, match="table has changed since the sandbox was saved"):
        notebook.wake()
    table.write_bytes(b"old" * 10000)
    assert notebook.run("print(table[:3])") == "b'old'\n"


def test_wake_refused_when_folder_became_a_link(open_notebook: Open, notebook_folder: Path, tmp_path: Path) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    notebook.hibernate()
    precious, moved = tmp_path / "precious", tmp_path / "moved"
    precious.mkdir()
    notebook_folder.rename(moved)
    notebook_folder.symlink_to(precious)
    with pytest.raises(ConfigurationError, match="was replaced: a link now leads to"):
        notebook.wake()
    assert notebook.asleep
    notebook_folder.unlink()
    moved.rename(notebook_folder)
    assert notebook.run("x") == "1"


def test_wake_refused_when_a_mounted_folder_became_a_link(
    open_notebook: Open, notebook_folder: Path, tmp_path: Path
) -> None:
    shared, precious = notebook_folder / "shared", tmp_path / "precious"
    shared.mkdir()
    precious.mkdir()
    notebook = open_notebook(mounts=[f"{shared}:/shared:rw"])
    notebook.run("x = 1")
    notebook.hibernate()
    shared.rename(notebook_folder / "moved")
    shared.symlink_to(precious)
    with pytest.raises(ConfigurationError, match=f"a link now leads to {precious}"):
        notebook.wake()
    assert notebook.asleep


def test_wake_succeeds_after_cause_is_removed(
    open_notebook: Open, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    notebook.hibernate()
    (image,) = images(data)
    damage(image)
    first = notebook.kc.execute("x += 1")
    until(lambda: "was not woken" in caplog.text)
    assert notebook.km.is_alive()
    damage(image)
    second = notebook.kc.execute("print(x)")
    refused = notebook.reply(first)
    assert refused["ename"] == "KernelNotWoken"
    assert "pages.img" in refused["evalue"]
    assert list(notebook.outputs(first)) == ["KernelNotWoken"]
    assert notebook.reply(second)["status"] == "ok"
    assert "".join(notebook.outputs(second)) == "1\n"


def test_bytes_in_transit_survive_a_failed_wake(open_notebook: Open, data: Path) -> None:
    notebook = open_notebook()
    notebook.run("text = ''.join(f'{number:07d}\\n' for number in range(2_000_000))")
    request = notebook.kc.execute("print(text, end='', flush=True)")
    assert notebook.iopub(request)["content"]["execution_state"] == "busy"
    notebook.hibernate()
    (image,) = images(data)
    damage(image)
    refused = notebook.kc.execute("1")
    assert notebook.reply(refused)["ename"] == "KernelNotWoken"
    damage(image)
    notebook.wake()
    assert "".join(notebook.outputs(request)) == "".join(f"{number:07d}\n" for number in range(2_000_000))
    assert notebook.run("6 * 7") == "42"


@pytest.mark.parametrize("failure", [OSError(errno.EMFILE, "Too many open files"), MemoryError("no memory")])
def test_cell_is_answered_when_wake_fails_unexpectedly(
    open_notebook: Open, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    notebook.hibernate()

    def fail() -> None:
        raise failure

    with monkeypatch.context() as scarce:
        scarce.setattr(os, "pipe", fail)
        request = notebook.kc.execute("x += 1")
        refused = notebook.reply(request)
    assert refused["ename"] == "KernelNotWoken"
    assert str(failure) in refused["evalue"]
    assert list(notebook.outputs(request)) == ["KernelNotWoken"]
    assert notebook.run("x") == "1"


@pytest.fixture
def bucket(gcs: GCS, monkeypatch: pytest.MonkeyPatch) -> GCS:
    """A bucket in which all kinds of data are stored."""
    for place in ("SANDBOX_METADATA", "SANDBOX_LOCK", "SANDBOX_CHECKPOINT", "FILESYSTEM_SNAPSHOT"):
        monkeypatch.setenv(f"{place}_BUCKET", gcs.bucket)
    return gcs


def test_cell_is_answered_when_storage_cannot_record_the_wake(
    bucket: GCS, open_notebook: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_state, "RECORD_AGAIN", 0.1)
    notebook = open_notebook()
    notebook.run("x = 1")
    notebook.hibernate()
    bucket.fault("status", code=403, operation="insert", name=".*metadata.json", times=None)
    assert notebook.run("x += 1; x") == "2"
    until(lambda: bucket.faults()[0]["struck"] > 2)
    assert "the storage could not record this: Google denied access to bucket" in caplog.text
    assert summary().running is False
    bucket.reset_faults()
    until(lambda: "is now recorded as running" in caplog.text)
    assert summary().running is True
    notebook.hibernate()
    assert summary().running is False
    assert notebook.run("x") == "2"


def test_kernel_with_unrecorded_wake_is_saved(
    bucket: GCS, open_notebook: Open, caplog: pytest.LogCaptureFixture
) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    notebook.hibernate()
    bucket.fault("status", code=403, operation="insert", name=".*metadata.json", times=None)
    assert notebook.run("x += 1; x") == "2"
    until(lambda: "the storage could not record this" in caplog.text)
    with pytest.raises(SandboxError, match="Google denied access to bucket"):
        notebook.nap()
    assert notebook.run("x += 1; x") == "3"
    bucket.reset_faults()
    notebook.hibernate()
    notebook.end(keep=True)
    assert open_notebook().run("x") == "3"


def test_kernel_taken_by_another_server_does_not_wake_here(bucket: GCS, open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("x = 1")
    notebook.hibernate()
    kept = user_sandboxes.Persistence.open()
    name = metadata_name(kept.registry.list().records[0].sandbox_id)
    data, info = kept.stores.metadata.read(name)
    document = json.loads(data)
    del document["signature"]
    document["tenancy"]["token"] += 1
    kept.stores.metadata.write(name, kept.stores.signer.sign(name, json.dumps(document).encode()), info.generation)
    with pytest.raises(FencedError):
        notebook.wake()
    until(lambda: not notebook.km.is_alive())


def summary() -> Summary:
    """Return the summary of the only sandbox in storage."""
    kept = user_sandboxes.Persistence.open()
    (record,) = kept.registry.list().records
    return kept.summarise(record)


# -- two processes -----------------------------------------------------------------------------------------------------

OTHER_PROCESS = """
import os, sys
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
sys.path.insert(0, os.environ["TESTS"])
from kernels import run
specs = KernelSpecManager()
specs.kernel_dirs = [sys.argv[1], *specs.kernel_dirs]
km = KernelManager(kernel_name=sys.argv[2], kernel_spec_manager=specs)
km.start_kernel(env={**os.environ, "JPY_SESSION_NAME": sys.argv[3]})
kc = km.client()
kc.start_channels()
kc.wait_for_ready(timeout=60)
print("ready", flush=True)
for line in sys.stdin:
    if line.startswith("asleep?"):
        print(km.provisioner.asleep, flush=True)
    elif line.startswith("alive?"):
        print(km.is_alive(), flush=True)
    else:
        print(run(kc, line.strip()), flush=True)
kc.stop_channels()
km.shutdown_kernel(now=True)
"""


class OtherProcess:
    """A second process that opens the notebook."""

    def __init__(self, specs: str, kernel: str, notebook: Path) -> None:
        command = [sys.executable, "-c", OTHER_PROCESS, specs, kernel, str(notebook)]
        env = {**os.environ, "TESTS": str(Path(__file__).parents[1] / "support")}
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> str:
        """Run a line of code in the kernel, or ask ``asleep?`` or ``alive?``. Return the first line of the answer."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def wait_for_ready(self) -> None:
        assert self.process.stdout and self.process.stderr
        assert self.process.stdout.readline() == "ready\n", self.process.stderr.read()


@pytest.fixture
def open_in_other_process(
    kernelspecs: KernelSpecManager, sandboxed: Callable[..., str], notebook_folder: Path, data: Path
) -> Iterator[Callable[..., OtherProcess]]:
    """Return a function that opens the notebook in another process. All end after the test."""
    others: list[OtherProcess] = []

    def start(**config: Any) -> OtherProcess:
        others.append(OtherProcess(kernelspecs.kernel_dirs[0], sandboxed(**config), notebook_folder / "a.ipynb"))
        return others[-1]

    yield start
    for other in others:
        other.process.communicate(timeout=LONG)


def test_notebook_open_elsewhere_is_refused_with_owner(
    open_notebook: Open, open_in_other_process: Callable[..., OtherProcess]
) -> None:
    other = open_in_other_process()
    other.wait_for_ready()
    assert other.ask("x = 1; x") == "1"
    with pytest.raises(LeaseHeldError, match=rf"in use by .*process {other.process.pid}\b"):
        open_notebook()
    assert other.ask("x") == "1"


@pytest.mark.parametrize("asleep", [False, True])
def test_hand_off_keeps_state(
    open_notebook: Open, open_in_other_process: Callable[..., OtherProcess], asleep: bool, data: Path
) -> None:
    notebook = open_notebook(enable_handoff=True)
    notebook.run("x = 1")
    if asleep:
        notebook.hibernate()
    other = open_in_other_process(enable_handoff=True)
    other.wait_for_ready()
    assert other.ask("x += 1; x") == "2"
    until(lambda: not notebook.km.is_alive())
    notebook.end()
    assert images(data)
    assert other.ask("x") == "2"


def test_hand_off_leaves_no_listener_file_or_thread(
    open_notebook: Open, open_in_other_process: Callable[..., OtherProcess], data: Path
) -> None:
    notebook = open_notebook(enable_handoff=True, client_transport="tcp")
    km, provisioner = notebook.km, notebook.km.provisioner
    addresses = {("127.0.0.1", getattr(km, f"{channel}_port")) for channel in CHANNELS}
    assert addresses <= listening() and Path(km.connection_file).exists()
    other = open_in_other_process(enable_handoff=True)
    other.wait_for_ready()
    until(lambda: not IO.held_by(provisioner))
    assert not addresses & listening()
    assert not Path(km.connection_file).exists()
    assert not km.is_alive()
    notebook.end()
