"""The everyday work of a notebook, with a hibernation in the middle: the state afterwards is the state before.

All cases of the first test share one kernel and one hibernation. The other tests use a kernel's other channels.
"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

import pytest
from kernels import LONG, Notebook, Open

pytestmark = [pytest.mark.runsc, pytest.mark.user, pytest.mark.template_copies]

SEQUENCE = count(1)


class Case(NamedTuple):
    """A cell before the hibernation, a cell after it, and the output of the latter."""

    before: str
    after: str
    output: str


CASES = {
    # First: its processes inherit the pipes of the other cases otherwise, and keep them open.
    "pool of processes": Case(
        "import multiprocessing; w6 = multiprocessing.Pool(2); r6 = w6.map_async(abs, range(-3, 0)); _ = r6.get(60)",
        "m6 = w6.map(abs, [-5]); p6 = w6._pool[:]; w6.close(); w6.join(); r6.get(60), m6, [p.exitcode for p in p6]",
        "([3, 2, 1], [5], [0, 0])",
    ),
    "open file": Case(
        "f1 = open('notes.txt', 'w+'); _ = f1.write('one\\n'); f1.flush()",
        "_ = f1.write('two\\n'); _ = f1.seek(0); f1.read()",
        "'one\\ntwo\\n'",
    ),
    "pathlib and tempfile": Case(
        "import pathlib, tempfile; d2 = tempfile.TemporaryDirectory(); t2 = tempfile.NamedTemporaryFile('w+')\n"
        "_ = (pathlib.Path(d2.name) / 'a').write_text('kept'); _ = t2.write('open')",
        "_ = t2.seek(0); (pathlib.Path(d2.name) / 'a').read_text(), t2.read()",
        "('kept', 'open')",
    ),
    "database in a file": Case(
        "import sqlite3; c3 = sqlite3.connect('data.sqlite'); _ = c3.execute('create table t (n)')\n"
        "c3.commit(); _ = c3.execute('insert into t values (7)')",
        "c3.commit(); sqlite3.connect('data.sqlite').execute('select n from t').fetchall()",
        "[(7,)]",
    ),
    "database in memory": Case(
        "import sqlite3; c4 = sqlite3.connect(':memory:'); _ = c4.execute('create table t (n)')\n"
        "_ = c4.executemany('insert into t values (?)', [(n,) for n in range(9)]); q4 = c4.execute('select n from t')\n"
        "_ = q4.fetchone()",
        "q4.fetchone(), c4.execute('select sum(n) from t').fetchone()",
        "((1,), (36,))",
    ),
    "subprocess": Case(
        "import subprocess; p5 = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        "_ = p5.stdin.write('one\\n'); p5.stdin.flush(); r5 = p5.stdout.readline()",
        "r5 + p5.communicate('two\\n')[0], p5.returncode",
        "('one\\ntwo\\n', 0)",
    ),
    "pool of threads": Case(
        "import threading; from concurrent.futures import ThreadPoolExecutor; g7 = threading.Event()\n"
        "e7 = ThreadPoolExecutor(2); r7 = [e7.submit(g7.wait, 60), e7.submit(sum, [1, 2])]",
        "g7.set(); [one.result(60) for one in r7]",
        "[True, 3]",
    ),
    "thread with a queue": Case(
        "import queue, threading; i8, o8 = queue.Queue(), queue.Queue()\n"
        "threading.Thread(target=lambda: [o8.put(i8.get() * 2) for _ in range(2)], daemon=True).start(); i8.put(1)\n"
        "r8 = o8.get(timeout=60)",
        "i8.put(r8); o8.get(timeout=60)",
        "4",
    ),
    "asyncio": Case(
        "import asyncio; e9 = asyncio.Event()\nasync def wait9():\n    await e9.wait(); return 'woken'\n"
        "t9 = asyncio.ensure_future(wait9()); await asyncio.sleep(0)",
        "e9.set(); print(await asyncio.wait_for(t9, 60), (await asyncio.gather(asyncio.sleep(0, 'slept')))[0])",
        "woken slept",
    ),
    "asyncio subprocess": Case(
        "import asyncio; p10 = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)",
        "print(await p10.communicate(b'text'), p10.returncode)",
        "(b'text', None) 0",
    ),
    "generators": Case(
        "g11 = (n * n for n in range(9)); _ = next(g11), next(g11)\ni11 = iter(open('/etc/hostname', 'rb').read, b'')",
        "next(g11), list(i11) is not None",
        "(4, True)",
    ),
    "sockets on loopback": Case(
        "import socket; s12 = socket.create_server(('127.0.0.1', 0))\n"
        "c12 = socket.create_connection(s12.getsockname()); a12, _ = s12.accept(); c12.sendall(b'one')",
        "c12.sendall(b'two'); c12.shutdown(1); b''.join(iter(lambda: a12.recv(9), b''))",
        "b'onetwo'",
    ),
    "web server on loopback": Case(
        "import http.server, threading, urllib.request; h13 = http.server.ThreadingHTTPServer(('127.0.0.1', 0), "
        "type('H', (http.server.BaseHTTPRequestHandler,), {'do_GET': lambda self: (self.send_response(204), "
        "self.end_headers()), 'log_message': lambda *_: None}))\n"
        "threading.Thread(target=h13.serve_forever, daemon=True).start()",
        "urllib.request.urlopen(f'http://127.0.0.1:{h13.server_port}/', timeout=60).status",
        "204",
    ),
    "signals": Case(
        "import signal; r14 = []; _ = signal.signal(signal.SIGUSR1, lambda number, frame: r14.append(number))",
        "signal.raise_signal(signal.SIGUSR1); r14 == [signal.SIGUSR1]",
        "True",
    ),
    "logging": Case(
        "import logging, sys; l15 = logging.getLogger('case15'); l15.propagate = False\n"
        "l15.addHandler(logging.StreamHandler(sys.stdout)); l15.addHandler(logging.FileHandler('log15.txt'))\n"
        "l15.warning('before')",
        "l15.warning('after'); print(open('log15.txt').read().split())",
        "after\n['before', 'after']",
    ),
    "mapped array": Case(
        "import numpy as np; np.save('a16.npy', np.arange(5)); m16 = np.load('a16.npy', mmap_mode='r+'); m16[0] = 9",
        "m16[1] = 8; m16.flush(); np.load('a16.npy').tolist()",
        "[9, 8, 2, 3, 4]",
    ),
    "data frame in chunks": Case(
        "import pandas as pd; pd.DataFrame({'n': range(6)}).to_csv('d17.csv', index=False)\n"
        "r17 = pd.read_csv('d17.csv', chunksize=2); _ = next(r17)",
        "[int(chunk.n.sum()) for chunk in r17]",
        "[5, 9]",
    ),
    "plot": Case(
        "%matplotlib inline\nimport matplotlib.pyplot as plt; f18, a18 = plt.subplots()\n"
        "_ = a18.plot([1, 2]); plt.close(f18)",
        "_ = a18.plot([2, 1]); import io; b18 = io.BytesIO(); f18.savefig(b18); len(a18.lines), b18.getvalue()[1:4]",
        "(2, b'PNG')",
    ),
    "%%bash": Case("%%bash --out o19\nexport A=1; echo $A", "%%bash\necho again", "again\n"),
    "output of %%bash": Case("o20 = None", "o19", "'1\\n'"),
    "%run and %autoreload": Case(
        "%load_ext autoreload\n%autoreload 2\n_ = open('mod21.py', 'w').write('value = 1\\n')\n"
        "%run mod21.py\nimport mod21",
        "_ = open('mod21.py', 'w').write('value = 22\\n')\n%autoreload now\nvalue, mod21.value",
        "(1, 22)",
    ),
    "%store": Case("s22 = [1, 2]\n%store s22", "del s22\n%store -r s22\ns22", "[1, 2]"),
    "%timeit": Case("t23 = 1", "r23 = %timeit -n1 -r1 -q -o t23\nr23.loops", "1"),
    "history": Case("h24 = 'kept'", "\"h24 = 'kept'\" in In", "True"),
}


def test_state_after_hibernation_is_the_state_before(open_notebook: Open) -> None:
    notebook = open_notebook()
    for case in CASES.values():
        notebook.run(case.before)
    notebook.hibernate()
    outputs = {}
    for name, case in CASES.items():
        try:
            outputs[name] = notebook.run(case.after).strip()
        except AssertionError as error:
            outputs[name] = str(error)
    assert outputs == {name: case.output.strip() for name, case in CASES.items()}


def answer(notebook: Notebook, prompt: str, text: str) -> None:
    """Wait for a prompt, hibernate the kernel, and answer."""
    request = notebook.kc.get_stdin_msg(timeout=LONG)
    assert request["content"]["prompt"].strip() == prompt
    notebook.hibernate()
    notebook.kc.input(text)


def test_prompts_of_input_and_debugger(open_notebook: Open) -> None:
    notebook = open_notebook()
    request = notebook.kc.execute("name = input('Name?')\ny = 3\nimport pdb; pdb.set_trace()\ny * 2", allow_stdin=True)
    answer(notebook, "Name?", "Ada")
    answer(notebook, "ipdb>", "y = 5")
    answer(notebook, "ipdb>", "continue")
    assert notebook.reply(request)["status"] == "ok"
    assert notebook.run("name, y") == "('Ada', 5)"


def test_widget_is_connected(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run(
        "import ipywidgets\nslider = ipywidgets.IntSlider(3); seen = []\n"
        "slider.observe(lambda change: seen.append((change.old, change.new)), 'value')"
    )
    comm_id = notebook.run("print(slider.comm.comm_id)").strip()
    notebook.hibernate()
    update = {"comm_id": comm_id, "data": {"method": "update", "state": {"value": 7}, "buffer_paths": []}}
    notebook.kc.shell_channel.send(notebook.kc.session.msg("comm_msg", update))
    assert notebook.run("slider.value, seen") == "(7, [(3, 7)])"


def debug(notebook: Notebook, command: str, **arguments: Any) -> Any:
    """Send a request to the debugger. Return the body of its successful response."""
    kc = notebook.kc
    content = {"type": "request", "seq": next(SEQUENCE), "command": command, "arguments": arguments}
    request = kc.session.msg("debug_request", content)
    kc.control_channel.send(request)
    while True:
        reply = kc.get_control_msg(timeout=LONG)
        if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
            assert reply["content"]["success"], reply["content"]
            return reply["content"].get("body")


def test_debugger_keeps_breakpoints(open_notebook: Open) -> None:
    notebook = open_notebook()
    cell = "first = 1\nsecond = first + 1\nthird = second + 1"
    debug(notebook, "initialize", clientID="test", adapterID="", pathFormat="path")
    debug(notebook, "attach")
    source = {"path": debug(notebook, "dumpCell", code=cell)["sourcePath"]}
    debug(notebook, "setBreakpoints", source=source, breakpoints=[{"line": 3}], sourceModified=False)
    debug(notebook, "configurationDone")
    notebook.hibernate()
    assert debug(notebook, "debugInfo")["breakpoints"][0]["breakpoints"] == [{"line": 3}]
    request = notebook.kc.execute(cell)
    while (message := notebook.kc.get_iopub_msg(timeout=LONG))["content"].get("event") != "stopped":
        assert message["content"].get("execution_state") != "idle" or message["parent_header"]["msg_id"] != request
    thread = message["content"]["body"]["threadId"]
    notebook.hibernate()
    frame = debug(notebook, "stackTrace", threadId=thread)["stackFrames"][0]
    assert frame["line"] == 3
    debug(notebook, "continue", threadId=thread)
    assert notebook.reply(request)["status"] == "ok"
    assert notebook.run("third") == "3"
