"""A kernel cannot get around its seccomp filter, or make a set-user-id file."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from kernels import run

from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox

pytestmark = [pytest.mark.runsc, pytest.mark.user]

LONG = 60
Start = Callable[..., tuple[KernelManager, BlockingKernelClient]]

MODES = """
import ctypes, errno, os, stat, struct
libc = ctypes.CDLL(None, use_errno=True)
CHMOD, FCHMODAT = {"x86_64": (90, 268), "aarch64": (0, 53)}[os.uname().machine]
done = {}

def call(*arguments):
    if libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def attempt(name, function):
    try:
        function()
        done[name] = "done"
    except OSError as error:
        done[name] = errno.errorcode[error.errno]

HERE, FCHMODAT2, OPENAT2 = -100, 452, 437
for bits in (0o4755, 0o2755, 0o6711):
    for kind, make in (("file", lambda name: open(name, "w").close()), ("folder", os.mkdir)):
        ways = {
            "chmod": lambda: os.chmod(name, bits),
            "fchmod": lambda: os.fchmod(os.open(name, os.O_RDONLY), bits),
            "fchmodat": lambda: call(FCHMODAT, HERE, name.encode(), bits),
            "fchmodat with a larger mode": lambda: call(FCHMODAT, HERE, name.encode(), bits | 1 << 40),
            "fchmodat2": lambda: call(FCHMODAT2, HERE, name.encode(), bits, 0),
            "chmod call": lambda: call(CHMOD, name.encode(), bits) if CHMOD else os.chmod(name, bits),
        }
        for way in ways:
            name = f"{way} {kind} {bits:o}"
            make(name)
            attempt(name, ways[way])
    made = {
        "open": lambda: os.open(name, os.O_CREAT | os.O_WRONLY, bits),
        "openat2": lambda: call(OPENAT2, HERE, name.encode(), struct.pack("QQQ", os.O_CREAT, bits, 0), 24),
        "mkdir": lambda: os.mkdir(name, bits),
        "mknod": lambda: os.mknod(name, stat.S_IFREG | bits),
        "FIFO": lambda: os.mknod(name, stat.S_IFIFO | bits),
        "device": lambda: os.mknod(name, stat.S_IFCHR | bits, os.makedev(1, 3)),
    }
    for way in made:
        name = f"made by {way} {bits:o}"
        attempt(name, made[way])
attempt("capability", lambda: os.setxattr(name, "security.capability", bytes.fromhex("01000002000004" + "0" * 26)))
open("plain", "w").close()
os.chmod("plain", 0o1640)
"""


def test_kernel_cannot_set_set_id_bits_in_its_folder(
    start_kernel: Start, sandboxed: Callable[..., str], notebook_folder: Path
) -> None:
    _, kc = start_kernel(sandboxed())
    run(kc, MODES)
    done = json.loads(run(kc, "import json; print(json.dumps(done))"))
    assert {done[name] for name in done if "chmod" in name} <= {"EPERM", "ENOSYS"}, done
    assert {done[name] for name in done if "device" in name} == {"EPERM"}, done
    assert done["capability"] != "done"
    found = {path.name: path.lstat().st_mode for path in notebook_folder.iterdir()}
    assert found["plain"] == stat.S_IFREG | 0o1640
    assert len(found) > 40
    assert [name for name, mode in found.items() if mode & 0o6000] == []
    assert [name for name, mode in found.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))] == []
    assert [name for name in found if "security.capability" in os.listxattr(notebook_folder / name)] == []


TRACING = """
import ctypes, errno, json, os, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
CALLS = {"x86_64": (110, 272, 62, 268), "aarch64": (173, 97, 129, 53)}
GETPPID, UNSHARE, KILL, FCHMODAT = CALLS[os.uname().machine]
TRACEME, CONT, SYSCALL, GETREGSET, SETREGSET = 0, 7, 24, 0x4204, 0x4205
SETOPTIONS, SEIZE, TRACESECCOMP = 0x4200, 0x4206, 0x80
NUMBERS, GENERAL, ARM_CALL = {"x86_64": (15, 1, 0), "aarch64": (8, 1, 0x404)}[os.uname().machine]

class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

def trace(request, pid, address=None, data=None):
    if libc.ptrace(request, pid, address, data) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")

def announce_getppid():
    '''Install a filter that stops at getppid for the tracer.'''
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, GETPPID), (6, 0, 0, 0x7FF00000), (6, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc.prctl(22, 2, program, 0, 0)

def replace_call(pid, number):
    '''Replace getppid by another system call.'''
    space = (ctypes.c_uint64 * 64)()
    vector = Vector(ctypes.addressof(space), ctypes.sizeof(space))
    trace(GETREGSET, pid, GENERAL, ctypes.addressof(vector))
    if space[NUMBERS] == GETPPID:
        if ARM_CALL:
            other = ctypes.c_int(number)
            small = Vector(ctypes.addressof(other), 4)
            trace(SETREGSET, pid, ARM_CALL, ctypes.addressof(small))
        space[NUMBERS] = number
        trace(SETREGSET, pid, GENERAL, ctypes.addressof(vector))

def attempt(way, number, *arguments):
    '''Let a child call getppid, replace the call by another, and return the result.'''
    pid = os.fork()
    if not pid:
        if way != "seized":
            libc.ptrace(TRACEME, 0, None, None)
        signal.raise_signal(signal.SIGSTOP)
        if way != "system calls":
            announce_getppid()
        result = libc.syscall(GETPPID, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
        os._exit(0 if result == 0 else 100)
    os.waitpid(pid, os.WUNTRACED)
    try:
        if way == "filter":
            trace(SETOPTIONS, pid, None, TRACESECCOMP)
        elif way == "seized":
            trace(SEIZE, pid, None, TRACESECCOMP)
            os.kill(pid, signal.SIGCONT)
            os.waitpid(pid, 0)
        while True:
            trace(SYSCALL if way == "system calls" else CONT, pid)
            _, status = os.waitpid(pid, 0)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                return "done" if os.waitstatus_to_exitcode(status) == 0 else "no effect"
            replace_call(pid, number)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return errno.errorcode[error.errno]

open("/tmp/file", "w").close()
targets = {"user namespace": (UNSHARE, 0x10000000), "signal to PID 1": (KILL, 1, 0),
    "set-user-id": (FCHMODAT, -100, b"/tmp/file", 0o4755)}
done = {f"{name} by {way}": attempt(way, *target)
    for name, target in targets.items() for way in ("system calls", "filter", "seized")}
print(json.dumps([done, oct(os.stat("/tmp/file").st_mode)]))
"""


@pytest.fixture
async def sandbox(spec: BundleSpec, runsc: Runsc) -> AsyncIterator[GVisorSandbox]:
    started = GVisorSandbox("attacked", spec, runsc)
    await started.start()
    yield started
    await started.delete()


async def python(sandbox: GVisorSandbox, code: str) -> Any:
    """Run code in the sandbox and return the JSON that it prints."""
    process = await sandbox.execute([sys.executable, "-I", "-c", code])
    out, err = await asyncio.wait_for(process.read(), LONG)
    assert err == b""
    return json.loads(out)


async def test_tracer_cannot_replace_system_calls(sandbox: GVisorSandbox) -> None:
    done, mode = await python(sandbox, TRACING)
    assert set(done.values()) == {"EPERM"}, done
    assert mode == "0o100644"


STEPPING = """
import ctypes, json, os, signal
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
TRACEME, CONT, SINGLESTEP, SETOPTIONS, EXITKILL = 0, 7, 9, 0x4200, 0x100000
pid = os.fork()
if not pid:
    libc.ptrace(TRACEME, 0, None, None)
    signal.raise_signal(signal.SIGSTOP)
    os._exit(7)
os.waitpid(pid, 0)
answers = [libc.ptrace(SETOPTIONS, pid, None, EXITKILL), libc.ptrace(SINGLESTEP, pid, None, None)]
os.waitpid(pid, 0)
answers.append(libc.ptrace(CONT, pid, None, None))
print(json.dumps([*answers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]))
"""


async def test_debugger_still_works(sandbox: GVisorSandbox) -> None:
    assert await python(sandbox, STEPPING) == [0, 0, 0, 7]
