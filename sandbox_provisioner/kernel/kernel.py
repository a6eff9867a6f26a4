"""SandboxedKernel: a kernel process in a sandbox, joined to its clients. Lives in the I/O thread; knows no Jupyter."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

from .activation import activate
from .activity import KernelActivity
from .bundle import Mount
from .errors import GuestError, LinkClosedError, SandboxError, StateError
from .folders import identity, replaced
from .guest.powers import CARRIED
from .guestprocess import GuestProcess
from .gvisor import GVisorSandbox
from .handle import SandboxHandle
from .journal import JOURNAL, What
from .kernel_output import PARTIAL, Budget, LogLines
from .link import GuestLink
from .manager import SandboxManager
from .metadata import Checkpoint
from .process import Process
from .relay import ChannelRelay
from .runtime import sweep
from .states import State
from .workers import bulk

log = logging.getLogger(__name__)

LAST_OUTPUT = 1.0
"""Seconds that an ended kernel's last messages and output have to get through."""
LAST_WORDS = 2000
DROPPED_PER_SECOND = 1 << 20
"""Bytes per second that are read of output which is not logged."""
IDENTIFY_TRIES = 10
INTERNAL = "An internal error; the server's log has more."
FIRST_PROCESS = 1
"""The number of a sandbox's first process, which is the kernel's."""
LOST = 1
"""The status of a kernel that could not be brought back."""


@dataclass(frozen=True)
class Start:
    """What a kernel is started with. ``remember`` is kept for those who restore it."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    folder: Mount | None = None
    watched: Sequence[Mount] = ()
    """Further mounts that other kernels could replace by links while this one starts."""
    files: Mapping[str, str] = field(default_factory=dict)
    connection_file: str = ""
    """Inside; one of the ``files``."""
    remember: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Ending:
    """Where a kernel's stdout and stderr go (None drops them) until they are closed, and who hears its status then.

    Those in ``logged`` are the server's own log or terminal, and get lines that kernel_output.py makes; all others get
    the bytes unchanged.
    """

    sinks: Mapping[str, int | None] = field(default_factory=dict)
    tell: Callable[[int], None] = lambda status: None
    logged: frozenset[str] = frozenset()

    def close(self) -> None:
        """Close the descriptors, once: their numbers are soon others'."""
        sinks, self.sinks = self.sinks, {}
        for sink in sinks.values():
            if sink is not None:
                os.close(sink)


Begin = Callable[[GVisorSandbox, Start], Awaitable[GuestProcess]]
Farewell = Callable[[str, SandboxError | None], tuple[bytes, bytes]]
"""What the clients on shell and on iopub hear at last of a kernel that was rewound: to the savepoint that keeps it, or,
because of a problem, to itself."""


class SandboxedKernel:
    """One kernel after another behind the same listeners: ``launch`` ends the one that still runs.

    A persistent one can ``hibernate`` and is woken by the first client that asks something of it; ``on_trouble`` is
    told, in the I/O thread, why it could not be. Calls are not heeded while it is being shut down. ``on_joined`` is
    told of each sandbox's link.
    """

    def __init__(self) -> None:
        self.activity = KernelActivity()
        self.restored = False
        """True if the present kernel came from a checkpoint, and may be working on requests that were not seen here."""
        self.relay = ChannelRelay(self.activity)
        self.relay.on_call = self._called
        self.on_trouble: Callable[[SandboxError], None] = lambda error: None
        self.on_joined: Callable[[GuestLink], None] = lambda link: None
        self.heeds_calls: Callable[[], bool] = lambda: True
        self.handle: SandboxHandle | None = None
        self.manager: SandboxManager | None = None
        self._waking: asyncio.Task[None] | None = None
        self._heeded = 0
        self.status: int | None = 0
        self.last_words = b""
        self._process: GuestProcess | None = None
        self._life: asyncio.Task[None] | None = None
        self._ending = Ending()
        self._rewinding = asyncio.Lock()

    async def launch(
        self,
        handle: SandboxHandle,
        start: Start,
        targets: Mapping[str, str],
        ending: Ending,
        template: Path | None = None,
    ) -> None:
        """Start the sandbox and the kernel in it, and join the clients to its ``targets``. All or nothing.

        The kernel is not started unless the sandbox shows the very folder that was asked for. One whose spec carries
        that is a copy of the image of a ``template``, or stood by as one already.
        """
        async with self._taking_over(handle, ending):
            contents = {"targets": dict(targets), **start.remember}
            handle.describe({"process": FIRST_PROCESS, **contents})  # it may outlive this server at any moment
            await (self.manager.start(handle.sandbox_id, template) if self.manager else handle.start(template))
            begin = self._activate if handle.instance.spec.carried else self._start
            self._process = await self._identified(handle.instance, start, begin)
            handle.describe({"process": self._process.number, **contents})
        self._join(handle, targets, ending, restored=False)

    async def resume(self, handle: SandboxHandle, ending: Ending) -> None:
        """Bring a kernel back that was saved by this or another server. All or nothing; what was saved stays."""
        assert self.manager is not None
        async with self._taking_over(handle, ending):
            await self.manager.restore(handle.sandbox_id)
            self._process = handle.instance.link.process(handle.contents["process"])
            if self._process is None:
                raise SandboxError(
                    f"The kernel in sandbox {handle.sandbox_id} had ended before it was saved.",
                    f"`jupyter sandbox delete {handle.sandbox_id}` forgets it; the notebook then starts afresh.",
                )
        self._join(handle, handle.contents["targets"], ending, restored=True)

    async def hibernate(self, insist: float | None = None) -> None:
        """Save a persistent kernel and give its memory back; its clients stay, and what they ask for wakes it.

        One that is about to wake up does so first; nothing happens to one that sleeps. ``insist``, for a kernel that is
        not to be woken by this server any more, is SandboxHandle.checkpoint's.
        """
        assert self.manager is not None and self.handle is not None
        self._note_activity()
        try:
            await self.manager.checkpoint(self.handle.sandbox_id, insist)
        except StateError:  # it sleeps already
            if not self.asleep:
                raise

    async def wake(self) -> None:
        """Bring a hibernated kernel back; nothing happens to one that is awake."""
        if self.asleep:
            assert self.manager is not None and self.handle is not None
            try:
                await self.manager.restore(self.handle.sandbox_id)
            except StateError:  # somebody else was quicker
                if self.handle.instance.state != State.RUNNING:
                    raise
            self.relay.awake()

    def keep_awake(self, name: str, seconds: float | None) -> str:
        """Keep the kernel from being hibernated for idleness for ``seconds``: None without end, 0 no more.

        ``name`` tells different callers apart. Return a sentence that says for how long it is kept awake now.
        """
        try:
            self.activity.keep_awake(name, seconds)
        except ValueError as error:
            raise SandboxError(str(error)) from error
        if self.handle and self.handle.persistent:
            self._note_activity()
        return self.activity.awake_for() or "The kernel is not kept awake"

    async def savepoint(self, name: str) -> Checkpoint:
        """Keep a persistent kernel's memory under a name; it runs on, or sleeps on."""
        assert self.manager is not None and self.handle is not None
        self._note_activity()
        return await self.manager.savepoint(self.handle.sandbox_id, name)

    async def rewind(self, name: str, farewell: Farewell | None = None) -> str:
        """Bring a persistent kernel back as it was at a savepoint; returns the name of one that has the present.

        Its clients have to connect again, as after a restart. If a cell of its own asks for it, ``farewell`` is how
        that ends. If it fails, the present goes on; if even that cannot be brought back, the kernel has ended.
        """
        async with self._rewinding:
            handle = self._require_rewindable(name)
            present, asleep, kept, problem = handle.instance, self.asleep, "", None
            self._note_activity()
            assert self.manager is not None
            try:
                kept = await self.manager.rewind(handle.sandbox_id, name)
            except Exception as error:
                problem = error if isinstance(error, SandboxError) else SandboxError(INTERNAL)
                raise
            finally:
                if handle.instance is not present:
                    await self._rejoin(handle, present, farewell(kept, problem) if farewell else (b"", b""))
                elif self.asleep and not asleep:
                    await self.wake()
            return kept

    def _require_rewindable(self, name: str) -> SandboxHandle:
        assert self.handle is not None
        if self.status is not None:
            raise StateError(self.handle.sandbox_id, "rewind", "without a kernel")
        if self.handle.metadata.savepoint(name).contents.get("connection") != self.handle.contents.get("connection"):
            raise SandboxError(
                f"Savepoint {name} is of a kernel with other keys than this one: its clients could not talk to it.",
                "Fork from it instead.",
            )
        return self.handle

    async def _rejoin(self, handle: SandboxHandle, before: GVisorSandbox, farewell: tuple[bytes, bytes]) -> None:
        """Another sandbox is in the place of the one ``before``, which the clients were joined to."""
        assert self._life is not None
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        self._process = handle.instance.link.process(handle.contents["process"])
        if self._process is None:
            self.relay.disconnect()
            self._ending.close()
            self._ending.tell(LOST)
            self.status, self._life = LOST, None
        else:
            self.status, self.restored = None, True
            self.activity.reset(handle.contents)
            self._life = asyncio.create_task(self._live(handle, self._process, self._ending))
            signing = _signing(handle.contents)
            await self.relay.reconnect(handle.instance.link, handle.contents["targets"], signing, *farewell)
            self.on_joined(handle.instance.link)  # whose own connections are not among those that were waited for
        before.link.lose(LinkClosedError("it was rewound."))

    def _note_activity(self) -> None:
        """Record for the server that restores it what the kernel is working on."""
        assert self.handle is not None
        if not self.asleep:
            self.handle.describe({**self.handle.contents, **self.activity.record()})

    @property
    def asleep(self) -> bool:
        """Whether it is hibernated."""
        return self.handle is not None and self.handle.instance.state == State.CHECKPOINTED

    @asynccontextmanager
    async def _taking_over(self, handle: SandboxHandle, ending: Ending) -> AsyncIterator[None]:
        """From whatever was there to a kernel in ``handle``, or to nothing."""
        _sweep_once()
        if self.handle is not handle:
            await self.kill()
        await self.ended()
        self.handle = handle
        try:
            await self.relay.listen()
            yield
        except BaseException:
            ending.close()
            await asyncio.shield(handle.instance.delete())
            raise

    def _join(self, handle: SandboxHandle, targets: Mapping[str, str], ending: Ending, restored: bool) -> None:
        assert self._process is not None
        self.status, self.restored = None, restored
        self.activity.reset(handle.contents if restored else None)
        self.last_words = b""
        self._ending = ending
        self.on_joined(handle.instance.link)
        self.relay.connect(handle.instance.link, targets, _signing(handle.contents))
        self._life = asyncio.create_task(self._live(handle, self._process, ending))

    def saving(self) -> None:
        """Told by whoever is about to save it."""
        self._heeded = self.relay.heeded

    def saved(self) -> None:
        """Told by whoever saved it: a client may have asked for something meanwhile, which may be saved with it."""
        asked = self.relay.called or self.relay.asked > self._heeded
        if asked or (self.handle and self.handle.instance.link.urged):
            self._called()

    def _called(self) -> None:
        if self.heeds_calls() and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake_up())

    async def _wake_up(self) -> None:
        """Wake the kernel for a client. Any failure is reported, so that the client gets an answer."""
        try:
            await self.wake()
        except SandboxError as error:
            self.on_trouble(error)
        except Exception as error:
            log.exception("A kernel could not be woken")
            self.on_trouble(
                SandboxError(f"{type(error).__name__}: {error}.", "The server's log has more. Run the cell again.")
            )

    @staticmethod
    async def _identified(sandbox: GVisorSandbox, start: Start, begin: Begin) -> GuestProcess:
        for _ in range(IDENTIFY_TRIES):  # a neighbour that writes into the folder changes what it is known by
            try:
                return await begin(sandbox, start)
            except GuestError as error:
                if error.errno != errno.ESTALE:
                    raise
        raise replaced(*filter(None, (start.folder, *start.watched)))

    @staticmethod
    async def _start(sandbox: GVisorSandbox, start: Start) -> GuestProcess:
        return await sandbox.execute(
            start.argv,
            env=start.env,
            cwd=start.cwd,
            stdin=False,
            files=start.files,
            expect=identity(start.folder, *start.watched),
        )

    @staticmethod
    async def _activate(sandbox: GVisorSandbox, start: Start) -> GuestProcess:
        """The kernel of a copy of a template, as the one that was asked for."""
        process, folder = sandbox.link.process(FIRST_PROCESS), start.folder
        if process is None or folder is None:
            raise GuestError("The copy of a template has no kernel in it any more.")
        orders = {
            **start.remember["connection"],
            "connection_file": start.connection_file,
            "env": dict(start.env),
            "cwd": start.cwd,
        }
        await activate(
            sandbox.link,
            orders,
            folder=folder.destination,
            files=start.files,
            expect=identity(folder._replace(destination=CARRIED), *start.watched),
            outlive=sandbox.spec.outlives,
        )
        return process

    async def signal(self, signum: int) -> None:
        """Signal the kernel's process group; SIGKILL ends the whole sandbox, which no guest can resist."""
        if signum == SIGKILL:
            await self.kill()
        elif self._process and self.status is None:
            await self.wake()
            with suppress(LinkClosedError):  # it is dead, which is no mistake of the caller's
                self._process.send_signal(signum)

    async def kill(self) -> None:
        """End the kernel and its sandbox now; one that is being rewound first comes to be one or the other."""
        if self.handle:
            await self.handle.instance.delete()  # and whatever is under way with it fails
        async with self._rewinding:
            if self.handle:
                await self.handle.instance.delete()

    async def ended(self) -> int:
        """Wait until the kernel has ended and nothing of its sandbox is left; its exit status."""
        while (self._life and not self._life.done()) or self._rewinding.locked():
            async with self._rewinding:
                life = self._life
            if life:
                await asyncio.wait({life})
        return self.status or 0

    async def close(self) -> None:
        """End the kernel, if one runs, and its listeners."""
        await self.kill()
        await self.ended()
        await self.relay.close()

    async def _live(self, handle: SandboxHandle, process: GuestProcess, ending: Ending) -> None:
        sandbox, copying = handle.instance, asyncio.create_task(self._copy(process, ending, handle.sandbox_id))
        try:
            status = await process.wait()
        except asyncio.CancelledError:  # it was rewound: another process goes on in its place
            copying.cancel()
            raise
        with suppress(TimeoutError):
            await asyncio.wait_for(self.relay.drained(), LAST_OUTPUT)
        await asyncio.wait({copying}, timeout=LAST_OUTPUT)
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
        ending.close()
        ending.tell(status)
        self.status = status
        self.activity.reset()
        self.relay.disconnect()
        await sandbox.delete()
        JOURNAL.write(handle.entry(What.ENDED))

    async def _copy(self, process: Process, ending: Ending, sandbox_id: str) -> None:
        loop = asyncio.get_running_loop()
        budget = Budget(loop.time())
        logs = {name: LogLines(sandbox_id, budget) for name in ending.logged}
        output = process.stream()
        following = asyncio.ensure_future(anext(output, None))
        try:
            while True:
                waits = any(stream.pending for stream in logs.values())
                done, _ = await asyncio.wait({following}, timeout=PARTIAL if waits else None)
                piece = following.result() if done else None
                if piece is None:
                    for name, stream in logs.items():
                        await _write_all(ending.sinks.get(name), stream.flush(loop.time()))
                    if done:
                        return
                    continue
                following = asyncio.ensure_future(anext(output, None))
                self.last_words = (self.last_words + piece.data)[-LAST_WORDS:]
                log = logs.get(piece.stream)
                lines = log.feed(piece.data, loop.time()) if log else [piece.data]
                await _write_all(ending.sinks.get(piece.stream), lines)
                if log and log.dropping:  # reading it all at once would take time from other kernels
                    await asyncio.sleep(len(piece.data) / DROPPED_PER_SECOND)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _write_all(sink: int | None, pieces: Sequence[bytes]) -> None:
    """Write each piece as a whole, so that lines of different writers do not mix."""
    if sink is not None:
        for piece in pieces:
            with suppress(OSError):
                await _write(sink, piece)


def _signing(contents: Mapping[str, Any]) -> tuple[bytes, str] | None:
    """Return the key and the scheme with which a kernel's messages are signed; None for one that is not Jupyter's."""
    connection = contents.get("connection")
    return (connection["key"].encode(), connection["signature_scheme"]) if connection else None


async def _write(sink: int, data: bytes) -> None:
    """Write to a descriptor that others share, and so must not be made non-blocking, without ever blocking."""
    loop = asyncio.get_running_loop()
    view = memoryview(data)
    while view:
        writable = asyncio.Event()
        try:
            loop.add_writer(sink, writable.set)
        except PermissionError:  # a regular file: always writable, and not for epoll
            view = view[os.write(sink, view) :]
            continue
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sink)
        view = view[os.write(sink, view[: select.PIPE_BUF]) :]


_sweeping: dict[int, asyncio.Task[list[str]]] = {}


def _sweep_once() -> None:
    """On this process's first launch, remove in the background what dead servers left."""
    if os.getpid() not in _sweeping:
        _sweeping[os.getpid()] = asyncio.create_task(bulk(sweep))
