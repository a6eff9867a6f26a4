"""Show the notebook's folder at its path in a copy of a template, and give up all capabilities permanently.

PID 1 calls this in the sandbox. A template is made before the path of the notebook's folder is known, and a restore
cannot move a mount. So the folder is mounted at a fixed path, and later bound to its own path. From then on no process
in the sandbox has a capability, as in a sandbox that was not made from a template.

Parts of the folder may be protected from the kernel. They get mounts of their own before the folder is bound, so that
the kernel's path never shows them without protection. A read-only part comes from a second mount of the folder, which
is read-only on the host too: gVisor does not check extended attributes when it only remounts a part. Other sandboxes
may write to the folder meanwhile. So each part is opened without following links, compared with its change time on the
host, and mounted through its descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

CARRIED = "/.sandbox-folder"
"""The fixed path at which a template mounts the notebook's folder."""
CARRIED_READ_ONLY = "/.sandbox-folder-read-only"
"""The fixed path at which a template mounts the folder a second time. In a copy, an empty folder covers it."""
READ_ONLY, WRITABLE, EMPTY, MOUNTED = "read-only", "writable", "empty", "mounted"
"""Kinds of a part of the folder: mounted on itself, covered by an empty folder, or covered by the template's own mount
of the same path, whose files the kernel already uses."""
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC = 0x1, 0x20, 0x1000, 0x4000
PR_CAPBSET_DROP = 24
CAPSET_VERSION_3 = 0x20080522


def show_folder(target: str, parts: list[tuple[str, str, int]], cover: str = "") -> None:
    """Show the carried folder with its protected ``parts`` at ``target``.

    Each part is a path in the folder, its kind, and its st_ctime_ns; outer parts come before inner ones. ``cover``, a
    folder in memory above ``target``, becomes read-only; mounts in it stay as they are. Raises OSError with a path as
    its file name: ESTALE if a part was replaced. Then the folder is not shown.
    """
    for path, _, changed in parts:  # in most cases, a replaced part is found before anything is mounted
        with _opened(path, changed):
            pass
    for path, kind, changed in parts:
        _protect(path, kind, changed, os.path.join(target, path))
    _mount("tmpfs", CARRIED_READ_ONLY, MS_RDONLY, "tmpfs", "mode=0700")
    os.makedirs(target, exist_ok=True)
    if cover:
        _mount(cover, cover, MS_BIND | MS_REC)
        _mount("", cover, MS_REMOUNT | MS_BIND | MS_RDONLY)
    _mount(CARRIED, target, MS_BIND | MS_REC)


def _protect(path: str, kind: str, changed: int, shown: str) -> None:
    """Mount a part of the carried folder. ``shown`` is its path in the sandbox."""
    with _opened(path, changed) as part, _opened(path, changed, CARRIED_READ_ONLY) as same_part:
        if kind == EMPTY:
            _mount("tmpfs", part, 0, "tmpfs", "mode=0700")
        else:
            _mount({MOUNTED: shown, READ_ONLY: same_part, WRITABLE: part}[kind], part, MS_BIND)
    if kind in (READ_ONLY, MOUNTED):
        with _opened(path, changed) as part:
            if not os.statvfs(part).f_flag & os.ST_RDONLY:
                raise OSError(errno.EPERM, "the path did not become read-only", shown)


@contextmanager
def _opened(path: str, changed: int, folder: str = CARRIED) -> Iterator[str]:
    """Open a part of the carried folder without following links, and yield a path that leads to exactly this part.

    Raises OSError with ESTALE if it is a link, is missing, or does not have the st_ctime_ns ``changed``.
    """
    stale = OSError(errno.ESTALE, "a protected part of the folder was replaced", path)
    place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        for name in path.split("/"):
            try:
                inner = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
            except OSError as error:
                raise stale from error
            os.close(place)
            place = inner
        if os.fstat(place).st_ctime_ns != changed:
            raise stale
        yield f"/proc/self/fd/{place}"
    finally:
        os.close(place)


def _mount(source: str, target: str, flags: int, kind: str = "", options: str = "") -> None:
    """Call mount(2). Raises OSError with ``target`` as its file name."""
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [os.fsencode(text) or None for text in (source, target, kind, options)]
    if libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]):
        raise OSError(ctypes.get_errno(), "the folder could not be bound", target)


def drop_capabilities() -> None:
    """Give up all capabilities of this process and its children, permanently: the bounding set is emptied too.

    Raises OSError if the system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    capability = 0
    while not libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
        capability += 1
    if ctypes.get_errno() != errno.EINVAL:  # EINVAL: the previous number was the last capability.
        raise OSError(ctypes.get_errno(), "the process could not reduce its bounding set", "capabilities")
    header = ctypes.create_string_buffer(struct.pack("Ii", CAPSET_VERSION_3, 0))
    if libc.capset(header, ctypes.create_string_buffer(24)):
        raise OSError(ctypes.get_errno(), "the process could not give up its capabilities", "capabilities")
