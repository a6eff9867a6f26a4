"""Start, signal and reap the sandbox's processes for the host. Runs in PID 1, in its event loop."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from capabilities import drop_capabilities

MAPS = "/run/jupyter/maps"
"""Copy of PID 1's memory mappings for ``open_files`` and ``zygote``, which may not read them from /proc."""
DEFAULT_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that PID 1 or Python ignores or handles; a child must not inherit that."""


class Process:
    """A child that the host requested, and PID 1's ends of its pipes. ``pid`` is 0 when it has exited."""

    def __init__(self, number: int, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.number = number
        self.pid = pid
        self.group = pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr


class Processes:
    """The processes that the host requested, by the host's number. ``tell`` sends the host a control message."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self.tell = tell
        self.table: dict[int, Process] = {}

    def running(self) -> list[int]:
        """Return the numbers of the processes that have not exited."""
        return [number for number, process in self.table.items() if process.pid]

    def spawn(self, message: dict[str, Any], without_capabilities: bool) -> None:
        """Start a process as the host's message demands, and report whether that succeeded."""
        number = message["process"]
        try:
            write_files(message["files"], message["expect"])
            record_mappings()
            self.table[number] = start(message, without_capabilities)
        except (OSError, ValueError) as error:
            self.tell(op="failed", process=number, **failure(error))
        else:
            self.tell(op="started", process=number)

    def signal(self, number: int, signum: int, wait_until: float) -> None:
        """Signal a process group, whose leader may have exited. See ``wait_until_asleep`` for ``wait_until``."""
        process = self.table.get(number)
        if process is None:
            return
        if process.pid:
            wait_until_asleep(process.pid, wait_until)
        try:
            os.killpg(process.group, signum)
        except OSError:
            pass

    def reap(self) -> None:
        """Report all of these processes that have exited, and reap orphans, which became children of PID 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for process in list(self.table.values()):
                if process.pid == pid:
                    process.pid = 0
                    self.tell(op="exited", process=process.number, status=os.waitstatus_to_exitcode(status))
                    self._forget_ended(process)

    def pipe_closed(self, process: Process, fd: int) -> None:
        """Note that one of a process's pipes was closed."""
        for pipe in ("stdin", "stdout", "stderr"):
            if getattr(process, pipe) == fd:
                setattr(process, pipe, -1)
        self._forget_ended(process)

    def _forget_ended(self, process: Process) -> None:
        if not process.pid and {process.stdin, process.stdout, process.stderr} == {-1}:
            self.table.pop(process.number, None)


def failure(error: OSError | ValueError) -> dict[str, Any]:
    """Return the fields that tell the host about ``error``."""
    return {"errno": getattr(error, "errno", None) or errno.EINVAL, "filename": str(getattr(error, "filename", ""))}


def record_mappings() -> None:
    """Write PID 1's mappings to MAPS. A process can prevent that, which affects only later restores of its sandbox."""
    try:
        with open("/proc/self/maps", errors="replace") as maps:
            write_files({MAPS: maps.read()}, {})
    except (OSError, ValueError):
        pass


def write_files(files: dict[str, str], expect: dict[str, int]) -> None:
    """Write ``files``, after a check that each path in ``expect`` still has the given st_ctime_ns.

    Raises OSError: ESTALE if a path has changed, another errno if there is a FIFO or a link at the path of a file.
    Another process may have made it; opening it does not block.
    """
    for path, changed in expect.items():
        if os.stat(path).st_ctime_ns != changed:
            raise OSError(errno.ESTALE, "the file or folder was changed", path)
    for path, text in files.items():
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags, 0o600), "w") as file:
            file.write(text)


def start(message: dict[str, Any], without_capabilities: bool) -> Process:
    """Start a child in its own session as the host's "spawn" message demands.

    Raises OSError if it cannot be executed or its arguments are invalid.
    """
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    in_read, in_write = os.pipe() if message["stdin"] else (os.open("/dev/null", os.O_RDONLY), -1)
    failed_read, failed_write = os.pipe()
    pid = os.fork()
    if not pid:
        _become_child(message, without_capabilities, (in_read, out_write, err_write), failed_write)
    for fd in (out_write, err_write, in_read, failed_write):
        os.close(fd)
    reported = os.read(failed_read, 4096).decode("utf-8", "replace")
    os.close(failed_read)
    kept = [fd for fd in (out_read, err_read, in_write) if fd >= 0]
    if reported:
        for fd in kept:
            os.close(fd)
        number, _, path = reported.partition(" ")
        raise OSError(int(number), os.strerror(int(number)), path)
    for fd in kept:
        os.set_blocking(fd, False)
    return Process(message["process"], pid, in_write, out_read, err_read)


def _become_child(message: dict[str, Any], without_capabilities: bool, stdio: tuple[int, ...], failed: int) -> NoReturn:
    """Execute the command in the forked child. If that fails, write errno and path to ``failed``, and exit."""
    path = message["cwd"]
    try:
        os.setsid()
        os.chdir(path)
        path = message["argv"][0]
        if without_capabilities:
            drop_capabilities()
        for target, source in enumerate(stdio):
            os.dup2(source, target)
        signal.set_wakeup_fd(-1)
        for signum in DEFAULT_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        os.execvpe(path, message["argv"], message["env"])
    except (OSError, ValueError, IndexError) as error:
        number = getattr(error, "errno", None) or errno.EINVAL
        os.write(failed, f"{number} {path}".encode("utf-8", "replace"))
    finally:
        os._exit(127)


def wait_until_asleep(pid: int, until: float) -> None:
    """Wait until the process's main thread sleeps, but no longer than until the monotonic time ``until``.

    A restore interrupts all threads, and gVisor delivers a signal that arrives meanwhile to the first thread that is
    ready again. If that is another thread, a program that sleeps in its main thread does not notice the signal.
    """
    while time.monotonic() < until and _state(pid) == "R":
        time.sleep(0.005)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
