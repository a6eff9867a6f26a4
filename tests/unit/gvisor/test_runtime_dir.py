"""Test the folders of running sandboxes: they are locked while their owner runs, and removed after it has exited."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from leftovers import leftovers

from sandbox_provisioner import config
from sandbox_provisioner.errors import ConfigurationError
from sandbox_provisioner.gvisor import runtime_dir as runtime_module
from sandbox_provisioner.gvisor.runtime_dir import (
    RuntimeFolder,
    kill_processes,
    left_behind,
    mounts_below,
    runtime_root,
    sweep,
)

pytestmark = pytest.mark.user


@pytest.fixture
def idler() -> Iterator[type[Idler]]:
    """Start processes that only wait; kill those that are left after the test."""
    Idler.started = []
    yield Idler
    for child in Idler.started:
        child.kill()
        child.wait()


class Idler:
    """A process that waits until it is killed, with these arguments on its command line, as a runsc process has."""

    started: list[subprocess.Popen[bytes]]

    def __init__(self, *arguments: str) -> None:
        self._child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", *arguments])
        self.started.append(self._child)
        command = Path("/proc", str(self._child.pid), "cmdline")
        while b"signal.pause" not in command.read_bytes():  # Linux shows the command line shortly after the start
            time.sleep(0.001)

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def ended(self) -> int:
        return self._child.wait(timeout=20)


class Owner:
    """Another process of this user that runs ``code``, which prints one line when it is ready."""

    def __init__(self, code: str) -> None:
        begin = "import os, sys, time\nfrom sandbox_provisioner.gvisor.runtime_dir import RuntimeFolder\n"
        self._child = subprocess.Popen(
            [sys.executable, "-c", begin + textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout
        self.line = self._child.stdout.readline().strip()

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        assert self._child.stdout
        self._child.stdout.close()


# -- the root --------------------------------------------------------------------------------------------------


def test_runtime_root_is_created_private_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_RUNTIME_DIR", str(tmp_path / "new" / "root"))
    root = runtime_root()
    assert root == tmp_path / "new" / "root" / "jupyter-sandbox"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert runtime_root() == root


def test_runtime_root_is_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SANDBOX_RUNTIME_DIR", "here")
    assert runtime_root() == tmp_path / "here" / "jupyter-sandbox"


def foreign(root: Path) -> None:
    root.mkdir(mode=0o700)
    os.chown(root, 65534, 65534)


def open_to(mode: int, root: Path) -> None:
    root.mkdir()
    root.chmod(mode)


def linked(root: Path) -> None:
    target = root.with_name("target")
    target.mkdir(mode=0o700)
    root.symlink_to(target)


def dangling(root: Path) -> None:
    root.symlink_to("nowhere")


UNFIT: dict[str, Callable[[Path], None]] = {
    "writable for the group": partial(open_to, 0o770),
    "writable for everybody": partial(open_to, 0o777),
    "a link": linked,
    "a link to nothing": dangling,
    "a file": Path.touch,
}
if os.geteuid() == 0:
    UNFIT["another user's"] = foreign


@pytest.mark.parametrize("make", UNFIT.values(), ids=UNFIT.keys())
def test_runtime_root_that_others_can_change_is_refused(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "jupyter-sandbox"
    make(root)
    monkeypatch.setenv("SANDBOX_RUNTIME_DIR", str(tmp_path))
    actions: list[Callable[[], object]] = [runtime_root, sweep, RuntimeFolder.create]
    for action in actions:
        with pytest.raises(ConfigurationError, match=str(root)) as refusal:
            action()
        assert refusal.value.setting == "SANDBOX_RUNTIME_DIR"
        assert refusal.value.remedy


def test_runtime_root_that_cannot_be_created_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_RUNTIME_DIR", "/proc/nowhere")
    with pytest.raises(ConfigurationError, match="/proc/nowhere") as refusal:
        runtime_root()
    assert refusal.value.setting == "SANDBOX_RUNTIME_DIR"


@pytest.fixture
def unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Unset SANDBOX_RUNTIME_DIR and use a data folder for this test; remove the folder in /tmp afterwards."""
    monkeypatch.delenv("SANDBOX_RUNTIME_DIR")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(runtime_module, "_fixed_root", lambda: tmp_path / "fixed")
    records = tmp_path / "data" / "sandbox" / "runtime"
    yield records
    for record in records.glob("*"):
        shutil.rmtree(record.read_text(), ignore_errors=True)


def test_default_runtime_root_is_recorded_in_the_data_folder(unset: Path) -> None:
    root = runtime_root()
    assert root.parent == Path("/tmp") and stat.S_IMODE(root.stat().st_mode) == 0o700
    assert runtime_root() == root
    assert [record.read_text() for record in unset.iterdir()] == [str(root)]


@pytest.mark.parametrize("mode", [0o777, 0o2775])
def test_runtime_root_is_in_the_data_folder_if_tmp_is_not_sticky(
    unset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(mode)
    monkeypatch.setattr(config, "TMP", str(tmp_path / "tmp"))
    old = os.umask(0o002)
    try:
        root = runtime_root()
        assert runtime_root() == root
    finally:
        os.umask(old)
    assert root.parent == unset.parent / "run"
    assert stat.S_IMODE(root.stat().st_mode) == stat.S_IMODE(root.parent.stat().st_mode) == 0o700
    (warning,) = caplog.messages
    assert "has no sticky bit" in warning and str(root) in warning and "SANDBOX_RUNTIME_DIR" in warning


def test_concurrent_first_calls_create_one_root(unset: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: runtime_root(), range(16)))) == 1


def test_recorded_root_that_is_missing_or_untrusted_is_replaced(unset: Path, tmp_path: Path) -> None:
    first = runtime_root()
    first.rmdir()
    second = runtime_root()
    assert second != first and second.is_dir()
    (record,) = unset.iterdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    record.write_text(str(tmp_path / "open"))
    second.rmdir()
    assert runtime_root() not in (second, tmp_path / "open")


def test_fixed_root_is_used_without_a_data_folder(unset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", "/proc/nowhere")
    assert runtime_root() == tmp_path / "fixed"


def test_sweep_includes_the_folder_of_earlier_versions(unset: Path, tmp_path: Path, idler: type[Idler]) -> None:
    old = tmp_path / "fixed" / "0123456789ab"
    (old / "runsc").mkdir(parents=True)
    (tmp_path / "fixed").chmod(0o700)
    left = idler(f"--root={old / 'runsc'}")
    assert sweep() == [old.name]
    assert left.ended() == -signal.SIGKILL
    assert not old.exists()


# -- a folder and its lock -------------------------------------------------------------------------------------


def is_locked(path: Path) -> bool:
    with_lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(with_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(with_lock)
    return False


def test_runtime_folder_is_private_and_locked_until_removed(runtime: Path) -> None:
    folder = RuntimeFolder.create()
    assert [folder.path] == list(runtime.iterdir())
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.bundle.is_dir()
    assert folder.state.is_dir()
    assert is_locked(folder.path)
    folder.remove()
    assert list(runtime.iterdir()) == []
    folder.remove()


def test_remove_leaves_no_descriptor(runtime: Path) -> None:
    before = psutil.Process().num_fds()
    for _ in range(10):
        RuntimeFolder.create().remove()
    assert psutil.Process().num_fds() <= before


def test_remove_kills_only_the_processes_of_its_folder(runtime: Path, idler: type[Idler]) -> None:
    one, other = RuntimeFolder.create(), RuntimeFolder.create()
    mine = [idler(f"--root={one.state}", "run"), idler("x", f"--root={one.state}")]
    strangers = [idler(f"--root={other.state}"), idler(f"--root={one.state}-2"), idler(str(one.state)), idler()]
    one.remove()
    assert [process.ended() for process in mine] == [-signal.SIGKILL] * 2
    assert all(process.alive for process in strangers)
    assert kill_processes(other.state) == 1
    other.remove()


def test_kill_ignores_processes_that_end_meanwhile(tmp_path: Path) -> None:
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            subprocess.run(["/bin/sh", "-c", "exit", f"--root={tmp_path}"], check=False)

    crowd = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in crowd:
        thread.start()
    try:
        assert sum(kill_processes(tmp_path) for _ in range(150)) > 0
    finally:
        stop.set()
        for thread in crowd:
            thread.join()


def test_mount_points_are_listed_innermost_first() -> None:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    below = mounts_below(Path("/dev"))
    assert set(below) == {point for point in points if point.startswith("/dev/")}
    assert not any(inner.startswith(f"{outer}/") for i, outer in enumerate(below) for inner in below[i + 1 :])


# -- the sweep -------------------------------------------------------------------------------------------------


def test_sweep_removes_the_folder_of_a_killed_owner(runtime: Path, idler: type[Idler]) -> None:
    owner = Owner("folder = RuntimeFolder.create()\nprint(folder.path.name, flush=True)\ntime.sleep(1000)")
    survivor = idler(f"--root={runtime / owner.line / 'runsc'}")
    assert sweep() == []
    assert survivor.alive
    owner.kill()
    assert sweep() == [owner.line]
    assert survivor.ended() == -signal.SIGKILL
    assert list(runtime.iterdir()) == []
    assert sweep() == []


def test_sweep_keeps_folders_of_live_owners(runtime: Path, idler: type[Idler]) -> None:
    ours = RuntimeFolder.create()
    other = Owner("folder = RuntimeFolder.create()\nprint(folder.path.name, flush=True)\ntime.sleep(1000)")
    running = idler(f"--root={ours.state}")
    assert sweep() == []
    assert running.alive
    assert {path.name for path in runtime.iterdir()} == {ours.path.name, other.line}
    other.kill()
    assert sweep() == [other.line]
    ours.remove()


def test_forked_child_does_not_keep_the_lock(runtime: Path) -> None:
    owner = Owner(
        """
        folder = RuntimeFolder.create()
        if not os.fork():
            print(folder.path.name, os.getpid(), flush=True)
        time.sleep(1000)
        """
    )
    name, child = owner.line.split()
    owner.kill()
    try:
        assert sweep() == [name]
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_child_command_does_not_keep_the_lock(runtime: Path) -> None:
    owner = Owner(
        """
        import subprocess
        folder = RuntimeFolder.create()
        child = subprocess.Popen(["sleep", "1000"], close_fds=False, stdout=subprocess.DEVNULL)
        print(folder.path.name, child.pid, flush=True)
        time.sleep(1000)
        """
    )
    name, child = owner.line.split()
    owner.kill()
    try:
        assert sweep() == [name]
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_sweep_keeps_a_new_folder_without_its_final_name(runtime: Path) -> None:
    newborn = runtime / ".0123456789ab"
    newborn.mkdir()
    assert sweep() == []
    assert newborn.exists()
    past = time.time() - 2 * runtime_module.UNNAMED_TIMEOUT
    os.utime(newborn, (past, past))
    assert sweep() == [newborn.name]


def test_sweep_ignores_links_and_files(runtime: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").touch()
    (runtime / "0123456789ab").symlink_to(precious)
    (runtime / "ba9876543210").touch()
    assert sweep() == []
    assert (precious / "data").exists()
    (runtime / "0123456789ab").unlink()
    (runtime / "ba9876543210").unlink()


def test_sweep_ignores_folders_with_other_names(runtime: Path) -> None:
    for name in ("notes", "0123456789AB", "0123456789abc", "..0123456789ab"):
        (runtime / name).mkdir()
        assert sweep() == []
        (runtime / name).rmdir()


def test_sweep_does_not_follow_links_in_a_folder(runtime: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").touch()
    dead = runtime / "00000000dead"
    dead.mkdir()
    (dead / "bundle").symlink_to(precious)
    assert sweep() == ["00000000dead"]
    assert (precious / "data").exists()


def test_failed_sweep_releases_the_folders_that_it_locked(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no process could save these sandboxes until this one exits."""
    folder = runtime / "0123456789ab"
    folder.mkdir()
    monkeypatch.setattr(runtime_module, "runtime_roots", lambda: [runtime, tmp_path / "missing"])
    with pytest.raises(FileNotFoundError) as failure:
        sweep()
    assert not is_locked(folder), failure.traceback  # the traceback keeps the locks alive that were not released
    folder.rmdir()


@pytest.mark.parametrize("make", [Path.mkdir, lambda note: note.write_text("[")], ids=["unreadable", "invalid"])
def test_sweep_keeps_a_sandbox_whose_note_cannot_be_read(
    runtime: Path, idler: type[Idler], make: Callable[[Path], object]
) -> None:
    """It may be a persistent sandbox that still runs, whose only state is its memory."""
    folder = runtime / "0123456789ab"
    folder.mkdir()
    make(folder / "note.json")
    running = idler(f"--root={folder / 'runsc'}")
    assert sweep() == []
    assert running.alive
    (left,) = left_behind()
    left.remove()
    assert running.ended() == -signal.SIGKILL


def test_concurrent_sweeps(runtime: Path) -> None:
    dead = {f"{number:012x}" for number in range(20)}
    for name in dead:
        (runtime / name / "bundle" / "deep").mkdir(parents=True)
    command = [sys.executable, "-c", "from sandbox_provisioner.gvisor.runtime_dir import sweep; print(*sweep())"]
    sweepers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [sweeper.communicate(timeout=60)[0].split() for sweeper in sweepers]
    assert [sweeper.returncode for sweeper in sweepers] == [0, 0, 0]
    assert {name for answer in answers for name in answer} == dead
    assert list(runtime.iterdir()) == []


@pytest.mark.debian
@pytest.mark.runsc
def test_sweep_ends_the_sandbox_of_a_killed_server(runtime: Path) -> None:
    owner = Owner(
        """
        import asyncio
        from sandbox_provisioner.gvisor.bundle import BundleSpec
        from sandbox_provisioner.gvisor.sandbox import GVisorSandbox
        from sandbox_provisioner.gvisor.interpreter import visible
        from sandbox_provisioner.gvisor.runsc import find

        async def main():
            python = os.path.realpath(sys.executable)
            mounts = tuple(visible([sys.executable], {}))
            spec = BundleSpec(python, "/home/x", "x", mounts, environment={"PATH": "/bin"})
            sandbox = GVisorSandbox("box", spec, find())
            await sandbox.start()
            await sandbox.execute([python, "-c", "import signal; signal.pause()"])
            print(sandbox._container.folder.path.name, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    assert sweep() == []
    assert any(word.startswith("process") for word in leftovers(runtime))
    owner.kill()
    assert sweep() == [owner.line]
    assert leftovers(runtime) == []
