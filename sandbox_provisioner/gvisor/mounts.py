"""Decide which host folders a kernel may use, and which files in them stay hidden or read-only.

Links are followed before each check: a guest can replace a folder by a link before the next kernel starts there.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import ConfigurationError
from .bundle import Mount

OPEN_PARTS = {".asdf", ".conda", ".local", ".pyenv", ".rye", ".venv", ".virtualenvs"}
"""Hidden parts of a home that contain interpreters and libraries."""
MOST_LINKS = 40
"""Links that are followed on the way to one path; Linux has the same limit."""


def within(path: str, folder: str) -> bool:
    """Return True if ``path`` is ``folder`` or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def homes() -> set[str]:
    """Return the user's home from the environment and from the user database, each as named and with links followed."""
    found = {os.path.expanduser("~")}
    try:
        found.add(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        pass
    named = {os.path.normpath(home) for home in found if os.path.isabs(home)}
    return (named | {os.path.realpath(home) for home in named}) - {"/"}


def hidden(path: str) -> bool:
    """Return True if ``path`` is, or lies in, an entry of a home that begins with a dot.

    Entries in OPEN_PARTS are not hidden, except for the folders .local and .local/share themselves.
    """
    for home in homes():
        if within(path, home) and path != home:
            parts = Path(path).relative_to(home).parts
            open_part = parts[0] in OPEN_PARTS and parts not in ((".local",), (".local", "share"))
            if parts[0].startswith(".") and not open_part:
                return True
    return False


def private(path: str) -> bool:
    """Return True if ``path`` is a home, contains one, or is hidden in one, as named or with links followed."""
    places = {path, os.path.realpath(path)}
    return any(place == "/" or hidden(place) or any(within(home, place) for home in homes()) for place in places)


def planted_link(path: str, writable: Iterable[str]) -> tuple[str, str] | None:
    """Return the first link on the way to ``path`` that lies in a ``writable`` folder, and its target; else None.

    A kernel that can write to the folder may have made the link. After ``MOST_LINKS`` links, any link is returned.
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
            except OSError:  # not a link
                place = here
                continue
            followed += 1
            if followed > MOST_LINKS or any(within(place, root) for root in roots):
                return here, target
            place = "/" if os.path.isabs(target) else place
            parts += target.split("/")[::-1]
    return None


def require_below_root(folder: Mount, root: str, mounts: Iterable[Mount]) -> None:
    """Require that a kernel's folder lies in the server's root folder or in a writable one of ``mounts``.

    Paths are compared with links followed. Raises ConfigurationError, which names the link that leads out, if any.
    """
    named = [mount.source for mount in mounts if mount.source and mount.writable]
    if any(within(folder.source, os.path.realpath(place)) for place in (root, *named)):
        return
    link = planted_link(folder.destination, [root])
    why = f"{link[0]} is a link to {link[1]}" if link else f"its real path is {folder.source}"
    raise ConfigurationError(
        "working_folder",
        f"A sandboxed kernel cannot work in {folder.destination}: it is not below the server's root folder {root}, "
        f"because {why}.",
        f"Use a folder below the root folder, or add {folder.source + ':rw'!r} to SandboxProvisioner.mounts.",
    )


def require_no_planted_link(folder: Mount, shared: Iterable[str], configured: Iterable[str]) -> None:
    """Require that no link in a folder that kernels could write to leads out of it, to a kernel's ``folder``.

    ``shared`` are the real paths of these folders; a kernel may have made each link in them. A link may lead to one of
    the ``configured`` places. Raises ConfigurationError, which names the link.
    """
    shared = list(shared)
    link = planted_link(folder.destination, shared)
    if link is None or any(within(folder.source, os.path.realpath(place)) for place in configured):
        return
    if not any(within(link[0], place) and within(folder.source, place) for place in shared):
        raise ConfigurationError(
            "working_folder",
            f"A sandboxed kernel cannot work in {folder.destination}: {link[0]} is a link to {link[1]}, out of the "
            "folder that kernels could write to, and a kernel may have created it.",
            f"Open the notebook by its real path, in {folder.source}, or remove the link.",
        )


def unlinked(mount: Mount, writable: Iterable[str], setting: str) -> Mount:
    """Return ``mount`` with the links in its source followed.

    Raises ConfigurationError if one of the links lies in a ``writable`` folder: a kernel may have made it.
    """
    if link := planted_link(mount.source, writable):
        real = os.path.realpath(mount.source)
        raise ConfigurationError(
            setting,
            f"{mount.source} cannot be mounted: {link[0]} is a link to {link[1]}, and a kernel may have created it.",
            f"Remove the link, or set {setting} to {real} if that is the folder you mean.",
        )
    return mount._replace(source=os.path.realpath(mount.source))


def working_folder(path: str, allow_home: bool, reserved: Mapping[str, str]) -> Mount:
    """Return the writable mount of a kernel's folder. ``reserved`` has each reserved folder with its setting.

    Raises ConfigurationError if the folder does not exist, is /, is a home or hidden in one (unless ``allow_home``), or
    lies in a reserved folder.
    """
    folder = os.path.abspath(os.path.expanduser(path))
    real = os.path.realpath(folder)
    if not os.path.isdir(real):
        raise ConfigurationError("working_folder", f"The kernel's folder {folder} does not exist.", "Create it.")
    if real == "/" or ((real in homes() or hidden(real)) and not allow_home):
        alternative = "" if real == "/" else ", or set SandboxProvisioner.allow_home"
        raise ConfigurationError(
            "working_folder",
            f"A sandboxed kernel for a notebook in {folder} would see and could change everything in it, keys and "
            "start-up files included.",
            f"Move the notebook into a folder of its own{alternative}.",
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
    """Return the change time (st_ctime_ns) of each mount's source by destination. PID 1 compares them in the sandbox.

    runsc follows links when it mounts: a guest that can write to a folder above may replace the source by a link after
    our check, but cannot choose a change time. Raises ConfigurationError if a source was already replaced.
    """
    return {mount.destination: change_time(mount) for mount in mounts if mount}


def change_time(mount: Mount) -> int:
    """Return the st_ctime_ns of a mount's source. Raises ConfigurationError if a link leads to it now."""
    try:
        place = os.open(mount.source, os.O_PATH | os.O_NOFOLLOW)
    except OSError as error:
        raise replaced_error(mount) from error
    try:
        if os.readlink(f"/proc/self/fd/{place}") != mount.source:
            raise replaced_error(mount)
        return os.fstat(place).st_ctime_ns
    finally:
        os.close(place)


def require_itself(folder: Mount) -> None:
    """Raise ConfigurationError if the path of a mount's source contains a link now.

    A guest that can write to a folder above may have made the link while the kernel was hibernated.
    """
    real = os.path.realpath(folder.source)
    if real != folder.source:
        raise ConfigurationError(
            "working_folder",
            f"{folder.source}, which is mounted in the sandbox, was replaced: a link now leads to {real}.",
            "Replace the link by the original folder or file. The kernel's saved state is unchanged.",
        )


def replaced_error(*mounts: Mount) -> ConfigurationError:
    """Return the error for a mount, one of ``mounts``, whose source was replaced while the kernel started."""
    places = " or ".join(mount.destination for mount in mounts)
    problem = f"{places} was replaced while the start was being prepared, so the kernel was not started."
    return ConfigurationError("working_folder", problem, "Check the folder, then start the kernel again.")


def masks(mounts: Iterable[Mount], secret: Iterable[str], home: str) -> list[Mount]:
    """Return a mask for each ``secret`` folder in a mount: an empty folder in memory that hides it from the kernel.

    ``home`` gets no mask, because it is in memory anyway.
    """
    mounts = list(mounts)
    given = {mount.destination for mount in mounts} | {home}
    places = [place for mount in mounts for _, place in _inside(mount, secret)]
    return [Mount("", place, True) for place in dict.fromkeys(places) if place not in given]


def shields(mounts: Iterable[Mount], trusted: Iterable[str]) -> list[Mount]:
    """Return a shield for each ``trusted`` path in a writable mount: a read-only mount of the path over itself.

    The host reads or runs these files, so a kernel must not change them.
    """
    writable = [mount for mount in mounts if mount.source and mount.writable]
    return [Mount(real, place) for mount in writable for real, place in _inside(mount, trusted)]


def _inside(mount: Mount, paths: Iterable[str]) -> list[tuple[str, str]]:
    """Return those of ``paths`` that lie in the mount's source, links followed, each with its path in the sandbox."""
    if not mount.source:
        return []
    source = os.path.realpath(mount.source)
    real = (os.path.realpath(path) for path in paths if os.path.exists(path))
    return [
        (path, str(Path(mount.destination, os.path.relpath(path, source))))
        for path in real
        if path != source and within(path, source)
    ]
