"""Find the place that a path leads to, and decide which links on the way may be followed.

A path is walked one component at a time on descriptors, without following links in the kernel. A link is read and
walked in the same way. The result is the descriptor of a folder and a name in it, together with the real path, which is
checked against the rules for links.

``openat2(RESOLVE_BENEATH)`` is not used: it refuses absolute links that stay inside, cannot name the link that leads
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
from .entries import SAFE, AccessRefused, Place

LINKS = 40
"""Maximum number of links that one path may lead through; the same limit as in Linux."""
STEPS = 1000
"""Maximum components of a path and its links; a guest can make targets with thousands, and each costs time."""
SPARE_STEPS, STEPS_PER_PATH = 10_000, 25
"""Maximum steps that the links of one request may take together: a fixed number, and so many more for each path."""


@dataclass(frozen=True)
class Area:
    """A folder or file, by its real path, that links may lead to."""

    real: str
    writable: bool = True
    trusted: bool = False
    """True if no sandbox can write there, so that its links are the user's own."""


@dataclass
class _Walk:
    """The open folders from a base folder, given by its real path, to the current one."""

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
    """Follow the links of each path only once in a request, and limit the steps for all paths together.

    Without the limit, a guest could make a folder of chained links that takes minutes to list. A path that leads
    elsewhere in the middle of a request is no risk: each walk opens the folder that was found without following links,
    and the rules are checked for that folder.
    """

    steps: int = SPARE_STEPS
    """Steps that links may still take."""
    found: dict[tuple[str | bool, ...], tuple[str, str, Sequence[str]]] = field(default_factory=dict)
    """The end of each walk: the real path of a folder, a name in it, and the links on the way."""
    refused: dict[tuple[str | bool, ...], str] = field(default_factory=dict)

    def walk(self, walk: _Walk, relative: str, follow: bool) -> str:
        """Walk to the last component and return its name. Raises AccessRefused for too many links or steps."""
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
        """Walk the ``pending`` components, the last one first, and return the name that the walk ends with."""
        charge = steps = 0  # steps cost nothing before the first link
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
                target = _read_link(entry)
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
    """Treat all walks in the block as one request. A block in another one belongs to the same request."""
    token = _request.set(_request.get() or _Request())
    try:
        yield
    finally:
        _request.reset(token)


class LinkRules:
    """The rules for links beneath the folder ``root``, and the walk that applies them.

    A link in one of the ``shared()`` folders, which sandboxes can write to, may lead to a place in that folder. Any
    other link may lead to a place beneath the root. All links may lead to the ``allowed`` areas. Writing through a link
    in a shared folder or area to a ``protected()`` or hidden place is refused, because a sandbox cannot write there
    itself.

    No link in a shared folder or area may lead to a ``forbidden()`` place, which sandboxes do not see at all.
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
        """Walk to ``path``, an absolute path beneath the root, and yield its place; the entry need not exist.

        Raises AccessRefused if a link leads to a forbidden place, and OSError as the system does.
        """
        relative = self._relative(path)
        walk = _Walk(self._root.real, [open_real(self._root.real)])
        try:
            name, scopes = self._walk(walk, relative, follow)
            real = os.path.join(walk.real, name) if name != "." else walk.real
            asked = set(relative.split("/"))
            if not all(self._permits(scope, real, False, asked) for scope in scopes):
                raise AccessRefused(_outside(path, real))
            if write and not all(self._permits(scope, real, True, asked) for scope in scopes):
                raise AccessRefused(_read_only(path, real))
            yield Place(walk.folders[-1], name, real)
        finally:
            walk.close()

    def area_left(self, old: str, new: str) -> Area | None:
        """Return the area, if any, that links at the real path ``old`` are bound to, but links at ``new`` are not."""
        scope = self.scope(os.path.dirname(old))
        return None if scope.trusted or within(self.scope(os.path.dirname(new)).real, scope.real) else scope

    def require_movable(self, target: str, scope: Area, old: Place, new: Place) -> None:
        """Raise AccessRefused unless a link, from its new place, leads to where it was allowed to lead before."""
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
                f"{old.real} is a symbolic link to {target}, which cannot be moved out of {scope.real}: in "
                f"{os.path.dirname(new.real)} it would lead to another place."
            )

    def scope(self, folder: str) -> Area:
        """Return the area that the links in a folder, given by its real path, may lead to."""
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
        """Walk to the last component. Return its name, and the areas that the links on the way are bound to."""
        name = (_request.get() or _Request()).walk(walk, relative, follow)
        return name, {self.scope(folder) for folder in set(walk.links)}

    def _permits(self, scope: Area, real: str, write: bool, asked: set[str]) -> bool:
        """Return True if a link of this scope may lead to the real path; ``asked`` are the names in the request."""
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
        hidden = any(name.startswith(".") and name != "." and name not in asked for name in inner)
        return not hidden and not any(within(real, os.path.realpath(place)) for place in self._protected())


def _read_link(entry: int) -> str:
    """Return the target of a link that is open with O_PATH, and close it."""
    try:
        return os.readlink("", dir_fd=entry)
    finally:
        os.close(entry)


def _innermost(areas: Iterable[Area], path: str) -> Area | None:
    """Return the innermost area that contains a real path; of two with the same path, a read-only one."""
    found = (area for area in areas if within(path, area.real))
    return max(found, key=lambda area: (len(area.real), not area.writable), default=None)


def _outside(path: str, real: str) -> str:
    return f"{path} leads through a symbolic link to {real}, which must not be accessed through that link."


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
        "too many other links and folders. Open it alone."
    )
