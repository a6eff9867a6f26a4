"""Build the OCI bundle of a sandbox: its mounts and the command line of PID 1.

A sandbox sees only the system's programs and libraries and its interpreters' folders, all read-only; the configured
folders; a private home and /tmp in memory; and an /etc with a few harmless files. Everything else is read-only, so that
a file that nobody would keep is refused with EROFS instead of being lost with the sandbox.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigurationError
from ..guest.capabilities import CARRIED, CARRIED_READ_ONLY

GUEST = Path(__file__).parents[1] / "guest"
GUEST_INSIDE = "/.sandbox"

SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC_FOLDERS = ("/etc/alternatives", "/etc/fonts", "/etc/ssl/certs", "/etc/R")
ETC_FILES = (
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/timezone",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/debian_version",
    "/etc/locale.alias",
    "/etc/ssl/openssl.cnf",
)
MEMORY = ("/tmp", "/run", "/dev/shm")
"""Folders in memory that every sandbox has, besides its home."""
SHARED_MEMORY = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders in memory with the mode of /tmp."""
NETWORK_FILES = ("/etc/resolv.conf", "/etc/gai.conf", "/etc/services", "/etc/protocols")


class Mount(NamedTuple):
    """A host folder or file at a path in the sandbox. An empty source means a new folder in memory.

    A folder in memory that is not writable is empty, and only contains the mount points of other mounts.
    """

    source: str
    destination: str
    writable: bool = False


@dataclass(frozen=True)
class BundleSpec:
    """The description of a sandbox from which its bundle is built. ``python`` runs PID 1.

    A sandbox that ``outlives`` its server keeps running when the server is killed, so that another process can
    checkpoint it. ``carried`` is the kernel's folder in a template or a copy of one. A template cannot contain the path
    of a later kernel's folder, so the folder is mounted at the fixed path CARRIED. When a copy is activated, PID 1
    binds it to its destination, and receives ``outlives``. ``inner`` are the parts of the carried folder that are
    hidden from the kernel or read-only: see ``carried.py``. It is None in sandboxes of earlier versions, which do not
    mount the folder a second time, at CARRIED_READ_ONLY.

    In a ``read_only`` sandbox, nothing can be written outside of the writable mounts. Sandboxes of earlier versions are
    not ``read_only``, and an image can only be restored as it was saved.
    """

    python: str
    home: str
    user: str
    mounts: tuple[Mount, ...] = ()
    network: str = "none"
    environment: Mapping[str, str] = field(default_factory=dict)
    outlives: bool = False
    carried: Mount | None = None
    inner: tuple[Mount, ...] | None = None
    read_only: bool = False


def parse_mount(text: str) -> Mount:
    """Parse a mount from a setting: ``source[:destination][:ro|rw]``. Raises ConfigurationError if it is invalid."""
    parts = text.split(":")
    mode = parts.pop() if parts[-1] in ("ro", "rw") else "ro"
    if len(parts) not in (1, 2):
        problem = f"The mount {text!r} is not of the form source[:destination][:ro|rw]."
        raise ConfigurationError("mounts", problem, "Correct the mounts setting.")
    source = os.path.expanduser(parts[0])
    destination = parts[1] if len(parts) == 2 else source
    for path in (source, destination):
        if not os.path.isabs(path) or os.path.normpath(path) == "/":
            problem = f"The mount {text!r} has {path!r}, which is not an absolute path below /."
            raise ConfigurationError("mounts", problem, "Give a full path.")
    if not os.path.exists(source):
        problem = f"The mount {text!r} cannot be made: {source} does not exist."
        raise ConfigurationError("mounts", problem, "Create it, or remove it from mounts.")
    return Mount(source, os.path.normpath(destination), mode == "rw")


def arrange(mounts: Iterable[Mount]) -> list[Mount]:
    """Return the mounts in the order in which they are made, outer before inner, with their pins (see ``_pins``).

    The last mount for a destination wins. A mount whose content its outer mount already shows is left out.
    """
    needed = _needed(mounts)
    return sorted([*needed, *_pins(needed)], key=lambda mount: _depth(mount.destination))


def _needed(mounts: Iterable[Mount]) -> list[Mount]:
    """Return one mount per destination, outer before inner, without those that their outer mount already shows."""
    chosen = {mount.destination: mount for mount in mounts}
    needed: list[Mount] = []
    for destination in sorted(chosen, key=_depth):
        mount = chosen[destination]
        above = innermost(destination, needed)
        if above is None or not _shows(above, mount):
            needed.append(mount)
    return needed


def _depth(path: str) -> tuple[int, str]:
    return path.count("/"), path


def _pins(mounts: Sequence[Mount]) -> set[Mount]:
    """Return the pins: each folder between a writable mount and a mount inside it, mounted on itself.

    A kernel cannot rename a mount point, but it can rename a folder above it, and so move the files that the inner
    mount protects. As a mount point, the folder in between cannot be renamed either.
    """
    taken = {mount.destination for mount in mounts}
    pins = set()
    for mount in mounts:
        above = innermost(mount.destination, mounts)
        if above and above.source and above.writable:
            inside = Path(mount.destination).relative_to(above.destination)
            for parent in list(inside.parents)[:-1]:
                destination = os.path.join(above.destination, parent)
                source = os.path.join(above.source, parent)
                linked = os.path.realpath(source) != os.path.join(os.path.realpath(above.source), parent)
                if destination not in taken and os.path.isdir(source) and not linked:
                    pins.add(Mount(source, destination, True))
    return pins


def innermost(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """Return the innermost of ``mounts`` that contains ``path``, or None."""
    outer = (mount for mount in mounts if path.startswith(mount.destination.rstrip("/") + "/"))
    return max(outer, key=lambda mount: len(mount.destination), default=None)


def cover(mount: Mount, mounts: Iterable[Mount]) -> Mount | None:
    """Return a read-only folder in memory for the folders above ``mount`` in a writable folder in memory; else None.

    Without it, a kernel that works in /home/me/project/notebooks could write to /home/me/project: to its private home
    in memory instead of the folder of that name on the host. Hidden folders such as ~/.cache stay writable.
    """
    around = innermost(mount.destination, mounts)
    if not (mount.source and mount.writable and around and around.writable) or around.source:
        return None
    first, *below = Path(mount.destination).relative_to(around.destination).parts
    return None if not below or first.startswith(".") else Mount("", os.path.join(around.destination, first))


def _shows(outer: Mount, inner: Mount) -> bool:
    """Return True if ``outer`` already shows the source of ``inner`` at its destination, with the same access."""
    if not outer.source or not inner.source or outer.writable != inner.writable:
        return False
    return os.path.join(outer.source, os.path.relpath(inner.destination, outer.destination)) == inner.source


def system_mounts() -> list[Mount]:
    """Return read-only mounts of the system's programs and libraries and of the folders in /etc that they read."""
    mounts = [Mount("/usr", "/usr")]
    mounts += [Mount(path, path) for path in SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    return mounts + [Mount(path, path) for path in ETC_FOLDERS if os.path.isdir(path)]


def all_mounts(spec: BundleSpec) -> list[Mount]:
    """Return every mount of the sandbox, in the order in which they are made."""
    return arrange(_unordered(spec))


def requested_mounts(spec: BundleSpec) -> list[Mount]:
    """Return every mount except the pins (see ``_pins``), which depend on the folders that exist on the host."""
    return _needed(_unordered(spec))


def _unordered(spec: BundleSpec) -> list[Mount]:
    places = [*MEMORY, spec.home, *(["/var/tmp"] if spec.read_only else [])]
    carried = [spec.carried._replace(destination=CARRIED)] if spec.carried else []
    if spec.carried and spec.inner is not None:
        carried.append(Mount(spec.carried.source, CARRIED_READ_ONLY))
    mounts = [*system_mounts(), *(Mount("", place, True) for place in places), *spec.mounts, *carried]
    covers = [cover(mount, mounts) for mount in mounts] if spec.read_only else []
    return [*filter(None, covers), *mounts]


def folder_cover(spec: BundleSpec) -> str:
    """Return the path of the ``cover`` that PID 1 makes above the carried folder when it binds it; empty for none."""
    found = cover(spec.carried, all_mounts(spec)) if spec.read_only and spec.carried else None
    return found.destination if found else ""


def carried_mounts(spec: BundleSpec) -> list[Mount]:
    """Return the carried folder, if any, and the mounts in it, as processes in the sandbox see them."""
    return [spec.carried, *(spec.inner or ())] if spec.carried else []


def config(spec: BundleSpec) -> dict[str, Any]:
    """Return the content of config.json: the mounts, the namespaces and PID 1's command, which has no capabilities.

    Only PID 1 of a template has two capabilities: it needs them to bind the carried folder, and then drops them.
    """
    held = ["CAP_SYS_ADMIN", "CAP_SETPCAP"] if spec.carried else []
    capabilities = dict.fromkeys(("bounding", "effective", "permitted"), held) | {"inheritable": [], "ambient": []}
    mode = ["template"] if spec.carried else ["outlive"] if spec.outlives else []
    namespaces = ["pid", "ipc", "uts", "mount"] + (["network"] if spec.network == "none" else [])
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [spec.python, "-I", "-S", "-B", GUEST_INSIDE, *mode],
            "env": [f"{name}={value}" for name, value in spec.environment.items()],
            "cwd": "/",
            "capabilities": capabilities,
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": spec.read_only},
        "hostname": "sandbox",
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}, *map(_oci, all_mounts(spec))],
        "linux": {"namespaces": [{"type": kind} for kind in namespaces]},
    }


def _oci(mount: Mount) -> dict[str, Any]:
    if not mount.source:
        mode = "mode=1777" if mount.destination in SHARED_MEMORY else "mode=0700"
        options = [mode] if mount.writable else [mode, "ro"]
        return {"destination": mount.destination, "type": "tmpfs", "source": "tmpfs", "options": options}
    options = ["rbind", "rw" if mount.writable else "ro"]
    return {"destination": mount.destination, "type": "bind", "source": mount.source, "options": options}


def etc(spec: BundleSpec) -> dict[str, str]:
    """Return the generated files of the sandbox's /etc by name. Inside, the user has uid 0 and no capabilities."""
    return {
        "passwd": f"{spec.user}:x:0:0::{spec.home}:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n",
        "group": f"{spec.user}:x:0:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "hostname": "sandbox\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }


def write(folder: Path, spec: BundleSpec) -> None:
    """Write config.json and the root folder, with the files that are not mounted, into ``folder``.

    Raises ConfigurationError if the source of a mount does not exist.
    """
    for mount in (*spec.mounts, *([spec.carried] if spec.carried else [])):
        if mount.source and not os.path.exists(mount.source):
            problem = f"{mount.source} cannot be mounted: it does not exist."
            raise ConfigurationError("mounts", problem, "Create it, or correct the setting mounts.")
    root = folder / "rootfs"
    (root / "etc" / "ssl").mkdir(parents=True)
    for path in SYSTEM:
        if os.path.islink(path):
            (root / path[1:]).symlink_to(os.readlink(path))
    for name, text in etc(spec).items():
        (root / "etc" / name).write_text(text)
    for path in ETC_FILES + (NETWORK_FILES if spec.network != "none" else ()):
        if os.path.isfile(path):
            shutil.copyfile(path, root / path[1:])
    if spec.read_only:
        _make_mount_points(root, spec)
    guest = root / GUEST_INSIDE[1:]
    guest.mkdir()
    for source in GUEST.glob("*.py"):
        shutil.copyfile(source, guest / source.name)
    (folder / "config.json").write_text(json.dumps(config(spec)))


def _make_mount_points(root: Path, spec: BundleSpec) -> None:
    """Make the folders above the mounts that no other mount contains, and the place to which PID 1 binds the folder.

    runsc makes missing ones, but then a write there fails with EPERM, which does not tell why. PID 1 can make none.
    """
    mounts = all_mounts(spec)
    places = [os.path.dirname(mount.destination) for mount in mounts if innermost(mount.destination, mounts) is None]
    if spec.carried and innermost(spec.carried.destination, mounts) is None:
        places.append(spec.carried.destination)
    for place in places:
        if place.lstrip("/") and not (root / Path(place).parts[1]).is_symlink():
            (root / place[1:]).mkdir(parents=True, exist_ok=True)
