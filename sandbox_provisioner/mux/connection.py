"""The host's end of the pipe to a sandbox's PID 1: GuestConnection.

The guest is treated as hostile: it may send only as many bytes as it has credit for, give credit only for bytes that
it received, and reply only to requests. This bounds the memory and work that a guest can cause. If a guest breaks a
rule, its connection is closed and its sandbox ended.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .._text import printable
from ..errors import GuestError, LinkClosedError, ProtocolError
from ..guest.frames import CONTROL, HEADER, MAX_PAYLOAD, VERSION, Decoder, FrameError, encode
from .host_api import HostApi
from .process import GuestProcess, ProcessTable, refusal
from .stream import GuestStream, StreamTable

MAX_HOOK_ERROR = 1000
"""Characters of a hook's error that are reported."""
HOOK_REPORT = 5.0
"""Extra seconds to wait, after a hook's time limit, for the guest's report."""

BEFORE_CHECKPOINT = "sandbox_before_checkpoint"
AFTER_RESTORE = "sandbox_after_restore"
"""Names of the functions that a notebook defines as hooks."""


@dataclass(frozen=True)
class Hooks:
    """Settings of a kernel's hooks."""

    seconds: float = 0.0
    """Time limit of a hook; 0 for no hooks."""
    reseed: bool = False
    """True to reseed the random number generators after a restore."""


class ConnectionState(Enum):
    """The state of a connection. Frames are sent only in OPEN, dropped in CLOSED, and held in all others."""

    NEW = "new"
    """The guest has not sent its hello message."""
    OPEN = "open"
    QUIESCED = "quiesced"
    """The traffic is stopped for a checkpoint, or not yet continued after a restore."""
    DETACHED = "detached"
    """The pipes are closed, and the streams are kept until the sandbox is restored."""
    CLOSED = "closed"


class Pipe(asyncio.Protocol):
    """The pipes to and from PID 1. Runs on the host's I/O loop. ``on_end`` is called if the guest closes them first."""

    def __init__(self, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_data = on_data
        self._on_end = on_end
        self._reader: asyncio.ReadTransport | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._closed = False

    async def open(self, to_guest: int, from_guest: int) -> None:
        """Take over the descriptors of the two pipes."""
        loop = asyncio.get_running_loop()
        self._reader, _ = await loop.connect_read_pipe(lambda: self, os.fdopen(from_guest, "rb", 0))
        self._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_guest, "wb", 0))

    def write(self, data: bytes) -> None:
        """Send ``data`` to the guest, or buffer it."""
        if self._writer:
            self._writer.write(data)

    def close(self) -> None:
        """Close both pipes. Buffered data is discarded."""
        self._closed = True
        if self._reader:
            self._reader.close()
        if self._writer and not self._writer.is_closing():
            self._writer.abort()

    def data_received(self, data: bytes) -> None:
        """Call ``on_data``. Called by the loop when data has arrived."""
        self._on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Call ``on_end`` unless the pipes were closed here. Called by the loop."""
        if not self._closed:
            self._on_end()


class GuestConnection:
    """The connection to one sandbox, across any number of checkpoints and restores. Runs on the host's I/O loop."""

    def __init__(self) -> None:
        self.state = ConnectionState.NEW
        self.error: Exception | None = None
        self.hooks = Hooks()
        self.on_closed: Callable[[Exception], None] = lambda error: None
        self.on_hook_failed: Callable[[str], None] = lambda reason: None
        self.host_api = HostApi(lambda message: self.send(_control(message)))
        self.control_waits = False
        """True if a control message, such as a signal, is held for the guest. Answers to its requests do not count."""
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder()
        self._pipe: Pipe | None = None
        self._restoring = False
        self._streams = StreamTable(self)
        self._processes = ProcessTable(self)
        self._held: list[bytes] = []
        self._waits: dict[str, asyncio.Future[None]] = {"hello": self._loop.create_future()}
        self._quiesce_waits: deque[asyncio.Future[None]] = deque()
        self._hook_waits: deque[asyncio.Future[None]] = deque()

    @property
    def quiet(self) -> bool:
        """True in every state but OPEN, so also while ``resting``: ``send`` does not send frames now."""
        return self.state is not ConnectionState.OPEN

    @property
    def asleep(self) -> bool:
        """True only in DETACHED: the sandbox has ended with a checkpoint, and its restore has not begun."""
        return self.state is ConnectionState.DETACHED

    @property
    def resting(self) -> bool:
        """True in QUIESCED and DETACHED: the guest is being saved, is ``asleep`` or is being restored."""
        return self.state in (ConnectionState.QUIESCED, ConnectionState.DETACHED)

    # -- the pipe ----------------------------------------------------------------------------------------------

    async def attach(self, to_guest: int, from_guest: int) -> None:
        """Take over the descriptors of the pipes to and from a sandbox that is about to start."""
        self._decoder = Decoder()
        self._pipe = Pipe(self._data_received, self._disconnected)
        await self._pipe.open(to_guest, from_guest)
        if self.state is ConnectionState.DETACHED:
            self.state = ConnectionState.QUIESCED

    async def greeted(self) -> None:
        """Wait for the guest's hello message."""
        await asyncio.shield(self._waits["hello"])

    async def reattach(self, hooks: bool = True) -> None:
        """Take over a restored guest that had another connection. Its streams end; its processes keep running."""
        self._require_usable()
        self._restoring = True
        if hooks:
            self._start_hook(AFTER_RESTORE)
        self._send_at_once(op="adopt")
        try:
            await self.greeted()
        finally:
            self._restoring = False

    def detach(self) -> None:
        """Close the pipes but keep the streams, because the checkpointed sandbox will be restored."""
        if self._pipe:
            self._pipe.close()
            self._pipe = None
        if self.state in (ConnectionState.OPEN, ConnectionState.QUIESCED):
            self.state = ConnectionState.DETACHED

    def close(self, error: Exception) -> None:
        """End the connection and all streams, processes and waits with ``error``. Later calls do nothing."""
        if self.error:
            return
        self.error, self.state = error, ConnectionState.CLOSED
        self.detach()
        self._held.clear()
        self.control_waits = False
        self.host_api.clear()
        for wait in (*self._waits.values(), *self._quiesce_waits, *self._hook_waits):
            if not wait.done():
                wait.set_exception(error)
                wait.exception()  # Mark as retrieved, so that asyncio logs no warning if it is not awaited.
        self._streams.close()
        self._processes.close(error)
        self.on_closed(error)

    async def quiesce(self) -> None:
        """Stop the traffic in both directions at the end of a frame, so that no byte is in the pipes on return."""
        self._require_usable()
        if self.state is ConnectionState.OPEN:
            self.state = ConnectionState.QUIESCED
        confirmed = self._loop.create_future()
        self._quiesce_waits.append(confirmed)
        self._send_at_once(op="quiesce")
        await asyncio.shield(confirmed)

    async def resume(self) -> None:
        """Continue the traffic once the guest confirms: after a restore, or after a checkpoint that failed."""
        self._require_usable()
        self._restoring = True
        self._start_hook(AFTER_RESTORE)
        self._send_at_once(op="resume")
        try:
            await self._wait_for_reply("resumed")
        finally:
            self._restoring = False
        self._continue_traffic()

    async def call_hook(self, name: str) -> None:
        """Run a hook of the kernel, if it has one, and wait until it has finished or its time is over."""
        if ended := self._start_hook(name):
            await asyncio.wait({ended}, timeout=self.hooks.seconds + HOOK_REPORT)

    def _start_hook(self, name: str) -> asyncio.Future[None] | None:
        if not self.hooks.seconds or not self._pipe:
            return None
        self._hook_waits.append(self._loop.create_future())
        request = {"name": name, "reseed": self.hooks.reseed and name == AFTER_RESTORE}
        self._send_at_once(op="hook", request=request, seconds=self.hooks.seconds)
        return self._hook_waits[-1]

    def _continue_traffic(self) -> None:
        """Enter OPEN: send the held frames in order, and later frames at once."""
        self.state = ConnectionState.OPEN
        self.control_waits = False
        held, self._held = self._held, []
        for frame in held:
            self._write(frame)
        self._streams.resume()

    # -- streams and processes -----------------------------------------------------------------------------------

    def open(self, target: str) -> GuestStream:
        """Open a stream to ``target``, such as "unix:/path", "tcp:127.0.0.1:5000" or "process:1:output".

        Raises GuestError if too many streams are open, LinkClosedError if the sandbox is gone.
        """
        self._require_usable()
        return self._streams.open(target)

    async def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        stdin: bool = True,
        files: Mapping[str, str] | None = None,
        expect: Mapping[str, int] | None = None,
    ) -> GuestProcess:
        """Write ``files`` and start a process in the sandbox. Raises GuestError if it cannot be executed.

        ``expect`` maps paths to st_ctime_ns: if one differs, the error's errno is ESTALE.
        """
        self._require_usable()
        request = {"argv": list(argv), "env": dict(env), "cwd": cwd, "stdin": stdin}
        return await self._processes.spawn({**request, "files": dict(files or {}), "expect": dict(expect or {})})

    def process(self, number: int) -> GuestProcess | None:
        """Return the running process with this number, and start to receive its output; None if it has ended."""
        process = self._processes.get(number)
        if process:
            process.begin()
        return process

    async def activate(self, **message: Any) -> None:
        """Ask PID 1 to activate a copy of a template, and wait. Raises GuestError if it fails."""
        self.tell(op="activate", **message)
        await self._wait_for_reply("activated")

    # -- sending -----------------------------------------------------------------------------------------------

    def tell(self, **message: Any) -> None:
        """Send PID 1 a control message. Raises GuestError if it is larger than a frame."""
        self._require_usable()
        frame = _control(message)
        if len(frame) > HEADER.size + MAX_PAYLOAD:
            problem = f"The command and its environment are larger than {MAX_PAYLOAD // 1024} KiB. Shorten them."
            raise GuestError(problem, errno.E2BIG)
        self.control_waits = self.quiet
        self.send(frame)

    def send(self, frame: bytes) -> None:
        """Send a frame, or hold it until the traffic continues."""
        if not self.quiet:
            self._write(frame)
        elif not self.error:
            self._held.append(frame)

    def _send_at_once(self, **message: Any) -> None:
        """Send a control message in any state, because it stops or continues the traffic."""
        self._write(_control(message))

    def _write(self, frame: bytes) -> None:
        if self._pipe:
            self._pipe.write(frame)

    def _require_usable(self) -> None:
        if self.error:
            raise LinkClosedError(f"The sandbox is gone: {self.error}")

    async def _wait_for_reply(self, op: str) -> None:
        """Wait for the reply ``op``. If the guest sends this reply at any other time, it breaks a rule."""
        self._waits[op] = self._loop.create_future()
        try:
            await self._waits[op]
        finally:
            self._waits.pop(op, None)

    def _reply_expected(self, op: str) -> bool:
        return op in self._waits and not self._waits[op].done()

    # -- receiving ---------------------------------------------------------------------------------------------

    def _disconnected(self) -> None:
        """Close the connection because the pipe broke, except during a restore, which reports its own failure.

        Once a guest is quiesced, its image may be complete. The checkpoint then succeeds, or reports the failure.
        """
        quiesced = self.state is ConnectionState.QUIESCED and not self._quiesce_waits
        if not self._restoring and not quiesced:
            self.close(LinkClosedError("its PID 1 has ended."))

    def _data_received(self, data: bytes) -> None:
        try:
            for kind, number, payload in self._decoder.feed(data):
                if kind == CONTROL:
                    self._control_received(payload)
                else:
                    self._streams.received(kind, number, payload)
                if self.error:
                    return
        except FrameError as error:
            self.close(ProtocolError(f"Invalid frame from guest: {error}."))
        except ProtocolError as error:
            self.close(error)

    def _control_received(self, payload: bytes) -> None:
        try:
            message = json.loads(payload)
            self._handle(message["op"], message)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"Invalid message from guest: {str(error)[:100]}.") from error

    def _handle(self, op: str, message: dict[str, Any]) -> None:
        match op:
            case "started" | "failed" | "exited":
                self._processes.received(op, message)
            case "hello" if self.state is ConnectionState.NEW:
                self._hello_received(message["version"], message["processes"])
            case "quiesced" if self._quiesce_waits:
                self._quiesce_waits.popleft().set_result(None)
            case "hooked" if self._hook_waits:
                self._hook_waits.popleft().set_result(None)
                if problem := str(message["trouble"]):
                    self.on_hook_failed(printable(problem[:MAX_HOOK_ERROR]))
            case "resumed" if self._reply_expected(op):
                self._quiesce_waits.clear()  # The guest never got these requests: it replies in order.
                self._waits[op].set_result(None)
            case "activated" if self._reply_expected(op):
                if message["errno"]:
                    self._waits[op].set_exception(refusal("The copy of a template could not be activated", message))
                else:
                    self._waits[op].set_result(None)
            case "ask" if self.state is not ConnectionState.NEW:
                self.host_api.receive(message["number"], message["request"])
            case "answered":
                self.host_api.confirm(message["number"])
            case _:
                raise ProtocolError(f"Unexpected message from guest: {str(op)[:50]!r}.")

    def _hello_received(self, version: int, processes: list[int]) -> None:
        if version != VERSION:
            raise ProtocolError(f"The guest uses protocol version {version!r:.20}, not {VERSION}.")
        self._processes.adopt(processes, restored=self._restoring)
        self._continue_traffic()
        self._waits["hello"].set_result(None)


def _control(message: Mapping[str, Any]) -> bytes:
    """Return the frame of a control message."""
    return encode(CONTROL, 0, json.dumps(message).encode())
