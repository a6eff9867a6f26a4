"""Test ``jupyter sandbox`` with a running server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from apis import KERNEL, become_user, serving
from kernels import run
from notebooks import until
from servers import Server

from sandbox_provisioner.cli.app import main
from sandbox_provisioner.cli.progress import bar, watched
from sandbox_provisioner.cli.targets import Found
from sandbox_provisioner.cli.targets import Server as Reached
from sandbox_provisioner.client import Sandbox, SandboxClient

COMMAND = str(Path(sys.executable).parent / "jupyter-sandbox")
pytestmark = pytest.mark.runsc


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as api:
        yield api.server


@pytest.fixture(autouse=True)
def notebooks(server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the server's user."""
    return become_user(server, monkeypatch)


@pytest.fixture
def client(server: Server) -> Iterator[SandboxClient]:
    """Yield a client of the server; delete all sandboxes after the test."""
    with SandboxClient(server.url, "t") as client:
        yield client
        for sandbox in client.list():
            client.delete(sandbox.id)


@pytest.fixture
def sandbox(server: Server, client: SandboxClient) -> Sandbox:
    """Return a sandbox with a running kernel for the notebook a.ipynb."""
    made = client.create(kernel_name=KERNEL, notebook_path="a.ipynb")
    server.ready_client(str(made.kernel_id)).stop_channels()
    return made


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Run a command, which must succeed, and return its JSON output."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_list_shows_state_and_notebook(sandbox: Sandbox, notebooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = ask(capsys, "list")["sandboxes"]
    assert shown["state"] == "running"
    assert shown["kernel_id"] == sandbox.kernel_id
    assert shown["notebook_path"] == str(notebooks / "a.ipynb")
    assert shown["storage"] == "local"
    (alone,) = ask(capsys, "list", "--no-server")["sandboxes"]
    assert (alone["id"], alone["kernel_id"]) == (shown["id"], None)
    assert main(["show", "a.ipynb"]) == 0
    printed = capsys.readouterr().out
    assert sandbox.id in printed and str(sandbox.kernel_id) in printed


def test_ephemeral_kernel_is_listed(client: SandboxClient, notebooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = client.create(kernel_name=KERNEL)
    (shown,) = ask(capsys, "list")["sandboxes"]
    assert (shown["id"], shown["persistent"], shown["storage"]) == (made.id, False, None)
    assert main(["show", made.id]) == 0
    assert "running, ephemeral" in capsys.readouterr().out
    assert main(["hibernate", made.id]) == 4
    assert ask(capsys, "delete", made.id)["deleted"][0]["id"] == made.id


def test_hibernate_wake_and_restart(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hibernate", sandbox.id[:8]]) == 0
    printed = capsys.readouterr().out
    assert f"Hibernate {sandbox.id[:8]} a.ipynb: hibernated, " in printed
    assert ask(capsys, "list")["sandboxes"][0]["state"] == "hibernated"
    (awake,) = ask(capsys, "wake", "a.ipynb")["sandboxes"]
    assert (awake["id"], awake["state"]) == (sandbox.id, "running")
    assert ask(capsys, "restart", sandbox.id)["sandboxes"][0]["kernel_id"] == sandbox.kernel_id


def test_rewind_twice(server: Server, sandbox: Sandbox, notebooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kc = server.ready_client(str(sandbox.kernel_id))
    run(kc, "x = 1")
    assert ask(capsys, "savepoint", "a.ipynb", "one")["name"] == "one"
    run(kc, "x = 2")
    assert main(["savepoint", "a.ipynb", "one"]) == 4
    printed = capsys.readouterr()
    assert printed.out.endswith(f"Savepoint one of {sandbox.id[:8]} a.ipynb: failed\n")
    assert (
        printed.err.count("\n") == 1
        and "already has a savepoint one" in printed.err
        and "Choose another name" in printed.err
    )
    kept = ask(capsys, "rewind", "a.ipynb", "one")["kept"]
    kc.stop_channels()
    kc = server.ready_client(str(sandbox.kernel_id))
    assert run(kc, "x") == "1"
    kc.stop_channels()
    assert [item["name"] for item in ask(capsys, "savepoint", "a.ipynb")["items"]] == ["one", kept]
    nbformat.write(nbformat.v4.new_notebook(), notebooks / "a.ipynb")
    fork = ask(capsys, "fork", "a.ipynb", "--savepoint", kept, "--notebook", "fork.ipynb")
    assert fork["notebook_path"] == str(notebooks / "fork.ipynb") and fork["state"] == "running"
    assert (notebooks / "fork.ipynb").exists()
    kc = server.ready_client(fork["kernel_id"])
    assert run(kc, "x") == "2"
    kc.stop_channels()
    assert ask(capsys, "savepoint", "a.ipynb", "--delete", "one") == {"deleted": "one"}
    assert main(["rewind", "a.ipynb", "one"]) == 3


def test_fork_outside_root_folder_is_refused(
    sandbox: Sandbox, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fork", "a.ipynb", "--notebook", str(tmp_path / "b.ipynb")]) == 5
    assert "the root folder of http://" in capsys.readouterr().err


def test_create_list_and_delete_snapshots(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", sandbox.id, "files"]) == 0
    assert "Snapshot files of" in capsys.readouterr().out
    assert [item["name"] for item in ask(capsys, "snapshot", sandbox.id)["items"]] == ["files"]
    assert main(["snapshot", sandbox.id, "--delete", "files"]) == 0
    assert ask(capsys, "snapshot", sandbox.id) == {"items": []}


def execute(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([COMMAND, "exec", *words], capture_output=True)


def test_exec_streams_output_and_exit_status(sandbox: Sandbox) -> None:
    answer = execute(sandbox.id, "--", "sh", "-c", r"printf 'a\0b'; echo $0 >&2; exit 7", "--", "-x")
    assert (answer.stdout, answer.stderr, answer.returncode) == (b"a\0b", b"--\n", 7)
    answer = execute("--cwd", "/tmp", sandbox.id, "pwd")
    assert (answer.stdout, answer.returncode) == (b"/tmp\n", 0)
    assert execute(sandbox.id, "--", "sh", "-c", "kill -9 $$").returncode == 137
    answer = execute(sandbox.id, "--", "no-such-program")
    assert answer.returncode == 1
    assert b"no-such-program" in answer.stderr


@pytest.mark.debian
def test_interrupted_exec_kills_its_command(client: SandboxClient, sandbox: Sandbox) -> None:
    words = [COMMAND, "exec", sandbox.id, "--", "sh", "-c", "echo up; exec sleep 1000"]
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"jupyter sandbox: interrupted; the command in the sandbox is killed.\n"
    assert process.returncode == 130
    until(lambda: b"sleep" not in execute(sandbox.id, "--", "sh", "-c", "cat /proc/[0-9]*/comm").stdout)


def test_failure_does_not_stop_the_others(
    client: SandboxClient, sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    ephemeral = client.create(kernel_name=KERNEL)
    assert main(["hibernate", ephemeral.id, sandbox.id, "--json"]) == 4
    printed = capsys.readouterr()
    assert [shown["id"] for shown in json.loads(printed.out)["sandboxes"]] == [sandbox.id]
    assert ephemeral.id in printed.err
    assert main(["hibernate", sandbox.id, "nonsense"]) == 3


def test_delete_ends_kernel_and_removes_state(
    client: SandboxClient, sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    client.hibernate(sandbox.id)
    assert ask(capsys, "prune", "--older-than", "0s") == {"deleted": [], "kept": [], "freed": 0}
    assert main(["revert", sandbox.id]) == 4
    assert ask(capsys, "delete", "a.ipynb")["freed"] > 0
    assert ask(capsys, "list")["sandboxes"] == []
    assert client.list() == []


def test_server_that_denies_access_is_named(
    server: Server, sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = server.runtime.glob("jpserver-*.json")
    info = file.read_text()
    file.write_text(json.dumps({**json.loads(info), "token": "wrong"}))
    try:
        assert [shown["state"] for shown in ask(capsys, "list")["sandboxes"]] == ["running"]
        for command in ("hibernate", "wake"):
            assert main([command, sandbox.id]) == 5
            assert f"Check the token for {server.url}" in capsys.readouterr().err
    finally:
        file.write_text(info)


def test_progress_is_shown(server: Server, client: SandboxClient, sandbox: Sandbox) -> None:
    found = Found(sandbox)
    with watched(Namespace(json=True), "Hibernate", found, Reached(client, "", ()), 10**9) as step:
        while not step.newest:
            client.hibernate(sandbox.id)
            client.wake(sandbox.id)
    assert "of 1.0 GB" in step.newest


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [(5_000_000, None, "5.0 MB"), (0, 10, f"[{'.' * 20}] 0% of 10 B"), (5, 10, f"[{'#' * 10}{'.' * 10}] 50% of 10 B"),
     (30, 10, f"[{'#' * 20}] 100% of 10 B")],
)  # fmt: skip
def test_progress_bar_is_limited(done: int, total: int | None, shown: str) -> None:
    assert bar(done, total) == shown


@pytest.mark.slow
def test_fork_in_storage_is_woken_by_next_server(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path_factory.mktemp("server")) as api:
        first = api.server
        notebooks = become_user(first, monkeypatch)
        with SandboxClient.from_running_server() as client:
            sandbox = client.create(kernel_name=KERNEL, notebook_path="a.ipynb")
        kc = first.ready_client(str(sandbox.kernel_id))
        run(kc, "x = 41")
        kc.stop_channels()
    assert [shown["state"] for shown in ask(capsys, "list")["sandboxes"]] == ["saved"]
    fork = ask(capsys, "fork", sandbox.id, "--notebook", "b.ipynb")
    assert fork["state"] == "saved"
    second = Server(notebooks.parent)
    try:
        assert main(["exec", "a.ipynb", "--", "ls"]) == 4
        assert f"`jupyter sandbox wake {sandbox.id}` starts one" in capsys.readouterr().err
        for name in ("a.ipynb", "b.ipynb"):
            (awake,) = ask(capsys, "wake", name)["sandboxes"]
            assert (awake["state"], awake["notebook_path"]) == ("running", str(notebooks / name))
            kc = second.ready_client(awake["kernel_id"])
            assert run(kc, "x + 1") == "42"
            kc.stop_channels()
        assert main(["delete", "a.ipynb", "b.ipynb"]) == 0
    finally:
        second.stop()


def test_named_server_is_used_for_everything(
    server: Server,
    sandbox: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for folder in ("RUNTIME", "DATA", "CONFIG"):
        monkeypatch.setenv(f"JUPYTER_{folder}_DIR", str(tmp_path / folder))
    assert ask(capsys, "list")["sandboxes"] == []
    named = ["--server", f"{server.url}lab?token=t"]
    (shown,) = ask(capsys, "list", *named)["sandboxes"]
    assert (shown["id"], shown["notebook_path"], shown["where"]) == (sandbox.id, "a.ipynb", None)
    assert main(["list", "--server", server.url]) == 5
    assert f"Check the token for {server.url}" in capsys.readouterr().err
    monkeypatch.setenv("JUPYTER_TOKEN", "t")
    named = ["--server", server.url]
    assert ask(capsys, "hibernate", "a.ipynb", *named)["sandboxes"][0]["state"] == "hibernated"
    fork = ask(capsys, "fork", sandbox.id, "--notebook", "b.ipynb", *named)
    assert fork["notebook_path"] == "b.ipynb"
    assert ask(capsys, "prune", "--older-than", "0s", *named)["deleted"] == []
    assert {entry["id"] for entry in ask(capsys, "delete", sandbox.id, "b.ipynb", *named)["deleted"]} == {
        sandbox.id,
        fork["id"],
    }
