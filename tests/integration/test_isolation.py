"""Code in a sandbox attacks the host, the server and other kernels, and fails."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from kernels import run
from leftovers import leftovers
from notebooks import until
from servers import READY

from sandbox_provisioner.errors import ConfigurationError, ProtocolError, SandboxError
from sandbox_provisioner.guest.frames import MAX_PAYLOAD, WINDOW
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.runtime_dir import sweep
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox
from sandbox_provisioner.gvisor.state import State
from sandbox_provisioner.kernel.env_filter import PASSED

pytestmark = [pytest.mark.runsc, pytest.mark.template_copies, pytest.mark.user]

Start = Callable[..., tuple[KernelManager, BlockingKernelClient]]
Sandboxed = Callable[..., str]
StartSandbox = Callable[[], Awaitable[GVisorSandbox]]

PATIENCE = 60
ALWAYS_SET = ("HOME", "USER", "LOGNAME", "TMPDIR", "JPY_PARENT_PID")
SET_BY_KERNEL = ("CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "GIT_PAGER", "MPLBACKEND", "PAGER")
PIP = ("PIP_RETRIES", "PIP_DEFAULT_TIMEOUT", "PIP_DISABLE_PIP_VERSION_CHECK", "PIP_LOG")
"""Variables that the sandbox itself sets for a kernel without network."""
KNOWN_VARIABLES = (*PASSED, *ALWAYS_SET, *SET_BY_KERNEL, *PIP, "PASSED_ON")
MEMORY_BOUND = 64 << 20
"""Bytes by which the server may grow during an attack. Without protection, the attacks use many times more."""

TOOLS = """
import ctypes, glob, json, os, pathlib, signal, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def attempt(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        return type(error).__name__
    return "done"

def call(name, *arguments):
    return 0 if getattr(libc, name)(*arguments) >= 0 else ctypes.get_errno()

def write(path):
    with open(path, "w") as file:
        file.write("written by a guest")

def connect(family, kind, address):
    with socket.socket(family, kind) as sock:
        sock.settimeout(5)
        sock.connect(address)
        sock.send(b"from a guest")
"""

PIPE = """
import json, os, signal, struct, time
pipe = os.open("/proc/1/fd/1", os.O_WRONLY)
def frame(kind, stream, payload=b""):
    return struct.pack("!BII", kind, stream, len(payload)) + payload
def say(**message):
    return frame(6, 0, json.dumps(message).encode())
def send(data):
    for start in range(0, len(data), 4096):
        os.write(pipe, data[start : start + 4096])
"""
"""Code that sends forged frames to the host. Writes of up to 4096 bytes do not mix with those of PID 1."""


def ask(kc: BlockingKernelClient, expression: str) -> Any:
    """Evaluate a Python expression in the kernel after TOOLS, and return its value."""
    return json.loads(run(kc, f"{TOOLS}\nprint(json.dumps({expression}))"))


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Fail if the memory of this process, which is the server here, grows by MEMORY_BOUND or more in the block."""
    process = psutil.Process()
    before = peak = process.memory_info().rss
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.02):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert peak - before < MEMORY_BOUND


# -- the network -------------------------------------------------------------------------------------------------


@pytest.mark.debian
def test_network_is_unreachable(start_kernel: Start, sandboxed: Sandboxed) -> None:
    _, kc = start_kernel(sandboxed())
    with ExitStack() as stack:
        listeners = []
        for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            if family == socket.AF_INET6 and not Path("/proc/net/if_inet6").exists():
                continue
            listener = stack.enter_context(socket.socket(family))
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((everywhere, 0))
            listener.listen()
            listener.setblocking(False)
            listeners.append(listener)
        own = [item for items in psutil.net_if_addrs().values() for item in items]
        for listener in listeners:
            own_addresses = {item.address.partition("%")[0] for item in own if item.family == listener.family}
            for host in own_addresses | {"127.0.0.1" if listener.family == socket.AF_INET else "::1"}:
                target = (host, listener.getsockname()[1])
                attempt = f"attempt(connect, {int(listener.family)}, socket.SOCK_STREAM, {target!r})"
                assert ask(kc, attempt) in ("OSError", "ConnectionRefusedError"), target
            with pytest.raises(BlockingIOError):
                listener.accept()
    for target in (("192.0.2.1", 80), ("169.254.169.254", 80), ("10.0.0.1", 22)):
        for kind in ("socket.SOCK_STREAM", "socket.SOCK_DGRAM"):
            assert ask(kc, f"attempt(connect, socket.AF_INET, {kind}, {target!r})") == "OSError", target
    assert ask(kc, "attempt(socket.getaddrinfo, 'example.org', 80)") == "gaierror"
    assert ask(kc, "[name for _, name in socket.if_nameindex()]") in ([], ["lo"])
    for form in ("AF_INET, socket.SOCK_RAW", "AF_PACKET, socket.SOCK_RAW", "AF_VSOCK, socket.SOCK_STREAM"):
        assert ask(kc, f"attempt(socket.socket, socket.{form})") != "done", form


@pytest.mark.debian
def test_unix_sockets_of_host_are_unreachable(start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path) -> None:
    _, kc = start_kernel(sandboxed())
    for address in ("./agent.sock", f"\0isolation-{uuid4().hex}"):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
            assert ask(kc, f"attempt(connect, socket.AF_UNIX, socket.SOCK_STREAM, {address!r})") != "done"
            with pytest.raises(BlockingIOError):
                listener.accept()


# -- files -------------------------------------------------------------------------------------------------------


def test_home_is_unreadable(
    start_kernel: Start, sandboxed: Sandboxed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    work = home / "work"
    secret = home / ".ssh" / "id_ed25519"
    for folder in (work, secret.parent):
        folder.mkdir(parents=True)
    secret.write_text("a private key")
    (home / "diary.txt").write_text("dear diary")
    (work / "link").symlink_to(secret)
    (work / "folder-link").symlink_to("../.ssh")
    monkeypatch.setenv("HOME", str(home))
    _, kc = start_kernel(sandboxed(), cwd=str(work))
    paths = [str(secret), "link", "folder-link/id_ed25519", "../.ssh/id_ed25519", f"/proc/1/root{secret}"]
    paths += [f"/proc/self/root{secret}", "/proc/self/cwd/../.ssh/id_ed25519", "/dev/fd/../cwd/../.ssh/id_ed25519"]
    assert set(ask(kc, f"[attempt(open, path) for path in {paths}]")) <= {"FileNotFoundError", "PermissionError"}
    assert "diary.txt" not in ask(kc, "os.listdir(os.path.expanduser('~'))")
    real = pwd.getpwuid(os.geteuid()).pw_dir
    seen = ask(kc, f"os.listdir({real!r}) if os.path.isdir({real!r}) else []")
    assert not {".bashrc", ".profile", ".ssh", ".bash_history", ".jupyter"} & set(seen)


def test_home_is_refused_as_notebook_folder(
    start_kernel: Start, sandboxed: Sandboxed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link, other = tmp_path / "real", tmp_path / "home", tmp_path / "other"
    real.mkdir()
    link.symlink_to(real)
    other.symlink_to(link)
    for home in (link, real):
        monkeypatch.setenv("HOME", str(home))
        for folder in (real, link, other):
            with pytest.raises(ConfigurationError):
                start_kernel(sandboxed(home_folder=""), cwd=str(folder))


@pytest.mark.debian
def test_writes_outside_notebook_folder_fail(
    start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    shown = tmp_path / "shown"
    for folder in (outside, shown):
        folder.mkdir()
        (folder / "file").write_text("as it was")
    (notebook_folder / "way-out").symlink_to(outside)
    _, kc = start_kernel(sandboxed(mounts=[str(shown)]))
    name = f"isolation-{uuid4().hex}"
    base, here = Path(sys.base_prefix), Path(sys.prefix)
    places = [Path(path) for path in ("/", "/usr", "/usr/bin", "/etc", "/etc/ssl/certs", "/tmp", "/run")]
    places += [base, base / "lib", base / "bin", here, here / "bin", outside, shown, notebook_folder.parent]
    folders = [*map(str, places), "way-out", "/proc/self/cwd/..", "/proc/1/root/usr", "/proc/self/root/usr"]
    try:
        results = ask(kc, f"[attempt(write, folder + '/{name}') for folder in {folders}]")
        written = [str(place) for place in places if (place / name).exists()]
    finally:
        for place in places:
            (place / name).unlink(missing_ok=True)
    assert written == []
    assert "OSError" in results  # some folders are read-only, others such as /tmp are the guest's own
    for change in ("write", "os.unlink", "lambda p: os.chmod(p, 0o777)", "lambda p: os.link(p, 'stolen')"):
        for target in (shown / "file", outside / "file", notebook_folder / "way-out" / "file"):
            assert ask(kc, f"attempt({change}, {str(target)!r})") != "done"
    assert ask(kc, "attempt(write, 'allowed')") == "done"
    assert (notebook_folder / "allowed").exists()
    assert [(path / "file").read_text() for path in (outside, shown)] == ["as it was"] * 2


@pytest.mark.debian
def test_guest_cannot_remount_read_only_folder(start_kernel: Start, sandboxed: Sandboxed, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "file").write_text("as it was")
    _, kc = start_kernel(sandboxed(mounts=[str(shown)]))
    script = f"""{TOOLS}
shown = {str(shown)!r}
call("unshare", 0x10000000)
for name in ("uid_map", "gid_map"):
    attempt(pathlib.Path("/proc/self", name).write_text, "0 0 1")
call("unshare", 0x00020000)
os.makedirs("/tmp/over", exist_ok=True)
for flags in (32, 32 | 4096):
    call("mount", None, shown.encode(), None, flags, None)
call("mount", shown.encode(), b"/tmp/over", None, 4096, None)
for path in (shown, "/tmp/over"):
    attempt(write, path + "/file")
attempt(write, shown + "/new")
"""
    ask(kc, f"subprocess.run([sys.executable, '-c', {script!r}], capture_output=True).returncode")
    assert (shown / "file").read_text() == "as it was"
    assert os.listdir(shown) == ["file"]


def environment(folder: Path) -> Path:
    """Create a virtual environment with the packages of this test run, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (own,) = Path(sys.prefix).glob(f"lib/{site.parent.name}/site-packages")
    (site / "borrowed.pth").write_text(f"{own}\n")
    return folder / "bin" / "python"


@pytest.mark.parametrize("place", ["venv", "envs/deeper/venv", "."])
def test_environment_in_notebook_folder_is_read_only(
    place: str, start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path, spec: BundleSpec
) -> None:
    python = environment(notebook_folder / place)
    argv = [str(python), "-c", "import sys, runpy; runpy.run_module('ipykernel_launcher', run_name='__main__')"]
    argv += ["-f", "{connection_file}"]
    kernel = {"argv": argv, "display_name": "it", "language": "python"}
    mounts = [mount.source for mount in spec.mounts]
    _, kc = start_kernel(sandboxed(spec=kernel, mounts=mounts))
    prefix = python.parent.parent
    names = ["bin", "lib", "pyvenv.cfg"]
    if any("/lib64/" in entry for entry in sys.path):  # otherwise lib64 is a link to lib, which no Python uses
        names.append("lib64")
    before = sorted(str(path) for name in names for path in [prefix / name, *(prefix / name).rglob("*")])
    first = place.split("/")[0]
    ask(
        kc,
        f"""[
        attempt(write, {str(python)!r}),
        attempt(os.unlink, {str(python)!r}),
        attempt(write, {str(prefix / "pyvenv.cfg")!r}),
        [attempt(write, path + "/evil.pth") for path in glob.glob({str(prefix / "lib/python3*/site-packages")!r})],
        [attempt(os.rename, {str(prefix)!r} + "/" + name, "moved-" + name) for name in {names}],
        attempt(os.rename, {first!r}, "moved"),
        attempt(os.rename, {str(prefix)!r}, "moved-too"),
        ]""",
    )
    after = sorted(str(path) for name in names for path in [prefix / name, *(prefix / name).rglob("*")])
    assert [path for path in after if path in before] == before
    assert not list(prefix.rglob("evil.pth"))
    assert "written by a guest" not in (prefix / "pyvenv.cfg").read_text()
    assert os.path.islink(python)


def test_guest_files_do_not_run_on_host(
    start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran-on-the-host"
    evil = f"open({str(ran)!r}, 'w')"
    _, kc = start_kernel(sandboxed())
    python = environment(notebook_folder / "venv")  # not read-only for a kernel that was started before
    modules = [f"{name}.py" for name in ("json", "site", "sitecustomize", "usercustomize", "ast", "shutil", "runsc")]
    ask(kc, f"[pathlib.Path(name).write_text({evil!r}) for name in {modules}]")
    assert ask(
        kc,
        f"""[
        [pathlib.Path(f, "e.pth").write_text("import os; {evil}") for f in glob.glob("venv/lib/*/site-packages")],
        os.unlink("venv/bin/python"),
        pathlib.Path("venv/bin/python").write_text("#!/bin/sh\\n: > {ran}\\n"),
        os.chmod("venv/bin/python", 0o755),
        ]""",
    )
    kernel = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "it"}
    with pytest.raises(RuntimeError):
        start_kernel(sandboxed("other", spec={**kernel, "language": "python"}))
    assert not ran.exists()


def test_variables_with_guest_folders_expose_no_host_files(
    start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home / ".keys", home / "Documents", elsewhere / "bin"):
        folder.mkdir(parents=True)
    secrets = [home / ".keys" / "secret", home / "Documents" / "secret", elsewhere / "secret"]
    for secret in secrets:
        secret.write_text("not for guests")
    secrets.append(notebook_folder / "src" / "secret")
    show = f"import os; os.write(1, repr([p for p in {list(map(str, secrets))} if os.path.exists(p)]).encode())"
    program = elsewhere / "bin" / "program"
    program.write_text(f"#!/bin/sh\nfor path in {' '.join(map(str, secrets))}; do test -e $path && echo $path; done\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(notebook_folder / "src"))
    python = environment(notebook_folder / "venv")
    (site,) = (notebook_folder / "venv").glob("lib/python3*/site-packages")
    (site / "evil.pth").write_text(f"{home}/.keys\n{home}/Documents\n{elsewhere}\n")
    (notebook_folder / "src").symlink_to(home / "Documents")
    wrapper, link = python.with_name("wrapper"), python.with_name("link")
    wrapper.write_text(f"#!{program}\n")
    link.symlink_to(program)
    for path in (program, wrapper):
        path.chmod(0o755)
    for number, argv in enumerate(([str(python), "-c", show], [str(wrapper)], [str(link)])):
        output = tmp_path / f"output-{number}"
        kernel = {"argv": argv, "display_name": "it", "language": "python"}
        with output.open("wb") as file, pytest.raises((RuntimeError, SandboxError)):
            start_kernel(sandboxed("other", spec=kernel), stdout=file, stderr=file)
        assert output.read_text() in ("", "[]"), argv


def test_connection_files_and_other_sandboxes_are_hidden(
    start_kernel: Start,
    sandboxed: Sandboxed,
    notebook_folder: Path,
    runtime: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jupyter, sandboxes = notebook_folder / "a" / "jupyter", notebook_folder / "b" / "sandboxes"
    for folder in (jupyter, sandboxes):
        folder.mkdir(parents=True, mode=0o700)
    (jupyter / "kernel-1.json").write_text("a key")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(jupyter))
    monkeypatch.setenv("SANDBOX_RUNTIME_DIR", str(sandboxes))
    link = tmp_path / "link"
    link.symlink_to(notebook_folder)
    for folder in (notebook_folder, link):
        _, kc = start_kernel(sandboxed(), cwd=str(folder))
        assert ask(kc, "[name for top in 'ab' for _, _, names in os.walk(top) for name in names]") == []
        moves = ask(kc, "[attempt(os.rename, p, 'moved') for p in ('a', 'b', 'a/jupyter', 'b/sandboxes')]")
        assert moves == ["OSError"] * 4
        assert ask(kc, "attempt(write, 'a/jupyter/kernel-1.json')") == "done"
    assert (jupyter / "kernel-1.json").read_text() == "a key"


def test_link_in_notebook_folder_is_not_writable(
    start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "file").write_text("as it was")
    (notebook_folder / "link").symlink_to(outside)
    with suppress(ConfigurationError):
        _, kc = start_kernel(sandboxed(mounts=[str(notebook_folder / "link" / "inner")]))
        ask(kc, "attempt(write, 'link/file')")
    assert (outside / "file").read_text() == "as it was"


@pytest.mark.cold_start
def test_folder_swapped_for_link_during_start_is_not_mounted(
    start_kernel: Start,
    sandboxed: Sandboxed,
    runsc: Runsc,
    notebook_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, work = tmp_path / "home", notebook_folder / "work"
    home.mkdir()
    work.mkdir()
    (home / "secret").write_text("not for guests")
    monkeypatch.setenv("HOME", str(home))
    swapping = tmp_path / "runsc"
    swap = f"mv {work} {work}-moved; ln -s {home} {work}"
    swapping.write_text(f'#!/bin/sh\ncase "$*" in *" run "*) {swap} ;; esac\nexec {runsc.path} "$@"\n')
    swapping.chmod(0o755)
    with suppress(SandboxError):
        _, kc = start_kernel(sandboxed(runsc=str(swapping)), cwd=str(work))
        assert ask(kc, "os.path.exists('secret')") is False
    assert work.is_symlink()
    assert not set(os.listdir(home)) - {"secret", ".local"}  # Jupyter's own runtime folder is in .local


# -- processes and variables -------------------------------------------------------------------------------------


def test_host_processes_are_hidden(start_kernel: Start, sandboxed: Sandboxed) -> None:
    mark = f"isolation-{uuid4().hex}"
    with subprocess.Popen([sys.executable, "-c", "input()", mark], stdin=subprocess.PIPE) as witness:
        _, kc = start_kernel(sandboxed())
        commands = ask(kc, "[pathlib.Path(p).read_text() for p in glob.glob('/proc/[0-9]*/cmdline')]")
        assert commands and not any(mark in command for command in commands)
        assert ask(kc, "max(int(p) for p in os.listdir('/proc') if p.isdecimal())") < 100
        for pid in {witness.pid, os.getpid()} - set(range(100)):
            assert ask(kc, f"attempt(os.kill, {pid}, 0)") == "ProcessLookupError"
        assert witness.poll() is None


def test_only_passed_variables_are_readable(
    start_kernel: Start, sandboxed: Sandboxed, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, late = uuid4().hex, uuid4().hex
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("PASSED_ON", "yes")
    km, kc = start_kernel(sandboxed(pass_environment=["PASSED_ON"]), env={**os.environ, "GIVEN": "too"})
    paths = "p for p in glob.glob('/proc/[0-9]*/environ') if p != '/proc/1/environ'"
    every = f"''.join(pathlib.Path(p).read_text() for p in ({paths})) + repr(dict(os.environ))"
    seen = ask(kc, every)
    assert secret not in seen
    inside = ask(kc, "dict(os.environ)")
    assert (inside["PASSED_ON"], inside["GIVEN"]) == ("yes", "too")
    private = {name for name in os.environ if name not in KNOWN_VARIABLES and name[:3] != "LC_"}
    assert not private & inside.keys()
    assert ask(kc, "attempt(open, '/proc/1/environ')") == "PermissionError"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", late)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    km.restart_kernel(now=True)
    kc.wait_for_ready(timeout=PATIENCE)
    seen = ask(kc, every)
    assert secret not in seen and late not in seen


# -- capabilities ------------------------------------------------------------------------------------------------


@pytest.mark.debian
def test_capabilities_cannot_be_gained(start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path) -> None:
    _, kc = start_kernel(sandboxed())
    status = "[line.split() for line in open('/proc/{}/status') if line.startswith(('Cap', 'NoNewPrivs'))]"
    for process in ("self", "1"):
        capabilities = dict(ask(kc, status.format(process)))
        assert capabilities.pop("NoNewPrivs:", "1") == "1"
        assert capabilities and set(capabilities.values()) == {"0" * 16}, process
    read = "subprocess.run({}, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout"
    ask(kc, "__import__('shutil').copy('/bin/cat', 'cat') and 0")
    (notebook_folder / "cat").chmod(0o6755)
    for argv in (["./cat", "/proc/self/status"], ["su", "-c", "cat /proc/self/status"]):
        lines = ask(kc, read.format(argv)).splitlines()
        assert all(line.split()[1] == "0" * 16 for line in lines if line.startswith("Cap")), argv
    assert ask(kc, "subprocess.run(['mount', '-t', 'tmpfs', 'none', '/tmp'], capture_output=True).returncode") != 0
    assert "/tmp none" not in ask(kc, "open('/proc/mounts').read()")
    eperm, enosys = 1, 38
    calls = {
        "'mount', b'none', b'/tmp', b'tmpfs', 0, None": eperm,
        "'mount', None, b'/usr', None, 4096 | 32, None": eperm,
        "'umount2', b'/usr', 2": eperm,
        "'chroot', b'/tmp'": eperm,
        "'sethostname', b'x', 1": eperm,
        "'unshare', 0x10000000": eperm,
        "'unshare', 0x10020000": eperm,
        "'unshare', 0x00020000": eperm,
        "'syscall', 435, ctypes.create_string_buffer(struct.pack('Q', 0x10000000) + bytes(80)), 88": enosys,
        "'ptrace', 16, 1, 0, 0": eperm,
    }
    assert {text: ask(kc, f"call({text})") for text in calls} == calls
    for kind, major in (("S_IFCHR", 1), ("S_IFBLK", 8), ("S_IFBLK", 254)):
        make = f"lambda path: os.mknod(path, stat.{kind} | 0o666, os.makedev({major}, 1))"
        assert ask(kc, f"attempt({make}, 'device')") == "PermissionError"
        ask(kc, f"attempt({make}, '/tmp/device-{kind}-{major}')")  # one build creates the file, but cannot open it
        assert ask(kc, f"attempt(open, '/tmp/device-{kind}-{major}', 'rb')") != "done"
    assert os.listdir(notebook_folder) == ["cat"]
    assert ask(kc, "attempt(open, '/proc/1/mem', 'r+b')") == "PermissionError"


# -- the server --------------------------------------------------------------------------------------------------

HOSTILE = {
    "random bytes": "send(os.urandom(100_000))",
    "maximum length": "send(struct.pack('!BII', 2, 1, 0xFFFFFFFF))",
    "length one too long": f"send(struct.pack('!BII', 2, 1, {MAX_PAYLOAD + 1}))",
    "kind 0": "send(frame(0, 1))",
    "kind 7": "send(frame(7, 1))",
    "data for unknown stream": "send(frame(2, 999, b'x'))",
    "data without credit": f"[send(frame(2, 1, bytes(2000))) for _ in range({WINDOW} // 1000)]",
    "empty data": "send(frame(2, 1))",
    "too much credit": "send(frame(3, 1, b'\\x7f\\xff\\xff\\xff'))",
    "malformed credit": "send(frame(3, 1, b'x'))",
    "flood of ends": "[send(frame(4, 1) * 400) for _ in range(10_000)]",
    "flood of resets": "[send(frame(5, 1) * 400) for _ in range(10_000)]",
    "flood of new streams": "[send(frame(1, 2 * n, b'tcp:127.0.0.1:22')) for n in range(1, 10_000)]",
    "stream with a number of the host": "send(frame(1, 5, b'x'))",
    "incomplete JSON": "send(frame(6, 0, b'{'))",
    "deeply nested JSON": "send(frame(6, 0, b'[' * 200_000))",
    "JSON array": "send(frame(6, 0, b'[1]'))",
    "infinite number": 'send(frame(6, 0, b\'{"op": "exited", "process": 1, "status": 1e999}\'))',
    "long number": 'send(frame(6, 0, b\'{"op": "exited", "process": 1, "status": \' + b\'9\' * 100_000 + b\'}\'))',
    "impossible status": "send(say(op='exited', process=1, status=99999))",
    "missing status": "send(say(op='exited', process=1))",
    "process that is no number": "send(say(op='exited', process=[1], status=0))",
    "second hello": "send(say(op='hello', version=1, processes=[1, 2, 3]))",
    "reply without request": "send(say(op='quiesced'))",
    "unknown operation": "send(say(op='x' * 100_000))",
}


@pytest.fixture
async def start_sandbox(spec: BundleSpec, runsc: Runsc) -> AsyncIterator[StartSandbox]:
    started: list[GVisorSandbox] = []

    async def start() -> GVisorSandbox:
        sandbox = GVisorSandbox(f"isolation-{len(started)}", spec, runsc)
        started.append(sandbox)
        await sandbox.start()
        return sandbox

    yield start
    for sandbox in started:
        await sandbox.delete()


async def answers(sandbox: GVisorSandbox) -> bool:
    """Return True if a sandbox still executes commands."""
    process = await sandbox.execute(["/bin/echo", "well"])
    return await asyncio.wait_for(process.read(), PATIENCE) == (b"well\n", b"")


async def wait_until_stopped(sandbox: GVisorSandbox) -> None:
    while sandbox.state == State.RUNNING:
        await asyncio.sleep(0.02)


@pytest.mark.cold_start
@pytest.mark.parametrize("attack", HOSTILE)
@pytest.mark.usefixtures("unprotected_init")
async def test_unconfined_guest_violating_protocol_is_ended(attack: str, start_sandbox: StartSandbox) -> None:
    neighbour, sandbox = await start_sandbox(), await start_sandbox()
    argv = [sandbox.spec.python, "-I", "-c", f"{PIPE}\n{HOSTILE[attack]}\ntime.sleep(1000)"]
    with bounded_memory():
        process = await sandbox.execute(argv)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == -9
    assert isinstance(sandbox.connection.error, ProtocolError)
    assert len(str(sandbox.connection.error)) < 1000
    await asyncio.wait_for(wait_until_stopped(sandbox), PATIENCE)
    assert await answers(neighbour)


@pytest.mark.cold_start
@pytest.mark.resource_use
@pytest.mark.parametrize(
    "flood",
    [
        "while True: os.write(1, bytes(65536))",
        "while True: os.write(1, b'x'); os.write(2, b'x')",
        f"[send(frame(2, s, b'x') * 400) for _ in range({WINDOW} // 400 - 1) for s in (3, 5)]; time.sleep(100)",
        "send(struct.pack('!BII', 2, 1, 200_000))\nwhile True: os.write(pipe, b'x')",
        "send(struct.pack('!BII', 2, 1, 200_000)); os.kill(1, signal.SIGSTOP); time.sleep(100)",
        "errors = os.open('/proc/1/fd/2', os.O_WRONLY)\nwhile True: os.write(errors, bytes(4096))",
    ],
    ids=["output", "tiny outputs", "tiny frames", "frame byte by byte", "half a frame", "stderr of PID 1"],
)
@pytest.mark.usefixtures("unprotected_init")
async def test_unconfined_flood_uses_bounded_memory(flood: str, start_sandbox: StartSandbox) -> None:
    neighbour, sandbox = await start_sandbox(), await start_sandbox()
    with bounded_memory():
        first = await sandbox.execute([sandbox.spec.python, "-I", "-c", "import time; time.sleep(1000)"])
        await sandbox.execute([sandbox.spec.python, "-I", "-c", f"{PIPE}\n{flood}"])
        for _ in range(20):
            assert await answers(neighbour)
            await asyncio.sleep(0.1)
        await sandbox.delete()
    assert first.returncode == -9
    assert await answers(neighbour)


@pytest.mark.cold_start
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP", "SIGSEGV"])
@pytest.mark.usefixtures("unprotected_init")
def test_unconfined_signal_to_pid_1_affects_own_sandbox_only(
    signal: str, start_kernel: Start, sandboxed: Sandboxed, runtime: Path
) -> None:
    name = sandboxed()
    _, neighbour = start_kernel(name)
    km, kc = start_kernel(name)
    kc.execute(f"import os, signal; os.kill(1, signal.{signal})", silent=True)
    if signal == "SIGKILL":
        until(lambda: not km.is_alive())
    assert run(neighbour, "6 * 7") == "42"
    km.shutdown_kernel(now=True)
    assert len(list(runtime.iterdir())) == 1
    assert run(neighbour, "6 * 7") == "42"


@pytest.mark.cold_start
@pytest.mark.usefixtures("unprotected_init")
def test_unconfined_kernel_with_forged_exit_is_restartable(start_kernel: Start, sandboxed: Sandboxed) -> None:
    km, kc = start_kernel(sandboxed())
    kc.execute(f"{PIPE}\nos.kill(1, signal.SIGSTOP)\nsend(say(op='exited', process=1, status=99999))", silent=True)
    until(lambda: not km.is_alive())
    km.restart_kernel(now=True)
    kc.wait_for_ready(timeout=PATIENCE)
    assert run(kc, "6 * 7") == "42"


@pytest.mark.resource_use
def test_fork_bomb_affects_own_sandbox_only(start_kernel: Start, sandboxed: Sandboxed, runtime: Path) -> None:
    name = sandboxed()
    _, neighbour = start_kernel(name)
    km, kc = start_kernel(name)
    before = len(psutil.pids())
    bomb = "import os, time\nfor _ in range(8): os.fork()\ntime.sleep(100)"
    kc.execute(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {bomb!r}])", silent=True)
    for _ in range(20):
        assert run(neighbour, "6 * 7") == "42"
        time.sleep(0.1)
    km.shutdown_kernel(now=True)
    until(lambda: len(psutil.pids()) < before + 100)
    assert len(list(runtime.iterdir())) == 1


@pytest.mark.resource_use
def test_client_that_does_not_read_uses_bounded_memory(start_kernel: Start, sandboxed: Sandboxed) -> None:
    name = sandboxed()
    _, neighbour = start_kernel(name)
    km, other = start_kernel(name)
    other.stop_channels()
    km.context.setsockopt(zmq.RCVHWM, 20)  # keep the queue of the client that does read small
    kc = km.client()
    kc.start_channels()
    kc.wait_for_ready(timeout=READY)
    with zmq.Context() as context, context.socket(zmq.SUB) as stalled:
        stalled.linger = 0
        stalled.rcvhwm = 1
        stalled.subscribe(b"")
        stalled.connect(km._make_url("iopub"))
        assert stalled.poll(0) == 0
        run(kc, "1")
        with bounded_memory():
            flood = "import sys\nfor _ in range(900): print('x' * 100_000, flush=True)"
            reply = kc.execute_interactive(flood, output_hook=lambda message: None, timeout=PATIENCE)
            assert reply["content"]["status"] == "ok"
        assert run(neighbour, "6 * 7") == "42"
    kc.stop_channels()


def test_server_with_unread_output_ends_kernels(
    sandboxed: Sandboxed, kernelspecs: KernelSpecManager, notebook_folder: Path
) -> None:
    script = "import os\nwhile True: os.write(1, bytes(1 << 16))"
    kernel = {"argv": [sys.executable, "-c", script], "display_name": "it", "language": "python"}
    name = sandboxed("loud", spec=kernel)
    reader, writer = os.pipe()
    kernels = [KernelManager(kernel_name=name, kernel_spec_manager=kernelspecs) for _ in range(2)]
    try:
        with bounded_memory():
            for km in kernels:
                km.start_kernel(stdout=writer, stderr=writer)
            until(lambda: not select.select([], [writer], [], 0)[1])
            for km in kernels:
                km.shutdown_kernel(now=True)
    finally:
        os.close(reader)
        os.close(writer)


def test_output_never_reaches_reused_descriptor(
    sandboxed: Sandboxed, kernelspecs: KernelSpecManager, notebook_folder: Path, tmp_path: Path
) -> None:
    script = (
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\nprint('said', flush=True)\ntime.sleep(100)"
    )
    kernel = {"argv": [sys.executable, "-c", script], "display_name": "it", "language": "python"}
    km = KernelManager(kernel_name=sandboxed("late", spec=kernel), kernel_spec_manager=kernelspecs)
    with (tmp_path / "log").open("w") as log:
        number = log.fileno()
        km.start_kernel(stdout=log, stderr=log)
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    taken = {other, os.dup2(other, number)}
    try:
        (notebook_folder / "go").touch()
        until(lambda: (tmp_path / "log").read_text() + (tmp_path / "other").read_text() != "")
        km.shutdown_kernel(now=True)
    finally:
        for fd in taken:
            os.close(fd)
    assert (tmp_path / "log").read_text().startswith("said\n")
    assert (tmp_path / "other").read_text() == ""


@pytest.mark.cold_start
@pytest.mark.usefixtures("unprotected_init")
def test_unconfined_lost_sandbox_leaves_nothing(start_kernel: Start, sandboxed: Sandboxed, runtime: Path) -> None:
    km, kc = start_kernel(sandboxed())
    kc.execute(f"{PIPE}\nsend(os.urandom(100_000))", silent=True)
    until(lambda: not km.is_alive())
    until(lambda: leftovers(runtime) == [])


def test_sweep_keeps_foreign_folders(runtime: Path) -> None:
    others = [runtime / name for name in ("gnupg", ".ssh", "systemd", "0123456789abcdef", "deadbeef")]
    for folder in others:
        folder.mkdir()
        os.utime(folder, (1, 1))
    sweep()
    assert all(folder.exists() for folder in others)
    for folder in others:
        folder.rmdir()
