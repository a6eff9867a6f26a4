"""Bind the notebook's folder to its path in a copy of a template, and give up all capabilities permanently.

PID 1 calls this in the sandbox. A template is made before the path of the notebook's folder is known, and a restore
cannot move a mount. So the folder is mounted at a fixed path, and later bound to its own path. From then on no process
in the sandbox has a capability, as in a sandbox that was not made from a template.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

CARRIED = "/.sandbox-folder"
"""The fixed path at which a template mounts the notebook's folder."""
MS_RDONLY = 0x1
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
PR_CAPBSET_DROP = 24
CAPSET_VERSION_3 = 0x20080522


def bind(source: str, target: str, cover: str = "") -> None:
    """Make the folder ``source`` visible at ``target`` too. ``cover``, a folder above ``target``, becomes read-only.

    Mounts in ``cover`` stay as they are. Raises OSError with the path that could not be mounted as its file name.
    """
    os.makedirs(target, exist_ok=True)
    if cover:
        _mount(cover, cover, MS_BIND | MS_REC)
        _mount("", cover, MS_REMOUNT | MS_BIND | MS_RDONLY)
    _mount(source, target, MS_BIND)


def _mount(source: str, target: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None):
        raise OSError(ctypes.get_errno(), "the folder could not be mounted", target)


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
