"""Templates on this user's disk: at most one for each kernelspec, looked for, published and dropped in single steps.

A kernelspec has a folder with images, of which ``template.json`` names the one that counts. An image is used under a
shared lock, and deleted only under an exclusive one, so that no server takes it away from another; what dead builders
left, the next one collects.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import stat
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

from jupyter_core.paths import jupyter_data_dir

from .staging import locked

DOCUMENT = "template.json"
LOCK = ".building"
IMAGE = "image-"
POLL = 0.1
ALONE = fcntl.LOCK_EX | fcntl.LOCK_NB

Mark = list[int]
"""By what a file is known again: device, inode, size and both times; of a folder, without its size and ctime."""


@dataclass(frozen=True)
class Template:
    """One template, or, if it has no ``image``, why this kernelspec can have none."""

    kernel_name: str
    key: str
    created: str
    image: str = ""
    """The name of the folder that has it."""
    size: int = 0
    preloaded: list[str] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Modules that were to be preloaded, and why they were not."""
    unfit: str = ""
    failed: bool = False
    """Whether it is unfit because making it failed, which may be different the next time."""
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """The host's files that it depends on, the image's own among them."""

    @property
    def changed(self) -> str:
        """The first file that is not what it was; empty if all are. Blocks for some milliseconds."""
        return next((path for path, before in self.marks.items() if mark(path) != before), "")

    @property
    def age(self) -> timedelta:
        """How long ago it was made."""
        return datetime.now(UTC) - datetime.fromisoformat(self.created)


def mark(path: str) -> Mark | None:
    """By what the file is known; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode):
        return [found.st_dev, found.st_ino, found.st_mtime_ns]
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


class TemplateShelf:
    """The templates in ``folder``, which is made on demand."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or Path(jupyter_data_dir(), "sandbox", "templates")).absolute()

    def get(self, kernel_name: str) -> Template | None:
        """The template that this kernelspec has, current or not; None if none, or none that can be understood."""
        try:
            document = json.loads((self.folder / kernel_name / DOCUMENT).read_bytes())
            found = Template(**document)
        except (OSError, ValueError, TypeError):
            return None
        return found if found.kernel_name == kernel_name and os.path.basename(found.image) == found.image else None

    def list(self) -> list[Template]:
        """All that there are."""
        names = sorted(path.parent.name for path in self.folder.glob(f"*/{DOCUMENT}"))
        return [found for name in names if (found := self.get(name))]

    @contextmanager
    def using(self, template: Template) -> Iterator[Path]:
        """Its image, which stays for as long as the block lasts. FileNotFoundError if it is gone, or cannot be had."""
        image = self.folder / template.kernel_name / template.image
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(image, fcntl.LOCK_SH | fcntl.LOCK_NB))
            except OSError as error:  # somebody may be deleting it
                raise FileNotFoundError(f"{image} cannot be had: {error.strerror}") from error
            if not (image / "checkpoint.img").exists():
                raise FileNotFoundError(f"{image} is gone")
            yield image

    @asynccontextmanager
    async def building(self, kernel_name: str, wait: bool) -> AsyncIterator[Path | None]:
        """A new folder for an image, while nobody else makes one for this kernelspec; None if somebody does."""
        place = self.folder / kernel_name
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        (place / LOCK).mkdir(mode=0o700, exist_ok=True)
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(locked(place / LOCK, ALONE))
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
        """Make it the one that counts, with the image in ``draft`` if it has one; within ``building``."""
        place = self.folder / template.kernel_name
        if draft:
            name = f"{IMAGE}{uuid4().hex[:12]}"
            image = draft.rename(place / name)
            files = sorted(image.iterdir())
            marks = {**template.marks, **{str(path): found for path in files if (found := mark(str(path)))}}
            size = sum(path.stat().st_size for path in files)
            template = Template(**{**asdict(template), "image": name, "marks": marks, "size": size})
        partial = place / LOCK / DOCUMENT
        partial.write_text(json.dumps(asdict(template)))
        partial.rename(place / DOCUMENT)
        return template

    def fail(self, failure: Template) -> None:
        """Say that none could be made, unless there is one, or somebody is at it."""
        place = self.folder / failure.kernel_name
        with suppress(OSError), locked(place / LOCK, ALONE):
            found = self.get(failure.kernel_name)
            if found is None or not found.image:
                self.publish(failure)

    def drop(self, kernel_name: str, image: str = "") -> bool:
        """Forget a kernelspec's template, or only if it has this image; whether there was one."""
        found, place = self.get(kernel_name), self.folder / kernel_name
        if not (place / DOCUMENT).exists() or (image and found and found.image != image):
            return False
        (place / DOCUMENT).unlink(missing_ok=True)
        with suppress(OSError), locked(place / LOCK, ALONE):  # who builds another one collects, too
            self._collect(place)
        return True

    def _collect(self, place: Path) -> None:
        """Remove the images that do not count and that nobody uses."""
        current = self.get(place.name)
        for path in (*place.glob(f"{IMAGE}*"), *(place / LOCK).glob("*")):
            if current and path.name == current.image:
                continue
            with suppress(OSError):
                if path.is_dir():
                    with locked(path, ALONE):
                        shutil.rmtree(path)
