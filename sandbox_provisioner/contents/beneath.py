"""Access files beneath a folder that an attacker can write to, without a race between check and use.

Each operation acts on the folder that a walk by the rules of ``links`` has reached, even if an attacker swaps part of
the path meanwhile.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from ..gvisor.mounts import within
from ..storage.disk import closing
from .entries import SAFE, AccessRefused, Place, copy_entry, not_a_file, remove_entry, type_and_target
from .links import LinkRules

MAX_ATTEMPTS = 100
"""Maximum attempts to open a file that is repeatedly replaced by a link."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Beneath:
    """File operations on paths beneath a folder. Links are followed only as ``rules`` permit.

    A folder that is moved out of a shared folder or area is passed to ``share``, which makes it a shared folder: links
    in it still may not lead out of it. A sandbox may have it open, and make further links in it. The copy of a folder
    with links is passed to ``share`` too. A link that is moved out on its own must still lead to an allowed place.
    """

    def __init__(self, rules: LinkRules, share: Callable[[Iterable[str]], None] = lambda folders: None) -> None:
        self._rules = rules
        self._share = share
        self.name = rules.name
        self.locate = rules.locate

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """Open a regular file or a folder and return its descriptor.

        Raises AccessRefused for anything else; never blocks on a FIFO.
        """
        for _ in range(MAX_ATTEMPTS):
            with self.locate(path, write=bool(flags & WRITING)) as place:
                try:
                    found = os.open(place.name, flags | SAFE | os.O_NONBLOCK | os.O_NOCTTY, mode, dir_fd=place.folder)
                except OSError as error:
                    if error.errno == errno.ELOOP:
                        continue
                    if error.errno == errno.ENXIO:
                        raise AccessRefused(not_a_file(path)) from None
                    error.filename = path
                    raise
            if not _is_file_or_folder(os.fstat(found)):
                os.close(found)
                raise AccessRefused(not_a_file(path))
            return found
        raise AccessRefused(f"{path} is repeatedly replaced by a link.")

    def stat(self, path: str) -> os.stat_result:
        """Return the status of a file or folder, with links followed. Raises AccessRefused for anything else."""
        for _ in range(MAX_ATTEMPTS):
            with self.locate(path) as place:
                found = place.stat()
            if not stat.S_ISLNK(found.st_mode):
                if not _is_file_or_folder(found):
                    raise AccessRefused(not_a_file(path))
                return found
        raise AccessRefused(f"{path} is repeatedly replaced by a link.")

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
        with closing(found):
            return os.access(f"/proc/self/fd/{found}", mode)

    def listdir(self, path: str) -> list[str]:
        """Return the names of a folder's entries."""
        with self._open(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
            return os.listdir(folder)

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
                with self._checked_move(old, new, remove_entry):
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
        with self._open(source) as old, self._open(target, os.O_WRONLY) as new:
            shutil.copystat(f"/proc/self/fd/{old}", f"/proc/self/fd/{new}")

    def copytree(self, source: str, target: str, linked: bool = False) -> None:
        """Copy a folder and its contents to a path that does not exist.

        A link to an accessible place is copied as that place's content, any other link as a link that stays bound to
        its folder. In a folder that was reached through a link (``linked``), links to folders are copied as links:
        a guest's links to their own folder would fill the disk otherwise. Raises AccessRefused for an entry that is
        neither a file nor a folder nor a link.
        """
        names = self.listdir(source)
        self.mkdir(target)
        for name in names:
            old, new = os.path.join(source, name), os.path.join(target, name)
            is_link = stat.S_ISLNK(self.lstat(old).st_mode)
            try:
                is_folder = stat.S_ISDIR(self.stat(old).st_mode)
            except (AccessRefused, FileNotFoundError):
                self._copy_link(old, new)
                continue
            if is_folder and is_link and linked:
                self._copy_link(old, new)
            elif is_folder:
                self.copytree(old, new, linked or is_link)
            else:
                self.copyfile(old, new)
                self.copystat(old, new)
        with self._open(source) as before, self._open(target) as after:
            shutil.copystat(f"/proc/self/fd/{before}", f"/proc/self/fd/{after}")

    def size(self, path: str) -> int:
        """Return the disk space that a folder's entries use, in bytes; links are not followed."""
        total = 0
        with self._open(path, os.O_RDONLY | os.O_DIRECTORY) as top:
            for _, folders, files, folder in os.fwalk(".", dir_fd=top):
                for name in (*folders, *files):
                    with suppress(FileNotFoundError):
                        total += os.stat(name, dir_fd=folder, follow_symlinks=False).st_blocks * 512
        return total

    def _rename(self, old: Place, new: Place, rename: Callable[..., None]) -> None:
        def undo(folder: int, name: str) -> None:
            os.rename(name, old.name, src_dir_fd=folder, dst_dir_fd=old.folder)

        with self._checked_move(old, new, undo):
            rename(old.name, new.name, src_dir_fd=old.folder, dst_dir_fd=new.folder)

    @contextmanager
    def _checked_move(self, old: Place, new: Place, undo: Callable[[int, str], None]) -> Iterator[None]:
        """Check an entry before the block moves it, and verify afterwards that the same entry was moved.

        Raises AccessRefused for a link that must not leave its folder. If a sandbox replaced the entry meanwhile, calls
        ``undo`` for the new place and raises AccessRefused.
        """
        area, before = self._rules.area_left(old.real, new.real), type_and_target(old)
        if area and stat.S_ISLNK(before[0]):
            self._rules.require_movable(before[1], area, old, new)
        elif stat.S_ISDIR(before[0]):
            inside = [os.path.relpath(path, old.real) for path in self._rules.shared() if within(path, old.real)]
            if area:
                inside.append(".")
            self._share(os.path.normpath(os.path.join(new.real, path)) for path in inside)
        yield
        # Not checked if a sandbox can write to the new place: it may have replaced the entry there, which is allowed.
        if area and self._rules.scope(os.path.dirname(new.real)).trusted and type_and_target(new) != before:
            undo(new.folder, new.name)
            raise AccessRefused(f"{old.real} was replaced by something else, perhaps a link, while it was moved.")

    def _copy_link(self, source: str, target: str) -> None:
        with (
            self.locate(source, follow=False) as old,
            self.locate(target, follow=False, write=True) as new,
        ):
            if not stat.S_ISLNK(old.stat().st_mode):
                raise AccessRefused(not_a_file(source))
            if self._rules.area_left(old.real, new.real):
                self._share([os.path.dirname(new.real)])
            copy_entry(old.folder, old.name, new.folder, new.name)

    def _open(self, path: str, flags: int = os.O_RDONLY) -> AbstractContextManager[int]:
        """Open a file or folder for a block."""
        return closing(self.open(path, flags))


def _is_file_or_folder(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
