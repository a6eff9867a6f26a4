"""Restrict PID 1 and all its children for good, and close PID 1 to its children.

No child may enter a user namespace of its own. In one it would hold every capability, and so a larger part of gVisor to
attack: Debian's runsc let it remount a read-only folder of the host writable. This is a seccomp filter; an OCI one
would not do, because runsc answers it with EPERM only, and libc falls back from clone3, whose flags a filter cannot
see, on ENOSYS alone.

PID 1 has the same user id as the kernel, and the pipe to the host. A kernel that took the pipe, or stopped PID 1, could
refuse to be saved. So PID 1 is not "dumpable": gVisor then refuses other processes its /proc/1/fd, memory, ptrace and
pidfd_getfd (Debian's runsc of 2024 refuses all but /proc/1/fd). The filter refuses signals to PID 1 and changes of its
resource limits. pidfd_send_signal does not show its target, and libraries expect ENOSYS from old kernels; F_SETSIG
could have a file send any signal to PID 1.
"""

from __future__ import annotations

import ctypes
import os
import struct

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
SECCOMP_MODE_FILTER = 2
LOAD, IF_EQUAL, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38
CALL_NUMBER, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 16, 24
CLONE_NEWUSER = 0x10000000
F_SETSIG = 10
INIT = 1
NAMES = (
    *("clone3", "pidfd_send_signal", "unshare", "clone", "fcntl"),
    *("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "prlimit64"),
)
NUMBERS = {
    "x86_64": (435, 424, 272, 56, 72, 62, 200, 234, 129, 297, 302),
    "aarch64": (435, 424, 97, 220, 25, 129, 130, 131, 138, 240, 261),
}
"""The numbers of the system calls in NAMES."""

Step = tuple[int, str, int]
"""An instruction, the label where it jumps to if its condition holds, and its operand."""


def filter_steps(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter's instructions for a machine; KeyError for one that gVisor does not run on."""
    targets = dict.fromkeys(NAMES, "init") | {"clone3": "missing", "pidfd_send_signal": "missing"}
    targets |= {"unshare": "namespaces", "clone": "namespaces", "fcntl": "signals"}
    numbers = zip(NAMES, NUMBERS[machine], strict=True)
    parts: dict[str, list[Step]] = {
        "": [(LOAD, "", CALL_NUMBER), *((IF_EQUAL, targets[name], number) for name, number in numbers)],
        "allow": [(RETURN, "", ALLOW)],
        "namespaces": [(LOAD, "", FIRST_ARGUMENT), (IF_ANY_BIT, "refuse", CLONE_NEWUSER), (RETURN, "", ALLOW)],
        "signals": [(LOAD, "", SECOND_ARGUMENT), (IF_EQUAL, "refuse", F_SETSIG), (RETURN, "", ALLOW)],
        "init": [(LOAD, "", FIRST_ARGUMENT), (IF_EQUAL, "refuse", INIT), (RETURN, "", ALLOW)],
        "missing": [(RETURN, "", REFUSE | ENOSYS)],
        "refuse": [(RETURN, "", REFUSE | EPERM)],
    }
    labels: dict[str, int] = {}
    steps: list[Step] = []
    for label, part in parts.items():
        labels[label] = len(steps)
        steps += part
    return [
        (code, labels[label] - place - 1 if label else 0, 0, operand)
        for place, (code, label, operand) in enumerate(steps)
    ]


def confine() -> None:
    """Install the filter and close PID 1; OSError, or KeyError on a machine that gVisor does not run on."""
    steps = filter_steps(os.uname().machine)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getpid() == INIT and libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PID 1 could not be closed to other processes")
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")
