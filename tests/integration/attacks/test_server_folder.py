"""The server does not run code that a kernel leaves in the folder that the server was started in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from notebooks import Notebook
from servers import Server

pytestmark = [pytest.mark.runsc, pytest.mark.user]

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]


def test_modules_in_the_servers_folder_are_not_imported(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path, tmp_path: Path
) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    code = f"open({str(tmp_path / 'owned')!r}, 'w').close()"
    for module in ("ipykernel", "nbconvert", "xeus_python"):
        notebook.run(f"open('{module}.py', 'w').write({code!r})")
    assert (notebook_folder / "nbconvert.py").exists()
    server.ask("GET", "kernelspecs")
    server.ask("GET", "nbconvert")
    assert not (tmp_path / "owned").exists()
    notebook.close()


def test_templates_in_the_servers_folder_are_not_used(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    notebook.run(
        "import os; os.mkdir('lab'); open('lab/index.html.j2', 'w').write('OWNED')\n"
        "open('lab/conf.json', 'w').write('{\"base_template\": \"base\"}')"
    )
    body = {"type": "notebook", "content": {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}}
    assert server.ask("PUT", "contents/a.ipynb", body)[0] in (200, 201)
    with urlopen(Request(f"{server.url}nbconvert/html/a.ipynb", headers={"Authorization": "token t"})) as answer:
        assert b"OWNED" not in answer.read()
    notebook.close()


def test_notebook_cannot_select_export_module(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path, tmp_path: Path
) -> None:
    server = serve()
    notebook = Notebook(server, sandboxed())
    code = f"open({str(tmp_path / 'owned')!r}, 'w').close()"
    notebook.run(
        f"import json; open('test_it.py', 'w').write({code!r})\n"
        "def write(name, exporter):\n"
        "    info = {'name': 'python', 'file_extension': '.py', 'nbconvert_exporter': exporter}\n"
        "    document = {'cells': [], 'metadata': {'language_info': info}, 'nbformat': 4, 'nbformat_minor': 5}\n"
        "    open(name, 'w').write(json.dumps(document))\n"
        "write('bad.ipynb', 'unittest.__main__.main'); write('good.ipynb', 'python')"
    )

    def export(name: str) -> tuple[int, bytes]:
        request = Request(f"{server.url}nbconvert/script/{name}", headers={"Authorization": "token t"})
        try:
            with urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except HTTPError as error:
            return error.code, error.read()

    assert export("good.ipynb")[0] == 200
    status, body = export("bad.ipynb")
    assert status == 500 and b"not the name of an installed exporter" in body
    assert export("good.ipynb")[0] == 200
    assert not (tmp_path / "owned").exists()
    notebook.close()


def test_server_does_not_write_through_link_to_environment(
    serve: Serve, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    """The kernel's interpreter lies in the folder that the kernel can write to, and is read-only for it."""
    environment = notebook_folder / "env"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    (environment / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    packages = environment / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    packages.mkdir(parents=True)
    (packages / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    spec = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "env"}
    server = serve()
    notebook = Notebook(server, sandboxed(spec={**spec, "language": "python"}))
    with pytest.raises(AssertionError, match="Read-only"):
        notebook.run(f"open({str(packages / 'sitecustomize.py')!r}, 'w')")
    notebook.run(f"import os; os.symlink({str(packages / 'sitecustomize.py')!r}, 'y.py')")
    status, _ = server.ask("PUT", "contents/y.py", {"type": "file", "format": "text", "content": "owned"})
    assert status == 403
    assert not (packages / "sitecustomize.py").exists()
    notebook.close()
