"""The files in a persistent kernel's home folder, such as installed packages, are carried over a restart."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from notebooks import Notebook, until
from servers import Server

pytestmark = [pytest.mark.runsc, pytest.mark.user]

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]

LOST = "The files in the home folder were not carried over the restart"
WRITE = "import os; [open(path, 'w').close() for path in (os.path.expanduser('~/kept'), '/tmp/gone')]"
LOOK = "import os; print(os.path.exists(os.path.expanduser('~/kept')), os.path.exists('/tmp/gone'), 'x' in globals())"


def source_of_package(folder: Path) -> str:
    """Write the source of a package that needs no other package to be installed, and return the folder's name."""
    package = folder / "source"
    (package / "answering").mkdir(parents=True)
    (package / "answering" / "__init__.py").write_text("ANSWER = 42\n")
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "answering"\nversion = "1.0"\n'
    )
    (package / "backend.py").write_text(
        "import zipfile\n"
        "def build_wheel(folder, config_settings=None, metadata_directory=None):\n"
        "    name, info = 'answering-1.0-py3-none-any.whl', 'answering-1.0.dist-info'\n"
        "    with zipfile.ZipFile(f'{folder}/{name}', 'w') as wheel:\n"
        "        wheel.writestr('answering/__init__.py', 'ANSWER = 42')\n"
        "        wheel.writestr(f'{info}/METADATA', 'Metadata-Version: 2.1\\nName: answering\\nVersion: 1.0\\n')\n"
        "        tag = 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n'\n"
        "        wheel.writestr(f'{info}/WHEEL', tag)\n"
        "        wheel.writestr(f'{info}/RECORD', '')\n"
        "    return name\n"
    )
    return package.name


def restart(server: Server, notebook: Notebook) -> None:
    """Restart the notebook's kernel as JupyterLab does, and wait until the new one answers."""
    status, answer = server.ask("POST", f"kernels/{notebook.kernel_id}/restart")
    assert status == 200, answer
    notebook.close()
    notebook.kc = server.ready_client(notebook.kernel_id)


def fresh(server: Server, kernel_id: str) -> BlockingKernelClient:
    """Wait until a kernel that ended was restarted, and return a client of the new one."""
    until(lambda: "restarting kernel" in server.log.read_text())
    return server.ready_client(kernel_id)


def hibernate(server: Server) -> None:
    (sandbox,) = server.ask("GET", "sandboxes")[1]["items"]
    assert server.ask("POST", f"sandboxes/{sandbox['id']}/hibernate")[0] == 200


def test_installed_packages_are_there_after_a_restart(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    source = source_of_package(notebook_folder)
    notebook.run(f"%pip install --quiet --no-index --no-build-isolation ./{source}")
    notebook.run("x = 1")
    restart(server, notebook)
    assert notebook.run("import answering; print(answering.ANSWER, 'x' in globals())") == "42 False\n"
    notebook.close()


@pytest.mark.template_copies
def test_home_is_carried_over_restarts_of_awake_hibernated_and_crashed_kernels(
    serve: Serve, sandboxed: Sandboxed
) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    notebook.run("x = 1")
    notebook.run(WRITE)
    restart(server, notebook)
    assert notebook.run(LOOK) == "True False False\n"
    notebook.run("x = 1")
    hibernate(server)
    restart(server, notebook)
    assert notebook.run(LOOK) == "True False False\n"
    notebook.kc.execute("import os; os.kill(os.getpid(), 9)")
    notebook.close()
    notebook.kc = fresh(server, notebook.kernel_id)
    assert notebook.run(LOOK) == "True False False\n"
    assert notebook.run("%sandbox reset-home") == "The next restart of the kernel empties its home folder.\n"
    restart(server, notebook)
    assert notebook.run(LOOK) == "False False False\n"
    notebook.close()
    server.stop()
    assert list((server.runtime.parent / "data" / "sandbox").rglob("home.tar")) == []


def test_first_cell_tells_that_files_were_lost(serve: Serve, sandboxed: Sandboxed) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed(home_limit=100_000))
    notebook.run(f"{WRITE}; open(os.path.expanduser('~/large'), 'wb').write(os.urandom(200_000))")
    restart(server, notebook)
    told = notebook.run(LOOK)
    assert told.startswith(f"{LOST}, because they have more than 100,000 bytes, which is the setting home_limit.")
    assert told.endswith("False False False\n")
    assert notebook.run(LOOK) == "False False False\n"
    end_sandbox(server)
    notebook.close()
    notebook.kc = fresh(server, notebook.kernel_id)
    assert notebook.run(LOOK).startswith(f"{LOST}, because the sandbox itself ended unexpectedly.")
    hibernate(server)
    for image in (server.runtime.parent / "data" / "sandbox").rglob("pages.img"):
        image.unlink()
    restart(server, notebook)
    assert notebook.run(LOOK).startswith(f"{LOST}, because the hibernated kernel could not be woken: ")
    notebook.close()


def end_sandbox(server: Server) -> None:
    """Kill the only sandbox of the server, without its server."""
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # a command of runsc that has just ended
            if any("--root=" in part for part in child.cmdline()):
                child.kill()


BREAK = """
import pathlib
folder = pathlib.Path('~/.ipython/profile_default/startup').expanduser()
folder.mkdir(parents=True, exist_ok=True)
(folder / '00-end.py').write_text('import os; os._exit(1)')
"""


@pytest.mark.cold_start
def test_files_with_which_no_kernel_starts_are_given_up(serve: Serve, sandboxed: Sandboxed) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    notebook.run(WRITE)
    notebook.run(BREAK)
    assert server.ask("POST", f"kernels/{notebook.kernel_id}/restart")[0] == 200
    notebook.close()
    notebook.kc = fresh(server, notebook.kernel_id)
    told = notebook.run(LOOK)
    assert told.startswith(f"{LOST}, because a kernel with these files ended before it answered a request.")
    assert told.endswith("False False False\n")
    notebook.close()


@pytest.mark.parametrize("config", [{"persistent": False}, {"home_limit": 0}], ids=["ephemeral", "no limit"])
def test_home_is_empty_after_a_restart(serve: Serve, sandboxed: Sandboxed, config: dict[str, Any]) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed(**config))
    notebook.run(WRITE)
    restart(server, notebook)
    assert notebook.run(LOOK) == "False False False\n"
    notebook.close()


def test_forged_archive_is_not_unpacked(serve: Serve, sandboxed: Sandboxed, notebook_folder: Path) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    (notebook_folder / "data").mkdir()
    notebook.run(WRITE)
    notebook.run(FORGE)
    restart(server, notebook)
    told = notebook.run("import os; print(os.path.exists('/tmp/evil'), os.path.exists('/evil'))")
    assert told.startswith(LOST) and told.endswith("False False\n")
    assert os.listdir(notebook_folder / "data") == []
    notebook.close()


FORGE = """
import os, subprocess, sys
open('/tmp/meddle.py', 'w').write('''
import io, os, signal, tarfile, time
def add(name, **fields):
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    member.size = 4 if member.isreg() else 0
    tar.addfile(member, io.BytesIO(b"evil"))
def tools():
    while True:
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) not in (1, os.getpid()):
                try:
                    if "archive.py" in open(f"/proc/{entry}/cmdline").read():
                        yield int(entry)
                except OSError:
                    pass
        time.sleep(0.001)
for tool in tools():
    try:
        os.kill(tool, signal.SIGSTOP)
        with open(f"/proc/{tool}/fd/1", "wb") as pipe, tarfile.open(fileobj=pipe, mode="w|") as tar:
            add("tmp/evil")
            add("root/evil")
            add("home/../tmp/evil")
            add("home/link", type=tarfile.SYMTYPE, linkname="FOLDER/data")
            add("home/link/evil")
        os.kill(tool, signal.SIGKILL)
    except OSError:
        pass
'''.replace("FOLDER", os.getcwd()))
subprocess.Popen([sys.executable, "/tmp/meddle.py"], start_new_session=True)
import time; time.sleep(3)
"""
