"""Check folders that may not exist yet."""

from __future__ import annotations

import os
from pathlib import Path


def writable(folder: Path) -> bool:
    """Return True if files can be created in the folder, or the folder itself if it does not exist yet."""
    there = nearest(folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def nearest(folder: Path) -> Path:
    """Return the path or its innermost parent that exists and is visible to this user."""
    return next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
