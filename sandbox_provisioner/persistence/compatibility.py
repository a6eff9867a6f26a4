"""Compare the files and CPU features that a checkpoint needs with those of this machine.

Only the bytes of files in use are compared, so a restore is possible after the installation of a package, with new
modification times, and on another machine with the same environment. The guest reports its files in use. The report is
untrusted: each path is resolved only within the sandbox's own mounts, and the length of the report is limited.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from errno import ENOENT
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple, TypeVar

from ..errors import GuestError, MetadataError
from ..gvisor.bundle import BundleSpec, Mount
from ..gvisor.carried import visible_mounts
from ..gvisor.guest_tool import GuestTool
from ..gvisor.mounts import within
from ..gvisor.sandbox import GVisorSandbox
from ..storage.base import DIGEST
from ..storage.parts import in_parallel
from ..workers import bulk
from . import packages
from .digest_cache import LARGE, SAMPLE, SAMPLES, DigestCache

T = TypeVar("T")
R = TypeVar("R")

USES = ("mapped", "shared", "open", "folder")
STATES = ("deleted", "", "lost")
"""From best to worst; a path that is reported with several states gets the worst."""
MOST_FILES = 1 << 14
MOST_TEXT = 1 << 23
MOST_BYTES = 1 << 35
"""Maximum bytes to hash for one sandbox in folders that it cannot write to."""
SAMPLED_ABOVE = 1 << 26
"""Bytes above which a file in a folder that the sandbox can write to is identified by its size and by samples."""
MOST_WRITABLE_BYTES = 1 << 32
"""Maximum bytes to hash in folders that the sandbox can write to, where it can create any number of files of any
size: a few seconds of work."""
LONGEST_PATH = 4096
LONGEST_TITLE = 100
CPU_FEATURES = re.compile(
    r"mmx|fxsr|s?sse.*|pni|avx.*|amx.*|v?aes|v?pclmulqdq|sha.*|sm3|sm4|gfni|fma4?|f16c|bmi.|abm|popcnt|adx|movbe"
    r"|movdir.*|rdrand|rdseed|rdpid|rdtscp|fsgsbase|xsave.*|clflush.*|clwb|cx8|cx16|cmov|lahf_lm|3dnow.*|xop|tbm|rtm|hle"
)
"""The x86 CPU flags that programs use. The other flags concern only the Linux kernel and change with its version."""


@dataclass(frozen=True)
class FilePrint:
    """A host file that a sandbox uses, and the data that identifies it.

    ``use`` is "mapped" (a private mapping, as of a library), "shared" (a shared mapping), "open" or "folder".
    ``state`` is empty if the file was unchanged, "deleted" if the sandbox itself seems to have deleted it while in use
    (not every runsc can save that), or "lost" if others removed or replaced it. An empty ``digest`` means that the file
    must exist, with any bytes. The digest of a ``sampled`` file covers its size and some of its bytes. ``process`` is
    the process that uses a file with a state; it is not stored.
    """

    use: str
    state: str = ""
    size: int = 0
    digest: str = ""
    sampled: bool = False
    process: str = ""


Prints = Mapping[str, FilePrint]
"""Files in use by their path in the sandbox."""


async def inventory(sandbox: GVisorSandbox, digests: DigestCache) -> dict[str, FilePrint]:
    """Return the host files that the processes of a running sandbox, which may be an orphan, use.

    Raises SandboxError, usually GuestError, if the guest sends no valid list, or one that is too long.
    """
    given_up = Event()
    try:
        return await bulk(examine, await _report(sandbox), sandbox.spec, digests, given_up)
    finally:
        given_up.set()


async def _report(sandbox: GVisorSandbox) -> bytes:
    """Return the list that the guest makes. Raises GuestError."""
    if not sandbox.reachable:
        return await sandbox.execute_in_orphan(
            "import json, open_files; json.dump(open_files.files_in_use(), sys.stdout)"
        )
    text = bytearray()
    async with GuestTool.run(sandbox, "Listing the files in use", "open_files.py", "processes") as tool:
        async for piece in tool.output():
            text += piece
            if len(text) > MOST_TEXT:
                raise GuestError(
                    f"The sandbox uses too many files: their list is longer than {MOST_TEXT:,} bytes. Close files "
                    "or end processes in it, then try again."
                )
        await tool.finish()
    return bytes(text)


def examine(text: bytes, spec: BundleSpec, digests: DigestCache, given_up: Event | None = None) -> dict[str, FilePrint]:
    """Return a FilePrint for each file of the host in the guest's report ``text``, by its path in the sandbox. Blocks.

    Raises GuestError if they are too many or too large, GivenUpError soon after ``given_up`` is set.
    """
    mounts, budget = _mounts(spec), _Budget()
    unwanted = given_up or Event()

    def identify(reported: _Reported) -> tuple[str, FilePrint] | None:
        path, use, state, process = reported
        mount = _mount_of(path, mounts)
        if mount is None:
            return None
        if state:
            return path, FilePrint(use, state if mount.writable else "lost", process=process)
        try:
            with _opened(path, mount, use) as file:
                if use == "mapped" or (use != "folder" and not mount.writable):
                    size = os.fstat(file).st_size
                    sampled = mount.writable and size > SAMPLED_ABOVE
                    budget.spend(size, sampled, mount.writable)
                    digest = digests.of(file, sampled, lambda: not unwanted.is_set())
                    return path, FilePrint(use, "", size, digest, sampled)
                return path, FilePrint(use)
        except OSError:
            return None  # it is not a file of the host, or cannot be read

    return dict(filter(None, _for_each(identify, _parse_report(text), digests)))


def unsaveable(prints: Prints) -> list[str]:
    """Return a clause for each lost file, because of which a sandbox that uses these files could not be restored."""
    return [_replaced(path, used, "in memory") for path, used in sorted(prints.items()) if used.state == "lost"]


def detached(prints: Prints) -> list[str]:
    """Return a clause for each file that was removed or replaced while in use: runsc cannot save some of these."""
    return [_replaced(path, used, "open") for path, used in sorted(prints.items()) if used.state]


def _replaced(path: str, used: FilePrint, how: str) -> str:
    user = shown(used.process) or "the sandbox"
    return f"{shown(path)} was removed or replaced while {user} had it {how}"


def installed_packages(paths: Iterable[str], spec: BundleSpec) -> dict[str, str]:
    """Return the packages that contain these files of a sandbox, by their place in it. Blocks; see ``packages``.

    Leaves out folders that the sandbox can write to, in which it could have made links.
    """
    mounts = _mounts(spec)
    hosts = {packages.top(path): packages.top(host) for path in paths if (host := _host_path(path, mounts))}
    found = packages.installed(f"{host}/" for host in hosts.values() if host)
    return {place: found[host] for place, host in hosts.items() if host in found}


def _host_path(path: str, mounts: Iterable[Mount]) -> str:
    """Return the path on the host of a file in the sandbox; empty if it is not one that the sandbox cannot write to."""
    mount = _mount_of(path, mounts)
    return mount.source + path[len(mount.destination) :] if mount and not mount.writable else ""


def differences(
    recorded: Prints, spec: BundleSpec, digests: DigestCache, before: Mapping[str, str] | None = None
) -> list[str]:
    """Return a clause for each of the ``recorded`` files that differs in a sandbox of ``spec`` here. Blocks.

    ``before`` are the packages that were installed when the sandbox was saved, as ``installed_packages`` returns them.
    """
    mounts, budget = _mounts(spec), _Budget()

    def difference(item: tuple[str, FilePrint]) -> str | None:
        path, used = item
        mount = _mount_of(path, mounts)
        if used.state:
            return None
        if mount is None:
            return f"{shown(path)} is not in a folder that is mounted here"
        try:
            with _opened(path, mount, used.use) as file:
                if not used.digest:
                    return None
                size = os.fstat(file).st_size
                budget.spend(size, used.sampled, mount.writable)
                same = size == used.size and digests.of(file, used.sampled) == used.digest
                return None if same else f"{shown(path)} has changed since the sandbox was saved"
        except FileNotFoundError:
            return f"{shown(path)} is not there"
        except OSError as error:
            return f"{shown(path)} cannot be read: {error.strerror}"

    found = dict(zip(recorded, _for_each(difference, recorded.items(), digests), strict=True))
    changed = {path: clause for path, clause in sorted(found.items()) if clause}
    now = installed_packages(changed, spec)
    remarks = {path: shown(packages.difference(before or {}, now, path)) for path in changed}
    return unsaveable(recorded) + [clause + remarks[path] for path, clause in changed.items()]


def _for_each(function: Callable[[T], R], items: Iterable[T], digests: DigestCache) -> list[R]:
    """Call ``function`` for each item in a few threads, save the new digests, and return the results."""
    found = in_parallel([partial(function, item) for item in items])
    digests.save()
    return found


def to_json(prints: Prints) -> dict[str, Any]:
    """Return ``prints`` for a document. ``sampled`` is written only if true: older versions refuse the key."""
    documents = {path: asdict(used) for path, used in prints.items()}
    for document in documents.values():
        del document["process"]
        if not document["sampled"]:
            del document["sampled"]
    return documents


def from_json(document: object) -> dict[str, FilePrint]:
    """Return the files in use, by path, from the JSON of ``to_json``. Raises MetadataError if it is malformed."""
    if not isinstance(document, Mapping) or len(document) > MOST_FILES:
        raise MetadataError("The list of files in use is invalid.")
    return {_checked_path(path): _checked(path, value) for path, value in document.items()}


def _checked_path(path: object) -> str:
    if not isinstance(path, str) or not _usable(path):
        raise MetadataError(f"The list of files in use has {path!r:.200}, which is not a full path.")
    return path


def _checked(path: str, value: object) -> FilePrint:
    try:
        found = FilePrint(**value)  # type: ignore[arg-type]
        texts = (found.use, found.state, found.digest, found.process)
        sound = (
            all(isinstance(text, str) for text in texts)
            and found.use in USES
            and found.state in STATES
            and (not found.digest or DIGEST.fullmatch(found.digest))
            and type(found.size) is int
            and found.size >= 0
            and type(found.sampled) is bool
        )
    except TypeError:
        sound = False
    if not sound:
        raise MetadataError(f"The list of files in use has an invalid entry for {shown(path)}.")
    return found


# -- resolve a path in the sandbox to a host file --------------------------------------------------------------------


class _Reported(NamedTuple):
    path: str
    use: str
    state: str
    process: str


def _parse_report(text: bytes) -> Iterator[_Reported]:
    """Return the entry for each usable path in the guest's report, each path once.

    Raises GuestError if the report is malformed or too long.
    """
    try:
        report = json.loads(text)
        if len(report) > MOST_FILES:
            raise ValueError(f"it names {len(report):,} files, and at most {MOST_FILES:,} are allowed")
        known = [
            (str(path), USES.index(use), STATES.index(state), str(*process)[:LONGEST_TITLE])
            for path, use, state, *process in report
        ]
    except (TypeError, ValueError, RecursionError) as error:
        raise GuestError(f"The sandbox's list of files in use is invalid: {shown(str(error)[:100])}.") from error
    known.sort(key=lambda file: (file[0], file[2], -file[1]))
    worst = {entry[0]: entry for entry in known}
    return (
        _Reported(path, USES[use], STATES[state], process)
        for path, use, state, process in worst.values()
        if _usable(path)
    )


def _usable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    normal = path.startswith("/") and not path.startswith("//") and os.path.normpath(path) == path
    return normal and "\0" not in path and len(path) < LONGEST_PATH


def _mounts(spec: BundleSpec) -> list[Mount]:
    """Return the mounts with links in their sources resolved, innermost first."""
    mounts = [mount._replace(source=mount.source and os.path.realpath(mount.source)) for mount in visible_mounts(spec)]
    return sorted(mounts, key=lambda mount: len(mount.destination), reverse=True)


def _mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount that contains ``path`` in the sandbox; None if that is not a folder of the host."""
    found = next((mount for mount in mounts if within(path, mount.destination)), None)
    return found if found and found.source else None


@contextmanager
def _opened(path: str, mount: Mount, use: str) -> Iterator[int]:
    """Open the host file behind ``path`` with O_PATH. No link is followed, because it could lead out of ``mount``.

    Paths in an honest report contain no links. Raises FileNotFoundError if ``path`` contains a link or is not of the
    type that ``use`` requires.
    """
    path = mount.source + path[len(mount.destination) :]
    file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mode = os.fstat(file).st_mode
        fits = stat.S_ISDIR(mode) if use == "folder" else stat.S_ISREG(mode)
        if not fits or os.readlink(f"/proc/self/fd/{file}") != path:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), path)
        yield file
    finally:
        os.close(file)


class _Budget:
    """The bytes that may still be read, in folders that the sandbox can write to (True) and in others (False)."""

    def __init__(self) -> None:
        self._most = {True: MOST_WRITABLE_BYTES, False: MOST_BYTES}
        self._left = dict(self._most)
        self._lock = Lock()

    def spend(self, size: int, sampled: bool, writable: bool) -> None:
        """Count a file of ``size`` bytes. Raises GuestError if the budget is exceeded."""
        with self._lock:
            self._left[writable] -= SAMPLES * SAMPLE if sampled else min(size, LARGE)
            if self._left[writable] < 0:
                where = " in folders that it can write to" if writable else ""
                problem = f"The sandbox uses files with more than {self._most[writable]:,} bytes{where}: too many"
                raise GuestError(f"{problem} to compare. Close some that the notebook has mapped into memory.")


def shown(path: str) -> str:
    """Return an untrusted path in printable form, for a message."""
    return path if path.isprintable() else ascii(path)


# -- the CPU ---------------------------------------------------------------------------------------------------------


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the features of this machine's CPU that programs may use, sorted."""
    for line in cpuinfo.read_text().splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            every = name.strip() == "Features"
            return tuple(sorted({flag for flag in flags.split() if every or CPU_FEATURES.fullmatch(flag)}))
    return ()


def missing_cpu_features(architecture: str, features: Sequence[str]) -> list[str]:
    """Return clauses that say which architecture or ``features`` this machine's CPU lacks; empty if none.

    gVisor checks the features again at a restore, with a less detailed message.
    """
    here = os.uname().machine
    if architecture != here:
        return [f"it was saved on {shown(architecture[:50])}, and this machine is {here}"]
    missing = sorted(set(features) - set(cpu_features()))
    return [f"this machine's CPU lacks {', '.join(shown(feature[:50]) for feature in missing)}"] if missing else []
