"""Start, signal and reap the sandbox's processes for the host. Part of PID 1's event loop."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from capabilities import renounce

MAPS = "/run/jupyter/maps"
"""Copy of PID 1's mappings for ``open_files`` and ``zygote``, which may not read them from /proc."""
DEFAULT_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that PID 1 or Python ignores or handles; a child must not inherit that."""


class Process:
    """A child that the host requested, and the pipes to it."""

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

    def spawn(self, message: dict[str, Any], drop_capabilities: bool) -> None:
        """Start a process as the host's message demands, and report whether that succeeded."""
        number = message["process"]
        try:
            prepare(message["expect"], message["files"])
            record_mappings()
            arguments = number, message["argv"], message["env"], message["cwd"], message["stdin"]
            process = start(*arguments, drop_capabilities)
        except (OSError, ValueError) as error:
            self.tell(op="failed", process=number, **failure(error))
            return
        self.table[number] = process
        self.tell(op="started", process=number)

    def signal(self, number: int, signum: int, settle_until: float) -> None:
        """Signal a process group, whose leader may have exited. See ``settle``."""
        process = self.table.get(number)
        if process is None:
            return
        if process.pid:
            settle(process.pid, until=settle_until)
        try:
            os.killpg(process.group, signum)
        except OSError:
            pass

    def reap(self) -> None:
        """Report all processes that have exited, and reap those that they left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for number, process in list(self.table.items()):
                if process.pid == pid:
                    process.pid = 0
                    self.tell(op="exited", process=number, status=os.waitstatus_to_exitcode(status))
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
            prepare({}, {MAPS: maps.read()})
    except (OSError, ValueError):
        pass


def prepare(expect: dict[str, int], files: dict[str, str]) -> None:
    """Write ``files``, after a check that each path in ``expect`` still has the given st_ctime_ns.

    Raises OSError: ESTALE if a path has changed; also, without blocking, if a file's place holds a FIFO or a link,
    which another process may have put there.
    """
    for path, changed in expect.items():
        if os.stat(path).st_ctime_ns != changed:
            raise OSError(errno.ESTALE, "changed", path)
    for path, text in files.items():
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags, 0o600), "w") as file:
            file.write(text)


def start(number: int, argv: list[str], env: dict[str, str], cwd: str, stdin: bool, drop_capabilities: bool) -> Process:
    """Start a child in its own session. With ``drop_capabilities``, PID 1 has some, and the child gets none.

    Raises OSError if it cannot be executed or its arguments are invalid.
    """
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    in_read, in_write = os.pipe() if stdin else (os.open("/dev/null", os.O_RDONLY), -1)
    failed_read, failed_write = os.pipe()
    pid = os.fork()
    if not pid:
        step = cwd
        try:
            os.setsid()
            os.chdir(cwd)
            step = argv[0]
            if drop_capabilities:
                renounce()
            for source, target in ((in_read, 0), (out_write, 1), (err_write, 2)):
                os.dup2(source, target)
            signal.set_wakeup_fd(-1)
            for signum in DEFAULT_SIGNALS:
                signal.signal(signum, signal.SIG_DFL)
            os.execvpe(argv[0], argv, env)
        except (OSError, ValueError, IndexError) as error:
            number = getattr(error, "errno", None) or errno.EINVAL
            os.write(failed_write, f"{number} {step}".encode("utf-8", "replace"))
        finally:
            os._exit(127)
    for fd in (out_write, err_write, in_read, failed_write):
        os.close(fd)
    reported = os.read(failed_read, 4096).decode("utf-8", "replace")
    os.close(failed_read)
    if reported:
        for fd in (out_read, err_read, in_write):
            if fd >= 0:
                os.close(fd)
        code, _, step = reported.partition(" ")
        raise OSError(int(code), os.strerror(int(code)), step)
    for fd in (out_read, err_read, in_write):
        if fd >= 0:
            os.set_blocking(fd, False)
    return Process(number, pid, in_write, out_read, err_read)


def settle(pid: int, until: float) -> None:
    """Wait until the process's main thread is not running, but no longer than ``until``.

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
