"""A busy kernel is not hibernated: real kernels, the idle timer, and the culler of a real Jupyter Server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from jupyter_client.session import Session
from kernels import Notebook, Open
from leftovers import leftovers
from notebooks import Notebook as ServerNotebook
from notebooks import until
from servers import Server

from sandbox_provisioner.cli.app import main

pytestmark = pytest.mark.runsc

TIMER = {"enable_checkpoint_at_idle": True, "idle_timeout": 1.0}
CULLING = (
    "--MappingKernelManager.cull_idle_timeout=1",
    "--MappingKernelManager.cull_interval=1",
    "--MappingKernelManager.cull_connected=True",
)
CELL = 6
"""Seconds that a cell runs: several times the idle timeout."""
CONTROL = (
    ("usage_request", {}),
    ("kernel_info_request", {}),
    ("debug_request", {"type": "request", "seq": 1, "command": "debugInfo", "arguments": {}}),
    ("create_subshell_request", {}),
    ("list_subshell_request", {}),
    ("comm_info_request", {}),
)

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


def settled(notebook: Notebook) -> None:
    """Wait until the idle timer has hibernated the kernel."""
    until(lambda: notebook.asleep)


def watch(notebook: Notebook, seconds: float = CELL - 1, act: Callable[[], object] = lambda: None) -> None:
    """Check for some seconds that the kernel is busy and awake. Call ``act`` repeatedly."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        act()
        time.sleep(0.3)
        assert not notebook.asleep
        assert notebook.km.provisioner.busy


def control(notebook: Notebook, kind: str, content: dict[str, Any]) -> None:
    notebook.kc.control_channel.send(notebook.kc.session.msg(kind, content))


def test_control_requests_do_not_end_a_silent_cell(open_notebook: Open) -> None:
    notebook = open_notebook(**TIMER)
    request = notebook.kc.execute(f"import time; time.sleep({CELL}); x = 5", silent=True)

    def ask() -> None:
        for kind, content in CONTROL:
            control(notebook, kind, content)

    watch(notebook, act=ask)
    assert notebook.reply(request)["status"] == "ok"
    settled(notebook)
    assert notebook.run("x") == "5"


def test_busy_until_the_last_queued_cell_ends(open_notebook: Open) -> None:
    notebook = open_notebook(**TIMER)
    requests = [notebook.kc.execute(f"import time; time.sleep({CELL / 3})", silent=bool(n)) for n in range(3)]
    watch(notebook)
    reasons = notebook.km.provisioner.busy_reasons()
    assert len(reasons) == 1 and reasons[0].startswith("A cell has been running for ")
    for request in requests:
        notebook.reply(request)
    settled(notebook)


def test_busy_while_a_cell_runs_in_a_subshell(open_notebook: Open) -> None:
    notebook = open_notebook(**TIMER)
    control(notebook, "create_subshell_request", {})
    created = notebook.kc.get_control_msg(timeout=30)["content"]
    message = notebook.kc.session.msg("execute_request", {"code": f"import time; time.sleep({CELL})", "silent": True})
    message["header"]["subshell_id"] = created["subshell_id"]
    notebook.kc.shell_channel.send(message)
    notebook.run("1")  # the main shell's cell has ended earlier
    watch(notebook)
    notebook.reply(message["header"]["msg_id"])
    settled(notebook)


def test_busy_after_the_client_disconnects(open_notebook: Open) -> None:
    notebook = open_notebook(**TIMER)
    notebook.kc.execute(f"import time; time.sleep({CELL}); x = 5", silent=True)
    until(lambda: notebook.km.provisioner.busy)
    notebook.kc.stop_channels()
    watch(notebook)
    settled(notebook)
    notebook.kc = notebook.km.client()
    notebook.kc.start_channels()
    notebook.kc.wait_for_ready(timeout=60)
    assert notebook.run("x") == "5"
    notebook.kc.stop_channels()


@pytest.mark.debian
def test_interrupt_ends_a_cell(open_notebook: Open) -> None:
    notebook = open_notebook(**TIMER)
    notebook.kc.execute("import time; time.sleep(1000)")
    watch(notebook, 2)
    notebook.km.interrupt_kernel()
    settled(notebook)


def test_restart_or_death_ends_a_cell(open_notebook: Open) -> None:
    notebook = open_notebook(**TIMER)
    notebook.kc.execute("import time; time.sleep(1000)", silent=True)
    watch(notebook, 2)
    notebook.km.restart_kernel(now=True)
    assert not notebook.km.provisioner.activity.executing
    notebook.kc.wait_for_ready(timeout=60)
    settled(notebook)
    notebook.run("1")
    notebook.kc.execute("import os; os._exit(1)")
    until(lambda: not notebook.km.is_alive())
    assert not notebook.km.provisioner.activity.executing


def test_busy_after_hibernation_in_mid_cell(open_notebook: Open) -> None:
    notebook = open_notebook(**TIMER)
    request = notebook.kc.execute(f"import time\nfor _ in range({CELL * 2}): time.sleep(0.5)\nx = 5", silent=True)
    watch(notebook, 1)
    notebook.hibernate()
    notebook.wake()
    watch(notebook, 3)
    notebook.reply(request)
    settled(notebook)


def test_busy_after_reopening_in_mid_cell(open_notebook: Open, kernelspecs: KernelSpecManager) -> None:
    notebook = open_notebook(**TIMER)
    notebook.kc.execute(f"import time\nfor _ in range({CELL * 3}): time.sleep(0.5)\nx = 5", silent=True)
    watch(notebook, 1)
    notebook.hibernate()
    notebook.end(keep=True)
    km = KernelManager(kernel_name=notebook.km.kernel_name, kernel_spec_manager=kernelspecs)
    km.start_kernel(env={**os.environ, "JPY_SESSION_NAME": os.path.abspath("a.ipynb")})
    again = Notebook(km, km.client())
    watch(again, 3)
    settled(again)
    again.kc.start_channels()
    again.kc.wait_for_ready(timeout=60)
    assert again.run("x") == "5"
    again.end()


def test_forged_statuses_are_ignored(open_notebook: Open) -> None:
    notebook = open_notebook(**TIMER)
    request = notebook.kc.execute(f"import time; time.sleep({CELL})", silent=True)
    other = Session(key=b"another key")
    watch(notebook, act=lambda: notebook.kc.control_channel.socket.send_multipart(other.serialize(other.msg("x"))))
    notebook.reply(request)
    settled(notebook)


def test_magic_and_context_manager_keep_awake(open_notebook: Open) -> None:
    notebook = open_notebook(**TIMER)
    assert notebook.run("%sandbox keep-awake on") == "It is kept awake.\n"
    watch(notebook, 3)
    assert notebook.run("%sandbox keep-awake off") == "The kernel is not kept awake.\n"
    settled(notebook)
    assert notebook.run("%sandbox keep-awake 3s") == "It is kept awake for another 3 seconds.\n"
    watch(notebook, 2)
    settled(notebook)
    notebook.run(
        "import threading, time\nfrom jupyter_sandbox import keep_awake\n"
        "def work():\n    global done\n    with keep_awake():\n        time.sleep(4)\n        done = True\n"
        "threading.Thread(target=work).start()\ntime.sleep(0.5)"
    )
    watch(notebook, 2.5)
    assert notebook.km.provisioner.busy_reasons() == ["It is still kept awake by keep_awake() in the notebook"]
    settled(notebook)
    assert notebook.run("done") == "True"
    with pytest.raises(AssertionError):
        notebook.run("%sandbox keep-awake sometimes")


def test_culler_keeps_a_busy_kernel(serve: Serve, sandboxed: Sandboxed, runtime: Path) -> None:
    server = serve(*CULLING)
    notebook = ServerNotebook(server, sandboxed())
    notebook.kc.execute(f"import time; time.sleep({CELL}); x = 5", silent=True)
    end = time.monotonic() + CELL - 1
    while time.monotonic() < end:
        notebook.kc.control_channel.send(notebook.kc.session.msg("usage_request"))
        time.sleep(0.3)
        assert server.ask("GET", f"kernels/{notebook.kernel_id}")[1]["execution_state"] == "busy"
        shown = server.ask("GET", "sandboxes")[1]["items"][0]
        assert (shown["state"], shown["busy"]) == ("running", True)
    until(lambda: [line for line in leftovers(runtime) if line.startswith("folder")] == [])
    assert notebook.run("x") == "5"
    notebook.close()


def test_culler_ends_a_busy_kernel_if_configured(serve: Serve, sandboxed: Sandboxed, runtime: Path) -> None:
    server = serve(*CULLING, "--MappingKernelManager.cull_busy=True")
    notebook = ServerNotebook(server, sandboxed())
    notebook.run("x = 5")
    notebook.kc.execute("import time; time.sleep(1000)", silent=True)
    until(lambda: [line for line in leftovers(runtime) if line.startswith("folder")] == [])
    notebook.close()


def test_culler_keeps_a_busy_ephemeral_kernel(serve: Serve, sandboxed: Sandboxed) -> None:
    server = serve(*CULLING)
    notebook = ServerNotebook(server, sandboxed(persistent=False))
    request = notebook.kc.execute(f"import time; time.sleep({CELL})", silent=True)
    end = time.monotonic() + CELL - 1
    while time.monotonic() < end:
        notebook.kc.control_channel.send(notebook.kc.session.msg("usage_request"))
        time.sleep(0.3)
        assert notebook.listed()
    while notebook.kc.get_shell_msg(timeout=60)["parent_header"]["msg_id"] != request:
        pass
    until(lambda: not notebook.listed())


def test_api_keeps_awake(serve: Serve, sandboxed: Sandboxed, runtime: Path) -> None:
    server = serve(*CULLING)
    notebook = ServerNotebook(server, sandboxed())
    notebook.run("x = 5")
    identity = server.ask("GET", "sandboxes")[1]["items"][0]["id"]
    status, shown = server.ask("POST", f"sandboxes/{identity}/keep-awake", {"seconds": None})
    assert (status, shown["busy_reasons"]) == (200, ["It is kept awake"])
    time.sleep(4)
    assert server.ask("GET", f"sandboxes/{identity}")[1]["state"] == "running"
    assert server.ask("POST", f"sandboxes/{identity}/keep-awake", {"seconds": 0})[1]["busy"] is False
    until(lambda: [line for line in leftovers(runtime) if line.startswith("folder")] == [])
    assert server.ask("POST", f"sandboxes/{identity}/keep-awake", {"seconds": -1})[0] == 400
    notebook.close()


def test_off_ends_a_hold_of_magic_command_line_and_api(
    serve: Serve, sandboxed: Sandboxed, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve()
    notebook = ServerNotebook(server, sandboxed())
    notebook.run("%sandbox keep-awake on")
    identity = server.ask("GET", "sandboxes")[1]["items"][0]["id"]
    reach = ["--server", server.url, "--token", "t"]
    assert main(["keep-awake", identity, "off", *reach]) == 0
    assert capsys.readouterr().out.endswith(": The kernel is not kept awake.\n")
    notebook.run("%sandbox keep-awake 2h")
    assert server.ask("POST", f"sandboxes/{identity}/keep-awake", {"seconds": 0})[1]["busy_reasons"] == []
    assert main(["keep-awake", identity, "on", *reach]) == 0
    assert notebook.run("%sandbox keep-awake off") == "The kernel is not kept awake.\n"
    notebook.run("from jupyter_sandbox import keep_awake\nwork = keep_awake()\nwork.__enter__()")
    still = "It is still kept awake by keep_awake() in the notebook.\n"
    assert notebook.run("%sandbox keep-awake off") == still
    capsys.readouterr()
    assert main(["keep-awake", identity, "off", *reach]) == 0
    assert capsys.readouterr().out.endswith(f": {still}")
    notebook.close()


@pytest.mark.slow
def test_silent_cell_runs_for_ten_minutes(open_notebook: Open) -> None:
    notebook = open_notebook(enable_checkpoint_at_idle=True, idle_timeout=2.0)
    request = notebook.kc.execute("import time; time.sleep(600); x = 5", silent=True)
    watch(notebook, 595, lambda: control(notebook, "usage_request", {}))
    assert notebook.reply(request)["status"] == "ok"
    settled(notebook)
    assert notebook.run("x") == "5"
