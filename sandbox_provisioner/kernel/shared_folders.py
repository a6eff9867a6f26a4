"""Remember which folders sandboxes could write to, and which parts of them were read-only.

A notebook's code may have made any link in such a folder, even if its kernel ended long ago.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from jupyter_core.paths import jupyter_data_dir

_read: dict[Path, tuple[tuple[int, int], frozenset[str]]] = {}
"""The parsed content of each file, with the modification time and size that it had then."""


def list_file() -> Path:
    """Return the path of the user's list of writable folders: one JSON string per line."""
    return Path(jupyter_data_dir(), "sandbox", "shared-folders")


def protected_file() -> Path:
    """Return the path of the list of environments and other folders that kernels saw as read-only."""
    return list_file().with_name("protected-folders")


def remember(folders: Iterable[str], file: Path) -> None:
    """Add real paths to the list ``file``. Call before a sandbox gets them. Raises OSError if writing fails."""
    missing = sorted(set(folders) - recall(file))
    if missing:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One write in append mode: lines of two processes do not mix. The first "\n" ends a line that was cut short.
        lines = "".join(f"\n{json.dumps(folder)}" for folder in missing) + "\n"
        number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(number, lines.encode())
        finally:
            os.close(number)


def recall(file: Path) -> frozenset[str]:
    """Return the real paths in the list ``file``; invalid lines are skipped."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return frozenset()
    stamp = (found.st_mtime_ns, found.st_size)
    if file not in _read or _read[file][0] != stamp:
        _read[file] = stamp, frozenset(filter(None, map(_folder, file.read_text(errors="replace").splitlines())))
    return _read[file][1]


def _folder(line: str) -> str:
    try:
        folder = json.loads(line)
    except ValueError:
        return ""
    return folder if isinstance(folder, str) and os.path.isabs(folder) else ""
