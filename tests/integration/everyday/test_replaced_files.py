"""Files that were replaced or deleted while a kernel had them open do not keep it from being saved or opened again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import notebooks
import pytest
from command_line import sandbox_command
from kernels import Open
from servers import Server

from sandbox_provisioner.errors.saving import ReplacedFilesError

pytestmark = [pytest.mark.runsc, pytest.mark.template_copies, pytest.mark.user]

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


def replace(file: Path, content: bytes) -> None:
    """Replace a file by a new one, as editors and download programs do."""
    new = file.with_name(f".{file.name}.new")
    new.write_bytes(content)
    os.replace(new, file)


@pytest.mark.debian
def test_kernel_with_replaced_array_and_table_is_saved(open_notebook: Open, notebook_folder: Path) -> None:
    notebook = open_notebook()
    notebook.run("import os, numpy, pandas")
    notebook.run("numpy.save('old.npy', numpy.arange(200_000)); array = numpy.load('old.npy', mmap_mode='r')")
    (notebook_folder / "table.csv").write_text("number\n" + "".join(f"{n}\n" for n in range(200_000)))
    notebook.run("chunks = pandas.read_csv('table.csv', chunksize=1000); first = next(chunks)")
    replace(notebook_folder / "old.npy", b"other bytes")
    replace(notebook_folder / "table.csv", b"other bytes")
    notebook.run("os.stat('old.npy'), os.stat('table.csv')")
    notebook.hibernate()
    assert notebook.run("int(array.sum()), int(array[-1])") == str((sum(range(200_000)), 199_999))
    assert notebook.run("int(next(chunks).number.iloc[0])") == "1000"
    assert notebook.run("sum(len(chunk) for chunk in chunks)") == str(200_000 - 2000)
    notebook.hibernate()
    assert notebook.run("int(array[5])") == "5"


OPEN_FILES = """
import mmap, os, tempfile
reader = open("replaced", "rb", buffering=0)
reader.read(10)
twin = os.dup(reader.fileno())
other = open("replaced", "rb", buffering=0)
log = open("log", "a")
log.write("one\\n")
log.flush()
private = mmap.mmap(os.open("private", os.O_RDWR), 0, mmap.MAP_PRIVATE)
private[:5] = b"dirty"
shared = mmap.mmap(os.open("shared", os.O_RDWR), 0)
memory_only = tempfile.TemporaryFile()
memory_only.write(b"memory")
memory_only.flush()
"""
USE_FILES = """
reader.read(3), os.read(twin, 3), other.read(3), os.get_inheritable(twin), private[:8], private[-4:], shared[:4]
"""


@pytest.mark.debian
@pytest.mark.parametrize("looked", [True, False])
def test_positions_modes_and_changes_survive(open_notebook: Open, notebook_folder: Path, looked: bool) -> None:
    for name in ("replaced", "private", "shared"):
        (notebook_folder / name).write_bytes(bytes(range(65, 91)) * 400)
    notebook = open_notebook()
    notebook.run(OPEN_FILES)
    for name in ("replaced", "private"):
        replace(notebook_folder / name, b"new")
    for name in ("log", "shared"):
        (notebook_folder / name).unlink()
    if looked:
        notebook.run("[os.path.exists(name) for name in ('replaced', 'private', 'log', 'shared')]")
    notebook.hibernate()
    expected = (b"KLM", b"NOP", b"ABC", False, b"dirtyFGH", b"WXYZ", b"ABCD")
    assert notebook.run(USE_FILES.strip()) == repr(expected)
    notebook.run("log.write('two\\n'); log.flush(); shared[:4] = b'1234'")
    assert notebook.run("log.tell(), shared[:5]") == repr((8, b"1234E"))
    assert notebook.run("memory_only.seek(0), memory_only.read()") == "(0, b'memory')"
    assert not (notebook_folder / "log").exists()
    assert (notebook_folder / "replaced").read_bytes() == b"new"


def test_unchanged_files_stay_open(open_notebook: Open, notebook_folder: Path) -> None:
    (notebook_folder / "file").write_bytes(b"old")
    notebook = open_notebook()
    notebook.run("file = open('file', 'r+b', buffering=0)")
    notebook.hibernate()
    notebook.run("file.write(b'new')")
    assert (notebook_folder / "file").read_bytes() == b"new"


CHILD = """
import subprocess, sys
code = "file = open('table'); print('ready', flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
"""


@pytest.mark.debian
def test_error_names_file_and_process(open_notebook: Open, notebook_folder: Path) -> None:
    table = notebook_folder / "table"
    table.write_bytes(b"old")
    notebook = open_notebook()
    notebook.run(CHILD)
    replace(table, b"new")
    notebook.run("import os; os.stat('table')")
    pid = notebook.run("child.pid")
    with pytest.raises(ReplacedFilesError) as refusal:
        notebook.hibernate()
    assert f"{table} was removed or replaced while python" in str(refusal.value)
    assert f"(process {pid}) had it open" in str(refusal.value)
    assert "end the processes" in refusal.value.remedy
    notebook.run("child.communicate('\\n')")
    notebook.hibernate()
    assert notebook.run("child.returncode") == "0"


@pytest.mark.debian
def test_killed_servers_kernel_with_replaced_file_is_saved(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    (notebook_folder / "table").write_bytes(b"old" * 1000)
    kernel, server = sandboxed(), serve()
    notebook = notebooks.Notebook(server, kernel)
    notebook.run("import mmap, os; table = mmap.mmap(os.open('table', os.O_RDONLY), 0, prot=mmap.PROT_READ)")
    replace(notebook_folder / "table", b"new")
    notebook.run("os.stat('table')")
    notebook.close()
    server.kill()
    notebook = notebooks.Notebook(serve(), kernel)
    assert notebook.run("table[:6], len(table)") == "(b'oldold', 3000)"
    notebook.close()


def left_running(server: Server, kernel: str, folder: Path) -> None:
    """Stop a server whose notebook cannot be saved, because of a child process with a replaced file."""
    (folder / "notebooks" / "table").write_bytes(b"old")
    notebook = notebooks.Notebook(server, kernel)
    notebook.run(CHILD)
    replace(folder / "notebooks" / "table", b"new")
    notebook.run("import os; x = 'unsaved'; os.stat('table')")
    notebook.close()
    server.stop()
    assert f"{folder / 'notebooks' / 'table'} was removed or replaced while python" in server.log.read_text()


def test_unsaveable_kernel_runs_on_until_it_is_reset(serve: Serve, sandboxed: Sandboxed, tmp_path: Path) -> None:
    kernel = sandboxed()
    left_running(serve(), kernel, tmp_path)
    status, listed = sandbox_command(tmp_path, "list")
    assert status == 0 and " running " in listed
    server = serve()
    for _ in range(2):
        status, answer = server.open_notebook(kernel)
        assert (status, answer["type"]) == (422, "urn:sandbox:unsaveable")
        assert f"{tmp_path / 'notebooks' / 'table'} was removed or replaced while python" in answer["message"]
        assert "still runs" in answer["message"] and "`jupyter sandbox reset ID`" in answer["message"]
        assert "jupyter sandbox revert" not in answer["message"]
    _, page = server.ask("GET", "sandboxes")
    (sandbox,) = page["items"]
    assert sandbox["state"] == "running"
    assert server.ask("POST", f"sandboxes/{sandbox['id']}/revert")[0] == 409
    status, output = sandbox_command(tmp_path, "reset", "notebooks/a.ipynb")
    assert status == 0, output
    notebook = notebooks.Notebook(server, kernel)
    assert notebook.run("'x' in globals()") == "False"
    notebook.close()


def test_unsaveable_kernel_is_reverted_to_its_checkpoint(serve: Serve, sandboxed: Sandboxed, tmp_path: Path) -> None:
    kernel, server = sandboxed(), serve()
    notebook = notebooks.Notebook(server, kernel)
    notebook.run("x = 'saved'")
    notebook.close()
    server.stop()
    left_running(serve(), kernel, tmp_path)
    server = serve()
    status, answer = server.open_notebook(kernel)
    assert status == 422 and "`jupyter sandbox revert ID` returns to the checkpoint of " in answer["message"]
    (sandbox,) = server.ask("GET", "sandboxes")[1]["items"]
    status, reverted = server.ask("POST", f"sandboxes/{sandbox['id']}/revert")
    assert (status, reverted["state"]) == (200, "saved")
    notebook = notebooks.Notebook(server, kernel)
    assert notebook.run("x") == "'saved'"
    notebook.close()
