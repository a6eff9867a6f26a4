"""Test ``jupyter sandbox setup`` and ``doctor``, and the command line itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import OLD, empty_machine, script, stand_in

from sandbox_provisioner import __version__
from sandbox_provisioner.cli.app import configured, main
from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.gvisor import runsc as runsc_module
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.setup import runsc_install
from sandbox_provisioner.setup.progress import Note
from sandbox_provisioner.setup.runsc_install import Source

pytestmark = pytest.mark.user

COMMAND = str(Path(sys.executable).parent / "jupyter-sandbox")


class Shelf(Source):
    """A source that provides the given binary, or fails if there is none."""

    name = "shelf"
    title = "the shelf"

    def __init__(self, binary: Path | None = None) -> None:
        self._binary = binary

    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        if self._binary is None:
            raise SandboxError("it has no binary")
        shutil.copyfile(self._binary, target)


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine without runsc and with one kernel."""
    folder = empty_machine(monkeypatch, tmp_path)
    (folder / "kernels" / "some").mkdir(parents=True)
    (folder / "kernels" / "some" / "kernel.json").write_text(
        '{"argv": ["python", "-m", "xpython_launcher", "-f", "{connection_file}", "--raw"], "display_name": "Some"}'
    )
    handler = signal.getsignal(signal.SIGTERM)
    yield folder
    signal.signal(signal.SIGTERM, handler)


def twin(data: Path) -> Path:
    return data / "kernels" / "some-sandbox" / "kernel.json"


@pytest.mark.runsc
def test_setup_tests_runsc_and_installs_twins(
    runsc: Runsc, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SANDBOX_RUNSC", str(runsc.path))
    assert main(["setup", "--kernel", "some"]) == 0
    printed = capsys.readouterr().out
    assert f"runsc {runsc.version} at {runsc.path}" in printed
    assert "restored" in printed
    assert "Kernel some-sandbox: Some (sandbox)" in printed
    assert "Kernels without a sandboxed twin: python3. Run `jupyter sandbox setup` to try them." in printed
    assert "jupyter console --kernel some-sandbox" in printed
    assert twin(data).is_file()
    assert not (data / "sandbox").exists()
    assert main(["setup", "--kernel", "some"]) == 0
    assert main(["doctor"]) == 0
    assert main(["setup", "--remove"]) == 0
    assert not twin(data).exists()
    assert main(["doctor"]) == 1


@pytest.mark.runsc
def test_setup_replaces_an_outdated_runsc(
    runsc: Runsc, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path / "old" / "runsc", OLD)
    monkeypatch.setenv("PATH", f"{tmp_path / 'old'}:{os.environ['PATH']}")
    monkeypatch.setattr(runsc_install, "SOURCES", {"shelf": lambda: Shelf(runsc.path)})
    assert main(["setup", "--kernel", "some"]) == 0
    printed = capsys.readouterr().out
    assert f"is runsc {OLD}, which cannot checkpoint" in printed
    assert f"the shelf: runsc {runsc.version}" in printed
    assert (data / "sandbox" / "bin" / "runsc").is_file()
    assert main(["doctor"]) == 0


def test_setup_without_a_source_fails_with_one_message(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runsc_install, "SOURCES", {"shelf": Shelf})
    assert main(["setup"]) == 1
    printed = capsys.readouterr()
    first, reason, remedy = printed.err.splitlines()
    assert first == "jupyter sandbox: runsc could not be installed:"
    assert reason.strip() == "shelf: it has no binary"
    assert "SANDBOX_RUNSC" in remedy
    assert not twin(data).exists()


@pytest.mark.parametrize("arguments", [[], ["--source", "go"]])
def test_setup_does_not_override_a_wrong_setting(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SANDBOX_RUNSC", "/not/there")
    assert main(["setup", *arguments]) == 1
    assert "No runsc at /not/there (SANDBOX_RUNSC). Correct or unset" in capsys.readouterr().err


def test_unknown_kernel_is_refused_first(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["setup", "--kernel", "other"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "There is no kernel named other." in printed.err
    assert not (data / "sandbox").exists()


@pytest.mark.runsc
def test_failed_twin_does_not_stop_the_others(
    runsc: Runsc, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SANDBOX_RUNSC", str(runsc.path))
    twin(data).parent.mkdir()
    twin(data).write_text("{}")
    assert main(["setup", "--kernel", "some", "--kernel", "python3"]) == 1
    printed = capsys.readouterr()
    assert "Kernel some-sandbox: failed\n" in printed.out
    assert printed.err.count("\n") == 1 and "was not made by `jupyter sandbox setup`" in printed.err
    assert twin(data).read_text() == "{}"
    assert (data / "kernels" / "python3-sandbox" / "kernel.json").is_file()


@pytest.mark.runsc
def test_setup_and_remove_with_sys_prefix(
    runsc: Runsc, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "prefix" / "share" / "jupyter"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(runsc_module, "bin_folders", lambda: [shared / "sandbox" / "bin"])
    monkeypatch.setattr(runsc_install, "SOURCES", {"shelf": lambda: Shelf(runsc.path)})
    assert main(["setup", "--kernel", "some", "--sys-prefix"]) == 0
    assert (shared / "sandbox" / "bin" / "runsc").is_file()
    assert (shared / "kernels" / "some-sandbox" / "kernel.json").is_file()
    assert not twin(data).exists()
    assert main(["setup", "--remove", "--sys-prefix"]) == 0
    assert list((shared / "kernels").iterdir()) == []


def test_remove_without_twins(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["setup", "--remove"]) == 0
    assert f"Nothing to remove in {data / 'kernels'}" in capsys.readouterr().out


def test_doctor_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["runsc"]["ok"] is False
    assert "jupyter sandbox setup" in by_name["runsc"]["remedy"]
    assert by_name["platform"]["ok"] is True


def test_runsc_from_server_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert configured("runsc") == ""
    chosen = stand_in(tmp_path / "chosen")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "jupyter_server_config.py").write_text(f"c.SandboxProvisioner.runsc = {str(chosen)!r}\n")
    assert configured("runsc") == str(chosen)
    main(["doctor", "--json"])
    assert f"at {chosen} (from the runsc setting)" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["dance"], ["setup", "--source", "moon"], ["doctor", "--loud"]])
def test_wrong_arguments_show_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: jupyter sandbox" in capsys.readouterr().err


def test_jupyter_subcommand() -> None:
    jupyter = str(Path(sys.executable).parent / "jupyter")
    assert subprocess.check_output([jupyter, "sandbox", "--version"], text=True).strip() == __version__
    assert "--source" in subprocess.check_output([jupyter, "sandbox", "setup", "--help"], text=True)


@pytest.mark.parametrize("command", ["doctor", "list"])
def test_closed_output_pipe(command: str) -> None:
    with subprocess.Popen([COMMAND, command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_output_in_ascii() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    answer = subprocess.run([COMMAND, "doctor"], env=environment, capture_output=True, text=True)
    assert answer.stdout.isascii()
    assert "ok platform" in answer.stdout
    assert answer.stderr == ""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_build_leaves_nothing(data: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    more_than_a_pipe_holds = "head -c 200000 /dev/zero | tr '\\0' '\\n'"
    script(
        tmp_path / "go" / "go",
        f'[ "$1" = env ] && exec echo go1.99\n{more_than_a_pipe_holds}\necho $$ > {tmp_path}/pid\nexec sleep 1000',
    )
    workspaces = tmp_path / "workspaces"
    workspaces.mkdir()
    os.mkfifo(tmp_path / "pid")
    environment = {**os.environ, "PATH": f"{tmp_path / 'go'}:/usr/bin:/bin", "TMPDIR": str(workspaces)}
    with subprocess.Popen(
        [COMMAND, "setup", "--source", "go"],
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as setup:
        builder = (tmp_path / "pid").read_text().strip()
        setup.send_signal(number)
        words = setup.communicate(timeout=60)[1]
    assert setup.returncode == status
    assert b"Traceback" not in words
    assert not Path("/proc", builder).exists()
    assert list(workspaces.iterdir()) == []
    assert list((data / "sandbox" / "bin").iterdir()) == []
