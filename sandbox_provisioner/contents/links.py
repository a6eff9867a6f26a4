"""Resolve a path to a folder and a name in it, and check that the symbolic links on the way may be followed.

The path is walked one component at a time: each folder is opened relative to the one before, and the system never
follows a link. A link's target is read and walked in the same way. The result is a Place: the open folder, the name of
the entry in it, and the entry's real path, which LinkRules has checked.

``openat2(RESOLVE_BENEATH)`` is not used: it refuses absolute links to places inside, does not report which link leads
outside, and needs this walk as a fallback anyway.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..gvisor.mounts import within
from ..storage.disk import closing
from .entries import SAFE, AccessRefused, Place

LINKS = 40
"""Maximum number of links that one path may lead through; the same limit as in Linux."""
STEPS = 1000
"""Maximum number of components of a path and of all link targets on the way: a guest can make very long targets."""
SPARE_STEPS, STEPS_PER_PATH = 10_000, 25
"""Steps (components) that all links of a request may take together: SPARE_STEPS, and STEPS_PER_PATH for each path."""


@dataclass(frozen=True)
class Area:
    """A folder or file that links may lead to, and the limits for links in it. ``real`` is its real path."""

    real: str
    writable: bool = True
    trusted: bool = False
    """True if no sandbox can write to this folder, so that all links in it were made by the user."""


@dataclass
class _Walk:
    """A position during a walk: the open folders from ``base``, a real path, through ``names`` to the current one."""

    base: str
    folders: list[int]
    names: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    """The real path of each folder in which a link was followed."""

    @property
    def real(self) -> str:
        return os.path.join(self.base, *self.names)

    def restart(self, base: str) -> None:
        self.close()
        self.base, self.names = base, []
        self.folders.append(open_real(base))

    def up(self) -> None:
        if self.names:
            self.names.pop()
            os.close(self.folders.pop())
        else:
            self.restart(os.path.dirname(self.base))

    def close(self) -> None:
        while self.folders:
            os.close(self.folders.pop())


def open_real(path: str) -> int:
    """Open a folder by its real path, for lookups only. Raises OSError if the path now contains a link."""
    folder = os.open(path, os.O_PATH | os.O_DIRECTORY | SAFE)
    if os.readlink(f"/proc/self/fd/{folder}") != path:
        os.close(folder)
        raise FileNotFoundError(errno.ENOENT, "The folder was moved, or replaced by a link", path)
    return folder


@dataclass
class _Request:
    """The walks during one request to the server: their results, for reuse, and the number of steps that remain.

    Without a limit of steps, a guest could make a folder of chained links that takes minutes to list. Outdated results
    are no risk: a walk that reuses a result opens that folder without following links, and the rules are checked for
    that folder.
    """

    steps: int = SPARE_STEPS
    """Number of components that the links of this request may still lead through."""
    found: dict[tuple[str | bool, ...], tuple[str, str, Sequence[str]]] = field(default_factory=dict)
    """Where each walk ended: the real path of a folder, a name in it, and the folders of the links on the way."""
    refused: dict[tuple[str | bool, ...], str] = field(default_factory=dict)

    def walk(self, walk: _Walk, relative: str, follow: bool) -> str:
        """Move ``walk`` to the last component's folder; return its name. Raises AccessRefused for too many links."""
        path, parent = (walk.base, relative, follow), (walk.base, os.path.dirname(relative))
        if path in self.refused:
            raise AccessRefused(self.refused[path])
        pending = relative.split("/")[::-1]
        if known := self.found.get(path) or self.found.get(parent):
            real, name, links = known
            walk.restart(real)
            walk.links += links
            pending = [name or pending[0]]
        if path not in self.found:
            self.steps += STEPS_PER_PATH
        try:
            name = self._follow(walk, pending, follow, relative, parent)
        except AccessRefused as refusal:
            self.refused[path] = str(refusal)
            raise
        self.found[path] = walk.real, name, tuple(walk.links)
        return name

    def _follow(
        self, walk: _Walk, pending: list[str], follow: bool, relative: str, parent: tuple[str | bool, ...]
    ) -> str:
        """Move ``walk`` along ``pending``, a reversed list of components, and return the name of the final one."""
        charge = steps = 0  # a step costs ``charge``: 0 before the first link, then 1
        while pending:
            part = pending.pop()
            if not pending:
                self.found.setdefault(parent, (walk.real, "", tuple(walk.links)))
            steps += 1
            self.steps -= charge
            if steps > STEPS:
                raise AccessRefused(_too_many_links(relative))
            if charge and self.steps < 0:
                raise AccessRefused(_too_much_work(relative))
            if part in ("", "."):
                continue
            if part == "..":
                walk.up()
                continue
            last = not any(rest not in ("", ".") for rest in pending)
            try:
                entry = os.open(part, os.O_PATH | SAFE, dir_fd=walk.folders[-1])
            except FileNotFoundError:
                if last:
                    return part
                raise
            kind = os.fstat(entry).st_mode
            if stat.S_ISLNK(kind) and (follow or not last):
                charge = 1
                with closing(entry):
                    target = os.readlink("", dir_fd=entry)
                walk.links.append(walk.real)
                if len(walk.links) > LINKS:
                    raise AccessRefused(_too_many_links(relative))
                if os.path.isabs(target):
                    walk.restart("/")
                pending += target.split("/")[::-1]
            elif last:
                os.close(entry)
                return part
            else:
                walk.names.append(part)
                walk.folders.append(entry)
        return "."


_request: ContextVar[_Request | None] = ContextVar("request", default=None)


@contextmanager
def one_request() -> Iterator[None]:
    """Let all walks in the block share one _Request. A nested block shares the request of the outer block."""
    token = _request.set(_request.get() or _Request())
    try:
        yield
    finally:
        _request.reset(token)


class LinkRules:
    """The rules for links beneath the folder ``root``, and the walk that applies them.

    The scope of a link is the innermost ``shared()`` folder or ``allowed`` area that contains the link, else the root.
    Sandboxes can write to shared folders. A link may lead to places in its scope, and to all allowed areas. Links whose
    scope is not the root may not lead to ``forbidden()`` places, which sandboxes do not see, and may not be used to
    write to ``protected()`` or hidden places in the scope, which sandboxes cannot write to. No link may be used to
    write to a read-only area.
    """

    def __init__(
        self,
        root: str,
        allowed: Iterable[Area] = (),
        shared: Callable[[], Iterable[str]] = tuple,
        protected: Callable[[], Iterable[str]] = tuple,
        forbidden: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.name = os.path.abspath(root)
        self.shared = shared
        self._root = Area(os.path.realpath(root), trusted=True)
        self._allowed = tuple(allowed)
        self._protected = protected
        self._forbidden = forbidden

    @contextmanager
    def locate(self, path: str, *, follow: bool = True, write: bool = False) -> Iterator[Place]:
        """Yield the place of ``path``, an absolute path beneath the root; the entry at its end need not exist.

        With ``follow``, a link at the end is followed too. With ``write``, the rules for writing are checked as well.
        Raises AccessRefused if the rules do not permit a link on the way, and OSError as the system does.
        """
        relative = self._relative(path)
        walk = _Walk(self._root.real, [open_real(self._root.real)])
        try:
            name, scopes = self._walk(walk, relative, follow)
            real = os.path.join(walk.real, name) if name != "." else walk.real
            requested = set(relative.split("/"))
            if not all(self._permits(scope, real, False, requested) for scope in scopes):
                raise AccessRefused(
                    f"{path} leads through a symbolic link to {real}, which must not be accessed through that link."
                )
            if write and not all(self._permits(scope, real, True, requested) for scope in scopes):
                raise AccessRefused(_read_only(path, real))
            yield Place(walk.folders[-1], name, real)
        finally:
            walk.close()

    def area_left(self, old: str, new: str) -> Area | None:
        """Return the scope that a link leaves if moved from real path ``old`` to ``new``; None if none, or trusted."""
        scope = self.scope(os.path.dirname(old))
        return None if scope.trusted or within(self.scope(os.path.dirname(new)).real, scope.real) else scope

    def require_movable(self, target: str, scope: Area, old: Place, new: Place) -> None:
        """Raise AccessRefused unless a link to ``target``, moved to ``new``, leads to a place that ``scope`` allows."""
        folder = "/" if os.path.isabs(target) else os.path.dirname(new.real)
        walk = _Walk(folder, [open_real(folder)])
        try:
            name, scopes = self._walk(walk, target, follow=True)
            real = os.path.normpath(os.path.join(walk.real, name))
            permitted = all(self._permits(each, real, False, set()) for each in (scope, *scopes))
        except (OSError, AccessRefused):
            permitted = False
        finally:
            walk.close()
        if not permitted:
            raise AccessRefused(
                f"{old.real} is a symbolic link to {target} that cannot be moved out of {scope.real}: in "
                f"{os.path.dirname(new.real)} it would lead to a place that is not allowed."
            )

    def scope(self, folder: str) -> Area:
        """Return the scope of the links that lie directly in ``folder``, a real path."""
        shared = [Area(path) for path in self.shared()]
        return _innermost([*self._allowed, *shared], folder) or self._root

    def _relative(self, path: str) -> str:
        if "\0" in path:
            raise ValueError("embedded null byte")
        place = os.path.abspath(path)
        if not within(place, self.name):
            raise PermissionError(errno.EACCES, f"Not beneath {self.name}", path)
        return place[len(self.name) :].lstrip("/") or "."

    def _walk(self, walk: _Walk, relative: str, follow: bool) -> tuple[str, set[Area]]:
        """Move ``walk`` to the last component's folder. Return its name, and the scopes of the links on the way."""
        name = (_request.get() or _Request()).walk(walk, relative, follow)
        return name, {self.scope(folder) for folder in set(walk.links)}

    def _permits(self, scope: Area, real: str, write: bool, requested: set[str]) -> bool:
        """Return True if a link of this scope may lead to ``real``. Names in ``requested`` do not count as hidden."""
        if not scope.trusted and any(within(real, os.path.realpath(place)) for place in self._forbidden()):
            return False
        allowed = _innermost(self._allowed, real)
        if write and allowed and not allowed.writable:
            return False
        if allowed and not within(allowed.real, scope.real):
            return True
        if not within(real, scope.real):
            return False
        if not write or scope.trusted:
            return True
        inner = os.path.relpath(real, scope.real).split("/")
        hidden = any(name.startswith(".") and name != "." and name not in requested for name in inner)
        return not hidden and not any(within(real, os.path.realpath(place)) for place in self._protected())


def _innermost(areas: Iterable[Area], path: str) -> Area | None:
    """Return the innermost area that contains a real path; of two with the same path, a read-only one."""
    found = (area for area in areas if within(path, area.real))
    return max(found, key=lambda area: (len(area.real), not area.writable), default=None)


def _read_only(path: str, real: str) -> str:
    return (
        f"{path} leads through a symbolic link to {real}, which must not be written through that link, because "
        "kernels cannot write there either: it is hidden, protected, or in a read-only mount (add :rw to it in the "
        "setting mounts)."
    )


def _too_many_links(path: str) -> str:
    return f"{path} leads through too many symbolic links, perhaps in a circle."


def _too_much_work(path: str) -> str:
    return (
        f"{path} leads through a symbolic link that was not followed, because the links of this request lead through "
        "too many other links and folders. Open this path in a request of its own."
    )
