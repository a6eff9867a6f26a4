"""Which folders of the host a kernel may get, and what stays hidden or unwritable where one of them holds it.

Links are followed first: a guest can put one in the place of a folder and wait for the next kernel that starts there.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Mapping
from pathlib import Path

from .bundle import Mount
from .errors import ConfigurationError

OPEN_PARTS = {".asdf", ".conda", ".local", ".pyenv", ".rye", ".venv", ".virtualenvs"}
"""Hidden parts of a home in which interpreters and libraries are kept."""
MOST_LINKS = 40


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


def planted_link(path: str, writable: Iterable[str]) -> tuple[str, str] | None:
    """Return the first link on the way to ``path`` that lies in a ``writable`` folder, and its target; else None.

    A kernel that can write to the folder can have made the link.
    """
    roots = [os.path.realpath(folder) for folder in writable]
    place, parts, followed = "/", os.path.join(os.getcwd(), path).split("/")[::-1], 0
    while parts:
        part = parts.pop()
        if part == "..":
            place = os.path.dirname(place)
        elif part not in ("", "."):
            here = os.path.join(place, part)
            try:
                target = os.readlink(here)
            except OSError:  # it is no link
                place = here
                continue
            followed += 1
            if followed > MOST_LINKS or any(within(place, root) for root in roots):
                return here, target
            place = "/" if os.path.isabs(target) else place
            parts += target.split("/")[::-1]
    return None


def require_below_root(folder: Mount, root: str, mounts: Iterable[Mount]) -> None:
    """Refuse a kernel's folder that lies neither in the server's root folder nor in a writable one of ``mounts``.

    Paths are compared with links followed. ConfigurationError names the link that leads away, if there is one.
    """
    named = [mount.source for mount in mounts if mount.source and mount.writable]
    if any(within(folder.source, os.path.realpath(place)) for place in (root, *named)):
        return
    link = planted_link(folder.destination, [root])
    why = f"{link[0]} is a link to {link[1]}" if link else f"it is {folder.source}"
    raise ConfigurationError(
        "working_folder",
        f"A sandboxed kernel cannot work in {folder.destination}: that is not below the server's root folder {root}, "
        f"because {why}.",
        f"Use a folder below the root folder, or add {folder.source + ':rw'!r} to SandboxProvisioner.mounts.",
    )


def unlinked(mount: Mount, writable: Iterable[str], setting: str) -> Mount:
    """Return ``mount`` with the links in its source followed; ConfigurationError if a kernel can have made one."""
    if link := planted_link(mount.source, writable):
        real = os.path.realpath(mount.source)
        raise ConfigurationError(
            setting,
            f"{mount.source} cannot be mounted: {link[0]} is a link to {link[1]}, in a folder that kernels can write "
            "to.",
            f"Name {real} itself in {setting} if that is meant, or remove the link.",
        )
    return mount._replace(source=os.path.realpath(mount.source))


def working_folder(path: str, allow_home: bool, reserved: Mapping[str, str]) -> Mount:
    """The mount of a kernel's own folder; ConfigurationError if it cannot, or should not, have that one.

    ``reserved`` has the folders that are the server's own, each with the setting that names it.
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
    for own, setting in reserved.items():
        if within(real, os.path.realpath(own)):
            raise ConfigurationError(
                "working_folder",
                f"A sandboxed kernel cannot work in {folder}: Jupyter and its sandboxes keep their own files in {own} "
                f"({setting}).",
                f"Move the notebook into a folder of its own, or set {setting} to another folder.",
            )
    return Mount(real, folder, True)


def identity(*mounts: Mount | None) -> dict[str, int]:
    """Return where the sandbox must show each of ``mounts``, with the time of that folder's or file's last change.

    A guest that can write to a folder above may put a link in its place between our look at it and runsc's. It can
    set neither that time nor, for long, the same one as another folder's.
    """
    return {mount.destination: _last_change(mount) for mount in mounts if mount}


def _last_change(mount: Mount) -> int:
    try:
        place = os.open(mount.source, os.O_PATH | os.O_NOFOLLOW)
    except OSError as error:
        raise replaced(mount) from error
    try:
        if os.readlink(f"/proc/self/fd/{place}") != mount.source:
            raise replaced(mount)
        return os.fstat(place).st_ctime_ns
    finally:
        os.close(place)


def require_itself(folder: Mount) -> None:
    """Refuse a mount whose source had no links in it, and that a link leads away from now.

    ConfigurationError. A guest that can write to a folder above may have put the link there while the kernel slept.
    """
    real = os.path.realpath(folder.source)
    if real != folder.source:
        raise ConfigurationError(
            "working_folder",
            f"{folder.source}, which the kernel sees, is another folder or file now: a link leads to {real}.",
            "Put it back in its place; the kernel's state is kept.",
        )


def replaced(*mounts: Mount) -> ConfigurationError:
    """Return the error for a mount, one of these, that is not what it was a moment ago."""
    places = " or ".join(mount.destination for mount in mounts)
    problem = f"{places} was replaced by something else while the kernel started."
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
