"""The one power of a template's PID 1, to bind a folder to its place, and how it is given up for good.

A template cannot know where the notebook's folder will be, and a restore cannot move a mount. So the folder is mounted
at a place that is always the same, and bound to its own when it is known; from then on nobody in the sandbox has any
capability, as in one that did not come of a template.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

CARRIED = "/.sandbox-folder"
"""The place that is always the same."""
MS_BIND = 0x1000
PR_CAPBSET_DROP = 24
CAPSET_VERSION_3 = 0x20080522


def bind(source: str, target: str) -> None:
    """Show the folder ``source`` at ``target`` too; OSError with that as its file name."""
    os.makedirs(target, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(MS_BIND), None):
        raise OSError(ctypes.get_errno(), "not bound", target)


def renounce() -> None:
    """Give up every capability, and the way back to any, for this process and its children; OSError if it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    capability = 0
    while not libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
        capability += 1
    if ctypes.get_errno() != errno.EINVAL:  # which is what comes after the last one that there is
        raise OSError(ctypes.get_errno(), "the bounding set was kept", "capabilities")
    header = ctypes.create_string_buffer(struct.pack("Ii", CAPSET_VERSION_3, 0))
    if libc.capset(header, ctypes.create_string_buffer(24)):
        raise OSError(ctypes.get_errno(), "the capabilities were kept", "capabilities")
