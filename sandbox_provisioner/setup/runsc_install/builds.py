"""Keep the last build of runsc in the user's data folder, so that a setup for another environment need not build it.

The name of the file has the digest of the pinned source and the digest of the binary.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from ...config import own_folder
from ...gvisor.programs import reason_for_distrust


def reuse(module: Path, target: Path) -> bool:
    """Copy the kept build of ``module`` to ``target``; return False without one that is complete and trusted."""
    try:
        for kept in _folder().glob(f"{_source_digest(module)}-*"):
            shutil.copyfile(kept, target)
            if kept.name.endswith(f"-{_digest(target)}") and not reason_for_distrust(str(kept), ()):
                return True
    except OSError:
        pass
    return False


def keep(module: Path, binary: Path) -> None:
    """Keep a build of ``module`` instead of earlier ones. Errors are ignored: the next setup then builds again."""
    folder = _folder()
    partial, name = folder / f".{uuid4().hex}", f"{_source_digest(module)}-{_digest(binary)}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        try:
            shutil.copyfile(binary, partial)
            partial.rename(folder / name)
        except OSError:
            partial.unlink(missing_ok=True)


def _folder() -> Path:
    return own_folder() / "builds"


def _source_digest(module: Path) -> str:
    """Return a digest of the files that determine the build, and of this processor."""
    found = hashlib.sha256(platform.machine().encode())
    for path in sorted(path for path in module.rglob("*") if path.is_file()):
        content = path.read_bytes()
        found.update(f"\0{path.relative_to(module)}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def _digest(binary: Path) -> str:
    with open(binary, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
