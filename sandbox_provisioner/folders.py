"""Which folders of the host a kernel may get, and what stays hidden or unwritable where one of them holds it.

Links are followed first: a guest can put one in the place of a folder and wait for the next kernel that starts there.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from pathlib import Path

from .bundle import Mount
from .errors import ConfigurationError

OPEN_PARTS = {".asdf", ".conda", ".local", ".pyenv", ".rye", ".venv", ".virtualenvs"}
"""Hidden parts of a home in which interpreters and libraries are kept."""


def within(path: str, folder: str) -> bool:
    """Whether ``path`` is ``folder`` or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def homes() -> set[str]:
    """The user's home, by the environment and by the user database, as named and with links followed."""
    found = {os.path.expanduser("~")}
    try:
        found.add(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        pass
    named = {os.path.normpath(home) for home in found if os.path.isabs(home)}
    return (named | {os.path.realpath(home) for home in named}) - {"/"}


def hidden(path: str) -> bool:
    """Whether ``path`` lies in a hidden part of a home where no library has its place."""
    for home in homes():
        if within(path, home) and path != home:
            parts = Path(path).relative_to(home).parts
            open_part = parts[0] in OPEN_PARTS and parts not in ((".local",), (".local", "share"))
            if parts[0].startswith(".") and not open_part:
                return True
    return False


def private(path: str) -> bool:
    """Whether ``path`` is a home, holds one, or is hidden in one, by its name or with links followed."""
    places = {path, os.path.realpath(path)}
    return any(place == "/" or hidden(place) or any(within(home, place) for home in homes()) for place in places)


def working_folder(path: str, allow_home: bool, reserved: Iterable[str]) -> Mount:
    """The mount of a kernel's own folder; ConfigurationError if it cannot, or should not, have that one.

    ``reserved`` folders, and what lies in them, are the server's own.
    """
    folder = os.path.abspath(os.path.expanduser(path))
    real = os.path.realpath(folder)
    if not os.path.isdir(real):
        raise ConfigurationError("working_folder", f"The kernel's folder {folder} does not exist.", "Create it.")
    if real == "/" or ((real in homes() or hidden(real)) and not allow_home):
        raise ConfigurationError(
            "working_folder",
            f"A sandboxed kernel for a notebook in {folder} would see and could change everything in it, keys and "
            "start-up files included.",
            "Move the notebook into a folder of its own"
            + ("." if real == "/" else ", or set SandboxProvisioner.allow_home."),
        )
    for own in reserved:
        if within(real, os.path.realpath(own)):
            raise ConfigurationError(
                "working_folder",
                f"A sandboxed kernel cannot work in {folder}: Jupyter keeps its own files there.",
                "Move the notebook into a folder of its own.",
            )
    return Mount(real, folder, True)


def identity(folder: Mount | None) -> dict[str, int]:
    """Where the sandbox must show ``folder``, and by what it is known there: the time of its last change.

    A guest that can write to a folder above may put a link in its place between our look at it and runsc's. It can
    set neither that time nor, for long, the same one as another folder's.
    """
    if folder is None:
        return {}
    try:
        place = os.open(folder.source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise replaced(folder) from error
    try:
        if os.readlink(f"/proc/self/fd/{place}") != folder.source:
            raise replaced(folder)
        return {folder.destination: os.fstat(place).st_ctime_ns}
    finally:
        os.close(place)


def require_itself(folder: Mount) -> None:
    """Refuse a kernel's folder that was one, with links followed, and that a link leads away from now.

    ConfigurationError. A guest that can write to a folder above may have put the link there while the kernel slept.
    """
    real = os.path.realpath(folder.source)
    if real != folder.source:
        raise ConfigurationError(
            "working_folder",
            f"The kernel's folder {folder.source} is another one now: a link leads to {real}.",
            "Put the folder back in its place; the kernel's state is kept.",
        )


def replaced(folder: Mount) -> ConfigurationError:
    """The error for a folder that is not what it was a moment ago."""
    problem = f"The folder {folder.destination} was replaced by something else while the kernel started."
    return ConfigurationError("working_folder", problem, "Look into it, and start the kernel again.")


def masks(mounts: Iterable[Mount], secret: Iterable[str], home: str) -> list[Mount]:
    """Fresh folders over every ``secret`` one that a mount would show; the kernel's own ``home`` is fresh already."""
    mounts = list(mounts)
    given = {mount.destination for mount in mounts} | {home}
    places = [place for mount in mounts for _, place in _inside(mount, secret)]
    return [Mount("", place, True) for place in dict.fromkeys(places) if place not in given]


def shields(mounts: Iterable[Mount], trusted: Iterable[str]) -> list[Mount]:
    """Read-only mounts over what the host will believe or run, where the kernel could write to it otherwise."""
    writable = [mount for mount in mounts if mount.source and mount.writable]
    return [Mount(real, place) for mount in writable for real, place in _inside(mount, trusted)]


def _inside(mount: Mount, paths: Iterable[str]) -> list[tuple[str, str]]:
    """Those of ``paths`` that lie in the mount's source, with links followed, and where they appear in the sandbox."""
    if not mount.source:
        return []
    source = os.path.realpath(mount.source)
    real = (os.path.realpath(path) for path in paths if os.path.exists(path))
    return [
        (path, str(Path(mount.destination, os.path.relpath(path, source))))
        for path in real
        if path != source and within(path, source)
    ]
