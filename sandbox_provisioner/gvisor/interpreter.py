"""What a kernel's command needs to see of the host: its program, its interpreter's folders, its search path.

Everything is found by looking, and shown read-only. Nothing is executed: a guest may have written into an environment
that lies in a notebook's folder, and would then run on the host. For the same reason neither a link nor a path file
can make us show a home, a folder that one lies in, or the hidden parts of one.
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

from .bundle import GUEST_INSIDE, Mount
from .errors import CommandNotFoundError
from .folders import homes, private, within

PYTHON = re.compile(r"python[0-9.]*")
SYSTEM_SITE = re.compile(r"^include-system-site-packages\s*=\s*true\s*$", re.IGNORECASE | re.MULTILINE)
OWN_PACKAGES = ".sandbox-packages"


def resolve(command: str, env: Mapping[str, str]) -> str:
    """The program that ``command`` means, as an absolute path; CommandNotFoundError if there is none."""
    path = shutil.which(command, path=env.get("PATH"))
    if path is None:
        raise CommandNotFoundError(command)
    return os.path.abspath(path)


def roomy(argv: Sequence[str]) -> list[str]:
    """``argv``, a Python's with its module run by ``guest/roomy.py``, which says why."""
    program = Path(argv[0]).name
    module = next((place for place, part in enumerate(argv[1:], 1) if part == "-m" or not part.startswith("-")), 0)
    if not PYTHON.fullmatch(program) or argv[module] != "-m" or len(argv) < module + 2:
        return list(argv)
    return [*argv[:module], f"{GUEST_INSIDE}/roomy.py", *argv[module + 1 :]]


def frozen(argv: Sequence[str]) -> list[str]:
    """What ``roomy`` made, to be stopped when it would serve; empty for any other command."""
    script = f"{GUEST_INSIDE}/roomy.py"
    place = list(argv).index(script) + 1 if script in argv else 0
    return [*argv[:place], "--frozen", *argv[place:]] if place else []


def installing(program: str, env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Where pip is to put packages for a virtual environment's Python, and the variables that make it do so.

    The environment itself is read-only, and pip would go nowhere else; without one it goes to the user's own folder by
    itself. Nothing for any other program.
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


class Find(NamedTuple):
    """A path that a command needs, by its name and with links followed; what says so lies in ``origins``."""

    path: str
    real: str
    origins: tuple[str, ...]


def visible(argv: Sequence[str], env: Mapping[str, str]) -> list[Mount]:
    """The mounts that let ``argv``, whose first item is an absolute path, run as it would on the host."""
    return believed(look(argv, env))


def believed(finds: Iterable[Find], writable: Iterable[str] = ()) -> list[Mount]:
    """The mounts of what was found, for a guest that may have written to ``writable`` folders.

    Nothing is believed that was said there, nor a link from there to somewhere else.
    """
    folders = [os.path.realpath(folder) for folder in writable]
    return list(dict.fromkeys(Mount(find.path, find.path) for find in finds if not _doubted(find, folders)))


def _doubted(find: Find, folders: Sequence[str]) -> bool:
    return any(
        (within(find.path, folder) and not within(find.real, folder))
        or any(within(origin, folder) for origin in find.origins)
        for folder in folders
    )


def look(argv: Sequence[str], env: Mapping[str, str]) -> list[Find]:
    """All that ``argv``, whose first item is an absolute path, needs to see in order to run as it would on the host."""
    paths = [(path, ()) for path in (*user_site_folders(), *env.get("PYTHONPATH", "").split(os.pathsep), *argv[1:])]
    paths += [(entry, ()) for folder in user_site_folders() for entry in path_file_entries(folder)]
    return [
        Find(normal, os.path.realpath(normal), origins)
        for path, origins in dict.fromkeys([*_installations(argv[0]), *paths])
        if os.path.isabs(path) and os.path.exists(path) and not private(normal := os.path.normpath(path))
    ]


def _installations(program: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The folders of a program and of all that it leads to, and what path files there name, each with its origins."""
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
    """The path entries in ``folder``; those of an environment not the server's own only if they lie beside it."""
    own = any(within(folder, prefix) for prefix in (sys.prefix, sys.base_prefix))
    beside = str(Path(folder).parents[3])
    for entry in path_file_entries(folder):
        if own or within(os.path.realpath(entry), beside):
            yield entry


def _installed(prefix: str) -> bool:
    """Whether it is certain that software is installed there: a Python's, or the system's."""
    return bool(glob(os.path.join(escape(prefix), "lib*/python3*/os.py"))) or within(prefix, "/usr")


def parts(prefix: str) -> list[str]:
    """What of an environment must not be written to, also by a kernel whose folder is the environment's own."""
    return [os.path.join(prefix, name) for name in ("bin", "lib", "lib64", "include", "share", "etc", "pyvenv.cfg")]


def programs(program: str) -> Iterator[str]:
    """A program, those its links lead to, its environment's base, and the interpreter that its first line names."""
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
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    if len(words) > 1 and Path(words[0]).name == "env":
        found = shutil.which(words[-1])
        return [found] if found else []
    return words[:1]


def _base_python(program: str) -> list[str]:
    """The Python that a virtual environment was made from, as its pyvenv.cfg says."""
    try:
        lines = Path(program).parents[1].joinpath("pyvenv.cfg").read_text().splitlines()
    except (OSError, UnicodeDecodeError, IndexError):
        return []
    settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    home = settings.get("home", "")
    return [os.path.join(home, Path(program).name), os.path.join(home, "python3")] if home else []


def program_folders(program: str) -> list[str]:
    """The folder tree that a program was installed into, or only its bin and lib where that is a home's ``.local``."""
    prefix = os.path.dirname(os.path.dirname(program))
    if not private(prefix):
        return list(dict.fromkeys([prefix, os.path.realpath(prefix)]))
    parts = [os.path.dirname(program), os.path.join(prefix, "lib")]
    return [part for part in parts if os.path.isdir(part) and not private(part)] or [program]


def site_folders(prefix: str) -> list[str]:
    """Where the Pythons installed into ``prefix`` keep their packages."""
    return glob(os.path.join(escape(prefix), "lib*/python3*/*-packages"))


def user_site_folders() -> list[str]:
    """Where pip puts packages for the user, without the rest of the home."""
    return [
        folder for home in homes() for folder in glob(os.path.join(escape(home), ".local/lib/python3*/site-packages"))
    ]


def path_file_entries(folder: str) -> Iterator[str]:
    """The folders that path files and setuptools' editable finders add to the search path."""
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
