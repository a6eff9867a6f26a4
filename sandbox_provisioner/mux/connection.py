"""Send and receive frames on the host's end of the pipe to a sandbox's PID 1.

GuestLink opens streams, starts processes, and stops the traffic around a checkpoint. The guest is treated as hostile:
bytes need credit, credit needs bytes, and a reply needs a request. This bounds the memory and work that a guest can
cause. A guest that breaks a rule loses its link, and with it the sandbox.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._text import printable
from ..errors import GuestError, LinkClosedError, ProtocolError
from ..guest.frames import CONTROL, DATA, HEADER, MAX_PAYLOAD, OPEN, RESET, VERSION, Decoder, FrameError, encode
from .host_api import OpenAsks
from .process import GuestProcess
from .stream import Stream

MAX_TROUBLE = 1000
LATE = 5.0
"""Extra seconds to wait, after a hook's time limit, for the guest's report."""
MAX_STREAMS = 4096
MAX_PROCESSES = 1024
MAX_REFUSED = 64
"""Streams that a guest may try to open before it loses its link; each is refused."""


BEFORE_CHECKPOINT = "sandbox_before_checkpoint"
AFTER_RESTORE = "sandbox_after_restore"
"""Names of the functions that a notebook defines as hooks."""


@dataclass(frozen=True)
class Hooks:
    """Time limit of a hook in seconds (0: no hooks), and True if random generators are reseeded after a restore."""

    seconds: float = 0.0
    reseed: bool = False


class GuestLink:
    """The connection to one sandbox, across any number of checkpoints and restores. I/O loop only."""

    def __init__(self) -> None:
        self.quiet = True
        self.error: Exception | None = None
        self.hooks = Hooks()
        self.on_lost: Callable[[Exception], None] = lambda error: None
        self.on_hook_failed: Callable[[str], None] = lambda reason: None
        self.asks = OpenAsks(self._send_answer)
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder()
        self._streams: dict[int, Stream] = {}
        self._processes: dict[int, GuestProcess] = {}
        self._next_stream = 1
        self._next_process = 1
        self._refused = 0
        self._late_frames = 0
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._held: list[bytes] = []
        self._answers: list[bytes] = []
        self._adopting = False
        self._unanswered = 0
        self._quiesced: asyncio.Future[None] | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._activated: asyncio.Future[None] | None = None
        self._hooked: deque[asyncio.Future[None]] = deque()
        self._incoming_pipe: _Incoming | None = None
        self._reader: asyncio.ReadTransport | None = None
        self._writer: asyncio.WriteTransport | None = None

    # -- the pipe ----------------------------------------------------------------------------------------------

    async def attach(self, to_guest: int, from_guest: int) -> None:
        """Take over two descriptors, the pipes to and from a sandbox that is about to start."""
        self._decoder = Decoder()
        incoming = self._incoming_pipe = _Incoming(self)
        reader, _ = await self._loop.connect_read_pipe(lambda: incoming, os.fdopen(from_guest, "rb", 0))
        writer, _ = await self._loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_guest, "wb", 0))
        self._reader, self._writer = reader, writer

    async def greeted(self) -> None:
        """Wait for the guest's hello message."""
        await asyncio.shield(self._hello)

    @property
    def fresh(self) -> bool:
        """True until a guest has sent its hello message."""
        return not self._hello.done()

    @property
    def asleep(self) -> bool:
        """True while the guest is checkpointed: no process is at the other end, and nothing is lost."""
        return self._writer is None and not self.fresh and not self.error

    @property
    def resting(self) -> bool:
        """True while nothing is sent to the guest: it is hibernated, being checkpointed or being restored."""
        return self.quiet and not self.fresh and not self.error

    @property
    def urged(self) -> bool:
        """True if a control message, such as a signal, waits for the guest."""
        return any(HEADER.unpack_from(frame)[0] == CONTROL for frame in self._held)

    async def adopt(self, hooks: bool = True) -> None:
        """Take over a restored guest from another link. The guest's streams end; its processes keep running."""
        self._require_open()
        self._adopting = True
        if hooks:
            self._call(AFTER_RESTORE)
        self._urge(op="adopt")
        try:
            await self.greeted()
        finally:
            self._adopting = False

    def detach(self) -> None:
        """Close the pipes but keep the streams, because the checkpointed sandbox will be restored."""
        if self._reader:
            self._reader.close()
        if self._writer and not self._writer.is_closing():
            self._writer.abort()
        self._reader = self._writer = self._incoming_pipe = None

    def lose(self, error: Exception) -> None:
        """Close the link for good with ``error`` and end all streams, processes and waits, once."""
        if self.error:
            return
        self.error = error
        self.quiet = True
        self.detach()
        self._held.clear()
        self._answers.clear()
        self.asks.forget()
        for pending in (self._hello, self._quiesced, self._resumed, self._activated, *self._hooked):
            if pending and not pending.done():
                pending.set_exception(error)
                pending.exception()  # Mark as retrieved, so that asyncio logs no warning if it is not awaited.
        for stream in list(self._streams.values()):
            stream._closed = True
            if not stream._ended:
                stream._ended = True
                stream.on_end()
        self._streams.clear()
        for process in list(self._processes.values()):
            process._lost(error)
        self._processes.clear()
        self.on_lost(error)

    async def quiesce(self) -> None:
        """Stop the traffic in both directions at the end of a frame.

        On return all bytes sent are in the sandbox, and all bytes received are here.
        """
        self._require_open()
        self.quiet = True
        if self._quiesced is None or self._quiesced.done():
            self._quiesced = self._loop.create_future()
        self._unanswered += 1
        self._urge(op="quiesce")
        await asyncio.shield(self._quiesced)

    async def resume(self) -> None:
        """Continue the traffic once the guest confirms: after a restore, or after a checkpoint that failed."""
        self._require_open()
        self._resumed = self._loop.create_future()
        self._call(AFTER_RESTORE)
        self._urge(op="resume")
        try:
            await self._resumed
        finally:
            self._resumed = None
        self._flow()

    async def call(self, hook: str) -> None:
        """Run a hook of the kernel, if it has one, and wait until it has finished or its time is over."""
        if called := self._call(hook):
            await asyncio.wait({called}, timeout=self.hooks.seconds + LATE)

    def _call(self, hook: str) -> asyncio.Future[None] | None:
        if not self.hooks.seconds or not self._writer:
            return None
        self._hooked.append(self._loop.create_future())
        request = {"name": hook, "reseed": self.hooks.reseed and hook == AFTER_RESTORE}
        self._urge(op="hook", request=request, seconds=self.hooks.seconds)
        return self._hooked[-1]

    def _flow(self) -> None:
        """Send the frames that were held, in order."""
        self.quiet = False
        held, self._held, self._answers = [*self._held, *self._answers], [], []
        for frame in held:
            self._send(frame)
        for stream in list(self._streams.values()):
            stream._resume()

    def _send_answer(self, message: Mapping[str, Any]) -> None:
        """Send an answer, or hold it while the guest rests. Unlike other held frames it does not cause a wake."""
        frame = encode(CONTROL, 0, json.dumps(message).encode())
        if self.quiet:
            self._answers.append(frame)
        else:
            self._send(frame)

    # -- streams and processes -----------------------------------------------------------------------------------

    def open(self, target: str) -> Stream:
        """Open a stream to ``target``, such as "unix:/path", "tcp:127.0.0.1:5000" or "process:1:output".

        Raises GuestError if too many streams are open, LinkClosedError if the sandbox is gone.
        """
        self._require_open()
        if len(self._streams) >= MAX_STREAMS:
            raise GuestError(f"The sandbox has {MAX_STREAMS} streams open, and may have no more.")
        stream = Stream(self, self._next_stream)
        self._next_stream += 2
        self._streams[stream.number] = stream
        self._send(encode(OPEN, stream.number, target.encode()))
        return stream

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
        self._require_open()
        process = GuestProcess(self, self._next_process)
        request = {"argv": list(argv), "env": dict(env), "cwd": cwd, "stdin": stdin}
        self.tell(op="spawn", process=process.number, files=dict(files or {}), expect=dict(expect or {}), **request)
        self._next_process += 1
        self._processes[process.number] = process
        await process.started
        process.begin(stdin)
        return process

    async def activate(self, **message: Any) -> None:
        """Ask PID 1 to activate a copy of a template, and wait. Raises GuestError if it fails."""
        self._activated = self._loop.create_future()
        self.tell(op="activate", **message)
        try:
            await self._activated
        finally:
            self._activated = None

    def process(self, number: int) -> GuestProcess | None:
        """Return the running process of that number, such as one in a restored sandbox, and receive its output."""
        process = self._processes.get(number)
        if process:
            process.begin()
        return process

    def _greeted(self, version: int, processes: list[int]) -> None:
        if version != VERSION:
            raise ProtocolError(f"The guest speaks version {version!r:.20}, not {VERSION}.")
        if len(set(processes)) != len(processes) or len(processes) > (MAX_PROCESSES if self._adopting else 0):
            raise ProtocolError("The guest claims to have processes that it cannot have.")
        for number in processes:
            self._adopt(int(number))
        self._flow()
        self._hello.set_result(None)

    def _adopt(self, number: int) -> None:
        if not 0 < number < 1 << 31:
            raise ProtocolError(f"The guest claims to have a process {number}.")
        process = self._processes[number] = GuestProcess(self, number)
        process.started.set_result(None)
        self._next_process = max(self._next_process, number + 1)

    def tell(self, **message: Any) -> None:
        """Send PID 1 a control message. Raises GuestError if it is larger than a frame."""
        self._require_open()
        payload = json.dumps(message).encode()
        if len(payload) > MAX_PAYLOAD:
            raise GuestError("The command and its environment are too large for a sandbox.", errno.E2BIG)
        self._send(encode(CONTROL, 0, payload))

    def _urge(self, **message: Any) -> None:
        """Send a control message even while the link is quiet, because it stops or continues the traffic."""
        if self._writer:
            self._writer.write(encode(CONTROL, 0, json.dumps(message).encode()))

    def _require_open(self) -> None:
        if self.error:
            raise LinkClosedError(f"The sandbox is gone: {self.error}")

    def _send(self, frame: bytes) -> None:
        if self.quiet and not self.error:
            self._held.append(frame)
        elif self._writer:
            self._writer.write(frame)

    def _retire(self, stream: Stream) -> None:
        if stream._closed and stream._ended:
            self._streams.pop(stream.number, None)

    def _disconnected(self, incoming: _Incoming) -> None:
        """Lose the link because the pipe broke, except during a restore, which reports its own failure."""
        if self._incoming_pipe is incoming and not self._resumed and not self._adopting:
            self.lose(LinkClosedError("its PID 1 has ended."))

    # -- frames from the guest -------------------------------------------------------------------------------------

    def _incoming(self, data: bytes) -> None:
        try:
            for kind, number, payload in self._decoder.feed(data):
                self._frame(kind, number, payload)
                if self.error:
                    return
        except FrameError as error:
            self.lose(ProtocolError(f"The guest sent what is not a frame: {error}."))
        except ProtocolError as error:
            self.lose(error)

    def _frame(self, kind: int, number: int, payload: bytes) -> None:
        if kind == CONTROL:
            self._news(payload)
        elif kind == OPEN:
            self._refused += 1
            if self._refused > MAX_REFUSED or number % 2:
                raise ProtocolError("The guest keeps opening streams that it was refused.")
            self._send(encode(RESET, number))
        elif stream := self._streams.get(number):
            stream._received(kind, payload)
        elif kind == DATA or not 0 < number < self._next_stream:
            raise ProtocolError(f"The guest sent a frame of kind {kind} for stream {number}, which is not open.")
        else:
            self._late_frames += 1  # CREDIT, EOF or RESET that was sent before our own close arrived
            if self._late_frames > 8 * self._next_stream:
                raise ProtocolError("The guest keeps sending frames for streams that are over.")

    def _news(self, payload: bytes) -> None:
        try:
            message = json.loads(payload)
            op = message["op"]
            process = self._processes.get(message["process"]) if "process" in message else None
            self._react(op, message, process)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"The guest sent a message that makes no sense: {str(error)[:100]}.") from error

    def _react(self, op: str, message: dict[str, Any], process: GuestProcess | None) -> None:
        if op == "hello" and not self._hello.done():
            self._greeted(message["version"], message["processes"])
        elif op == "quiesced" and self._quiesced and self._unanswered:
            self._unanswered -= 1
            if not self._unanswered and not self._quiesced.done():
                self._quiesced.set_result(None)
        elif op == "hooked" and self._hooked:
            self._hooked.popleft().set_result(None)
            if trouble := str(message["trouble"]):
                self.on_hook_failed(printable(trouble[:MAX_TROUBLE]))
        elif op == "resumed" and self._resumed and not self._resumed.done():
            self._resumed.set_result(None)
        elif op == "ask" and self._hello.done():
            self.asks.asked(message["number"], message["request"])
        elif op == "answered":
            self.asks.arrived(message["number"])
        elif process and op == "started" and not process.started.done():
            process.started.set_result(None)
        elif process and op == "failed" and not process.started.done():
            del self._processes[process.number]
            process.started.set_exception(_refusal("The command could not be started in the sandbox", message))
        elif op == "activated" and self._activated and not self._activated.done():
            if message["errno"]:
                self._activated.set_exception(_refusal("The sandbox could not take its folder", message))
            else:
                self._activated.set_result(None)
        elif process and op == "exited" and process.started.done():
            status = _status(message["status"])
            del self._processes[process.number]
            process._exited(status)
        else:
            raise ProtocolError(f"The guest said {str(op)[:50]!r}, which nobody had asked for.")


def _refusal(problem: str, message: Mapping[str, Any]) -> GuestError:
    number = int(message["errno"])
    return GuestError(f"{problem}: {os.strerror(number)}: {printable(str(message['filename'])[:500])}.", number)


def _status(value: Any) -> int:
    status = int(value)
    if not -128 < status < 256:
        raise ValueError(f"exit status {status}")
    return status


class _Incoming(asyncio.Protocol):
    """Protocol that passes data from the pipe to its link."""

    def __init__(self, link: GuestLink) -> None:
        self._link = link

    def data_received(self, data: bytes) -> None:
        self._link._incoming(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._link._disconnected(self)
