"""Test the notes on errors that the sandbox causes, in real kernels; each kind has an innocent twin without a note."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernel_templates import is_copy
from kernels import Notebook, Open

pytestmark = [pytest.mark.runsc, pytest.mark.user]

NO_NETWORK = "Sandbox: this kernel has no network. To give it one, set SandboxProvisioner.network = 'host'"
CAUSED = {
    "import urllib.request; urllib.request.urlopen('http://example.org')": NO_NETWORK,
    "import socket; socket.getaddrinfo('example.org', 80)": NO_NETWORK,
    "import socket; socket.create_connection(('192.0.2.1', 80))": NO_NETWORK,
    "open('/data/set.csv')": "/data/set.csv is outside of the folders that this kernel sees. It sees FOLDER and",
    "open('../data/set.csv')": "/data/set.csv is outside of the folders that this kernel sees. It sees FOLDER and",
    "open('linked/set.csv')": "/elsewhere/set.csv is outside of the folders that this kernel sees. It sees FOLDER and",
    "open('/usr/notes.txt', 'w')": "/usr/notes.txt is read-only in this sandbox. Files can be kept in FOLDER. Files in",
    "import os; open(os.path.expanduser('~/absent/set.csv'))": "is a folder of its own, in memory",
}
INNOCENT = {
    "open('absent.csv')": "FileNotFoundError",
    "open('absent/set.csv')": "FileNotFoundError",
    "import os; open(os.path.abspath('absent.csv'))": "FileNotFoundError",
    "open('/tmp/absent.csv')": "FileNotFoundError",
    "open('/usr/lib/absent.csv')": "FileNotFoundError",
    "open('/proc/absent')": "FileNotFoundError",
    "import os; os.makedirs('/tmp/made'); open('/tmp/made/absent')": "FileNotFoundError",
    "import subprocess; subprocess.run(['no-such-command'])": "FileNotFoundError",
    "import socket; socket.create_connection(('127.0.0.1', 9))": "ConnectionRefusedError",
    "import socket; socket.getaddrinfo('127.0.0.1', 'no-such-service')": "gaierror",
    "open('.', 'w')": "IsADirectoryError",
    "raise PermissionError(13, 'Permission denied', 'closed.txt')": "PermissionError",
    "raise OSError(30, 'Read-only file system', 'file.txt')": "OSError",
    "1 / 0": "ZeroDivisionError",
}


def shown(notebook: Notebook, code: str) -> str:
    """Run a cell that fails. Return the traceback as the user reads it."""
    request = notebook.kc.execute(code)
    assert notebook.reply(request)["status"] == "error", code
    while (message := notebook.iopub(request))["msg_type"] != "error":
        pass
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(message["content"]["traceback"]))


def test_notes_name_the_limit_and_the_setting(open_notebook: Open, notebook_folder: Path) -> None:
    (notebook_folder / "linked").symlink_to("/elsewhere")
    notebook = open_notebook()
    for code, note in CAUSED.items():
        text = shown(notebook, code)
        assert note.replace("FOLDER", str(notebook_folder)) in text, text
        assert text.count("Sandbox: ") == 1
    notebook.hibernate()
    for code in list(CAUSED)[1:4:2]:
        assert "Sandbox: " in shown(notebook, code)


def test_errors_of_other_causes_get_no_note(open_notebook: Open) -> None:
    notebook = open_notebook()
    for code, error in INNOCENT.items():
        text = shown(notebook, code)
        assert error in text
        assert "Sandbox: " not in text, text


def test_note_is_added_once_to_an_error_that_is_raised_again(open_notebook: Open) -> None:
    notebook = open_notebook()
    shown(notebook, "try:\n    open('/data/x')\nexcept OSError as error:\n    kept = error\nraise kept")
    assert shown(notebook, "raise kept").count("Sandbox: ") == 1
    text = shown(
        notebook, "try:\n    open('/data/x')\nexcept OSError as error:\n    raise ValueError('no data') from error"
    )
    assert "ValueError: no data\nSandbox: /data/x is outside" in text


def test_no_note_about_a_network_that_the_kernel_has(open_notebook: Open) -> None:
    notebook = open_notebook(network="host")
    text = shown(notebook, "import socket; socket.getaddrinfo('no-such-name.invalid', 80)")
    assert "gaierror" in text
    assert "Sandbox: " not in text
    assert notebook.run("import os; print({'PIP_RETRIES', 'PIP_LOG'} & {*os.environ})").strip() == "set()"


@pytest.mark.parametrize("command", ["%pip install no-such-package-here", "!pip install no-such-package-here"])
def test_pip_without_network_fails_at_once_with_the_note(open_notebook: Open, command: str) -> None:
    notebook = open_notebook()
    text = notebook.run(command)
    assert "No matching distribution" in text
    assert NO_NETWORK in text.rstrip().splitlines()[-1]
    assert "Retrying" not in text
    assert "Sandbox: " not in notebook.run("%pip install ./absent.whl")
    assert "Sandbox: " not in notebook.run("%pip --version")
    assert notebook.run("import glob; glob.glob('/tmp/.sandbox-pip-*')") == "[]"


def test_own_settings_of_pip_are_kept(open_notebook: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_RETRIES", "2")
    notebook = open_notebook(pass_environment=["PIP_RETRIES"])
    code = "import os; print(os.environ['PIP_RETRIES'], os.environ['PIP_DISABLE_PIP_VERSION_CHECK'])"
    assert notebook.run(code) == "2 1\n"


@pytest.mark.templates
def test_notes_in_a_copy_of_a_template(open_notebook: Open) -> None:
    notebook = open_notebook()
    assert is_copy(notebook.km)
    for code in list(CAUSED)[1:4:2]:
        assert "Sandbox: " in shown(notebook, code)
