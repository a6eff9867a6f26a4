"""Test the functions that a notebook registers to run before a checkpoint and after a restore."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Thread

import pytest
from kernels import LONG, Open

from sandbox_provisioner.errors import UnsaveableError

pytestmark = [pytest.mark.runsc, pytest.mark.template_copies]

HOOKS = """
import threading
calls = []
def sandbox_before_checkpoint():
    calls.append(("before", threading.current_thread() is threading.main_thread()))
    print("before")
def sandbox_after_restore():
    calls.append(("after", threading.current_thread() is threading.main_thread()))
"""


@pytest.mark.debian
def test_hooks_run_in_main_thread_before_waking_cell(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run(HOOKS)
    notebook.hibernate()
    assert notebook.run("calls") == "[('before', True), ('after', True)]"
    notebook.hibernate()
    notebook.wake()
    assert notebook.run("len(calls)") == "4"


def test_hook_runs_after_restore_on_another_server(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run(HOOKS)
    notebook.hibernate()
    notebook.end(keep=True)
    assert open_notebook().run("[name for name, _ in calls]") == "['before', 'after']"


def test_hooks_run_during_busy_main_thread(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run(HOOKS)
    request = notebook.kc.execute("while len(calls) < 2: pass\nprint(calls)")
    while notebook.iopub(request)["content"].get("execution_state") != "busy":
        pass
    notebook.hibernate()
    notebook.wake()
    assert "".join(notebook.outputs(request)).split("\n")[-2] == "[('before', False), ('after', False)]"


def test_cell_sent_during_hooks_is_answered(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run(
        "import time\ndef sandbox_before_checkpoint():\n    print('about to', flush=True)\n    time.sleep(1.5)"
    )
    notebook.drain()
    falling_asleep = Thread(target=notebook.nap)
    falling_asleep.start()
    while notebook.kc.get_iopub_msg(timeout=LONG)["msg_type"] != "stream":
        pass
    request = notebook.kc.execute("time.sleep(1.5)\nprint('answered')")
    assert "".join(notebook.outputs(request)) == "answered\n"
    falling_asleep.join()


def test_hook_error_is_shown_and_logged(open_notebook: Open, caplog: pytest.LogCaptureFixture) -> None:
    notebook = open_notebook()
    notebook.run("x = 1\ndef sandbox_before_checkpoint():\n    raise ValueError('not\\nnow')")
    with caplog.at_level(logging.WARNING):
        notebook.hibernate()
    assert "hook failed: ValueError: not | now" in caplog.text
    assert notebook.kc.get_iopub_msg(timeout=10)
    assert notebook.run("x") == "1"


@pytest.mark.parametrize("hook", ["sandbox_before_checkpoint", "sandbox_after_restore"])
def test_slow_hook_is_abandoned(open_notebook: Open, caplog: pytest.LogCaptureFixture, hook: str) -> None:
    notebook = open_notebook(hook_timeout=0.5)
    notebook.run(f"import threading\nx = 1\ngo = threading.Event()\ndef {hook}():\n    go.wait()")
    with caplog.at_level(logging.WARNING):
        notebook.hibernate()
        notebook.wake()
    assert "hook failed: it took longer than 0.5 seconds" in caplog.text
    notebook.kc.control_channel.send(notebook.kc.session.msg("execute_request", {"code": "go.set()", "silent": True}))
    assert notebook.run("x") == "1"


def test_zero_timeout_disables_hooks(open_notebook: Open) -> None:
    notebook = open_notebook(hook_timeout=0)
    notebook.run(HOOKS)
    notebook.hibernate()
    assert notebook.run("calls") == "[]"


def test_failed_save_runs_resume_hook(open_notebook: Open, tmp_path: Path) -> None:
    library = tmp_path / "libraries" / "lib.so"
    library.parent.mkdir()
    library.write_bytes(bytes(4096))
    notebook = open_notebook(mounts=[str(library.parent)])
    notebook.run(HOOKS)
    notebook.run(f"import mmap\nfile = open({str(library)!r}, 'rb')")
    notebook.run("mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)")
    library.unlink()
    with pytest.raises(UnsaveableError):
        notebook.hibernate()
    assert notebook.run("[name for name, _ in calls]") == "['before', 'after']"


NOISE = """
import socket
for noise in (b"", b"{", b"[]", b'{"name": []}', b"x" * 10_000):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("/run/jupyter/hooks")
        try:
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
            stranger.recv(1)
        except OSError:
            pass
"""


def test_other_processes_cannot_end_a_hook(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run(HOOKS + NOISE)
    notebook.hibernate()
    assert notebook.run("[name for name, _ in calls]") == "['before', 'after']"


HALF_IMPORTED = """
import json, socket, sys, types
name = "IPython.core.interactiveshell"
whole, sys.modules[name] = sys.modules[name], types.ModuleType(name)
with socket.socket(socket.AF_UNIX) as caller:
    caller.connect("/run/jupyter/hooks")
    caller.sendall(json.dumps({"name": "sandbox_after_restore", "reseed": False}).encode())
    caller.shutdown(socket.SHUT_WR)
    caller.recv(1)
sys.modules[name] = whole
"""


def test_hook_call_during_import_can_be_repeated(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run(HOOKS + HALF_IMPORTED)
    notebook.hibernate()
    assert notebook.run("[name for name, _ in calls]") == "['before', 'after']"


DRAW = "import random, numpy\nrandom.seed(1); numpy.random.seed(1)"
DRAWN = "random.random(), float(numpy.random.random())"


@pytest.mark.parametrize("reseed", [False, True])
def test_random_state_is_reset_only_on_request(open_notebook: Open, reseed: bool) -> None:
    notebook = open_notebook(reseed=reseed)
    notebook.run(DRAW)
    undisturbed = notebook.run(DRAWN)
    notebook.run(DRAW)
    notebook.hibernate()
    both = zip(eval(undisturbed), eval(notebook.run(DRAWN)), strict=True)
    assert [mine != yours for mine, yours in both] == [reseed, reseed]


def test_hooks_leave_no_names_in_notebook(open_notebook: Open) -> None:
    notebook = open_notebook()
    assert notebook.run("import sys\n'hooks' in sys.modules, '/.sandbox' in sys.path") == "(False, False)"
