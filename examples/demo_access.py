"""Compare the access of a plain and a sandboxed kernel: the first half of `make demo`."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from demo_server import run
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

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
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))  # only looks for a route; sends nothing
    print('there is a route')
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
    """A kernel with one client."""

    def __init__(self, title: str, kernel_name: str) -> None:
        self.title = title
        self.name = kernel_name
        self._manager = KernelManager(kernel_name=kernel_name)
        self._client: BlockingKernelClient | None = None

    def start(self, folder: Path) -> None:
        begun = time.monotonic()
        self._manager.start_kernel(cwd=str(folder), stderr=subprocess.DEVNULL)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)
        self.seconds = time.monotonic() - begun

    def run(self, code: str) -> str:
        assert self._client is not None
        return run(self._client, code)

    def close(self) -> None:
        """End the kernel, even if its start was not completed."""
        if self._client:
            self._client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)
        elif self._manager.provisioner:
            self._manager.cleanup_resources()


class Report:
    """Prints observations, and records whether all claims hold."""

    def __init__(self) -> None:
        self.held = True

    def row(self, what: str, plain: str, sandboxed: str, holds: bool) -> None:
        """Print the results of the same action in a plain and a sandboxed kernel."""
        self.held = self.held and holds
        print(f"  {'✓' if holds else '✗'} {what:<42} {plain[:26]:<28} {sandboxed[:40]}", flush=True)

    def event(self, what: str, took: str, seen: str, holds: bool) -> None:
        """Print the result of a step, with its duration or an empty string."""
        self.held = self.held and holds
        print(f"  {'✓' if holds else '✗'} {what:<42} {took:>8}   {seen}", flush=True)


@contextlib.contextmanager
def listener() -> Iterator[int]:
    """Run a server on this machine's loopback, such as a private database would. Yield its port."""
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


def compare_first_starts(report: Report, plain: Kernel, sandboxed: Kernel, folder: Path) -> None:
    """Start and end both kernels, the sandboxed one without a template, and print the times until they were ready."""
    seconds = []
    for kernel in (plain, sandboxed):
        first = Kernel(kernel.title, kernel.name)
        os.environ["SANDBOX_TEMPLATE"] = "none"
        try:
            first.start(folder)
        finally:
            os.environ["SANDBOX_TEMPLATE"] = "use"
            first.close()
        seconds.append(f"{first.seconds:.2f} s")
    report.row("is ready after, the first time", seconds[0], f"{seconds[1]}, without a template", True)


def compare(report: Report, plain: Kernel, sandboxed: Kernel, folder: Path, secret: Path, port: int) -> None:
    """Run the same cells in both kernels, and print their results."""
    elsewhere = secret.with_name(f"{secret.name}-written")
    cells = [
        ("reads a secret of the server's environment", ENVIRONMENT.format(variable=VARIABLE), SECRET),
        ("reads a file in your home", READ.format(path=str(secret)), SECRET),
        ("connects to a server on 127.0.0.1", CONNECT.format(port=port), "welcome"),
        ("has a route to an outside address", ROUTE, "there is a route"),
        ("lists this machine's processes", PROCESSES, ""),
    ]
    report.row("is ready after, later", f"{plain.seconds:.2f} s", f"{sandboxed.seconds:.2f} s, from its template", True)
    for what, code, accessed in cells:
        plain_result, result = plain.run(code), sandboxed.run(code)
        holds = accessed not in result if accessed else int(result.split()[0]) < int(plain_result.split()[0])
        report.row(what, plain_result, result, holds)
    plain_result = plain.run(WRITE.format(path=str(elsewhere)))
    elsewhere.unlink(missing_ok=True)
    result = sandboxed.run(WRITE.format(path=str(elsewhere)))
    untouched = not elsewhere.exists()
    elsewhere.unlink(missing_ok=True)
    report.row("writes a file into your home", plain_result, f"{result}, in its own memory" * untouched, untouched)
    plain_result, result = plain.run(SHARE), sandboxed.run(SHARE)
    written = (folder / "note.txt").read_text() == "hello"
    report.row("writes a file into the notebook's folder", plain_result, result, written)


def compare_kernels(report: Report, notebooks: Path, sandboxed_name: str) -> None:
    """Put a secret into the home and the environment, start a kernel of each kind, and compare them."""
    os.environ[VARIABLE] = SECRET
    handle, name = tempfile.mkstemp(prefix=".sandbox-demo-", dir=Path.home(), text=True)
    with contextlib.ExitStack() as stack:
        stack.callback(Path(name).unlink)
        os.write(handle, SECRET.encode())
        os.close(handle)
        port = stack.enter_context(listener())
        plain = Kernel("plain kernel", "python3")
        sandboxed = Kernel("sandboxed kernel", sandboxed_name)
        print(f"\n    {'the kernel ...':<42} {plain.title:<28} {sandboxed.title}\n    {'-' * 96}")
        compare_first_starts(report, plain, sandboxed, notebooks)
        for kernel in (plain, sandboxed):
            stack.callback(kernel.close)
            kernel.start(notebooks)
        compare(report, plain, sandboxed, notebooks, Path(name), port)
