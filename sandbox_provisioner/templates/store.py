"""Store the templates on this user's disk: at most one per kernelspec, published and deleted atomically.

Each kernelspec has a folder with images; ``template.json`` names the current one. An image is used under a shared lock
and deleted only under an exclusive one, so that no server deletes an image that another one uses. Each build removes
the files that interrupted builds left.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import stat
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from ..config import own_folder
from ..persistence.staging import locked

DOCUMENT = "template.json"
LOCK = ".building"
IMAGE = "image-"
POLL = 0.1
"""Seconds between two attempts to get the build lock."""
EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB

Mark = list[int]
"""Values that show if a file has changed: device, inode, size, mtime, number of hard links, and ctime; for a folder
device, inode and mtime."""


class FolderMark(NamedTuple):
    """A folder in which modules were searched for: its mark, the names, and the entries that belong to them.

    Path files (``.pth``) always belong to them, because Python reads each one when it starts.
    """

    mark: Mark
    names: list[str]
    entries: list[str]

    @classmethod
    def of(cls, path: str, names: Iterable[str]) -> FolderMark | None:
        """Return the present mark of a folder; None if it is not a folder or cannot be read."""
        found, searched = mark(path), sorted(names)
        entries = _entries(path, searched)
        return None if found is None or entries is None else cls(found, searched, entries)

    def changed(self, path: str) -> bool:
        """Return True if an entry was added or removed that could change which modules are imported."""
        return mark(path) != self.mark and _entries(path, self.names) != self.entries


def _entries(path: str, names: Iterable[str]) -> list[str] | None:
    searched = {*names}
    try:
        found = os.listdir(path)
    except OSError:
        return None
    return sorted(name for name in found if name.endswith(".pth") or name.partition(".")[0] in searched)


@dataclass(frozen=True)
class Template:
    """A template; or, if ``image`` is empty, the reason (``unfit``) why the kernelspec has none."""

    kernel_name: str
    key: str
    created: str
    image: str = ""
    """Name of the image's folder."""
    size: int = 0
    preloaded: list[str] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Modules that could not be preloaded, with the reasons."""
    unfit: str = ""
    failed: bool = False
    """True if the build failed; another attempt may succeed."""
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """Marks of the host files that the template depends on, including those of the image."""
    folders: Mapping[str, FolderMark] = field(default_factory=dict)
    """Marks of the host folders in which modules were searched for."""

    @property
    def changed(self) -> str:
        """Path of the first file or folder that has changed; empty if none has. Blocks for some milliseconds."""
        files = (path for path, before in self.marks.items() if not _same(before, mark(path)))
        folders = (path for path, before in self.folders.items() if before.changed(path))
        return next(chain(files, folders), "")

    @property
    def age(self) -> timedelta:
        """Time since the template was built."""
        return datetime.now(UTC) - datetime.fromisoformat(self.created)


def mark(path: str) -> Mark | None:
    """Return the mark of a file or folder; None if it does not exist or cannot be reached."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode):
        return [found.st_dev, found.st_ino, found.st_mtime_ns]
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_nlink, found.st_ctime_ns]


def _same(before: Mark, found: Mark | None) -> bool:
    """Return True if a file has not changed. A new ctime is ignored if the number of hard links explains it.

    uv installs a package into several environments as hard links to one file.
    """
    return found is not None and (found == before or (found[:4] == before[:4] and found[4:5] != before[4:5]))


class TemplateShelf:
    """The templates in ``folder``, by default the user's. The folder is created when a template is built."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or own_folder() / "templates").absolute()

    def get(self, kernel_name: str) -> Template | None:
        """Return the kernelspec's template, even if outdated; None if it has none or the document is invalid."""
        try:
            document = json.loads((self.folder / kernel_name / DOCUMENT).read_bytes())
            document["folders"] = {path: FolderMark(*each) for path, each in document.get("folders", {}).items()}
            found = Template(**document)
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        return found if found.kernel_name == kernel_name and os.path.basename(found.image) == found.image else None

    def list(self) -> list[Template]:
        """Return all templates, sorted by kernelspec."""
        names = sorted(path.parent.name for path in self.folder.glob(f"*/{DOCUMENT}"))
        return [found for name in names if (found := self.get(name))]

    @contextmanager
    def using(self, template: Template) -> Iterator[Path]:
        """Provide the image, and keep it during the block. Raises FileNotFoundError if it is gone or being deleted."""
        image = self.folder / template.kernel_name / template.image
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(image, fcntl.LOCK_SH | fcntl.LOCK_NB))
            except OSError as error:  # another process may be deleting it
                raise FileNotFoundError(f"{image} cannot be locked: {error.strerror}") from error
            if not (image / "checkpoint.img").exists():
                raise FileNotFoundError(f"{image} is gone")
            yield image

    @asynccontextmanager
    async def building(self, kernel_name: str, wait: bool) -> AsyncIterator[Path | None]:
        """Hold the kernelspec's build lock and provide a path for an image; without ``wait``, None if it is locked."""
        place = self.folder / kernel_name
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        (place / LOCK).mkdir(mode=0o700, exist_ok=True)
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(locked(place / LOCK, EXCLUSIVE))
                    break
                except BlockingIOError:
                    if not wait:
                        yield None
                        return
                await asyncio.sleep(POLL)
            try:
                yield place / LOCK / uuid4().hex[:12]
            finally:
                self._collect(place)

    def publish(self, template: Template, draft: Path | None = None) -> Template:
        """Make the template current, with the image ``draft``, if given, and return it. Call in ``building`` only."""
        place = self.folder / template.kernel_name
        if draft:
            name = f"{IMAGE}{uuid4().hex[:12]}"
            image = draft.rename(place / name)
            files = sorted(image.iterdir())
            marks = {**template.marks, **{str(path): found for path in files if (found := mark(str(path)))}}
            size = sum(path.stat().st_size for path in files)
            template = replace(template, image=name, marks=marks, size=size)
        partial = place / LOCK / DOCUMENT
        partial.write_text(json.dumps(asdict(template)))
        partial.rename(place / DOCUMENT)
        return template

    def fail(self, failure: Template) -> None:
        """Record a failed build, unless the kernelspec has an image or another process is building."""
        place = self.folder / failure.kernel_name
        with suppress(OSError), locked(place / LOCK, EXCLUSIVE):
            found = self.get(failure.kernel_name)
            if found is None or not found.image:
                self.publish(failure)

    def drop(self, kernel_name: str, image: str = "") -> bool:
        """Delete a kernelspec's template, or nothing if ``image`` is given and not current. Return True if deleted."""
        found, place = self.get(kernel_name), self.folder / kernel_name
        if not (place / DOCUMENT).exists() or (image and found and found.image != image):
            return False
        (place / DOCUMENT).unlink(missing_ok=True)
        with suppress(OSError), locked(place / LOCK, EXCLUSIVE):  # if a build holds the lock, it collects at its end
            self._collect(place)
        return True

    def _collect(self, place: Path) -> None:
        """Remove the drafts and images that are neither current nor in use."""
        current = self.get(place.name)
        for path in (*place.glob(f"{IMAGE}*"), *(place / LOCK).glob("*")):
            if current and path.name == current.image:
                continue
            with suppress(OSError):
                if path.is_dir():
                    with locked(path, EXCLUSIVE):
                        shutil.rmtree(path)
