"""What a checkpoint needs of the machine it is restored on: the host's files that are in use, and the CPU's features.

Only files in use count, and only by their bytes: a package installed beside them, a touched file and the same
environment on another machine are no obstacle. The sandbox itself says what it uses, and is not believed: a path of
its leads nowhere but into the folders that it was given, and what it says is bounded.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from errno import ENOENT
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from .bundle import BundleSpec, Mount, windows
from .errors import GuestError, MetadataError
from .fingerprints import LARGE, Fingerprints
from .folders import within
from .guesttool import GuestTool
from .gvisor import GVisorSandbox
from .storage.base import DIGEST
from .workers import bulk

T = TypeVar("T")
R = TypeVar("R")

USES = ("mapped", "shared", "open", "folder")
STATES = ("deleted", "", "lost")
"""From the best to the worst; a path that is reported in several is in the worst of them."""
MOST_FILES = 1 << 14
MOST_TEXT = 1 << 23
MOST_BYTES = 1 << 35
"""How much of the host's files a sandbox can make us hash."""
LONGEST_PATH = 4096
THREADS = 4
CPU_FEATURES = re.compile(
    r"mmx|fxsr|s?sse.*|pni|avx.*|amx.*|v?aes|v?pclmulqdq|sha.*|sm3|sm4|gfni|fma4?|f16c|bmi.|abm|popcnt|adx|movbe"
    r"|movdir.*|rdrand|rdseed|rdpid|rdtscp|fsgsbase|xsave.*|clflush.*|clwb|cx8|cx16|cmov|lahf_lm|3dnow.*|xop|tbm|rtm|hle"
)
"""What programs use of an x86 CPU; the other flags are the kernel's own business, and change with its version."""


@dataclass(frozen=True)
class FilePrint:
    """A file of the host that a sandbox uses, and by what it is known again.

    ``use`` is "mapped" (privately: a library), "shared" (a mapping that follows the file), "open" or "folder".
    ``state`` is empty, or what became of the file while it was used: "deleted" by the sandbox itself, as far as can be
    told (not every runsc can save that), or "lost", which is removed or replaced by others. An empty ``digest`` means
    that the file must be there, with whatever bytes.
    """

    use: str
    state: str = ""
    size: int = 0
    digest: str = ""


Prints = Mapping[str, FilePrint]
"""By the path in the sandbox."""


async def inventory(sandbox: GVisorSandbox, fingerprints: Fingerprints) -> dict[str, FilePrint]:
    """The host's files that the processes of a running sandbox use; GuestError if it does not say, or too much."""
    text = bytearray()
    async with GuestTool.run(sandbox, "The list of files in use", "inventory.py") as tool:
        async for piece in tool.output():
            text += piece
            if len(text) > MOST_TEXT:
                raise GuestError(f"The sandbox says that more files are in use than fit into {MOST_TEXT:,} bytes.")
        await tool.finish()
    return await bulk(examine, bytes(text), sandbox.spec, fingerprints)


def examine(text: bytes, spec: BundleSpec, fingerprints: Fingerprints) -> dict[str, FilePrint]:
    """The prints of the files that a guest says it uses, as far as they are the host's. Blocks."""
    views, budget = _windows(spec), _Budget()

    def look(sighting: tuple[str, str, str]) -> tuple[str, FilePrint] | None:
        path, use, state = sighting
        window = _window(path, views)
        if window is None:
            return None
        if state:
            return path, FilePrint(use, state if window.writable else "lost")
        try:
            with _opened(path, window, use) as file:
                if use == "mapped" or (use != "folder" and not window.writable):
                    size = budget.spend(file)
                    return path, FilePrint(use, "", size, fingerprints.of(file))
                return path, FilePrint(use)
        except OSError:
            return None  # there is nothing here by which it could be known again

    return dict(filter(None, _for_each(look, _sightings(text), fingerprints)))


def unsaveable(prints: Prints) -> list[str]:
    """Why a sandbox with these files would not wake up as it was, were it saved now: clauses that name the files."""
    lost = sorted(path for path, used in prints.items() if used.state == "lost")
    return [f"{shown(path)}, which it has in memory, was removed or replaced while it ran" for path in lost]


def differences(recorded: Prints, spec: BundleSpec, fingerprints: Fingerprints) -> list[str]:
    """What of ``recorded`` is not so here, for a sandbox of ``spec``: clauses that name the files. Blocks."""
    views, budget = _windows(spec), _Budget()

    def look(item: tuple[str, FilePrint]) -> str | None:
        path, used = item
        window = _window(path, views)
        if used.state:
            return None
        if window is None:
            return f"{shown(path)} is in none of the folders that it sees here"
        try:
            with _opened(path, window, used.use) as file:
                if not used.digest or (budget.spend(file) == used.size and fingerprints.of(file) == used.digest):
                    return None
                return f"{shown(path)} is not the same as it was"
        except FileNotFoundError:
            return f"{shown(path)} is not there"
        except OSError as error:
            return f"{shown(path)} cannot be read: {error.strerror}"

    found = _for_each(look, recorded.items(), fingerprints)
    return unsaveable(recorded) + sorted(filter(None, found))


def _for_each(look: Callable[[T], R], items: Iterable[T], fingerprints: Fingerprints) -> list[R]:
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(look, items))
    fingerprints.save()
    return found


def to_json(prints: Prints) -> dict[str, Any]:
    """``prints`` for a document."""
    return {path: asdict(used) for path, used in prints.items()}


def from_json(document: object) -> dict[str, FilePrint]:
    """The prints that a document has; MetadataError if it has none such."""
    if not isinstance(document, Mapping) or len(document) > MOST_FILES:
        raise MetadataError("The list of files in use is not one.")
    return {_checked_path(path): _checked(path, value) for path, value in document.items()}


def _checked_path(path: object) -> str:
    if not isinstance(path, str) or not _usable(path):
        raise MetadataError(f"The list of files in use has {path!r:.200}, which is not a full path.")
    return path


def _checked(path: str, value: object) -> FilePrint:
    try:
        found = FilePrint(**value)  # type: ignore[arg-type]
        texts = (found.use, found.state, found.digest)
        sound = (
            all(isinstance(text, str) for text in texts)
            and found.use in USES
            and found.state in STATES
            and (not found.digest or DIGEST.fullmatch(found.digest))
            and type(found.size) is int
            and found.size >= 0
        )
    except TypeError:
        sound = False
    if not sound:
        raise MetadataError(f"What the list of files in use has for {shown(path)} cannot be understood.")
    return found


# -- from a path in the sandbox to a file of the host --------------------------------------------------------------


def _sightings(text: bytes) -> Iterator[tuple[str, str, str]]:
    """What the guest said, without what cannot be meant; GuestError if it makes no sense at all."""
    try:
        sightings = json.loads(text)
        if len(sightings) > MOST_FILES:
            raise ValueError(f"{len(sightings)} files")
        known = [(str(path), USES.index(use), STATES.index(state)) for path, use, state in sightings]
    except (TypeError, ValueError, RecursionError) as error:
        raise GuestError(f"The sandbox's list of files in use makes no sense: {shown(str(error)[:100])}.") from error
    known.sort(key=lambda sighting: (sighting[0], sighting[2], -sighting[1]))
    worst = {path: (use, state) for path, use, state in known}
    return ((path, USES[use], STATES[state]) for path, (use, state) in worst.items() if _usable(path))


def _usable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    normal = path.startswith("/") and not path.startswith("//") and os.path.normpath(path) == path
    return normal and "\0" not in path and len(path) < LONGEST_PATH


def _windows(spec: BundleSpec) -> list[Mount]:
    """The mounts with their sources' links followed, the innermost first."""
    mounts = [mount._replace(source=mount.source and os.path.realpath(mount.source)) for mount in windows(spec)]
    return sorted(mounts, key=lambda mount: len(mount.destination), reverse=True)


def _window(path: str, views: Iterable[Mount]) -> Mount | None:
    """The mount through which the sandbox sees ``path``, if that is a file of the host's."""
    window = next((mount for mount in views if within(path, mount.destination)), None)
    return window if window and window.source else None


@contextmanager
def _opened(path: str, window: Mount, use: str) -> Iterator[int]:
    """An O_PATH descriptor of what ``path`` is on the host, which cannot lead out of ``window``: no link is followed.

    A path that the guest reports has none in it, unless it means to mislead. FileNotFoundError for what else is there.
    """
    path = window.source + path[len(window.destination) :]
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
    """How much we may yet be made to read."""

    def __init__(self) -> None:
        self._left = MOST_BYTES
        self._lock = Lock()

    def spend(self, file: int) -> int:
        """The size of ``file``, if reading it is not too much."""
        size = os.fstat(file).st_size
        with self._lock:
            self._left -= min(size, LARGE)
            if self._left < 0:
                raise GuestError(f"The sandbox uses more than {MOST_BYTES:,} bytes of files, which are not compared.")
        return size


def shown(path: str) -> str:
    """A path from outside, fit for a message."""
    return path if path.isprintable() else ascii(path)


# -- the CPU ---------------------------------------------------------------------------------------------------------


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """What programs may have found this machine's CPU able to do, sorted."""
    for line in cpuinfo.read_text().splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            every = name.strip() == "Features"
            return tuple(sorted({flag for flag in flags.split() if every or CPU_FEATURES.fullmatch(flag)}))
    return ()


def missing_cpu_features(architecture: str, features: Sequence[str]) -> list[str]:
    """What of a recorded CPU this machine's lacks, as clauses. gVisor has the last word, and says less."""
    here = os.uname().machine
    if architecture != here:
        return [f"it was made on {shown(architecture[:50])}, and this is {here}"]
    missing = sorted(set(features) - set(cpu_features()))
    return [f"this machine's CPU lacks {', '.join(shown(feature[:50]) for feature in missing)}"] if missing else []
