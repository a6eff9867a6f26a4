"""Manage the folders of running sandboxes: each is locked by its owner process, and removed after the owner exits.

The lock is a flock on the folder itself: Linux releases it however the owner exits, and systemd's cleaner of /tmp skips
locked folders. A folder with a rescue note belongs to a persistent sandbox, which may still run without its server:
``sweep`` keeps it for ``sandbox.recovery``, which reads the note.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakSet

from .. import config
from ..errors import ConfigurationError, ProgramNotFoundError
from .programs import trusted_program

log = logging.getLogger(__name__)

NAME = re.compile(r"\.?[0-9a-f]{12}")
UNNAMED_TIMEOUT = 3600.0
"""Seconds for which a scan ignores a folder that does not have its final name yet."""
KILL_TIMEOUT = 5.0
"""Seconds to wait until killed runsc processes have exited, before their folder is removed."""
NOTE = "note.json"
RESCUED = "rescued"
"""File that marks a folder which is locked by a process that rescues the sandbox, not by the sandbox's server."""


def runtime_root() -> Path:
    """Return the folder that contains the folders of this user's sandboxes; create it if needed.

    Without SANDBOX_RUNTIME_DIR it is a folder in /tmp whose name is random, so that no other user can create it first,
    and recorded in Jupyter's data folder. If other users could replace it in /tmp, it is in Jupyter's data folder: an
    emptyDir of Kubernetes with fsGroup is writable for a group and has no sticky bit. XDG_RUNTIME_DIR is not used: it
    is removed when the user logs out, and with it the state of kernels that still run. Raises ConfigurationError if
    others can change the folder.
    """
    if chosen := os.environ.get("SANDBOX_RUNTIME_DIR"):
        return _create_root(Path(chosen, "jupyter-sandbox").absolute())
    try:
        return _recorded_root(config.own_folder() / "runtime")
    except OSError:  # the data folder cannot be written
        return _create_root(_fixed_root())


def _fixed_root() -> Path:
    """Return the folder that earlier versions used, now the fallback if the data folder cannot be written."""
    return Path(f"{config.TMP}/jupyter-sandbox-{os.geteuid()}")


def _recorded_root(records: Path) -> Path:
    """Return the folder that is recorded for this machine, or create and record one. Raises OSError."""
    record = records / _machine()
    if found := _read_record(record):
        return found
    records.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(records, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one process creates the folder
        if found := _read_record(record):
            return found
        root = _new_root(records)
        partial = record.with_suffix(".new")
        partial.write_text(str(root))
        partial.rename(record)
        return root
    finally:
        os.close(lock)


def _new_root(records: Path) -> Path:
    """Return a new folder in /tmp, or one beside ``records`` if other users could replace it in /tmp."""
    if not config.replaceable(Path(config.TMP)):
        return Path(tempfile.mkdtemp(prefix="jupyter-sandbox-", dir=config.TMP))
    private = records.parent / "run"
    private.mkdir(mode=0o700, exist_ok=True)
    root = _create_root(private / _machine())
    log.warning(
        "%s is writable for other users and has no sticky bit, so that they could replace the folders of running "
        "sandboxes there. These folders are in %s. Set SANDBOX_RUNTIME_DIR to a local folder of your own to move them.",
        config.TMP,
        root,
    )
    return root


def _machine() -> str:
    """Return an id of this boot of this machine and its /tmp, because several machines can share a data folder."""
    tmp, boot = os.stat(config.TMP), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(f"{boot} {tmp.st_dev} {tmp.st_ino}".encode()).hexdigest()[:16]


def _read_record(record: Path) -> Path | None:
    try:
        root = Path(record.read_text())
    except FileNotFoundError:
        return None
    return root if root.is_absolute() and _owned(root) else None


def _owned(root: Path) -> bool:
    """Return True if ``root`` is a folder that only this user can change or replace."""
    try:
        found = root.lstat()
        own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        return own and not config.replaceable(root.parent)
    except OSError:
        return False


def _create_root(root: Path) -> Path:
    """Create ``root`` if needed, and return it. Raises ConfigurationError if that fails or others can change it."""
    try:
        root.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigurationError(
            "SANDBOX_RUNTIME_DIR",
            f"The folder {root} cannot be created: {error.strerror}.",
            "Set SANDBOX_RUNTIME_DIR to a folder of your own.",
        ) from error
    if not _owned(root):
        raise ConfigurationError(
            "SANDBOX_RUNTIME_DIR",
            f"{root} cannot be used: it is not a folder, or another user can change or replace it.",
            "Set SANDBOX_RUNTIME_DIR to a folder that is yours alone, in a folder that only you can write to (`chmod "
            "go-w`) or that has the sticky bit.",
        )
    return root


def runtime_roots() -> list[Path]:
    """Return each folder that may contain folders of sandboxes: the present one, and that of earlier versions."""
    root, fixed = runtime_root(), _fixed_root()
    old = [] if os.environ.get("SANDBOX_RUNTIME_DIR") or fixed == root or not _owned(fixed) else [fixed]
    return [root, *old]


_held: WeakSet[RuntimeFolder] = WeakSet()


class RuntimeFolder:
    """The locked folder of one live sandbox: its OCI bundle, runsc's state and, if persistent, its note."""

    def __init__(self, path: Path, lock: int) -> None:
        self._set_paths(path)
        self._lock = lock
        _held.add(self)

    def _set_paths(self, path: Path) -> None:
        self.path = path
        self.bundle = path / "bundle"
        self.state = path / "runsc"

    @classmethod
    def create(cls) -> RuntimeFolder:
        """Create and lock a new folder. It is renamed to its final name after that, so no scan finds it unlocked."""
        root = runtime_root()
        name = uuid4().hex[:12]
        unnamed = root / f".{name}"
        unnamed.mkdir(mode=0o700)
        folder = cls(unnamed, os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY))
        try:
            fcntl.flock(folder._lock, fcntl.LOCK_EX)
            folder._set_paths(unnamed.rename(root / name))
            folder.bundle.mkdir()
            folder.state.mkdir()
        except OSError:
            folder.remove()
            raise
        return folder

    @classmethod
    def reclaim(cls, path: Path) -> RuntimeFolder | None:
        """Lock and return the folder of an owner that has exited.

        Return None if the owner still runs, the folder is gone, or it is new and does not have its final name yet.
        """
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if path.name.startswith(".") and time.time() - os.fstat(lock).st_mtime < UNNAMED_TIMEOUT:
                raise BlockingIOError
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists():
                raise BlockingIOError
        except OSError:
            os.close(lock)
            return None
        return cls(path, lock)

    def write_note(self, note: Mapping[str, Any]) -> None:
        """Write the note that describes this sandbox to the process that saves it if its server is killed."""
        partial = self.path / f".{NOTE}"
        partial.write_text(json.dumps(note))
        partial.rename(self.path / NOTE)

    def read_note(self) -> dict[str, Any] | None:
        """Return the note of this sandbox; see the function ``read_note``."""
        return read_note(self.path)

    @property
    def has_processes(self) -> bool:
        """True while a runsc process runs for this folder."""
        return any(_processes(self.state))

    def runs(self, *commands: bytes) -> bool:
        """Return True if one of these runsc commands runs for this folder, started by any process."""
        return any(set(commands) & set(arguments) for _, arguments in _processes(self.state))

    def remove(self) -> None:
        """Kill the runsc processes of this folder, and remove it with its mounts. Blocks, usually for milliseconds.

        runsc leaves a network namespace mounted in its state folder when root runs it.
        """
        deadline = time.monotonic() + KILL_TIMEOUT
        while kill_processes(self.state) and time.monotonic() < deadline:
            time.sleep(0.01)
        for mounted in mounts_below(self.path):
            with suppress(ProgramNotFoundError):
                subprocess.run([trusted_program("umount"), "-l", mounted], capture_output=True)
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Release the lock and keep the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _release_all() -> None:
    """Close inherited locks. Called in a forked child, which would otherwise keep them after the owner exits."""
    for folder in list(_held):
        folder.release()


os.register_at_fork(after_in_child=_release_all)


def read_note(path: Path) -> dict[str, Any] | None:
    """Return the note of the sandbox in the folder ``path``; None without a note, {} for one that cannot be read.

    The two differ because ``sweep`` kills sandboxes without a note: an error of the disk must not cause that.
    """
    try:
        note = json.loads((path / NOTE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def sweep() -> list[str]:
    """Kill the sandboxes without a note whose owners have exited, and return the names of their removed folders."""
    found, _ = scan(lambda note: note is None)
    for folder in found:
        folder.remove()
    return [folder.path.name for folder in found]


NoteFilter = Callable[[dict[str, Any] | None], bool]


def scan(wanted: NoteFilter) -> tuple[list[RuntimeFolder], list[Path]]:
    """Lock and return exited owners' folders with a ``wanted`` note; also return those that other processes rescue.

    Only one scan runs at a time: a scan locks each folder for a moment, and would hide it from another scan. Blocks.
    """
    found: list[RuntimeFolder] = []
    rescued: list[Path] = []
    try:
        for root in runtime_roots():
            lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                _scan(root, wanted, found, rescued)
            finally:
                os.close(lock)
    except BaseException:
        for folder in found:
            folder.release()
        raise
    return found, rescued


def _scan(root: Path, wanted: NoteFilter, found: list[RuntimeFolder], rescued: list[Path]) -> None:
    for path in root.iterdir():
        if not NAME.fullmatch(path.name):
            continue
        folder = RuntimeFolder.reclaim(path)
        if folder is None:
            if (path / RESCUED).exists() and wanted(read_note(path)):
                rescued.append(path)
        elif wanted(note := folder.read_note()):
            found.append(folder)
            if note is not None:
                with suppress(OSError):  # a full disk
                    (path / RESCUED).touch(mode=0o600)
        else:
            folder.release()


def left_behind() -> Iterator[RuntimeFolder]:
    """Yield the folders of exited owners, each locked by this process: the caller removes or releases it."""
    yield from scan(lambda note: True)[0]


def kill_processes(state: Path) -> int:
    """Kill every runsc process whose state folder is ``state``, and return their number.

    ``runsc kill`` is not used because it refuses a paused sandbox.
    """
    found = 0
    for handle, _ in _processes(state):
        found += 1
        with suppress(ProcessLookupError):  # the process has just ended
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    return found


def _processes(state: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Yield a pidfd, valid until the next one, and the arguments of each runsc process with this state folder."""
    wanted = f"--root={state}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            handle = os.pidfd_open(int(entry))
        except OSError:
            continue
        try:
            arguments = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
            if wanted in arguments:
                yield handle, arguments
        except OSError:
            pass
        finally:
            os.close(handle)


def mounts_below(folder: Path) -> list[str]:
    """Return the mount points in ``folder``, innermost first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in lines]
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)
