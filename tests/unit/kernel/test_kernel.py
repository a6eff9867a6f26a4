"""Test SandboxedKernel: several sandboxes, one after another, use the same listeners."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from guests import LIMIT
from leftovers import leftovers

from sandbox_provisioner.errors import GuestError, RunscError
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.runtime_dir import kill_processes
from sandbox_provisioner.kernel.kernel import SandboxedKernel
from sandbox_provisioner.kernel.output import LAST_WORDS, Ending
from sandbox_provisioner.kernel.relay import CHANNELS
from sandbox_provisioner.kernel.starting import Start
from sandbox_provisioner.sandbox.handle import SandboxHandle

pytestmark = [pytest.mark.runsc, pytest.mark.filterwarnings("error"), pytest.mark.debian, pytest.mark.user]
LONG = 60
TARGETS = {channel: f"unix:/run/kernel/{channel}" for channel in CHANNELS}
ECHO = """
    import os, signal, socketserver, sys, threading
    class Echo(socketserver.StreamRequestHandler):
        def handle(self):
            name = os.path.basename(self.server.server_address)
            for line in self.rfile:
                if line == b"exit\\n": os._exit(5)
                self.wfile.write(f"{GENERATION} {name} ".encode() + line)
    os.makedirs("/run/kernel", exist_ok=True)
    for channel in ("shell", "iopub", "stdin", "control", "hb"):
        server = socketserver.ThreadingUnixStreamServer(f"/run/kernel/{channel}", Echo)
        threading.Thread(target=server.serve_forever).start()
    print("up", flush=True)
    """


class Bench:
    """A kernel under test. ``ends`` contains the exit statuses that it reported."""

    def __init__(self, spec: BundleSpec, runsc: Runsc) -> None:
        self.kernel = SandboxedKernel()
        self.ends: list[int] = []
        self.spec, self.runsc = spec, runsc

    async def launch(self, code: str, argv: list[str] | None = None, **options: Any) -> None:
        """Run ``code`` as a kernel. Its output is dropped unless the test passes sinks."""
        command = argv or [self.spec.python, "-u", "-c", textwrap.dedent(code)]
        handle = SandboxHandle.create_ephemeral("kernel", self.spec, options.pop("runsc", self.runsc))
        ending = Ending(options.pop("sinks", {}), self.ends.append)
        start = Start(command, **({"env": {}, "cwd": "/tmp"} | options))
        await asyncio.wait_for(self.kernel.launch(handle, start, TARGETS, ending, None), LONG)

    async def end(self) -> int:
        return await asyncio.wait_for(self.kernel.ended(), LONG)


@pytest.fixture
async def bench(spec: BundleSpec, runsc: Runsc) -> AsyncIterator[Bench]:
    """A kernel that is closed after the test. Fails if a descriptor is left."""
    bench = Bench(spec, runsc)
    before = psutil.Process().num_fds()
    yield bench
    await asyncio.wait_for(bench.kernel.close(), LONG)
    assert psutil.Process().num_fds() <= before


async def ask(address: int, text: bytes) -> bytes:
    """Connect as a client, send a line and return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", address)
    writer.write(text)
    answer = await asyncio.wait_for(reader.readline(), LONG)
    writer.close()
    await writer.wait_closed()
    return answer


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not happened():
            await asyncio.sleep(0.01)


async def test_clients_reach_a_kernel_and_the_next_one_at_the_same_ports(bench: Bench, runtime: Path) -> None:
    kernel = bench.kernel
    ports = await kernel.relay.reserve_tcp("127.0.0.1", dict.fromkeys(CHANNELS, 0))
    for generation in ("first", "second"):
        waiting = None
        if generation == "second":
            waiting = asyncio.create_task(ask(ports["shell"], b"early\n"))
        await bench.launch(f"GENERATION = {generation!r}\n" + textwrap.dedent(ECHO))
        assert kernel.status is None
        for channel, port in ports.items():
            assert await ask(port, b"hello\n") == f"{generation} {channel} hello\n".encode()
        if waiting:
            assert await waiting == b"second shell early\n"
        assert await ask(ports["control"], b"exit\n") == b""
        assert await bench.end() == kernel.status == 5
        assert leftovers(runtime) == []
    assert bench.ends == [5, 5]


async def test_kernel_that_exits_is_reported_once_and_leaves_nothing(bench: Bench, runtime: Path) -> None:
    await bench.launch("raise SystemExit(3)")
    assert await bench.end() == 3
    assert await bench.end() == 3
    assert (bench.kernel.status, bench.ends) == (3, [3])
    assert leftovers(runtime) == []
    await bench.kernel.signal(signal.SIGINT)
    await bench.kernel.signal(signal.SIGKILL)


async def test_signals_reach_the_kernel_and_sigkill_ends_the_sandbox(bench: Bench, runtime: Path) -> None:
    code = """
        import signal, time
        try:
            print("up", flush=True)
            signal.pause()
        except KeyboardInterrupt: print("interrupted", flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: signal.pause()
        """
    await bench.launch(code)
    await until(lambda: bench.kernel.last_words == b"up\n")
    await bench.kernel.signal(signal.SIGINT)
    await until(lambda: bench.kernel.last_words == b"up\ninterrupted\n")
    await bench.kernel.signal(signal.SIGTERM)
    assert bench.kernel.status is None
    await asyncio.wait_for(bench.kernel.signal(signal.SIGKILL), LONG)
    assert await bench.end() == -signal.SIGKILL
    assert leftovers(runtime) == []


async def test_killed_sandbox_ends_its_kernel(bench: Bench, runtime: Path) -> None:
    await bench.launch("import signal; signal.pause()")
    for folder in runtime.iterdir():
        kill_processes(folder / "runsc")
    assert await bench.end() == -signal.SIGKILL
    assert bench.ends == [-signal.SIGKILL]
    assert leftovers(runtime) == []


async def test_all_output_is_copied_to_the_sinks(bench: Bench, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("stdout", "stderr")}
    sinks = {name: os.open(path, os.O_WRONLY | os.O_CREAT) for name, path in files.items()}
    amount = 1_500_000
    await bench.launch(
        f"import os, sys\nsys.stdout.write('o' * {amount})\nsys.stderr.write('e' * {amount})\nprint('last words')",
        sinks=sinks,
    )
    await bench.end()
    assert files["stdout"].read_bytes() == b"o" * amount + b"last words\n"
    assert files["stderr"].read_bytes() == b"e" * amount
    assert bench.kernel.last_words.endswith(b"last words\n")
    assert len(bench.kernel.last_words) <= LAST_WORDS


async def test_full_sink_delays_the_kernel_but_not_its_end(bench: Bench) -> None:
    reader, writer = os.pipe()
    await bench.launch("print('x' * 3_000_000)\nprint('done')", sinks={"stdout": writer, "stderr": None})
    await until(lambda: bool(bench.kernel.last_words))
    assert bench.kernel.status is None
    await asyncio.wait_for(bench.kernel.kill(), LONG)
    assert await bench.end() == -signal.SIGKILL
    assert os.read(reader, 10) == b"x" * 10
    os.close(reader)


async def test_broken_sink_does_not_disturb_the_kernel(bench: Bench) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    await bench.launch("print('x' * 3_000_000)\nraise SystemExit(4)", sinks={"stdout": writer, "stderr": None})
    assert await bench.end() == 4


async def test_kernel_gets_files_environment_and_folder(bench: Bench) -> None:
    await bench.launch(
        "import os; print(os.getcwd(), os.environ['NAME'], open('/run/x/connection.json').read())",
        env={"NAME": "value"},
        files={"/run/x/connection.json": "{}"},
    )
    await bench.end()
    assert bench.kernel.last_words == b"/tmp value {}\n"


async def test_failed_execution_leaves_nothing_and_allows_another_launch(bench: Bench, runtime: Path) -> None:
    sink = os.open(os.devnull, os.O_WRONLY)
    with pytest.raises(GuestError, match="no-such-kernel"):
        await bench.launch("", argv=["no-such-kernel"], sinks={"stdout": sink})
    assert leftovers(runtime) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sink)
    assert bench.kernel.status is not None
    await bench.launch("raise SystemExit(6)")
    assert await bench.end() == 6
    assert bench.ends == [6]


async def test_failed_sandbox_start_leaves_nothing(bench: Bench, runtime: Path, tmp_path: Path) -> None:
    broken = tmp_path / "runsc"
    broken.write_text("#!/bin/sh\necho 'no cheese today' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(RunscError, match="no cheese today"):
        await bench.launch("", runsc=Runsc(broken, bench.runsc.version))
    assert leftovers(runtime) == []
    assert bench.ends == []


async def test_cancelled_launch_leaves_nothing(bench: Bench, runtime: Path) -> None:
    launching = asyncio.create_task(bench.launch("import signal; signal.pause()"))
    await until(lambda: any(word.startswith("process") for word in leftovers(runtime)))
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(launching, LONG)
    assert leftovers(runtime) == []


async def test_close_ends_everything_and_can_be_repeated(bench: Bench, runtime: Path) -> None:
    ports = await bench.kernel.relay.reserve_tcp("127.0.0.1", dict.fromkeys(CHANNELS, 0))
    await bench.launch("import signal; signal.pause()")
    await asyncio.wait_for(bench.kernel.close(), LONG)
    assert leftovers(runtime) == []
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", ports["shell"])
    await asyncio.wait_for(bench.kernel.close(), LIMIT)


async def test_kernel_that_never_ran_can_be_closed() -> None:
    kernel = SandboxedKernel()
    assert await kernel.ended() == 0
    await kernel.kill()
    await kernel.signal(signal.SIGTERM)
    await kernel.close()
