"""A kernel cannot forge lines of the server's log, send escape sequences to its terminal, or flood the log."""

from __future__ import annotations

import os
import pty
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from notebooks import Notebook
from servers import Server, answers

from sandbox_provisioner.kernel.output import BURST

LONG = 60
FORGED = "[E 2026-11-18 12:00:00.000 ServerApp] forged by a guest"
HOSTILE = f"""
import os, sys, time
os.write(2, b"\\x1b[2J\\x1b]0;title\\x07{FORGED}\\n{FORGED}\\r{FORGED}\\r\\n")
os.write(1, b"no line end")
while not os.path.exists("go"):
    time.sleep(0.05)
for _ in range(200):
    os.write(2, b"flood\\n" * 10_000)
os.write(2, b"{FORGED}")
open("done", "w").close()
time.sleep(1000)
"""
SERVER_LINE = re.compile(r"\[[A-Z] [^]]*\] |output of sandbox [\w-]+ [|*] |    |To access the server|$")

Sandboxed = Callable[..., str]


def hostile(sandboxed: Sandboxed) -> str:
    kernel = {"argv": [sys.executable, "-c", HOSTILE], "display_name": "it", "language": "python"}
    return sandboxed("hostile", spec=kernel)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_output_is_marked_as_the_kernels(
    serve: Callable[..., Server], sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    name, neighbour = hostile(sandboxed), sandboxed()
    server = serve()
    status, kernel = server.ask("POST", "kernels", {"name": name})
    assert status == 201
    until(lambda: "ServerApp] forged" in server.log.read_text())
    (notebook_folder / "go").touch()
    status, other = server.ask("POST", "kernels", {"name": neighbour})
    assert status == 201
    client = server.client(other["id"])
    assert answers(client)
    client.stop_channels()
    until(lambda: (notebook_folder / "done").exists())
    server.ask("DELETE", f"kernels/{kernel['id']}")
    server.stop()
    said = server.log.read_bytes()
    assert b"\x1b" not in said and b"\x07" not in said and b"\r" not in said
    lines = said.decode().splitlines()
    forged = [line for line in lines if "forged by a guest" in line]
    assert len(forged) >= 3
    assert all(line.startswith(f"output of sandbox {kernel['id']} | ") for line in forged)
    flood = [line for line in lines if line.endswith("| flood")]
    assert 0 < len(flood) <= BURST + 10 * LONG
    assert any(re.search(r"\* dropped \d+ lines \(\d+ bytes\)", line) for line in lines)
    assert all(SERVER_LINE.match(line) for line in lines)


def test_names_of_files_are_printable_in_the_log(
    serve: Callable[..., Server], sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    server, name = serve(), f"it\x1b[2J\r{FORGED}.ipynb"
    notebook = Notebook(server, sandboxed())
    notebook.run(f"open({name!r}, 'w').write('no notebook')")
    status, _ = server.ask("GET", f"contents/{quote(name)}")
    assert status == 400
    notebook.close()
    said = server.log.read_bytes()
    assert b"forged by a guest" in said
    assert b"\x1b" not in said and b"\r" not in said


def test_terminal_gets_lines_and_a_callers_file_gets_bytes(
    sandboxed: Sandboxed, kernelspecs: KernelSpecManager, notebook_folder: Path, tmp_path: Path
) -> None:
    ours, terminal = pty.openpty()
    os.set_blocking(ours, False)
    km = KernelManager(kernel_name=hostile(sandboxed), kernel_spec_manager=kernelspecs)
    seen = bytearray()

    def read() -> bytes:
        try:
            seen.extend(os.read(ours, 1 << 16))
        except BlockingIOError:
            pass
        return bytes(seen)

    try:
        with (tmp_path / "given").open("wb") as given:
            km.start_kernel(stdout=given, stderr=terminal)
        until(lambda: read().count(b"forged by a guest") == 3)
        until(lambda: (tmp_path / "given").read_bytes() == b"no line end")
    finally:
        km.shutdown_kernel(now=True)
        os.close(ours)
        os.close(terminal)
    assert b"\x1b" not in seen and b"\x07" not in seen
    assert all(line.startswith(b"output of sandbox ") for line in bytes(seen).split(b"\r\n") if line)


def test_unfinished_line_is_shown(
    capfd: pytest.CaptureFixture[str], sandboxed: Sandboxed, kernelspecs: KernelSpecManager, notebook_folder: Path
) -> None:
    km = KernelManager(kernel_name=hostile(sandboxed), kernel_spec_manager=kernelspecs)
    km.start_kernel()
    seen = ""

    def read() -> str:
        nonlocal seen
        seen += capfd.readouterr().out
        return seen

    try:
        until(lambda: read().endswith("| no line end\n"))
    finally:
        km.shutdown_kernel(now=True)
