"""Restrict PID 1 and all its children permanently, and protect PID 1 from its children.

PID 1 calls ``confine`` in the sandbox before it starts anything.

No child may create a user namespace. In one it would hold every capability, and so reach a larger part of gVisor to
attack: Debian's runsc let it remount a read-only folder of the host writable. A seccomp filter prevents this. A filter
in the OCI configuration does not suffice: with runsc it can only return EPERM, but libc falls back from clone3, whose
flags a filter cannot read, only on ENOSYS.

PID 1 has the same user id as the kernel, and the pipe to the host. A kernel that took the pipe, or stopped PID 1, could
prevent a checkpoint. So PID 1 is not "dumpable": gVisor then refuses other processes its /proc/1/fd, memory, ptrace and
pidfd_getfd (Debian's runsc of 2024 refuses all but /proc/1/fd). The filter refuses signals to PID 1 and changes of its
resource limits. A filter cannot see the target of pidfd_send_signal, so that call returns ENOSYS, which libraries
expect from old kernels. F_SETSIG is refused because it could make a file send any signal to PID 1.

No child may set the set-user-id or set-group-id bit. In the notebook's folder the bit reaches the host, where another
user could run the file with the rights of the server's user. A filter cannot distinguish a folder from a file, so the
set-group-id bit of a folder is refused too. gVisor itself drops the bits where a file is created.

gVisor runs the filter before it notifies a tracer of a system call, and executes any call that the tracer substitutes.
So no child may trace the system calls of another process (strace); breakpoints and single steps (gdb) work.
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
CALL_NUMBER = 0
ARGUMENTS = (16, 24, 32, 40)
"""Offsets of the low halves of a system call's first four arguments in the filter's input."""
CLONE_NEWUSER = 0x10000000
F_SETSIG = 10
SET_IDS = 0o6000
PTRACE_SYSCALL, PTRACE_SETOPTIONS, PTRACE_SEIZE, PTRACE_O_TRACESECCOMP = 24, 0x4200, 0x4206, 0x80
INIT = 1
MACHINES = ("x86_64", "aarch64")
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "missing": ((435, 424), (435, 424)),  # clone3, pidfd_send_signal
    "namespaces": ((272, 56), (97, 220)),  # unshare, clone
    "signals": ((72,), (25,)),  # fcntl
    # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, prlimit64
    "init": ((62, 200, 234, 129, 297, 302), (129, 130, 131, 138, 240, 261)),
    "tracing": ((101,), (117,)),  # ptrace
    "second mode": ((90, 91), (52,)),  # chmod (x86_64 only), fchmod
    "third mode": ((268, 452), (53, 452)),  # fchmodat, fchmodat2
}
"""The parts of the filter, and the numbers of the system calls that each part checks, for each of MACHINES."""

Step = tuple[int, str, int]
"""An instruction, the label to jump to if its condition holds, and its operand."""


def filter_steps(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter's instructions for a machine. Raises ValueError for one that gVisor does not support."""
    index = MACHINES.index(machine)
    jumps = [(IF_EQUAL, part, number) for part, numbers in CALLS.items() for number in numbers[index]]
    first, second, third, fourth = ((LOAD, "", argument) for argument in ARGUMENTS)
    allow = (RETURN, "", ALLOW)
    parts: dict[str, list[Step]] = {
        "": [(LOAD, "", CALL_NUMBER), *jumps],
        "allow": [allow],
        "namespaces": [first, (IF_ANY_BIT, "refuse", CLONE_NEWUSER), allow],
        "signals": [second, (IF_EQUAL, "refuse", F_SETSIG), allow],
        "init": [first, (IF_EQUAL, "refuse", INIT), allow],
        "second mode": [second, (IF_ANY_BIT, "refuse", SET_IDS), allow],
        "third mode": [third, (IF_ANY_BIT, "refuse", SET_IDS), allow],
        "tracing": [
            first,
            (IF_EQUAL, "refuse", PTRACE_SYSCALL),
            (IF_EQUAL, "trace options", PTRACE_SETOPTIONS),
            (IF_EQUAL, "trace options", PTRACE_SEIZE),
            allow,
        ],
        "trace options": [fourth, (IF_ANY_BIT, "refuse", PTRACE_O_TRACESECCOMP), allow],
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
    """Install the filter in this process and, if it is PID 1, make it not dumpable.

    Raises OSError if the system refuses, ValueError on a machine that gVisor does not support.
    """
    steps = filter_steps(os.uname().machine)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getpid() == INIT and libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PID 1 could not be closed to other processes")
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")
