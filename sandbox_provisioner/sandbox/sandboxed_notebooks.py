"""Record which notebooks ran in a sandbox, and which kernels without a sandbox the user allowed for them.

A sandbox can write to its notebook's file, and so choose the kernel with which the notebook is opened next time.
``server.plain_kernels`` checks this record before it starts a plain kernel. There is one file for each path,
in a folder of the user's own data that no sandbox can write to. Several processes can use it at once. All functions
block for file access.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from ..config import own_folder
from ..errors import BadRequestError, ConflictError, ObjectNotFoundError
from ..gvisor.mounts import MOST_LINKS
from ..persistence import decoding
from ..storage.base import NEW
from ..storage.disk import closing
from ..storage.local import LocalStore

FOLDER = "sandboxed-notebooks"
MOST_ENTRIES = 10_000
KEEP_MISSING = 30 * 86_400.0
"""Seconds for which the entry of a missing file is kept. A sandbox can delete a file, and create it again."""


@dataclass(frozen=True)
class SandboxedNotebook:
    """The entry of one path: the plain kernel that the user allowed, and the last one that was refused; or empty."""

    notebook: str
    allowed: str = ""
    refused: str = ""
    missing_since: float = 0.0
    """Time at which ``prune`` first missed the file; 0 if it exists."""


Replaced = Mapping[str, tuple[SandboxedNotebook | None, int]]
"""The entries that were replaced, None for new ones, each with the generation of its replacement, by object name."""


class SandboxedNotebooks:
    """The entries in ``folder``, by default in the user's own data folder. Paths are absolute.

    A path stands for all of its ``spellings``. A path without an entry of its own also has the entries of its twins:
    the paths that differ only in case or Unicode form, which some file systems do not distinguish.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or own_folder() / FOLDER
        self._store = LocalStore(self._folder)

    def record(self, paths: Iterable[str]) -> Replaced:
        """Record that notebooks run in a sandbox. This revokes the user's permission for kernels without a sandbox.

        Return the entries before, for ``withdraw``.
        """
        replaced = {}
        for path in dict.fromkeys(spelling for named in paths for spelling in spellings(named)):
            while True:
                known, generation = self._read(_name(path))
                with suppress(ConflictError):
                    # Write even an unchanged entry: its new generation prevents that a failed start withdraws it.
                    written = self._store.write(_name(path), _encode(SandboxedNotebook(path)), generation)
                    replaced[_name(path)] = known, written.generation
                    break
        return replaced

    def withdraw(self, replaced: Replaced) -> None:
        """Undo ``record``, because the start failed, for the entries that were not written again meanwhile."""
        for name, (before, generation) in replaced.items():
            with suppress(ConflictError):
                if before:
                    self._store.write(name, _encode(before), generation)
                else:
                    self._store.delete(name, generation)

    def refused(self, path: str, kernel_name: str, can_allow: bool = True) -> bool:
        """Return True if a notebook ran in a sandbox and this kernel is not allowed for it, and record the refusal.

        Without ``can_allow``, no kernel is allowed.
        """
        name = kernel_name.lower()
        refused = [entry for entry in self._known(path) if entry.allowed != name or not can_allow]
        for entry in refused:
            self._update(entry, partial(replace, refused=name))
        return bool(refused)

    def find(self, path: str) -> SandboxedNotebook | None:
        """Return the entry of a notebook; None if it never ran in a sandbox."""
        return next(iter(self._known(path)), None)

    def allow(self, path: str, kernel_name: str) -> None:
        """Allow a kernel without a sandbox for a notebook, until the notebook runs in a sandbox again.

        Raises BadRequestError if ``path`` leads through a link to another notebook for which it is not allowed yet: a
        sandbox may have made the link.
        """
        name, named = kernel_name.lower(), self._find(os.path.normpath(path))
        for entry in self._known(path):
            if entry not in named and entry.allowed != name:
                problem = f"{path} leads through a link to {entry.notebook}, where the kernel is not allowed."
                raise BadRequestError(
                    problem, "Name that notebook if you want to allow the kernel for it.", "notebook_path"
                )
        for entry in named:
            self._update(entry, partial(replace, allowed=name))

    def revoke(self, path: str) -> None:
        """Refuse kernels without a sandbox for a notebook again."""
        for entry in self._known(path):
            self._update(entry, partial(replace, allowed=""))

    def entries(self) -> list[SandboxedNotebook]:
        """Return all entries, sorted by path."""
        names = [info.name for info in self._store.list("")]
        return sorted((entry for name in names if (entry := self._read(name)[0])), key=lambda entry: entry.notebook)

    def copy(self, old: str, new: str) -> None:
        """Record that a notebook, or a folder of notebooks, was copied; permissions are not copied."""
        for source, target in _moves(old, new):
            self.record(target + path.removeprefix(source) for path in self._below(source))

    def move(self, old: str, new: str) -> None:
        """Record that a notebook, or a folder of notebooks, was renamed; permissions are kept.

        An entry whose file still exists is kept: a sandbox can replace folders by links before this is called.
        """
        for before, after in _moves(old, new):
            for path, entry in self._below(before).items():
                gone = not os.path.lexists(path)
                target = replace(entry, notebook=after + path.removeprefix(before), allowed=entry.allowed * gone)
                self._change(target.notebook, partial(_moved, target))
                if gone and path != target.notebook:
                    self._store.delete(_name(path))

    def forget(self, path: str) -> None:
        """Delete the entries of a notebook, or of a folder of notebooks, that the user deleted.

        An entry whose file still exists is kept: a sandbox can replace folders by links before this is called.
        """
        for place in _places(path):
            for known in [place, *self._below(place)]:
                if not os.path.lexists(known):
                    self._store.delete(_name(known))

    def prepare(self) -> None:
        """Add the notebooks of all recorded sandboxes if there are no entries yet, then prune. Called once by a server.

        An earlier version recorded sandboxes, but did not write entries here.
        """
        if not self._folder.exists():
            from .user_sandboxes import registry  # rarely needed, and a server imports this module when it starts

            self.record(record.notebook_path for record in registry().list().records if record.notebook_path)
        self.prune(time.time())

    def prune(self, now: float) -> None:
        """Delete the entries of files that were missing for KEEP_MISSING, and the oldest of too many entries."""
        for entry in self.entries():
            missing = not os.path.lexists(entry.notebook)
            if missing and entry.missing_since and now - entry.missing_since >= KEEP_MISSING:
                self._store.delete(_name(entry.notebook))
            elif missing != bool(entry.missing_since):
                self._update(entry, partial(replace, missing_since=now if missing else 0.0))
        oldest_first = sorted(self._store.list(""), key=lambda info: info.updated)
        for info in oldest_first[: max(0, len(oldest_first) - MOST_ENTRIES)]:
            self._store.delete(info.name)

    def _known(self, path: str) -> list[SandboxedNotebook]:
        """Return the entries of a notebook, in the order of its spellings."""
        return [entry for spelling in spellings(path) for entry in self._find(spelling)]

    def _find(self, path: str) -> list[SandboxedNotebook]:
        """Return the entry of a path; without one, the entries of its twins."""
        entry = self._read(_name(path), path)[0]
        if entry:
            return [entry]
        twins = (self._read(info.name, path)[0] for info in self._store.list(_twins(path)))
        return [twin for twin in twins if twin]

    def _below(self, path: str) -> dict[str, SandboxedNotebook]:
        """Return the entries of a path and of all paths below it."""
        found = {entry.notebook: entry for entry in self.entries()}
        return {known: entry for known, entry in found.items() if f"{known}/".startswith(f"{path.rstrip('/')}/")}

    def _read(self, name: str, path: str = "") -> tuple[SandboxedNotebook | None, int]:
        """Return an entry, None if it does not exist, and its generation. An unreadable entry allows no kernel."""
        try:
            data, info = self._store.read(name)
        except ObjectNotFoundError:
            return None, NEW
        try:
            return decoding.decode(SandboxedNotebook, json.loads(data)), info.generation
        except decoding.FAILURES:
            return SandboxedNotebook(path), info.generation

    def _update(self, entry: SandboxedNotebook, change: Callable[[SandboxedNotebook], SandboxedNotebook]) -> None:
        """Change an entry, unless another process has deleted it meanwhile."""
        self._change(entry.notebook, lambda known: change(known) if known else None)

    def _change(self, path: str, change: Callable[[SandboxedNotebook | None], SandboxedNotebook | None]) -> None:
        """Replace the entry of ``path`` by ``change(entry)``; if that is None, do nothing. Retry after a conflict."""
        while True:
            known, generation = self._read(_name(path), path)
            entry = change(known)
            if entry == known or entry is None:
                return
            with suppress(ConflictError):
                self._store.write(_name(path), _encode(entry), generation)
                return


def spellings(path: str) -> list[str]:
    """Return the paths under which a notebook may be known: without ``..``, and with links followed step by step.

    So the entry of a notebook is found even if the notebook, or one of its folders, is reached through a link.
    """
    if "\0" in path:
        return []
    found = []
    with suppress(OSError):  # it is no link
        for _ in range(MOST_LINKS):
            found += _places(path)
            path = os.path.join(os.path.dirname(path), os.readlink(path))
    return list(dict.fromkeys([*found, _real(path)]))


def _real(path: str) -> str:
    """Return a path with its links resolved by Linux, which limits their number; unresolved if that fails."""
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return os.path.normpath(path)
    with closing(file):
        return os.readlink(f"/proc/self/fd/{file}")


def _places(path: str) -> list[str]:
    """Return the path without ``..``, and the path with the links in its folder resolved."""
    return [os.path.normpath(path), os.path.join(_real(os.path.dirname(path)), os.path.basename(path))]


def _moves(old: str, new: str) -> list[tuple[str, str]]:
    return list(dict.fromkeys(zip(_places(old), _places(new), strict=True)))


def _moved(entry: SandboxedNotebook, replaced: SandboxedNotebook | None) -> SandboxedNotebook:
    """Return the entry to write at the new path: without a permission that the replaced notebook did not have."""
    return replace(entry, allowed="") if replaced and replaced.allowed != entry.allowed else entry


def _encode(entry: SandboxedNotebook) -> bytes:
    return json.dumps(asdict(entry)).encode()


def _twins(path: str) -> str:
    """Return the beginning of the names of a path's entry and of its twins' entries."""
    folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
    return f"{_hash(folded)}/"


def _name(path: str) -> str:
    """Return the name of the object with the entry of ``path``."""
    return _twins(path) + _hash(path)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:40]
