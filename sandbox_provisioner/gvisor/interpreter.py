"""Find the host files that a kernel's command needs: its program, its interpreter's folders, its search path.

Files are only read, never executed: a guest may have written to an environment in a notebook's folder, and its code
would run on the host. For the same reason no link and no path file can cause a mount of a home, of a folder that
contains a home, or of the hidden parts of a home.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import escape, glob
from pathlib import Path
from typing import NamedTuple

from ..errors import CommandNotFoundError
from .bundle import GUEST_INSIDE, Mount
from .mounts import homes, private, within

PYTHON = re.compile(r"python[0-9.]*")
SYSTEM_SITE = re.compile(r"^include-system-site-packages\s*=\s*true\s*$", re.IGNORECASE | re.MULTILINE)
OWN_PACKAGES = ".sandbox-packages"


def resolve(command: str, env: Mapping[str, str]) -> str:
    """Return the absolute path of the program ``command``. Raises CommandNotFoundError if it is not on PATH."""
    path = shutil.which(command, path=env.get("PATH"))
    if path is None:
        raise CommandNotFoundError(command)
    return os.path.abspath(path)


def with_entrypoint(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with ``python -m MODULE`` replaced by ``python entrypoint.py MODULE`` (see guest/entrypoint.py).

    Any other command is returned unchanged.
    """
    program = Path(argv[0]).name
    module = next((place for place, part in enumerate(argv[1:], 1) if part == "-m" or not part.startswith("-")), 0)
    if not PYTHON.fullmatch(program) or argv[module] != "-m" or len(argv) < module + 2:
        return list(argv)
    return [*argv[:module], f"{GUEST_INSIDE}/entrypoint.py", *argv[module + 1 :]]


def as_zygote(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with the flag to stop before the kernel serves; [] if it does not run the entrypoint."""
    script = f"{GUEST_INSIDE}/entrypoint.py"
    place = list(argv).index(script) + 1 if script in argv else 0
    return [*argv[:place], "--frozen", *argv[place:]] if place else []


def pip_target(program: str, env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the folder in the home where pip installs packages, and the variables that make pip install there.

    Without them pip fails in a virtual environment, which is read-only in the sandbox. Both are empty for any other
    ``program``: outside an environment, pip falls back to the user's own folder.
    """
    prefix, own = Path(program).parent.parent, f"{env['HOME']}/{OWN_PACKAGES}"
    try:
        settings = (prefix / "pyvenv.cfg").read_text()
    except (OSError, ValueError):
        return "", {}
    folders = [f"{own}/{folder.relative_to(prefix)}" for folder in prefix.glob("lib/python3*/site-packages")]
    if SYSTEM_SITE.search(settings) or len(folders) != 1 or "PIP_PREFIX" in env:
        return "", {}
    path = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), *folders])
    return folders[0], {"PIP_PREFIX": own, "PYTHONPATH": path}


class NeededPath(NamedTuple):
    """A path that a command needs, as named and with links followed; ``origins``: folders of the files that name it."""

    path: str
    real: str
    origins: tuple[str, ...]


def visible(argv: Sequence[str], env: Mapping[str, str]) -> list[Mount]:
    """Return the read-only mounts that ``argv`` needs; its first item must be an absolute path."""
    return trusted_mounts(needed_paths(argv, env))


def trusted_mounts(paths: Iterable[NeededPath], writable: Iterable[str] = ()) -> list[Mount]:
    """Return read-only mounts of the trusted ``paths``, for a guest that may have written to ``writable`` folders.

    A path is not trusted if a file in a writable folder names it, or if it is a link that leads out of one.
    """
    folders = [os.path.realpath(folder) for folder in writable]
    return list(dict.fromkeys(Mount(each.path, each.path) for each in paths if not _untrusted(each, folders)))


def _untrusted(needed: NeededPath, folders: Sequence[str]) -> bool:
    return any(
        (within(needed.path, folder) and not within(needed.real, folder))
        or any(within(origin, folder) for origin in needed.origins)
        for folder in folders
    )


def needed_paths(argv: Sequence[str], env: Mapping[str, str]) -> list[NeededPath]:
    """Return every path that ``argv`` needs; its first item must be an absolute path."""
    paths = [(path, ()) for path in (*user_site_folders(), *env.get("PYTHONPATH", "").split(os.pathsep), *argv[1:])]
    paths += [(entry, ()) for folder in user_site_folders() for entry in path_file_entries(folder)]
    return [
        NeededPath(normal, os.path.realpath(normal), origins)
        for path, origins in dict.fromkeys([*_installations(argv[0]), *paths])
        if os.path.isabs(path) and os.path.exists(path) and not private(normal := os.path.normpath(path))
    ]


def _installations(program: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the folders of ``programs(program)``, and the entries of path files there, each with its origins."""
    first, *others = programs(program)
    prefixes: dict[str, tuple[str, ...]] = dict.fromkeys(program_folders(first), ())
    for folder in (folder for other in others for folder in program_folders(other)):
        if _installed(folder):
            prefixes[folder] = ()
        elif not any(within(folder, home) for home in homes()):
            prefixes.setdefault(folder, (os.path.realpath(os.path.dirname(first)),))
    yield from prefixes.items()
    for prefix, origins in prefixes.items():
        for folder in site_folders(prefix):
            origin = os.path.realpath(folder)
            yield from ((entry, (*origins, origin)) for entry in _trusted_entries(folder))


def _trusted_entries(folder: str) -> Iterator[str]:
    """Yield the trusted ones of the search path entries that files in ``folder`` add.

    All entries of the server's own environment are trusted; those of others only in the folder with the environment.
    """
    own = any(within(folder, prefix) for prefix in (sys.prefix, sys.base_prefix))
    beside = str(Path(folder).parents[3])
    for entry in path_file_entries(folder):
        if own or within(os.path.realpath(entry), beside):
            yield entry


def _installed(prefix: str) -> bool:
    """Return True if ``prefix`` certainly contains installed software: a Python, or a part of /usr."""
    return bool(glob(os.path.join(escape(prefix), "lib*/python3*/os.py"))) or within(prefix, "/usr")


def environment_parts(prefix: str) -> list[str]:
    """Return the parts of an environment that stay read-only, even for a kernel whose folder is the environment."""
    return [os.path.join(prefix, name) for name in ("bin", "lib", "lib64", "include", "share", "etc", "pyvenv.cfg")]


def programs(program: str) -> Iterator[str]:
    """Yield a program, its link targets, its environment's base Python, and the interpreter in its first line."""
    seen: set[str] = set()
    queue = [program]
    while queue:
        current = queue.pop()
        if current in seen or not (os.path.isfile(current) and os.access(current, os.X_OK)):
            continue
        seen.add(current)
        yield current
        if os.path.islink(current):
            queue.append(os.path.normpath(os.path.join(os.path.dirname(current), os.readlink(current))))
        else:
            queue += _shebang(current)
        queue += _base_python(current)


def _shebang(program: str) -> list[str]:
    with open(program, "rb") as file:
        first = file.readline(512)
    command = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    if len(command) > 1 and Path(command[0]).name == "env":
        found = shutil.which(command[-1])
        return [found] if found else []
    return command[:1]


def _base_python(program: str) -> list[str]:
    """Return the possible paths of the Python from which a virtual environment was created, by its pyvenv.cfg."""
    try:
        lines = Path(program).parents[1].joinpath("pyvenv.cfg").read_text().splitlines()
    except (OSError, UnicodeDecodeError, IndexError):
        return []
    settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    home = settings.get("home", "")
    return [os.path.join(home, Path(program).name), os.path.join(home, "python3")] if home else []


def program_folders(program: str) -> list[str]:
    """Return the tree that a program was installed into; only its bin and lib if the tree is private (``~/.local``)."""
    prefix = os.path.dirname(os.path.dirname(program))
    if not private(prefix):
        return list(dict.fromkeys([prefix, os.path.realpath(prefix)]))
    parts = [os.path.dirname(program), os.path.join(prefix, "lib")]
    return [part for part in parts if os.path.isdir(part) and not private(part)] or [program]


def site_folders(prefix: str) -> list[str]:
    """Return the package folders of the Pythons that are installed in ``prefix``."""
    return glob(os.path.join(escape(prefix), "lib*/python3*/*-packages"))


def user_site_folders() -> list[str]:
    """Return the folders in the user's homes where pip installs packages for the user."""
    patterns = [os.path.join(escape(home), ".local/lib/python3*/site-packages") for home in homes()]
    return [folder for pattern in patterns for folder in glob(pattern)]


def path_file_entries(folder: str) -> Iterator[str]:
    """Yield the folders that path files and setuptools' editable finders in ``folder`` add to the search path."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if name.endswith(".pth") and not name.startswith("."):
            yield from filter(os.path.isabs, _lines(Path(folder, name)))
    for name in names:
        if name.startswith("__editable___") and name.endswith("_finder.py"):
            for line in _lines(Path(folder, name)):
                if line.startswith("MAPPING"):
                    yield from _mapped(line.partition("=")[2])


def _lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return []


def _mapped(literal: str) -> list[str]:
    try:
        return [str(path) for path in ast.literal_eval(literal.strip()).values()]
    except (ValueError, SyntaxError, AttributeError):
        return []
