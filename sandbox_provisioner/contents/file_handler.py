"""Serve ``/files/`` without following links to places outside of the server's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from jupyter_server.base.handlers import AuthenticatedFileHandler
from tornado import web

from .beneath import Beneath
from .file_functions import call, exists, is_hidden


class GuardedFileHandler(AuthenticatedFileHandler):
    """A handler that serves ``/files/`` from one descriptor that was opened beneath the server's folder."""

    _file: Any = None

    def validate_absolute_path(self, root: str, absolute_path: str) -> str:
        """Open the file and return its path. Raises HTTPError 404 if it is hidden or missing, 403 if it is refused.

        Called by tornado before it serves the file.
        """
        manager: Any = self.contents_manager
        absolute_path = manager._get_os_path(self.path)
        if not manager.allow_hidden and is_hidden(absolute_path, root):
            self.log.info("Refusing to serve hidden file, via 404 Error, use ContentsManager.allow_hidden to enable")
            raise web.HTTPError(404)
        if not exists(absolute_path):
            raise web.HTTPError(404)
        try:
            number = call(Beneath.open, absolute_path, os.O_RDONLY)
        except FileNotFoundError:
            raise web.HTTPError(404) from None
        except PermissionError:
            raise web.HTTPError(403, f"Permission denied: {self.path}") from None
        try:
            self._file = os.fdopen(number, "rb")
        except IsADirectoryError:
            os.close(number)
            raise web.HTTPError(403, f"{self.path} is not a file") from None
        self._stat_result = os.fstat(number)
        return absolute_path

    def get_content(  # type: ignore[override]
        self, abspath: str, start: int | None = None, end: int | None = None
    ) -> Iterator[bytes]:
        """Yield the content of the file that was opened, from ``start`` to ``end``."""
        self._file.seek(start or 0)
        left = (self._stat_result.st_size if end is None else end) - (start or 0)
        while left > 0 and (chunk := self._file.read(min(left, 1 << 16))):
            left -= len(chunk)
            yield chunk

    def on_finish(self) -> None:
        """Close the file. Called by tornado after the response."""
        if self._file:
            self._file.close()
        super().on_finish()
