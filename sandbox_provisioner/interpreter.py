"""What a kernel's command needs to see of the host: its program, its interpreter's folders, its search path.

Everything found here is shown read-only. A home folder, or one that holds it, is never shown for this.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from .bundle import Mount
from .errors import CommandNotFoundError
from .process import LocalProcess

QUERY = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, *sys.path[1:]]))"
QUERY_TIMEOUT = 30.0
_answers: dict[tuple[str, ...], tuple[tuple[object, ...], list[str]]] = {}


def homes() -> set[str]:
    """The user's home, by the environment and by the user database."""
    found = {os.path.expanduser("~")}
    try:
        found.add(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        pass
    return {os.path.normpath(home) for home in found if os.path.isabs(home)} - {"/"}


def holds_home(path: str) -> bool:
    """Whether ``path`` is a home of this user, or a folder that one lies in."""
    return any(home == path or home.startswith(path.rstrip("/") + "/") for home in homes())


def resolve(command: str, env: Mapping[str, str]) -> str:
    """The program that ``command`` means, as an absolute path; CommandNotFoundError if there is none."""
    path = shutil.which(command, path=env.get("PATH"))
    if path is None:
        raise CommandNotFoundError(command)
    return os.path.abspath(path)


async def visible(argv: Sequence[str], env: Mapping[str, str]) -> list[Mount]:
    """The mounts that let ``argv``, whose first item is an absolute path, run as it would on the host."""
    paths: list[str] = []
    for program in programs(argv[0]):
        if re.fullmatch(r"python[\d.]*", Path(program).name):
            paths += await python_folders(program, env)
        else:
            paths += program_folders(program)
    paths += [part for part in argv[1:] if os.path.isabs(part) and os.path.exists(part)]
    return [Mount(path, path) for path in dict.fromkeys(map(os.path.normpath, paths)) if not holds_home(path)]


def programs(program: str) -> Iterator[str]:
    """A program, the programs that its links lead to, and the interpreter that its first line names."""
    seen: set[str] = set()
    queue = [program]
    while queue:
        current = queue.pop()
        if current in seen or not os.path.isfile(current):
            continue
        seen.add(current)
        yield current
        if os.path.islink(current):
            queue.append(os.path.normpath(os.path.join(os.path.dirname(current), os.readlink(current))))
        elif shebang := _shebang(current):
            queue.append(shebang)


def _shebang(program: str) -> str | None:
    try:
        with open(program, "rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    if len(words) > 1 and Path(words[0]).name == "env":
        return shutil.which(words[-1])
    return words[0] if words else None


async def python_folders(python: str, env: Mapping[str, str]) -> list[str]:
    """The prefixes and the search path of a Python, as it would see them with this environment; remembered."""
    key = (python, env.get("PYTHONPATH", ""), env.get("HOME", ""))
    if key in _answers:
        stamp, folders = _answers[key]
        if stamp == _stamp(folders):
            return folders
    status, out, _ = await LocalProcess.run([python, "-c", QUERY], QUERY_TIMEOUT, env={**env, "PYTHONSAFEPATH": ""})
    try:
        folders = [str(folder) for folder in json.loads(out)] if status == 0 else []
    except ValueError:
        folders = []
    folders = list(_real_too(folder for folder in folders if os.path.isabs(folder) and os.path.exists(folder)))
    _answers[key] = (_stamp(folders), folders)
    return folders


def _stamp(folders: Iterable[str]) -> tuple[object, ...]:
    """What changes when something is installed into one of ``folders``."""
    return tuple(os.stat(folder).st_mtime_ns if os.path.exists(folder) else None for folder in folders)


def _real_too(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        yield folder
        if os.path.realpath(folder) != folder:
            yield os.path.realpath(folder)


def program_folders(program: str) -> list[str]:
    """The folder tree that a program was installed into, or only its bin and lib where that is a home's ``.local``."""
    prefix = os.path.dirname(os.path.dirname(program))
    shared = {os.path.join(home, ".local") for home in homes()}
    if prefix == "/" or holds_home(prefix) or prefix in shared:
        parts = [os.path.dirname(program), os.path.join(prefix, "lib")]
        return [part for part in parts if os.path.isdir(part) and not holds_home(part)] or [program]
    return [prefix]
