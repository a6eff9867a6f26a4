"""Test SandboxProvisioner with Jupyter's own kernel managers: it fulfils the contract for kernel provisioners."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager, IOLoopKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager, KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.session import Session
from jupyter_core.utils import ensure_async, ensure_event_loop
from kernels import run
from leftovers import leftovers, listening
from servers import READY, Server
from traitlets.config import Config

from sandbox_provisioner.errors import ConfigurationError
from sandbox_provisioner.provisioner import SandboxProvisioner

pytestmark = [pytest.mark.runsc, pytest.mark.user]

Start = Callable[..., tuple[KernelManager, BlockingKernelClient]]
Sandboxed = Callable[..., str]
Provision = Callable[..., Any]
Refuse = Callable[["Bad"], str]

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
QUICK_RESTARTS = Config({"KernelRestarter": {"time_to_dead": 0.2, "random_ports_until_alive": False}})


def ports(km: KernelManager) -> dict[str, int]:
    return {channel: getattr(km, f"{channel}_port") for channel in CHANNELS}


def interrupt_a_busy_cell(km: KernelManager, kc: BlockingKernelClient) -> dict[str, Any]:
    """Interrupt a cell that sleeps, and return the content of its reply."""
    request = kc.execute("print('begun', flush=True)\nimport time\ntime.sleep(100)")
    while kc.get_iopub_msg(timeout=READY)["msg_type"] != "stream":
        pass
    km.interrupt_kernel()
    return reply_to(kc, request)


def reply_to(kc: BlockingKernelClient, request: str) -> dict[str, Any]:
    """Return the content of the reply to a request."""
    while (reply := kc.get_shell_msg(timeout=READY))["parent_header"].get("msg_id") != request:
        pass
    content: dict[str, Any] = reply["content"]
    return content


async def answer(kc: AsyncKernelClient, code: str) -> str:
    """Return the value of an expression in the kernel. Repeat the request if the previous kernel ended with it."""
    while True:
        try:
            reply = await kc.execute(code="", user_expressions={"value": code}, reply=True, timeout=10)
        except TimeoutError:
            continue
        value: str = reply["content"]["user_expressions"]["value"]["data"]["text/plain"]
        return value


@pytest.fixture
async def provision(kernelspecs: KernelSpecManager, notebook_folder: Path) -> AsyncIterator[Provision]:
    """Return a function that starts a kernel and returns its asynchronous manager. The kernel ends after the test."""
    started: list[KernelManager] = []

    async def start(name: str, make: type[KernelManager] = AsyncKernelManager, **settings: Any) -> Any:
        km = make(kernel_name=name, kernel_spec_manager=kernelspecs, **settings)
        started.append(km)
        await ensure_async(km.start_kernel())
        return km

    yield start
    for km in started:
        await km._async_shutdown_kernel(now=True)


# -- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.debian
def test_interrupt_as_signal(start_kernel: Start, sandboxed: Sandboxed) -> None:
    km, kc = start_kernel(sandboxed())
    assert interrupt_a_busy_cell(km, kc)["ename"] == "KeyboardInterrupt"
    assert run(kc, "1 + 1") == "2"


@pytest.mark.debian
def test_interrupt_as_message_if_kernelspec_requires_it(
    start_kernel: Start, sandboxed: Sandboxed, kernelspecs: KernelSpecManager
) -> None:
    spec = {**kernelspecs.get_kernel_spec("python3").to_dict(), "interrupt_mode": "message"}
    km, kc = start_kernel(sandboxed(spec=spec))
    assert interrupt_a_busy_cell(km, kc)["ename"] == "KeyboardInterrupt"
    assert run(kc, "1 + 1") == "2"


# -- restarts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", [False, True], ids=["politely", "at once"])
def test_restart_keeps_the_ports_and_the_client(start_kernel: Start, sandboxed: Sandboxed, now: bool) -> None:
    km, kc = start_kernel(sandboxed())
    run(kc, "x = 1")
    before = ports(km)
    km.restart_kernel(now=now)
    kc.wait_for_ready(timeout=READY)
    assert ports(km) == before
    assert run(kc, "'x' in globals()") == "False"


def test_restart_with_new_ports_closes_the_old_ones(start_kernel: Start, sandboxed: Sandboxed) -> None:
    km, kc = start_kernel(sandboxed(client_transport="tcp"), manager={"cache_ports": False})
    before = ports(km)
    kc.stop_channels()
    km.restart_kernel(now=True, newports=True)
    client = km.client()
    client.start_channels()
    client.wait_for_ready(timeout=READY)
    assert run(client, "1 + 1") == "2"
    assert not set(ports(km).values()) & set(before.values())
    assert not {port for _, port in listening()} & set(before.values())
    client.stop_channels()


@pytest.mark.parametrize("manager", [AsyncIOLoopKernelManager, IOLoopKernelManager])
async def test_dead_kernel_is_restarted_for_the_same_client(
    provision: Provision, sandboxed: Sandboxed, manager: type[KernelManager]
) -> None:
    km = await provision(sandboxed(), manager, config=QUICK_RESTARTS)
    restarted: Future[bool] = Future()
    km.add_restart_callback(lambda: restarted.set_result(True))
    kc = AsyncKernelClient(**km.get_connection_info(session=True))
    kc.start_channels()
    assert await answer(kc, "'x' in globals()") == "False"
    kc.execute("x = 1; import os; os.kill(os.getpid(), 9)")
    await asyncio.wait_for(asyncio.wrap_future(restarted), READY)
    assert await answer(kc, "'x' in globals()") == "False"
    kc.stop_channels()


# -- the process -----------------------------------------------------------------------------------------------------


async def test_running_kernel_has_a_process_and_no_status(provision: Provision, sandboxed: Sandboxed) -> None:
    provisioner = (await provision(sandboxed())).provisioner
    assert provisioner.has_process
    assert await provisioner.poll() is None


@pytest.mark.parametrize("how, status", [("kill", -signal.SIGKILL), ("terminate", -signal.SIGTERM)])
async def test_signalled_kernel_has_the_status_of_the_signal(
    provision: Provision, sandboxed: Sandboxed, how: str, status: int
) -> None:
    provisioner = (await provision(sandboxed())).provisioner
    await getattr(provisioner, how)()
    assert await provisioner.wait() == status
    assert await provisioner.poll() == status
    assert not provisioner.has_process


async def test_kernel_that_exits_reports_its_status(provision: Provision, sandboxed: Sandboxed) -> None:
    spec = {"argv": ["sh", "-c", "exit 3"], "display_name": "exits", "language": "sh"}
    provisioner = (await provision(sandboxed("exits", spec=spec))).provisioner
    assert await provisioner.wait() == 3
    assert await provisioner.poll() == 3
    assert not provisioner.has_process


async def test_wait_returns_after_cleanup_of_the_sandbox(
    provision: Provision, sandboxed: Sandboxed, runtime: Path
) -> None:
    provisioner = (await provision(sandboxed())).provisioner
    await provisioner.kill()
    await provisioner.wait()
    assert leftovers(runtime) == []


async def test_signals_to_a_kernel_that_has_ended_do_nothing(provision: Provision, sandboxed: Sandboxed) -> None:
    provisioner = (await provision(sandboxed())).provisioner
    await provisioner.kill()
    await provisioner.send_signal(signal.SIGINT)
    await provisioner.kill()
    await provisioner.wait()
    await provisioner.terminate()
    assert await provisioner.wait() == 0


async def test_user_signal_reaches_the_kernel(provision: Provision, sandboxed: Sandboxed) -> None:
    km = await provision(sandboxed())
    kc = km.client()
    kc.start_channels()
    await kc.wait_for_ready(timeout=READY)
    await kc.execute(
        "import signal; got = []; signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))", reply=True
    )
    await km.signal_kernel(signal.SIGUSR1)
    while await answer(kc, "got") == "[]":
        pass
    assert await answer(kc, "got == [signal.SIGUSR1]") == "True"
    kc.stop_channels()


async def test_shutdown_message_lets_the_kernel_exit(provision: Provision, sandboxed: Sandboxed) -> None:
    km = await provision(sandboxed())
    kc = km.client()
    kc.start_channels()
    await kc.wait_for_ready(timeout=READY)
    reply = await kc.shutdown(reply=True, timeout=READY)
    assert reply["msg_type"] == "shutdown_reply"
    assert await km.provisioner.wait() == 0
    kc.stop_channels()


async def test_stable_start_time_is_at_least_the_recommended_one(provision: Provision, sandboxed: Sandboxed) -> None:
    provisioner = (await provision(sandboxed())).provisioner
    assert provisioner.get_stable_start_time(recommended=10) > 10
    assert provisioner.get_stable_start_time(recommended=99) == 99


async def test_provisioner_info_has_the_sandbox_and_container_ids(provision: Provision, sandboxed: Sandboxed) -> None:
    km = await provision(sandboxed())
    first = await km.provisioner.get_provisioner_info()
    await km.restart_kernel(now=True)
    second = await km.provisioner.get_provisioner_info()
    assert first["sandbox_id"] == second["sandbox_id"] == first["kernel_id"] == km.kernel_id
    assert first["container_id"] != second["container_id"]


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.debian
@pytest.mark.parametrize("guest", ["ipc", "tcp"])
@pytest.mark.parametrize("host", ["tcp", "ipc"])
def test_transports_outside_and_inside_are_independent(
    start_kernel: Start, sandboxed: Sandboxed, host: str, guest: str
) -> None:
    km, kc = start_kernel(sandboxed(guest_transport=guest), manager={"transport": host})
    assert run(kc, "1 + 1") == "2"
    km.restart_kernel(now=True)
    kc.wait_for_ready(timeout=READY)
    assert run(kc, "import ipykernel; ipykernel.connect.get_connection_info(unpack=True)['transport']") == repr(guest)


def test_kernel_ports_are_on_loopback_only(start_kernel: Start, sandboxed: Sandboxed) -> None:
    before = listening()
    km, _ = start_kernel(sandboxed(client_transport="tcp"))
    assert listening() - before == {("127.0.0.1", port) for port in ports(km).values()}


def test_ipc_sockets_are_private_and_removed_with_the_kernel(
    start_kernel: Start, sandboxed: Sandboxed, tmp_path: Path
) -> None:
    km, kc = start_kernel(sandboxed(), manager={"transport": "ipc", "ip": str(tmp_path / "channel")})
    sockets = list(tmp_path.glob("channel-*"))
    assert len(sockets) == len(CHANNELS)
    assert {path.stat().st_mode & 0o777 for path in sockets} == {0o600}
    kc.stop_channels()
    km.shutdown_kernel(now=True)
    assert list(tmp_path.glob("channel-*")) == []


def test_encryption_is_end_to_end(start_kernel: Start, sandboxed: Sandboxed) -> None:
    km, kc = start_kernel(sandboxed(client_transport="tcp"), manager={"transport_encryption": "required"})
    assert run(kc, "1 + 1") == "2"
    address = ("127.0.0.1", km.shell_port)
    with socket.create_connection(address, READY) as wire, wire.makefile("rb") as received:
        wire.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32))
        greeting = received.read(64)
    assert greeting[12:32].rstrip(b"\0") == b"CURVE"


def test_each_of_two_clients_gets_its_own_replies(start_kernel: Start, sandboxed: Sandboxed) -> None:
    km, one = start_kernel(sandboxed())
    two = km.client(session=Session(key=km.session.key))
    two.start_channels()
    two.wait_for_ready(timeout=READY)
    requests = {client: client.execute(f"print({number})") for number, client in enumerate((one, two))}
    for client, request in requests.items():
        assert reply_to(client, request)["status"] == "ok"
        received = ""
        while len(received) < len("0\n1\n"):
            received += client.get_iopub_msg(timeout=READY)["content"].get("text", "")
        assert sorted(received.split()) == ["0", "1"]
    two.stop_channels()


# -- what the kernel is given ----------------------------------------------------------------------------------------


def test_kernel_gets_only_permitted_variables(
    start_kernel: Start, sandboxed: Sandboxed, kernelspecs: KernelSpecManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_SECRET", "hidden")
    monkeypatch.setenv("SERVER_OFFER", "passed")
    monkeypatch.setenv("LC_TIME", "C")
    spec = {**kernelspecs.get_kernel_spec("python3").to_dict(), "env": {"OF_THE_SPEC": "spec-${SERVER_OFFER}"}}
    name = sandboxed(spec=spec, pass_environment=["SERVER_OFFER"])
    _, kc = start_kernel(name, env={**os.environ, "OF_THE_START": "start"})
    seen = json.loads(run(kc, "import json, os; print(json.dumps(dict(os.environ)))"))
    assert seen["OF_THE_SPEC"] == "spec-passed"
    assert seen["OF_THE_START"] == "start"
    assert seen["SERVER_OFFER"] == "passed"
    assert seen["LC_TIME"] == "C"
    assert "SERVER_SECRET" not in seen
    assert "hidden" not in json.dumps(seen)


def test_kernelspec_may_repeat_a_variable_of_the_server(
    start_kernel: Start, sandboxed: Sandboxed, kernelspecs: KernelSpecManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPEATED", "same")
    spec = {**kernelspecs.get_kernel_spec("python3").to_dict(), "env": {"REPEATED": "same"}}
    _, kc = start_kernel(sandboxed(spec=spec))
    assert run(kc, "import os; os.environ['REPEATED']") == "'same'"


@pytest.mark.debian
def test_mounts_are_read_only_by_default(start_kernel: Start, sandboxed: Sandboxed, tmp_path: Path) -> None:
    for name in ("plain", "ro", "rw"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text(name)
    places = {"plain": tmp_path / "plain", "ro": Path("/data/ro"), "rw": Path("/data/rw")}
    mounts = [f"{tmp_path}/plain", f"{tmp_path}/ro:/data/ro:ro", f"{tmp_path}/rw:/data/rw:rw"]
    _, kc = start_kernel(sandboxed(mounts=mounts))
    for name, place in places.items():
        assert run(kc, f"open('{place}/old').read()") == repr(name)
        if name == "rw":
            run(kc, f"print('new', file=open('{place}/new', 'w'), flush=True)")
        else:
            with pytest.raises(AssertionError, match="Read-only file system"):
                run(kc, f"open('{place}/new', 'w')")
    assert (tmp_path / "rw" / "new").read_text() == "new\n"
    assert not (tmp_path / "plain" / "new").exists()
    assert not (tmp_path / "ro" / "new").exists()


def test_single_file_can_be_mounted(start_kernel: Start, sandboxed: Sandboxed, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("1,2")
    (tmp_path / "other.csv").write_text("3,4")
    _, kc = start_kernel(sandboxed(mounts=[f"{tmp_path}/one.csv:/data/table.csv"]))
    assert run(kc, "open('/data/table.csv').read()") == "'1,2'"
    assert run(kc, "import os; os.listdir('/data')") == "['table.csv']"
    assert run(kc, f"os.path.exists('{tmp_path}/other.csv')") == "False"


def test_kernel_works_in_the_notebooks_folder_and_can_write_there(
    start_kernel: Start, sandboxed: Sandboxed, tmp_path: Path
) -> None:
    folder = tmp_path / "with spaces and ü"
    folder.mkdir()
    km, kc = start_kernel(sandboxed(), cwd=str(folder))
    assert run(kc, "import os; os.getcwd()") == repr(str(folder))
    run(kc, "open('made.txt', 'w').write('by the kernel')")
    assert (folder / "made.txt").read_text() == "by the kernel"
    assert km.resolve_path("made.txt") == str(folder / "made.txt")


def test_working_folder_replaces_the_notebooks_folder(
    start_kernel: Start, sandboxed: Sandboxed, tmp_path: Path, notebook_folder: Path
) -> None:
    (tmp_path / "work").mkdir()
    (notebook_folder / "notebook.ipynb").touch()
    _, kc = start_kernel(sandboxed(working_folder=str(tmp_path / "work")), cwd=str(notebook_folder))
    assert run(kc, "import os; os.getcwd()") == repr(str(tmp_path / "work"))
    assert run(kc, f"os.path.exists('{notebook_folder}/notebook.ipynb')") == "False"


def test_warning_once_for_folder_on_import_path(
    start_kernel: Start,
    sandboxed: Sandboxed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "imported"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    start_kernel(sandboxed(), cwd=str(folder))
    assert caplog.text.count(f"The server imports Python modules from {folder}, which this kernel can write to") == 1


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a home folder that contains a key."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "id_rsa").write_text("a key")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_notebook_in_the_home_folder_is_refused(start_kernel: Start, sandboxed: Sandboxed, home: Path) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        start_kernel(sandboxed(), cwd=str(home))
    assert str(refusal.value) == (
        f"A sandboxed kernel for a notebook in {home} would see and could change everything in it, keys and start-up "
        "files included. Move the notebook into a folder of its own, or set SandboxProvisioner.allow_home."
    )


def test_notebook_in_the_home_folder_can_be_allowed(start_kernel: Start, sandboxed: Sandboxed, home: Path) -> None:
    _, kc = start_kernel(sandboxed(allow_home=True), cwd=str(home))
    assert run(kc, "open('id_rsa').read()") == "'a key'"


def test_kernel_without_a_notebook_gets_an_empty_home(
    start_kernel: Start, sandboxed: Sandboxed, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    _, kc = start_kernel(sandboxed())
    assert run(kc, "import os; os.getcwd()") == repr(str(home))
    assert "id_rsa" not in run(kc, "os.listdir()")


def test_precedence_is_kernelspec_configuration_environment(
    sandboxed: Sandboxed, kernelspecs: KernelSpecManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(config: Config, **stanza: str) -> str:
        km = KernelManager(kernel_name=sandboxed(**stanza), kernel_spec_manager=kernelspecs, config=config)
        factory = KernelProvisionerFactory.instance()
        provisioner = factory.create_provisioner_instance("id", km.kernel_spec, parent=km)
        assert isinstance(provisioner, SandboxProvisioner)
        return str(provisioner.working_folder)

    configured = Config({"SandboxProvisioner": {"working_folder": "/configuration"}})
    assert folder(Config()) == ""
    monkeypatch.setenv("SANDBOX_WORKING_FOLDER", "/environment")
    assert folder(Config()) == "/environment"
    assert folder(configured) == "/configuration"
    assert folder(configured, working_folder="/kernelspec") == "/kernelspec"


def test_every_setting_has_an_environment_variable_that_its_help_names(
    sandboxed: Sandboxed, kernelspecs: KernelSpecManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "mounts": ("/usr, /bin:/b:rw", ["/usr", "/bin:/b:rw"]),
        "pass_environment": ("ONE,TWO", ["ONE", "TWO"]),
        "network": ("host", "host"),
        "platform": ("ptrace", "ptrace"),
        "guest_transport": ("tcp", "tcp"),
        "working_folder": ("/work", "/work"),
        "allow_home": ("yes", True),
        "persistent": ("no", False),
        "enable_handoff": ("yes", True),
        "enable_checkpoint_at_idle": ("yes", True),
        "idle_timeout": ("60", 60.0),
        "handoff_timeout": ("5", 5.0),
        "on_shutdown": ("checkpoint", "checkpoint"),
        "storage_dir": ("/storage", "/storage"),
    }
    traits = SandboxProvisioner.class_traits(config=True)
    for name, (text, _) in given.items():
        variable = f"SANDBOX_{name.upper()}"
        assert variable in traits[name].help
        monkeypatch.setenv(variable, text)
    spec = kernelspecs.get_kernel_spec(sandboxed())
    provisioner = SandboxProvisioner(kernel_id="id", kernel_spec=spec)
    assert {name: getattr(provisioner, name) for name in given} == {name: value for name, (_, value) in given.items()}


def test_kernel_with_the_hosts_network_answers_and_restarts(start_kernel: Start, sandboxed: Sandboxed) -> None:
    km, kc = start_kernel(sandboxed(network="host"))
    assert run(kc, "1 + 1") == "2"
    km.restart_kernel(now=True)
    kc.wait_for_ready(timeout=READY)
    assert run(kc, "1 + 1") == "2"


# -- the process that starts it --------------------------------------------------------------------------------------


def test_io_thread_and_descriptors_end_with_the_last_kernel(start_kernel: Start, sandboxed: Sandboxed) -> None:
    km, kc = start_kernel(sandboxed())
    kc.stop_channels()
    km.shutdown_kernel()
    before = psutil.Process().num_fds()
    km, kc = start_kernel(sandboxed())
    run(kc, "print(1)")
    kc.stop_channels()
    km.shutdown_kernel()
    assert psutil.Process().num_fds() <= before
    assert "sandbox-io" not in [thread.name for thread in threading.enumerate()]


def _in_a_child(kernelspecs: KernelSpecManager, name: str) -> None:
    km = KernelManager(kernel_name=name, kernel_spec_manager=kernelspecs)
    km.start_kernel()
    kc = km.client()
    kc.start_channels()
    kc.wait_for_ready(timeout=READY)
    assert run(kc, "1 + 1") == "2"
    kc.stop_channels()
    km.shutdown_kernel(now=True)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_starts_kernels(start_kernel: Start, sandboxed: Sandboxed, kernelspecs: KernelSpecManager) -> None:
    name = sandboxed()
    _, kc = start_kernel(name)
    child = multiprocessing.get_context("fork").Process(target=_in_a_child, args=(kernelspecs, name))
    child.start()
    child.join(READY)
    assert child.exitcode == 0
    assert run(kc, "2 + 2") == "4"


@pytest.mark.parametrize("moment", ["at once", "when its folder is made", "when runsc runs"])
async def test_cancelled_start_leaves_nothing(
    sandboxed: Sandboxed,
    kernelspecs: KernelSpecManager,
    notebook_folder: Path,
    runtime: Path,
    provision: Provision,
    moment: str,
) -> None:
    ports_before = listening()
    name = sandboxed()
    starting = asyncio.create_task(provision(name))
    sign = {"at once": "", "when its folder is made": "folder", "when runsc runs": "process"}[moment]
    while not any(item.startswith(sign) for item in leftovers(runtime)) and sign:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert leftovers(runtime) == []
    assert listening() <= ports_before
    assert await (await provision(name)).provisioner.poll() is None


# -- bad input -------------------------------------------------------------------------------------------------------


@dataclass
class Bad:
    """Invalid settings, and texts that the error must contain: the value and the remedy. @ stands for a folder."""

    words: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ("python", "-m", "ipykernel_launcher", "-f", "{connection_file}")
    manager: dict[str, Any] = field(default_factory=dict)


BAD = {
    "an unknown setting": Bad(("'mount'", "mounts, network"), {"mount": ["@"]}),
    "an unknown value": Bad(("network", "'wlan'", "'none'", "'host'"), {"network": "wlan"}),
    "a value of the wrong kind": Bad(("mounts", "a list", "'/usr'"), {"mounts": {"/usr": "ro"}}),
    "an unknown network variable": Bad(("SANDBOX_NETWORK", "'wlan'", "none or host"), env={"SANDBOX_NETWORK": "wlan"}),
    "an unknown platform variable": Bad(("SANDBOX_PLATFORM", "'vm'", "systrap"), env={"SANDBOX_PLATFORM": "vm"}),
    "neither yes nor no": Bad(("SANDBOX_ALLOW_HOME", "'perhaps'", "1 or 0"), env={"SANDBOX_ALLOW_HOME": "perhaps"}),
    "a missing mount": Bad(("@/nowhere", "Create it"), {"mounts": ["@/nowhere"]}),
    "a missing mount in the environment": Bad(("@/nowhere", "Create it"), env={"SANDBOX_MOUNTS": "@/nowhere"}),
    "a mount of too many parts": Bad(("'/a:/b:/c:ro'", "source[:destination][:ro|rw]"), {"mounts": ["/a:/b:/c:ro"]}),
    "a relative mount": Bad(("'data'", "full path"), {"mounts": ["data"]}),
    "the whole disk as a mount": Bad(("'/:/disk'", "below /"), {"mounts": ["/:/disk"]}),
    "a missing runsc": Bad(("@/nowhere", "the runsc setting", "jupyter sandbox setup"), {"runsc": "@/nowhere"}),
    "a missing runsc in the environment": Bad(("@/nowhere", "SANDBOX_RUNSC"), env={"SANDBOX_RUNSC": "@/nowhere"}),
    "a runsc that is not executable": Bad(("not executable", "chmod +x @/plain"), {"runsc": "@/plain"}),
    "a runsc that is too old": Bad(("@/old", "20221219", "or newer", "jupyter sandbox setup"), {"runsc": "@/old"}),
    "a runsc that is none": Bad(("@/other", "something else", "jupyter sandbox setup"), {"runsc": "@/other"}),
    "a runsc that fails": Bad(("did not start", "status 7", "boom"), {"runsc": "@/broken"}),
    "a missing program": Bad(("'no-such-program'", "not found", "argv"), argv=("no-such-program",)),
    "a missing program by its path": Bad(("@/nowhere", "not found", "argv"), argv=("@/nowhere",)),
    "a missing working folder": Bad(("@/nowhere", "does not exist", "Create it"), {"working_folder": "@/nowhere"}),
    "an address that is not loopback": Bad(("0.0.0.0", "127.0.0.1"), manager={"ip": "0.0.0.0"}),
    "a runtime folder for all": Bad(("@/shared", "SANDBOX_RUNTIME_DIR"), env={"SANDBOX_RUNTIME_DIR": "@/shared"}),
}

SCRIPTS = {
    "old": "echo runsc version 0.0~20221219.0",
    "other": "echo something else; exit 1",
    "broken": '[ "$1" = --version ] && echo runsc version 20990101 && exit; echo boom >&2; exit 7',
}


@pytest.fixture
def bad(tmp_path: Path) -> dict[str, Bad]:
    """Return BAD with its placeholders replaced, and create the files in it."""
    (tmp_path / "plain").touch()
    (tmp_path / "shared" / "jupyter-sandbox").mkdir(parents=True)
    (tmp_path / "shared" / "jupyter-sandbox").chmod(0o777)
    for name, script in SCRIPTS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    filled = json.loads(json.dumps(BAD, default=asdict).replace("@", str(tmp_path)))
    return {case: Bad(**fields) for case, fields in filled.items()}


@pytest.fixture
def refuse(start_kernel: Start, sandboxed: Sandboxed, runtime: Path) -> Refuse:
    """Return a function that starts an invalid kernel and returns the error's text. Fails if anything is left."""

    def attempt(bad: Bad) -> str:
        spec = {"argv": bad.argv, "display_name": "Bad", "language": "python"}
        name = sandboxed("bad", spec=spec, **bad.config)
        ensure_event_loop()
        ports, descriptors, threads = listening(), psutil.Process().num_fds(), threading.active_count()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception) as refusal:
            for variable, value in bad.env.items():
                patch.setenv(variable, value)
            start_kernel(name, manager=bad.manager)
        assert leftovers(runtime) == []
        assert listening() <= ports
        assert psutil.Process().num_fds() <= descriptors
        assert threading.active_count() <= threads
        return str(refusal.value)

    return attempt


@pytest.mark.parametrize("case", BAD)
def test_invalid_kernel_is_refused_with_its_value_and_a_remedy(refuse: Refuse, bad: dict[str, Bad], case: str) -> None:
    text = refuse(bad[case])
    assert [word for word in bad[case].words if word not in text] == []


def test_valid_kernel_starts_after_all_refusals(
    refuse: Refuse, bad: dict[str, Bad], start_kernel: Start, sandboxed: Sandboxed
) -> None:
    for case in bad.values():
        refuse(case)
    _, kc = start_kernel(sandboxed())
    assert run(kc, "1 + 1") == "2"


def test_failed_program_is_logged_with_its_status_and_last_output(
    sandboxed: Sandboxed, start_kernel: Start, caplog: pytest.LogCaptureFixture
) -> None:
    argv = ["sh", "-c", "echo no module named ipykernel >&2; exit 3", "{connection_file}"]
    name = sandboxed("ends", spec={"argv": argv, "display_name": "Ends", "language": "sh"})
    with pytest.raises(RuntimeError, match="Kernel died"):
        start_kernel(name)
    (message,) = [text for text in caplog.messages if "ended with status" in text]
    assert "status 3" in message
    assert "no module named ipykernel" in message


ORDINARY_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
START_MEND_START = """
import os, sys
from jupyter_client.manager import start_new_kernel
name, mend = sys.argv[1:]
try:
    start_new_kernel(kernel_name=name)
except Exception as error:
    print(error)
exec(mend)
km, kc = start_new_kernel(kernel_name=name)
kc.stop_channels()
km.shutdown_kernel(now=True)
print("started")
"""


@pytest.fixture
def refused_by_system(sandboxed: Sandboxed, tmp_path: Path, notebook_folder: Path) -> Callable[..., str]:
    """Return a function that returns the error of a start on a changed system. A start after its repair must work."""

    def attempt(change: list[str], mend: str, env: dict[str, str] | None = None) -> str:
        argv = [*change, sys.executable, "-c", START_MEND_START, sandboxed(), mend]
        variables = {**os.environ, "JUPYTER_PATH": str(tmp_path), **(env or {})}
        done = subprocess.run(argv, env=variables, capture_output=True, text=True)
        *refusal, last = done.stdout.splitlines() or [""]
        assert last == "started", done.stdout + done.stderr
        return "\n".join(refusal)

    return attempt


@pytest.mark.parametrize("limit", ["size=32k", "nr_inodes=2"])
def test_full_disk_is_reported_and_a_later_start_succeeds(
    refused_by_system: Callable[..., str], tmp_path: Path, limit: str
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mount = f'mount -t tmpfs -o {limit} none "$0" && exec {shlex.join(ORDINARY_USER)} "$@"'
    change = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(full)]
    empty = "assert not any(files for _, _, files in os.walk(os.environ['SANDBOX_RUNTIME_DIR']))"
    mend = f"{empty}; os.environ['SANDBOX_RUNTIME_DIR'] = {str(tmp_path)!r}"
    text = refused_by_system(change, mend, {"SANDBOX_RUNTIME_DIR": str(full)})
    assert "disk is full" in text
    assert str(full) in text
    assert "df -h" in text


def test_forbidden_user_namespaces_are_reported_with_a_remedy(
    refused_by_system: Callable[..., str],
) -> None:
    setting = "/proc/sys/user/max_user_namespaces"
    change = [*ORDINARY_USER, "--keep-caps", "sh", "-c", 'echo 0 > "$0" && exec "$@"', setting]
    text = refused_by_system(change, f"open({setting!r}, 'w').write('1000')")
    assert "forbids user namespaces" in text
    assert "sudo sysctl -w user.max_user_namespaces=" in text


# -- Jupyter Server --------------------------------------------------------------------------------------------------


NEVER_STARTED = {"argv": ["true"], "display_name": "Bad", "language": "none"}


def test_server_reports_and_logs_why_a_kernel_did_not_start(
    serve: Callable[..., Server], sandboxed: Sandboxed, tmp_path: Path
) -> None:
    server = serve()
    bad, good = sandboxed("bad", spec=NEVER_STARTED, mounts=[f"{tmp_path}/nowhere"]), sandboxed()
    sentence = f"The mount '{tmp_path}/nowhere' cannot be made: {tmp_path}/nowhere does not exist. Create it"
    status, response = server.open_notebook(bad)
    assert status == 400
    assert sentence in response["message"]
    assert sentence in server.log.read_text()
    status, response = server.ask("POST", "kernels", {"name": bad})
    assert status == 400 and sentence in response["message"]
    assert server.ask("GET", "kernels") == (200, [])
    status, session = server.open_notebook(good)
    assert status == 201
    assert server.ask("DELETE", f"sessions/{session['id']}")[0] == 204
    server.process.kill()  # with jupyter_client 8.10, a server ignores SIGTERM after a failed start
    server.process.wait()


def test_kernel_of_a_server_has_its_folder_and_configuration(
    serve: Callable[..., Server], sandboxed: Sandboxed, notebook_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFERED", "yes")
    monkeypatch.setenv("SECRET", "no")
    server = serve("--SandboxProvisioner.pass_environment=OFFERED")
    _, session = server.open_notebook(sandboxed())
    kc = server.client(session["kernel"]["id"])
    assert run(kc, "import os; os.getcwd()") == repr(str(notebook_folder))
    assert run(kc, "[os.environ.get(name) for name in ('OFFERED', 'SECRET')]") == "['yes', None]"
    kc.stop_channels()
    assert server.ask("POST", f"kernels/{session['kernel']['id']}/restart")[0] == 200
    kc = server.ready_client(session["kernel"]["id"])
    assert run(kc, "'os' in globals()") == "False"
    kc.stop_channels()
