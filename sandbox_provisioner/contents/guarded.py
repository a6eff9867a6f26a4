"""Define the settings of guarded file access, and guard the server's folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from jupyter_core.paths import jupyter_config_path, jupyter_path
from tornado import web
from traitlets import Int, List, Unicode, validate
from traitlets.config import LoggingConfigurable

from .. import config
from ..errors import ConfigurationError
from ..gvisor.bundle import parse_mount
from ..gvisor.reserved_dirs import reserved_folders
from .beneath import Beneath
from .file_functions import guard
from .links import Area, LinkRules

MAX_FILE_SIZE = 512 << 20
"""Default limit in bytes: the longest string in Chromium, so JupyterLab cannot open a larger file."""


class GuardedContents(LoggingConfigurable):
    """Base class of the guarded managers and checkpoints, with their settings."""

    root_dir: str

    allowed_link_targets = config.setting(
        "SANDBOX_ALLOWED_LINK_TARGETS",
        List(
            Unicode(),
            help="Further folders that links in the server's folder may lead to, besides the sources of "
            "SandboxProvisioner.mounts.",
        ),
    )
    max_file_size = config.setting(
        "SANDBOX_MAX_FILE_SIZE",
        Int(
            MAX_FILE_SIZE,
            min=1,
            help="The largest file, in bytes, that the server loads into its memory, to open, copy, convert or hash "
            "it. Downloads, uploads and checkpoints are not limited.",
        ),
    )

    @validate("allowed_link_targets")
    def _absolute_targets(self, proposal: Any) -> list[str]:
        targets = [os.path.expanduser(target) for target in proposal["value"]]
        for target in targets:
            if not os.path.isabs(target):
                raise ConfigurationError(
                    "allowed_link_targets",
                    f"GuardedContents.allowed_link_targets has {target!r}, which is not an absolute path.",
                    "Begin it with / or ~.",
                )
        return targets

    def _get_os_path(self, path: str) -> str:
        """Return the path of a file in the file system. The first call registers the guard of the server's folder."""
        if self.__dict__.get("_guarded_dir") != self.root_dir:
            rules = LinkRules(self.root_dir, self._areas(), _shared, _protected, self._forbidden)
            guard(Beneath(rules, _share))
            self.__dict__["_guarded_dir"] = self.root_dir
        os_path: str = super()._get_os_path(path)  # type: ignore[misc]
        return os_path

    @contextmanager
    def open(self, os_path: str, mode: str = "r", **options: Any) -> Iterator[Any]:
        """Open a file. Raises HTTPError 400 in mode "rb" if it is larger than ``max_file_size``."""
        with super().open(os_path, mode, **options) as file:  # type: ignore[misc]
            if mode != "rb":
                yield file
                return
            size = os.fstat(file.fileno()).st_size
            if size > self.max_file_size:
                name = os.path.relpath(os_path, self.root_dir)
                raise web.HTTPError(
                    400,
                    f"{name} has {size} bytes, and the server loads files of at most {self.max_file_size} bytes. "
                    "Download it, open it in a notebook, or raise the setting GuardedContents.max_file_size.",
                )
            # Files in /proc report a size of 0.
            yield _BoundedReader(file, size or self.max_file_size)

    def _forbidden(self) -> Iterable[str]:
        """Return the folders of Jupyter and of this package, which kernels do not see."""
        return reserved_folders(str(self.config.SandboxProvisioner.get("storage_dir", "")))

    def _areas(self) -> Iterator[Area]:
        for target in self.allowed_link_targets:
            yield Area(os.path.realpath(target))
        from ..provisioner import SandboxProvisioner  # not at the server's start, which it would make longer

        for text in SandboxProvisioner(config=self.config).mounts:
            try:
                mount = parse_mount(text)
            except ConfigurationError as error:
                self.log.warning("Links to the mount %r are refused. %s", text, error.problem)
            else:
                yield Area(os.path.realpath(mount.source), mount.writable)


class _BoundedReader:
    """A file reader that ends after ``size`` bytes, even if the file grows while it is read."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._left = size

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes, or all that are left."""
        content = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(content)
        return content


def _shared() -> Iterable[str]:
    """Return the folders that sandboxes can write to."""
    from ..kernel.folders import list_file, recall

    return recall(list_file())


def _share(folders: Iterable[str]) -> None:
    """Remember folders with links that a sandbox may have made."""
    from ..kernel.folders import list_file, remember

    remember(folders, list_file())


def _protected() -> list[str]:
    """Return the folders that the server and kernels load code or settings from; sandboxes see them as read-only."""
    from ..kernel.folders import protected_file, recall

    return [sys.prefix, *jupyter_path(), *jupyter_config_path(), *recall(protected_file())]
