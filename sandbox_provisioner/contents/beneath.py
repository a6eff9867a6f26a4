"""Access files beneath a folder that an attacker can write to, without a race between check and use.

A path is walked one component at a time on descriptors, without following links in the kernel. A link is read and
walked in the same way. The result is the descriptor of a folder and a name in it, together with the real path, which is
checked against the rules for links. Each operation acts on the folder that the walk reached, even if an attacker swaps
part of the path meanwhile.

``openat2(RESOLVE_BENEATH)`` is not used: it refuses absolute links that stay inside, cannot name the link that leads
outside, and needs this walk as a fallback anyway.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..gvisor.mounts import within

LINKS = 40
"""Maximum number of links that one path may lead through; the same limit as in Linux."""
STEPS = 1000
"""Maximum components of a path and its links; a guest can make targets with thousands, and each costs time."""
TRIES = 100
"""Maximum attempts to open a file that is repeatedly replaced by a link."""
SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class AccessRefused(Exception):
    """The path leads through a link to a place outside, or is neither a file nor a folder."""


@dataclass(frozen=True)
class Area:
    """A folder or file, by its real path, that links may lead to."""

    real: str
    writable: bool = True
    trusted: bool = False
    """True if no sandbox can write there, so that its links are the user's own."""


@dataclass(frozen=True)
class Place:
    """An entry of a folder: the folder's descriptor, the entry's name, and its real path."""

    folder: int
    name: str
    real: str

    def stat(self) -> os.stat_result:
        """Return the status of the entry itself, not of a link's target."""
        return os.stat(self.name, dir_fd=self.folder, follow_symlinks=False)


@dataclass
class _Walk:
    """The open folders from a base folder, given by its real path, to the current one."""

    base: str
    folders: list[int]
    names: list[str] = field(default_factory=list)

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


class Beneath:
    """File operations on paths beneath ``root`` that no link can lead outside.

    A link in one of the ``shared()`` folders, which sandboxes can write to, may lead to a place in that folder. Any
    other link may lead to a place beneath the root. All links may lead to the ``allowed`` areas. Writing through a link
    in a shared folder or area to a ``protected()`` or hidden place is refused, because a sandbox cannot write there
    itself.

    No link in a shared folder or area may lead to a ``forbidden()`` place, which sandboxes do not see at all.

    A folder that is moved out of a shared folder or area is registered with ``share`` as a shared folder: its links
    stay bound to it, including those that a sandbox, which may still have the folder open, makes later. The copy of a
    folder with links is registered too. A link that is moved out on its own must still lead to an allowed place.
    """

    def __init__(
        self,
        root: str,
        allowed: Iterable[Area] = (),
        shared: Callable[[], Iterable[str]] = tuple,
        protected: Callable[[], Iterable[str]] = tuple,
        share: Callable[[Iterable[str]], None] = lambda folders: None,
        forbidden: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.name = os.path.abspath(root)
        self._root = Area(os.path.realpath(root), trusted=True)
        self._allowed = tuple(allowed)
        self._shared = shared
        self._protected = protected
        self._share = share
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

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """Open a regular file or a folder. Raises AccessRefused for anything else; never blocks on a FIFO."""
        for _ in range(TRIES):
            with self.locate(path, write=bool(flags & WRITING)) as place:
                try:
                    found = os.open(place.name, flags | SAFE | os.O_NONBLOCK | os.O_NOCTTY, mode, dir_fd=place.folder)
                except OSError as error:
                    if error.errno == errno.ELOOP:
                        continue
                    if error.errno == errno.ENXIO:
                        raise AccessRefused(_special(path)) from None
                    error.filename = path
                    raise
            if not _ordinary(os.fstat(found)):
                os.close(found)
                raise AccessRefused(_special(path))
            return found
        raise AccessRefused(f"{path} is replaced by a link again and again.")

    def stat(self, path: str) -> os.stat_result:
        """Return the status of a file or folder, with links followed. Raises AccessRefused for anything else."""
        for _ in range(TRIES):
            with self.locate(path) as place:
                found = place.stat()
            if not stat.S_ISLNK(found.st_mode):
                if not _ordinary(found):
                    raise AccessRefused(_special(path))
                return found
        raise AccessRefused(f"{path} is replaced by a link again and again.")

    def lstat(self, path: str) -> os.stat_result:
        """Return the status of an entry itself, which can be a link."""
        with self.locate(path, follow=False) as place:
            return place.stat()

    def access(self, path: str, mode: int) -> bool:
        """Return True if the user may access the file or folder."""
        self.stat(path)
        try:
            with self.locate(path, write=bool(mode & os.W_OK)) as place:
                found = os.open(place.name, os.O_PATH | SAFE, dir_fd=place.folder)
        except AccessRefused:
            return False
        try:
            return os.access(f"/proc/self/fd/{found}", mode)
        finally:
            os.close(found)

    def listdir(self, path: str) -> list[str]:
        """Return the names of a folder's entries."""
        folder = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        """Make a folder."""
        with self.locate(path, follow=False, write=True) as place:
            os.mkdir(place.name, mode, dir_fd=place.folder)

    def makedirs(self, path: str, mode: int = 0o777) -> None:
        """Make a folder and its missing parents. Raises FileExistsError if a file has its name."""
        try:
            if stat.S_ISDIR(self.stat(path).st_mode):
                return
        except FileNotFoundError:
            if os.path.abspath(path) != self.name:
                self.makedirs(os.path.dirname(os.path.abspath(path)), mode)
        try:
            self.mkdir(path, mode)
        except FileExistsError:
            if not stat.S_ISDIR(self.stat(path).st_mode):
                raise

    def unlink(self, path: str) -> None:
        """Remove a file, or a link but not its target."""
        with self.locate(path, follow=False, write=True) as place:
            os.unlink(place.name, dir_fd=place.folder)

    def rmtree(self, path: str) -> None:
        """Remove a folder and its contents; links in it are removed, not followed."""
        with self.locate(path, follow=False, write=True) as place:
            shutil.rmtree(place.name, dir_fd=place.folder)

    def replace(self, source: str, target: str) -> None:
        """Rename ``source`` to ``target``, or to the file that ``target`` is a link to."""
        with (
            self.locate(source, follow=False, write=True) as old,
            self.locate(target, write=True) as new,
        ):
            self._rename(old, new, os.replace)

    def move(self, source: str, target: str) -> None:
        """Rename an entry, which can be a link; copy and delete it if the target is on another file system.

        Raises AccessRefused for a link that must not leave its folder.
        """
        with (
            self.locate(source, follow=False, write=True) as old,
            self.locate(target, follow=False, write=True) as new,
        ):
            try:
                self._rename(old, new, os.rename)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                with self._judged(old, new, remove_entry):
                    copy_entry(old.folder, old.name, new.folder, new.name)
                remove_entry(old.folder, old.name)

    def copyfile(self, source: str, target: str) -> None:
        """Copy a file's content. Raises shutil.SameFileError if both paths lead to the same file."""
        with (
            os.fdopen(self.open(source, os.O_RDONLY), "rb") as old,
            os.fdopen(self.open(target, os.O_WRONLY | os.O_CREAT), "wb") as new,
        ):
            if os.path.samestat(os.fstat(old.fileno()), os.fstat(new.fileno())):
                raise shutil.SameFileError(f"{source} and {target} are the same file")
            new.truncate()
            shutil.copyfileobj(old, new)

    def copystat(self, source: str, target: str) -> None:
        """Copy a file's permissions and times."""
        with self._opened(source) as old, self._opened(target, os.O_WRONLY) as new:
            shutil.copystat(f"/proc/self/fd/{old}", f"/proc/self/fd/{new}")

    def copytree(self, source: str, target: str) -> None:
        """Copy a folder and its contents to a path that does not exist.

        A link to an accessible place is copied as that place's content, any other link as a link that stays bound to
        its folder. Raises AccessRefused for an entry that is neither a file nor a folder nor a link.
        """
        names = self.listdir(source)
        self.mkdir(target)
        for name in names:
            old, new = os.path.join(source, name), os.path.join(target, name)
            try:
                kind = self.stat(old).st_mode
            except (AccessRefused, FileNotFoundError):
                self._copy_link(old, new)
                continue
            if stat.S_ISDIR(kind):
                self.copytree(old, new)
            else:
                self.copyfile(old, new)
                self.copystat(old, new)
        with self._opened(source) as before, self._opened(target) as after:
            shutil.copystat(f"/proc/self/fd/{before}", f"/proc/self/fd/{after}")

    def size(self, path: str) -> int:
        """Return the disk space that a folder's entries use, in bytes; links are not followed."""
        total = 0
        top = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for _, folders, files, folder in os.fwalk(".", dir_fd=top):
                for name in (*folders, *files):
                    try:
                        total += os.stat(name, dir_fd=folder, follow_symlinks=False).st_blocks * 512
                    except FileNotFoundError:
                        continue
        finally:
            os.close(top)
        return total

    def _rename(self, old: Place, new: Place, rename: Callable[..., None]) -> None:
        def undo(folder: int, name: str) -> None:
            os.rename(name, old.name, src_dir_fd=folder, dst_dir_fd=old.folder)

        with self._judged(old, new, undo):
            rename(old.name, new.name, src_dir_fd=old.folder, dst_dir_fd=new.folder)

    @contextmanager
    def _judged(self, old: Place, new: Place, undo: Callable[[int, str], None]) -> Iterator[None]:
        """Check an entry before the block moves it, and verify afterwards that the same entry was moved.

        Raises AccessRefused for a link that must not leave its folder. If a sandbox replaced the entry meanwhile, calls
        ``undo`` for the new place and raises AccessRefused.
        """
        left, judged = self._left(old.real, new.real), _nature(old)
        if left and stat.S_ISLNK(judged[0]):
            self._judge_link(judged[1], left, old, new)
        elif stat.S_ISDIR(judged[0]):
            inside = [os.path.relpath(path, old.real) for path in self._shared() if within(path, old.real)]
            if left:
                inside.append(".")
            self._share(os.path.normpath(os.path.join(new.real, path)) for path in inside)
        yield
        # Not checked if a sandbox can write to the new place: it may have replaced the entry there, which is allowed.
        if left and self._scope(os.path.dirname(new.real)).trusted and _nature(new) != judged:
            undo(new.folder, new.name)
            raise AccessRefused(f"{old.real} was replaced by something else, perhaps a link, while it was moved.")

    def _left(self, old: str, new: str) -> Area | None:
        """Return the area, if any, that links at the real path ``old`` are bound to, but links at ``new`` are not."""
        scope = self._scope(os.path.dirname(old))
        return None if scope.trusted or within(self._scope(os.path.dirname(new)).real, scope.real) else scope

    def _judge_link(self, target: str, scope: Area, old: Place, new: Place) -> None:
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

    def _copy_link(self, source: str, target: str) -> None:
        with (
            self.locate(source, follow=False) as old,
            self.locate(target, follow=False, write=True) as new,
        ):
            if not stat.S_ISLNK(old.stat().st_mode):
                raise AccessRefused(_special(source))
            if self._left(old.real, new.real):
                self._share([os.path.dirname(new.real)])
            copy_entry(old.folder, old.name, new.folder, new.name)

    @contextmanager
    def _opened(self, path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
        found = self.open(path, flags)
        try:
            yield found
        finally:
            os.close(found)

    def _relative(self, path: str) -> str:
        if "\0" in path:
            raise ValueError("embedded null byte")
        place = os.path.abspath(path)
        if not within(place, self.name):
            raise PermissionError(errno.EACCES, f"Not beneath {self.name}", path)
        return place[len(self.name) :].lstrip("/") or "."

    def _walk(self, walk: _Walk, relative: str, follow: bool) -> tuple[str, list[Area]]:
        """Walk to the last component. Return its name, and the area that each link on the way is bound to."""
        pending = relative.split("/")[::-1]
        scopes: list[Area] = []
        steps = 0
        while pending:
            part = pending.pop()
            steps += 1
            if steps > STEPS:
                raise AccessRefused(_endless(relative))
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
                    return part, scopes
                raise
            kind = os.fstat(entry).st_mode
            if stat.S_ISLNK(kind) and (follow or not last):
                target = _read_link(entry)
                scopes.append(self._scope(walk.real))
                if len(scopes) > LINKS:
                    raise AccessRefused(_endless(relative))
                if os.path.isabs(target):
                    walk.restart("/")
                pending += target.split("/")[::-1]
            elif last:
                os.close(entry)
                return part, scopes
            else:
                walk.names.append(part)
                walk.folders.append(entry)
        return ".", scopes

    def _scope(self, folder: str) -> Area:
        """Return the area that the links in a folder, given by its real path, may lead to."""
        shared = [Area(path) for path in self._shared()]
        return _innermost([*self._allowed, *shared], folder) or self._root

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


def copy_entry(folder: int, name: str, target_folder: int, target: str) -> None:
    """Copy a file, a link as a link, or a folder and its contents, from one folder to another.

    Raises AccessRefused for any other entry.
    """
    kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISLNK(kind):
        os.symlink(os.readlink(name, dir_fd=folder), target, dir_fd=target_folder)
        return
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise AccessRefused(_special(name))
    old = os.open(name, os.O_RDONLY | SAFE | os.O_NONBLOCK, dir_fd=folder)
    try:
        if stat.S_ISDIR(kind):
            os.mkdir(target, 0o700, dir_fd=target_folder)
            new = os.open(target, os.O_RDONLY | os.O_DIRECTORY | SAFE, dir_fd=target_folder)
        else:
            new = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o600, dir_fd=target_folder)
        try:
            if stat.S_ISDIR(kind):
                for entry in os.listdir(old):
                    copy_entry(old, entry, new, entry)
            elif not stat.S_ISREG(os.fstat(old).st_mode):
                raise AccessRefused(_special(name))
            else:
                with os.fdopen(os.dup(old), "rb") as reader, os.fdopen(os.dup(new), "wb") as writer:
                    shutil.copyfileobj(reader, writer)
            shutil.copystat(f"/proc/self/fd/{old}", f"/proc/self/fd/{new}")
        finally:
            os.close(new)
    finally:
        os.close(old)


def remove_entry(folder: int, name: str) -> None:
    """Remove a file, a link, or a folder and its contents."""
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def _nature(place: Place) -> tuple[int, str]:
    """Return the type of an entry, and the target if it is a link."""
    try:
        return stat.S_IFLNK, os.readlink(place.name, dir_fd=place.folder)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return stat.S_IFMT(place.stat().st_mode), ""


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


def _ordinary(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)


def _special(path: str) -> str:
    return f"{path} is neither a file nor a folder (a FIFO, a socket or a device)."


def _outside(path: str, real: str) -> str:
    return f"{path} leads through a symbolic link to {real}, which must not be accessed through that link."


def _read_only(path: str, real: str) -> str:
    return (
        f"{path} leads through a symbolic link to {real}, which must not be written through that link, because "
        "kernels cannot write there either: it is hidden, protected, or in a read-only mount (add :rw to it in the "
        "setting mounts)."
    )


def _endless(path: str) -> str:
    return f"{path} leads through too many symbolic links, perhaps in a circle."
