"""A kernel cannot take over, stop or overload PID 1 of its sandbox, which has the pipe to the server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox
from sandbox_provisioner.persistence.compatibility import inventory
from sandbox_provisioner.persistence.digest_cache import DigestCache

pytestmark = pytest.mark.user

LONG = 60

ATTACKS = """
import ctypes, errno, fcntl, json, os, resource, signal, struct, time
libc = ctypes.CDLL(None, use_errno=True)
machine = os.uname().machine
CALLS = {"x86_64": (101, 200, 234, 129, 297, 310), "aarch64": (117, 130, 131, 138, 240, 270)}
PTRACE, TKILL, TGKILL, SIGQUEUE, TGSIGQUEUE, READ_MEMORY = CALLS[machine]
done = {}

def attempt(name, function):
    try:
        done[name] = "done: " + repr(function())
    except OSError as error:
        done[name] = errno.errorcode[error.errno]

def call(*arguments):
    if libc.syscall(*map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "refused")

for folder in ("/proc/1/fd", "/proc/1/task/1/fd"):
    for number in (0, 1, 2):
        path = f"{folder}/{number}"
        for name, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY), ("both", os.O_RDWR), ("path", os.O_PATH)):
            attempt(f"open {path} {name}", lambda: os.open(path, flags | os.O_NONBLOCK))
        attempt(f"readlink {path}", lambda: os.readlink(path))
        attempt(f"truncate {path}", lambda: os.truncate(path, 0))
for name in ("mem", "environ", "maps", "exe", "root", "cwd"):
    attempt(f"open {name}", lambda: os.open(f"/proc/1/{name}", os.O_RDONLY))
attempt("write memory", lambda: os.open("/proc/1/mem", os.O_RDWR))
for name, request in (("attach", 16), ("seize", 0x4206)):
    attempt(f"ptrace {name}", lambda: call(PTRACE, request, 1, 0, 0))
attempt("pidfd_getfd", lambda: call(438, os.pidfd_open(1), 1, 0))
room = ctypes.create_string_buffer(8)
here = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(room), 8))
attempt("process_vm_readv", lambda: call(READ_MEMORY, 1, ctypes.addressof(here), 1, ctypes.addressof(here), 1, 0))
for signum in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGKILL, signal.SIGSEGV, signal.SIGUSR1, signal.SIGCHLD):
    attempt(f"kill {signum.name}", lambda: os.kill(1, signum))
    attempt(f"tkill {signum.name}", lambda: call(TKILL, 1, signum))
    attempt(f"tgkill {signum.name}", lambda: call(TGKILL, 1, 1, signum))
    attempt(f"sigqueue {signum.name}", lambda: call(SIGQUEUE, 1, signum, ctypes.addressof(room)))
    attempt(f"tgsigqueue {signum.name}", lambda: call(TGSIGQUEUE, 1, 1, signum, ctypes.addressof(room)))
    attempt(f"pidfd {signum.name}", lambda: signal.pidfd_send_signal(os.pidfd_open(1), signum))
    attempt(f"/proc {signum.name}", lambda: signal.pidfd_send_signal(os.open("/proc/1", os.O_RDONLY), signum))
attempt("signal of a file", lambda: fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGSTOP))
attempt("limits", lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)))
print(json.dumps(done))
"""

EXIT_SIGNALS = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
CLONE_PARENT = 0x8000
parent = os.fork()
if not parent:  # PID 1 becomes the parent of its child, whose exit signal is SIGSTOP
    if libc.syscall(CLONE, signal.SIGSTOP, 0, 0, 0, 0) == 0:
        while os.getppid() != 1:
            time.sleep(0.01)
    os._exit(0)
os.waitpid(parent, 0)
if libc.syscall(CLONE, CLONE_PARENT | signal.SIGSTOP, 0, 0, 0, 0) == 0:
    os._exit(0)
print("tried")
"""

FIFOS = """
import os
for name in ("maps", "sandbox", "hooks"):
    path = f"/run/jupyter/{name}"
    if os.path.exists(path):
        os.unlink(path)
    os.mkfifo(path)
print("tried")
"""

FULL = """
import os, socket, time
peers = []
while len(peers) < 64:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(1)
    try:
        peer.connect("/run/jupyter/sandbox")
    except OSError:
        break
    peers.append(peer)
print("tried", flush=True)
time.sleep(1000)
"""


@pytest.fixture
async def sandbox(spec: BundleSpec, runsc: Runsc) -> AsyncIterator[GVisorSandbox]:
    started = GVisorSandbox("attacked", spec, runsc)
    await started.start()
    yield started
    await started.delete()


async def python(sandbox: GVisorSandbox, code: str) -> Any:
    """Run code in the sandbox and return what it prints."""
    process = await sandbox.execute([sys.executable, "-I", "-c", code])
    out, err = await asyncio.wait_for(process.read(), LONG)
    assert err == b""
    return out.decode()


async def require_working(sandbox: GVisorSandbox) -> None:
    """Require that PID 1 starts processes, quiesces and resumes."""
    assert await python(sandbox, "print(6 * 7)") == "42\n"
    await asyncio.wait_for(sandbox.connection.quiesce(), LONG)
    await asyncio.wait_for(sandbox.connection.resume(), LONG)
    assert await python(sandbox, "print(6 * 7)") == "42\n"


async def test_other_processes_cannot_access_init(sandbox: GVisorSandbox) -> None:
    done = json.loads(await python(sandbox, ATTACKS))
    assert set(done.values()) <= {"EACCES", "EPERM", "ENOSYS"}, done
    await require_working(sandbox)


async def test_other_processes_cannot_access_init_after_restore(sandbox: GVisorSandbox, tmp_path: Any) -> None:
    await sandbox.checkpoint(tmp_path / "image")
    await sandbox.restore(tmp_path / "image")
    done = json.loads(await python(sandbox, ATTACKS))
    assert set(done.values()) <= {"EACCES", "EPERM", "ENOSYS"}, done
    await require_working(sandbox)


@pytest.mark.parametrize("attack", [EXIT_SIGNALS, FIFOS], ids=["exit signals", "FIFOs in place of its files"])
async def test_init_cannot_be_stopped(sandbox: GVisorSandbox, attack: str) -> None:
    assert await python(sandbox, attack) == "tried\n"
    await require_working(sandbox)


async def test_open_requests_do_not_block_init(sandbox: GVisorSandbox) -> None:
    process = await sandbox.execute([sys.executable, "-I", "-c", FULL])
    async for piece in process.stream():
        assert piece.data == b"tried\n"
        break
    await require_working(sandbox)


async def test_inventory_contains_files_of_init(sandbox: GVisorSandbox, tmp_path: Any) -> None:
    await python(sandbox, "pass")
    found = await inventory(sandbox, DigestCache(tmp_path / "fingerprints"))
    assert sandbox.spec.python in found
