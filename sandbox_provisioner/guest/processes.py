"""Start a child in the sandbox: fork and exec, with pipes for its standard streams."""

from __future__ import annotations

import errno
import os
import signal
import time

from capabilities import renounce


class Process:
    """A child that the host requested, and the pipes to it."""

    def __init__(self, name: int, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.name = name
        self.pid = pid
        self.group = pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr


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


def start(name: int, argv: list[str], env: dict[str, str], cwd: str, stdin: bool, powerful: bool) -> Process:
    """Start a child in a session of its own, without the capabilities that PID 1 may have (``powerful``).

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
            if powerful:
                renounce()
            for source, target in ((in_read, 0), (out_write, 1), (err_write, 2)):
                os.dup2(source, target)
            signal.set_wakeup_fd(-1)
            for signum in (
                signal.SIGCHLD,
                signal.SIGTERM,
                signal.SIGINT,
                signal.SIGHUP,
                signal.SIGPIPE,
                signal.SIGXFSZ,
            ):
                signal.signal(signum, signal.SIG_DFL)
            os.execvpe(argv[0], argv, env)
        except (OSError, ValueError, IndexError) as error:
            number = getattr(error, "errno", None) or errno.EINVAL
            os.write(failed_write, f"{number} {step}".encode("utf-8", "replace"))
        finally:
            os._exit(127)
    for fd in (out_write, err_write, in_read, failed_write):
        os.close(fd)
    failure = os.read(failed_read, 4096).decode("utf-8", "replace")
    os.close(failed_read)
    if failure:
        for fd in (out_read, err_read, in_write):
            if fd >= 0:
                os.close(fd)
        number, _, step = failure.partition(" ")
        raise OSError(int(number), os.strerror(int(number)), step)
    for fd in (out_read, err_read, in_write):
        if fd >= 0:
            os.set_blocking(fd, False)
    return Process(name, pid, in_write, out_read, err_read)


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
