"""One runsc container: its runtime folder, the runsc process that runs it, and the commands on it.

The container's stdin and stdout are always pipes: a restore needs the same kinds of files as the checkpoint had.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from fcntl import F_SETPIPE_SZ, fcntl
from functools import partial
from signal import SIGKILL
from typing import Any
from uuid import uuid4

from ..errors import DiskFullError, GuestError, ProtocolError, RunscNotFoundError, SandboxError
from ..mux.connection import GuestConnection
from ..process import LocalProcess
from ..workers import CONTROL, control
from . import bundle
from .bundle import GUEST_INSIDE, BundleSpec
from .runsc import SETUP_HINT, Runsc, checked, clean_output, explain
from .runtime_dir import RuntimeFolder, kill_processes
from .zombies import hold_children, reap

START_TIMEOUT = 120.0
COMMAND_TIMEOUT = 30.0
PIPE_SIZE = 1 << 20
OUTPUT_TIMEOUT = 5.0
"""Seconds to wait for the rest of runsc's output after a failed start."""
OUTPUT_KEPT = 1 << 14
"""Bytes of runsc's output that are kept for the error message."""
EXECUTION_LIMIT = 60
"""Seconds after which a process of ``Container.execute`` ends itself."""
EXECUTION_OUTPUT = 1 << 23
"""Most bytes of output of such a process."""


class Container:
    """A runsc container, used for one start or restore of a sandbox, with its own id.

    ``reachable`` is False if PID 1 cannot be reached: its server was killed, or ``Pause.cut_off`` was called.
    """

    def __init__(self, runsc: Runsc, spec: BundleSpec, platform: str) -> None:
        self.id = uuid4().hex[:12]
        self.reachable = True
        self.folder: RuntimeFolder | None = None
        self.main: LocalProcess | None = None
        self._runsc = runsc
        self._settings = runsc.settings(spec.network, platform)
        self._output = bytearray()
        self._children: list[int] = []

    @property
    def ended(self) -> bool:
        """True if no child process of this process runs the container: not started yet, exited or an orphan."""
        return self.main is None or self.main.returncode is not None

    def prepare(self, spec: BundleSpec, note: Mapping[str, Any] | None) -> None:
        """Create the runtime folder with the bundle and the rescue note. Raises SandboxError. Blocks."""
        try:
            self.folder = RuntimeFolder.create()
            bundle.write(self.folder.bundle, spec)
            self.write_note(note)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError(str(error)) from error
            raise SandboxError(
                f"The sandbox was not started: its runtime folder cannot be written ({error}).",
                "Make it writable, or set SANDBOX_RUNTIME_DIR to another folder.",
            ) from error

    def write_note(self, note: Mapping[str, Any] | None) -> None:
        """Write the rescue note, with the container's id, to the folder. Does nothing without a note or a folder."""
        if note is not None and self.folder:
            self.folder.write_note({**note, "container_id": self.id})

    async def run(self, connection: GuestConnection, command: str, *arguments: str) -> None:
        """Start the process of ``runsc run`` or ``restore`` with ``connection`` attached. Raises SandboxError."""
        assert self.folder is not None
        guest_in, to_guest = os.pipe()
        try:
            from_guest, guest_out = os.pipe()
        except OSError:
            os.close(guest_in)
            os.close(to_guest)
            raise
        for pipe in (to_guest, from_guest):
            with suppress(OSError):  # optional: the user's pipe quota may refuse it
                fcntl(pipe, F_SETPIPE_SZ, PIPE_SIZE)
        argv = self._argv(command, *arguments, f"--bundle={self.folder.bundle}", self.id)
        try:
            await connection.attach(to_guest, from_guest)
            self.main = LocalProcess.start(argv, stdin=guest_in, stdout=guest_out)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            os.close(guest_in)
            os.close(guest_out)

    async def wait_until_started(self, greet: Callable[[], Awaitable[None]], extra_time: float) -> None:
        """Wait for ``greet``, which returns when the guest answers.

        Raises the error of ``explain`` if runsc exits first or the time is over, ProtocolError if the answer is wrong.
        """
        assert self.main is not None
        reading = asyncio.create_task(self._keep_output(self.main))
        answer = asyncio.ensure_future(greet())
        end = asyncio.create_task(self.main.wait())
        try:
            await asyncio.wait({answer, end}, timeout=START_TIMEOUT + extra_time, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                error = answer.exception()
                if error is None:
                    self._children = await control(hold_children, self.main.pid)
                    return
                if isinstance(error, ProtocolError):
                    raise error
                await asyncio.wait({end}, timeout=OUTPUT_TIMEOUT)  # the pipe closed first: runsc's exit follows
            if end.done():
                await asyncio.wait({reading}, timeout=OUTPUT_TIMEOUT)
            raise explain(self._argv("..."), self.main.returncode, clean_output(bytes(self._output)))
        finally:
            for task in (answer, end):
                task.cancel()
            await asyncio.gather(answer, end, return_exceptions=True)

    async def _keep_output(self, main: LocalProcess) -> None:
        async for piece in main.stream():
            self._output += piece.data
            del self._output[:-OUTPUT_KEPT]

    async def command(self, command: str, *options: str, timeout: float = COMMAND_TIMEOUT) -> bytes:
        """Run a runsc command on the container and return its output. Raises SandboxError."""
        argv = self._argv(command, *options, self.id)
        try:
            status, out, err = await LocalProcess.run(argv, timeout)
        except OSError as error:
            raise self._unusable(error) from error
        checked(argv, status, err or out)
        return out

    async def execute(self, code: str, python: str) -> bytes:
        """Run ``code`` in a sandbox whose PID 1 is not reachable, and return its output.

        It may import the guest's modules. The process ends itself after ``EXECUTION_LIMIT`` seconds: an image with a
        process of ``runsc exec`` cannot be restored, so none may be left at the next checkpoint. Raises SandboxError.
        """
        prepare = f"import signal, sys; signal.alarm({EXECUTION_LIMIT}); sys.path.insert(0, {GUEST_INSIDE!r})"
        argv = self._argv("exec", self.id, python, "-I", "-S", "-B", "-c", f"{prepare}; {code}")
        try:
            process = LocalProcess.start(argv)
        except OSError as error:
            raise self._unusable(error) from error
        output = {"stdout": bytearray(), "stderr": bytearray()}
        try:
            async with asyncio.timeout(2 * EXECUTION_LIMIT):
                async for piece in process.stream():
                    output[piece.stream] += piece.data
                    if len(output[piece.stream]) > EXECUTION_OUTPUT:
                        raise GuestError(f"Sandbox {self.id} sent more than {EXECUTION_OUTPUT:,} bytes.")
                status = await process.wait()
        except TimeoutError:
            status = None
        finally:
            await process.stop(grace=0)
            process.close()
        checked(argv, status, bytes(output["stderr"]))
        return bytes(output["stdout"])

    async def status(self) -> str:
        """Return the container's state as runsc reports it, such as "running" or "paused". Raises SandboxError."""
        try:
            return str(json.loads(await self.command("state"))["status"])
        except (ValueError, LookupError, TypeError) as error:
            raise SandboxError(f"The answer of `runsc state` for container {self.id} is invalid: {error}.") from error

    def kill(self) -> None:
        """Begin to kill the container's processes, and return at once."""
        if self.folder:
            CONTROL.submit(partial(kill_processes, self.folder.state))

    async def kill_now(self) -> None:
        """Kill the container's processes, so that the operation in progress fails at once."""
        if self.main and self.folder:
            self.main.send_signal(SIGKILL)
            await control(kill_processes, self.folder.state)

    async def remove(self) -> None:
        """Kill the container's processes and remove its folder. May be called more than once."""
        folder, main, children = self.folder, self.main, self._children
        self.folder, self.main, self._children = None, None, []
        if main:
            children = children or hold_children(main.pid)
            main.send_signal(SIGKILL)
        if folder:
            try:
                await control(folder.remove)
            except RuntimeError:  # the interpreter is exiting and starts no more threads
                folder.remove()
        if main:
            await main.stop(grace=0)
            main.close()
        if children:
            with suppress(RuntimeError):  # the interpreter is exiting
                await control(reap, children)

    def _argv(self, *arguments: str) -> list[str]:
        assert self.folder is not None
        return self._runsc.command(self.folder.state, *arguments, settings=self._settings)

    def _unusable(self, error: OSError) -> RunscNotFoundError:
        return RunscNotFoundError(f"runsc at {self._runsc.path} cannot be started: {error.strerror}.", SETUP_HINT)
