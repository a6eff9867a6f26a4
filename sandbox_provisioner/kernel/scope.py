"""Find the project that a notebook belongs to, and the files in it that programs on the host would execute.

A kernel can write to its folder, so it can create markers, links and environments there. A marker in a folder that a
kernel can write to never gives a kernel more than that folder. Links are never followed here. All functions block.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from fnmatch import translate
from itertools import takewhile
from pathlib import Path

from ..errors import ConfigurationError
from ..gvisor.bundle import Mount
from ..gvisor.interpreter import environment_parts
from ..gvisor.mounts import homes, private, within

MARKERS = (".git", "pyproject.toml", "setup.py", "environment.yml", "requirements.txt", ".jupyter-sandbox")
"""Names of files and folders of which one makes the folder around it a project."""
GIT_CODE = (".git/hooks", ".git/config", ".git/config.worktree", ".git/modules")
"""Parts of a git repository from which git on the host takes commands, also those of the submodules."""
PROTECTED = (
    *GIT_CODE, ".envrc", ".vscode", ".idea", ".devcontainer", ".husky", ".pre-commit-config.yaml", ".jupyter*",
    "jupyter_*config.*", ".venv", "venv", ".conda",
)  # fmt: skip
"""Default of the setting ``protected_paths``."""
ENVIRONMENT_FILES = ("pyvenv.cfg", "conda-meta")
"""Names of which one makes the folder around it an environment."""
MOST_FOLDERS = 50_000
"""Maximum folders in one place that are examined for environments."""
MOST_PROTECTED = 100
"""Maximum paths that are protected, because each becomes a mount."""


def project_folder(notebooks: Mount, kind: str, root: str, markers: Iterable[str] = ()) -> Mount:
    """Return the folder that a kernel for the folder ``notebooks`` can write to, by the setting ``folder_scope``.

    The folder is never above ``root``, or without a server above a folder of the home, and never a home, a folder that
    contains one, or hidden. If the project's own folder is one of these, it is ``notebooks``; with the kind "root", it
    is the outermost folder that is none.
    """
    own = notebooks.source
    limit = _limit(own, root)
    allowed = [own, *takewhile(lambda folder: not private(folder), _between(os.path.dirname(own), limit))]
    names = {*MARKERS, *markers}
    if kind == "root":
        return _named(notebooks, allowed[-1])
    if kind == "project":
        return _named(notebooks, next((folder for folder in allowed if _holds(folder, names)), own))
    return notebooks


def _limit(folder: str, root: str) -> str:
    """Return the outermost folder that a scope may have."""
    tops = [os.path.realpath(root)] if root else sorted(homes(), key=len)
    return next((top for top in tops if within(folder, top)), folder)


def _between(inner: str, outer: str) -> list[str]:
    """Return ``inner`` and the folders above it up to ``outer``, the innermost first."""
    above = [inner, *map(str, Path(inner).parents)]
    return [folder for folder in above if within(folder, outer)]


def _holds(folder: str, names: Iterable[str]) -> bool:
    return any(os.path.lexists(os.path.join(folder, name)) for name in names)


def _named(notebooks: Mount, folder: str) -> Mount:
    """Return the mount of ``folder`` under the name that the path of ``notebooks`` has for it.

    If that path leads to ``folder`` only through links, return ``notebooks``.
    """
    below = os.path.relpath(notebooks.source, folder)
    named = notebooks.destination.removesuffix("" if below == "." else f"/{below}")
    return Mount(folder, named, True) if named and os.path.realpath(named) == folder else notebooks


def require_not_executed(folder: str, root: str, patterns: Collection[str]) -> None:
    """Require that a kernel's folder is no part of a repository's ``.git``, an environment, or another protected path.

    A kernel that works there could write to it; a link can lead there. Raises ConfigurationError.
    """
    for place in _between(os.path.dirname(folder), _limit(folder, root)):
        for path in _executed(place, {*patterns, ".git"}):
            if within(folder, path):
                raise ConfigurationError(
                    "working_folder",
                    f"A sandboxed kernel cannot work in {folder}: programs on the host execute files in {path}.",
                    "Move the notebook into another folder.",
                )


def protected(folder: Mount, cwd: str, patterns: Collection[str]) -> list[Mount]:
    """Return a read-only mount of each path in ``folder`` that a program on the host would execute, and that exists.

    Paths that match ``patterns``, and environments, are found in ``folder``, in ``cwd`` (a path in the sandbox), and in
    the folders in between; not in others, because a project can be large. Raises ConfigurationError if there are too
    many, or if a file has a second name through which a kernel could write to it.
    """
    inner = os.path.normpath(os.path.join(folder.source, os.path.relpath(cwd, folder.destination)))
    places = reversed(_between(inner, folder.source))
    paths = (path for place in places if os.path.realpath(place) == place for path in _executed(place, patterns))
    found = [path for path in dict.fromkeys(paths) if _plain(path)]
    if len(found) > MOST_PROTECTED:
        raise ConfigurationError(
            "protected_paths",
            f"{folder.source} has {len(found)} files and folders that programs on the host execute, such as "
            f"{found[-1]}; at most {MOST_PROTECTED} can be protected from a kernel. A kernel may have created them.",
            "Delete those that you do not know, or choose a smaller folder_scope.",
        )
    for path in found:
        if os.path.isfile(path) and os.lstat(path).st_nlink > 1:
            raise ConfigurationError(
                "protected_paths",
                f"{path}, which programs on the host execute, has a second name (a hard link), which a kernel may have "
                "made to write to it.",
                "Replace the file by a copy of itself, or take it out of protected_paths.",
            )
    return [Mount(path, os.path.join(folder.destination, os.path.relpath(path, folder.source))) for path in found]


def _executed(folder: str, patterns: Collection[str]) -> Iterator[str]:
    """Yield paths in ``folder`` that match a pattern, are an environment, or are parts of one; some do not exist.

    Names that are not UTF-8 are left out: runsc cannot mount them. Raises ConfigurationError for too many folders.
    """
    plain = [pattern for pattern in patterns if not any(letter in pattern for letter in "*?[")]
    yield from (os.path.join(folder, name) for name in plain)
    if os.path.isfile(os.path.join(folder, ".git")) and any(within(name, ".git") for name in patterns):
        yield os.path.join(folder, ".git")  # a submodule or worktree: the file names the repository
    if _holds(folder, ENVIRONMENT_FILES):
        yield from (*environment_parts(folder), os.path.join(folder, "conda-meta"))
    wanted = re.compile("|".join(map(translate, patterns)) or "(?!)")
    examined = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            examined += entry.is_dir(follow_symlinks=False)
            if examined > MOST_FOLDERS:
                raise ConfigurationError(
                    "protected_paths",
                    f"{folder} has more than {MOST_FOLDERS:,} folders, which cannot all be examined for environments.",
                    "Delete those that a kernel created, or choose a smaller folder_scope.",
                )
            is_environment = entry.is_dir(follow_symlinks=False) and _holds(entry.path, ENVIRONMENT_FILES)
            if (is_environment or wanted.match(entry.name)) and _is_utf8(entry.name):
                yield entry.path


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(path: str) -> bool:
    """Return True if ``path`` is a file or folder, and no part of it is a link. Devices and sockets are left out."""
    return (os.path.isfile(path) or os.path.isdir(path)) and os.path.realpath(path) == path
