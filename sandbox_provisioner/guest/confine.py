"""Takes from PID 1 and all its children, for good, the way into a user namespace of their own.

In one they would hold every capability, and so a larger part of gVisor to attack: Debian's runsc let them remount a
read-only folder of the host writable. It is a seccomp filter; an OCI one would not do, because runsc answers it with
EPERM only, and libc falls back from clone3, whose flags a filter cannot see, on ENOSYS alone.
"""

from __future__ import annotations

import ctypes
import os
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, IF_EQUAL, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38
CALL_NUMBER, FIRST_ARGUMENT = 0, 16
CLONE_NEWUSER = 0x10000000
NUMBERS = {"x86_64": (272, 56, 435), "aarch64": (97, 220, 435)}


def confine() -> None:
    """Install the filter; OSError, or KeyError on a machine that gVisor does not run on, if that fails."""
    unshare, clone, clone3 = NUMBERS[os.uname().machine]
    steps = (
        (LOAD, 0, 0, CALL_NUMBER),
        (IF_EQUAL, 5, 0, clone3),
        (IF_EQUAL, 1, 0, unshare),
        (IF_EQUAL, 0, 2, clone),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (IF_ANY_BIT, 2, 0, CLONE_NEWUSER),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE | ENOSYS),
        (RETURN, 0, 0, REFUSE | EPERM),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")
