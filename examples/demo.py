"""`make demo`: the same cells in a plain and in a sandboxed kernel, side by side; then memory saved and brought back.

Ends with exit code 0 only if everything it claims was seen to be true.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.iothread import IO
from sandbox_provisioner.provisioner import SandboxProvisioner

SECRET = f"secret-{secrets.token_hex(4)}"
VARIABLE = "DEMO_SECRET"

ENVIRONMENT = "import os; print(os.environ.get({variable!r}, 'not there'))"
READ = "print(open({path!r}).read() if os.path.exists({path!r}) else 'not there')"
CONNECT = """
import socket
try:
    print(socket.create_connection(('127.0.0.1', {port}), 5).recv(100).decode())
except OSError as error:
    print(error.strerror)
"""
ROUTE = """
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))  # sends nothing: is there a way?
    print('there is a way')
except OSError as error:
    print(error.strerror)
"""
PROCESSES = "print(len([name for name in os.listdir('/proc') if name.isdigit()]), 'processes')"
WRITE = """
try:
    open({path!r}, 'w').write('was here'); print('written')
except OSError as error:
    print(error.strerror)
"""
SHARE = "open('note.txt', 'w').write('hello'); print('written')"


class Kernel:
    """A kernel and one client of it."""

    def __init__(self, title: str, provisioner: str, folder: Path) -> None:
        self.title = title
        self.manager = KernelManager(kernel_name="python3")
        spec = self.manager.kernel_spec
        assert spec is not None
        spec.metadata = {**spec.metadata, "kernel_provisioner": {"provisioner_name": provisioner}}
        begun = time.monotonic()
        self.manager.start_kernel(cwd=str(folder), stderr=subprocess.DEVNULL)
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        self.seconds = time.monotonic() - begun

    def run(self, code: str) -> str:
        """What ``code`` prints."""
        printed: list[str] = []

        def collect(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = self.client.execute_interactive(code, timeout=60, output_hook=collect)
        return "".join(printed).strip() if reply["content"]["status"] == "ok" else reply["content"]["evalue"]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()


class Story:
    """Prints what is seen and remembers whether it is as claimed."""

    def __init__(self) -> None:
        self.held = True

    def row(self, what: str, plain: str, sandboxed: str, holds: bool) -> None:
        self.held = self.held and holds
        print(f"  {'✓' if holds else '✗'} {what:<42} {plain[:26]:<28} {sandboxed[:40]}")

    def line(self, text: str, holds: bool = True) -> None:
        self.held = self.held and holds
        print(f"  {'✓' if holds else '✗'} {text}")


@contextlib.contextmanager
def listener() -> Iterator[int]:
    """A server on this machine's loopback, such as a database nobody meant to share; yields its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                connection.sendall(b"welcome")
                connection.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.close()


def compare(story: Story, plain: Kernel, sandboxed: Kernel, folder: Path, secret: Path, port: int) -> None:
    """Run the same cells in both."""
    elsewhere = secret.with_name(f"{secret.name}-written")
    cells = [
        ("reads a secret of the server's environment", ENVIRONMENT.format(variable=VARIABLE), SECRET),
        ("reads a file in your home", READ.format(path=str(secret)), SECRET),
        ("connects to a server on 127.0.0.1", CONNECT.format(port=port), "welcome"),
        ("finds a way to an outside address", ROUTE, "there is a way"),
        ("lists this machine's processes", PROCESSES, ""),
    ]
    print(f"\n    {'the kernel ...':<42} {plain.title:<28} {sandboxed.title}\n    {'-' * 96}")
    story.row("is ready after", f"{plain.seconds:.2f} s", f"{sandboxed.seconds:.2f} s", True)
    for what, code, prize in cells:
        seen, kept = plain.run(code), sandboxed.run(code)
        fewer = int(kept.split()[0]) < int(seen.split()[0]) if not prize else prize not in kept
        story.row(what, seen, kept, fewer)
    seen = plain.run(WRITE.format(path=str(elsewhere)))
    elsewhere.unlink(missing_ok=True)
    kept = sandboxed.run(WRITE.format(path=str(elsewhere)))
    untouched = not elsewhere.exists()
    elsewhere.unlink(missing_ok=True)
    story.row("writes a file into your home", seen, f"{kept}, in its own memory" * untouched, untouched)
    seen, kept = plain.run(SHARE), sandboxed.run(SHARE)
    story.row("writes a file into the notebook's folder", seen, kept, (folder / "note.txt").read_text() == "hello")


def processes_of(container_id: str) -> list[str]:
    """The host's processes that belong to a container."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if container_id.encode() in entry.read_bytes():
                found.append(entry.parent.name)
    return found


def hibernate(story: Story, kernel: Kernel, folder: Path) -> None:
    """Checkpoint the sandbox, restore it, and look for what was in the kernel's memory; the client stays connected."""
    provisioner = kernel.manager.provisioner
    assert isinstance(provisioner, SandboxProvisioner) and provisioner.sandbox is not None
    kernel.run("answer = 42; countdown = iter(range(3, 0, -1)); next(countdown)")
    image = folder / "image"
    begun = time.monotonic()
    asyncio.run(IO.run(provisioner.sandbox.checkpoint(image)))
    saved = time.monotonic()
    size = sum(file.stat().st_size for file in image.iterdir()) / 1e6
    gone = not processes_of(provisioner.sandbox.container_id)
    story.line(
        f"checkpointed in {saved - begun:.2f} s: {size:.0f} MB on disk, no process left, its memory given back", gone
    )
    begun = time.monotonic()
    asyncio.run(IO.run(provisioner.sandbox.restore(image)))
    answer = kernel.run("print(answer, next(countdown))")
    story.line(
        f"restored and answering in {time.monotonic() - begun:.2f} s: variable and generator are {answer}",
        answer == "42 2",
    )


def main() -> int:
    print("Starting a plain and a sandboxed Python kernel ...", flush=True)
    os.environ[VARIABLE] = SECRET
    handle, name = tempfile.mkstemp(prefix=".sandbox-demo-", dir=Path.home(), text=True)
    os.write(handle, SECRET.encode())
    os.close(handle)
    story = Story()
    with contextlib.ExitStack() as stack:
        stack.callback(Path(name).unlink)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-demo-")))
        notebooks = folder / "notebooks"
        notebooks.mkdir()
        port = stack.enter_context(listener())
        plain = Kernel("plain kernel", "local-provisioner", notebooks)
        stack.callback(plain.close)
        sandboxed = Kernel("sandboxed kernel", "sandbox-provisioner", notebooks)
        stack.callback(sandboxed.close)
        compare(story, plain, sandboxed, notebooks, Path(name), port)
        print("\n  Now the sandboxed kernel's whole memory goes to disk and comes back:\n")
        hibernate(story, sandboxed, folder)
    print("\nEvery claim held." if story.held else "\nNot every claim held: see the lines marked ✗.")
    return 0 if story.held else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SandboxError as error:
        sys.exit(f"The demo cannot run here: {error}")
