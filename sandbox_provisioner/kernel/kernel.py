"""Run a kernel process in a sandbox and connect it to its clients. I/O thread only; knows nothing of Jupyter."""

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

from ..errors import GuestError, LinkClosedError, SandboxError, StateError
from ..events import JOURNAL, What
from ..guest.capabilities import CARRIED
from ..gvisor.bundle import Mount
from ..gvisor.mounts import identity, replaced
from ..gvisor.runtime_dir import sweep
from ..gvisor.sandbox import GVisorSandbox
from ..gvisor.state import State
from ..mux.activation import activate
from ..mux.connection import GuestConnection
from ..mux.process import GuestProcess
from ..persistence.metadata import Checkpoint
from ..process import Process
from ..sandbox.handle import SandboxHandle
from ..sandbox.manager import SandboxManager
from ..workers import bulk, control
from .activity import KernelActivity
from .output_log import PARTIAL, Budget, LogLines
from .relay import ChannelRelay

log = logging.getLogger(__name__)

LAST_OUTPUT = 1.0
"""Seconds to wait for the last messages and output of a kernel that has ended."""
LAST_WORDS = 2000
DROPPED_PER_SECOND = 1 << 20
"""Read rate, in bytes per second, of output that is dropped instead of logged."""
IDENTIFY_TRIES = 10
INTERNAL = "An internal error; the server's log has more."
FIRST_PROCESS = 1
"""Number of a sandbox's first process: the kernel."""
LOST = 1
"""Exit status of a kernel that could not be restored."""


@dataclass(frozen=True)
class Start:
    """The command, environment and files that a kernel is started with. ``remember`` is saved for a restore."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    folder: Mount | None = None
    watched: Sequence[Mount] = ()
    """Further mounts that other kernels could replace by links while this one starts."""
    files: Mapping[str, str] = field(default_factory=dict)
    connection_file: str = ""
    """Path inside the sandbox; one of the ``files``."""
    remember: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Ending:
    """The descriptors for a kernel's stdout and stderr (None drops them), and the callback for its exit status.

    Streams in ``logged`` go to the server's own log or terminal, as lines that ``output_log`` formats; all others get
    the bytes unchanged.
    """

    sinks: Mapping[str, int | None] = field(default_factory=dict)
    tell: Callable[[int], None] = lambda status: None
    logged: frozenset[str] = frozenset()

    def close(self) -> None:
        """Close the descriptors, only once: their numbers are soon reused."""
        sinks, self.sinks = self.sinks, {}
        for sink in sinks.values():
            if sink is not None:
                os.close(sink)


Begin = Callable[[GVisorSandbox, Start], Awaitable[GuestProcess]]
Farewell = Callable[[str, SandboxError | None], tuple[bytes, bytes]]
"""Called after a rewind with the name of the savepoint that has the state from before, and the problem if it failed.
Returns the last messages of the replaced kernel, for clients on shell and on iopub."""


class SandboxedKernel:
    """A sequence of kernels behind the same listeners: ``launch`` ends the one that still runs.

    Owned by the provisioner. A persistent kernel can be hibernated. The first request of a client wakes it while
    ``heeds_calls`` returns True; if that fails, ``on_trouble`` is called with the error. ``on_joined`` is called with
    the link of each new sandbox. All callbacks run in the I/O thread.
    """

    def __init__(self) -> None:
        self.activity = KernelActivity()
        self.restored = False
        """True if the kernel came from a checkpoint, and may be working on requests that this server did not see."""
        self.relay = ChannelRelay(self.activity)
        self.relay.on_call = self._called
        self.on_trouble: Callable[[SandboxError], None] = lambda error: None
        self.on_joined: Callable[[GuestConnection], None] = lambda link: None
        self.heeds_calls: Callable[[], bool] = lambda: True
        self.handle: SandboxHandle | None = None
        self.manager: SandboxManager | None = None
        self._waking: asyncio.Task[None] | None = None
        self._answered = 0
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
        """Start the sandbox and its kernel, and connect the clients to its ``targets``.

        On failure the instance is deleted. The kernel starts only if the sandbox shows the requested folder itself,
        not one that was put in its place. If the sandbox's spec has a ``carried`` folder, the kernel is a copy of
        ``template``, perhaps from the warm pool.
        """
        async with self._taking_over(handle, ending):
            contents = {"targets": dict(targets), **start.remember}
            handle.describe({"process": FIRST_PROCESS, **contents})  # early: it may outlive this server at any moment
            await (self.manager.start(handle.sandbox_id, template) if self.manager else handle.start(template))
            begin = self._activate if handle.instance.spec.carried else self._start
            self._process = await self._identified(handle.instance, start, begin)
            handle.describe({"process": self._process.number, **contents})
        self._join(handle, targets, ending, restored=False)

    async def resume(self, handle: SandboxHandle, ending: Ending) -> None:
        """Restore a kernel that this or another server saved, and connect its clients.

        On failure the instance is deleted and the saved state stays. Raises SandboxError if the kernel had ended before
        it was saved.
        """
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
        """Save a persistent kernel and free its memory. Its clients stay connected, and their next request wakes it.

        A wake in progress is completed first. Does nothing if the kernel is already hibernated. ``insist`` is passed to
        SandboxHandle.checkpoint; give it if this server will not wake the kernel again.
        """
        assert self.manager is not None and self.handle is not None
        self._note_activity()
        try:
            await self.manager.checkpoint(self.handle.sandbox_id, insist)
        except StateError:  # already hibernated
            if not self.asleep:
                raise

    async def wake(self) -> None:
        """Restore a hibernated kernel. Does nothing if it is awake."""
        if self.asleep:
            assert self.manager is not None and self.handle is not None
            try:
                await self.manager.restore(self.handle.sandbox_id)
            except StateError:  # another task already restored it
                if self.handle.instance.state != State.RUNNING:
                    raise
            finally:
                if self.handle.instance.state == State.RUNNING:  # also if the caller was cancelled during the restore
                    self.relay.awake()

    def keep_awake(self, name: str, seconds: float | None) -> str:
        """Prevent hibernation for idleness for ``seconds``, on behalf of ``name``: None for no limit, 0 to stop.

        Return a sentence that states how long the kernel is now kept awake. Raises SandboxError for too many names.
        """
        try:
            self.activity.keep_awake(name, seconds)
        except ValueError as error:
            raise SandboxError(str(error)) from error
        if self.handle and self.handle.persistent:
            self._note_activity()
        return self.activity.awake_for() or "The kernel is not kept awake"

    async def savepoint(self, name: str) -> Checkpoint:
        """Save a persistent kernel's memory as a savepoint and return it. The kernel stays running or hibernated."""
        assert self.manager is not None and self.handle is not None
        self._note_activity()
        return await self.manager.savepoint(self.handle.sandbox_id, name)

    async def rewind(self, name: str, farewell: Farewell | None = None) -> str:
        """Restore a persistent kernel to a savepoint. Return the name of the savepoint that has the state from before.

        Clients have to reconnect, as after a restart. If one of the kernel's own cells requested it, ``farewell`` makes
        the messages that end the cell. On failure the kernel continues in its previous state; if that cannot be
        restored either, it has ended.
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
        """Connect the clients, which were connected to the instance ``before``, to the handle's new one."""
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
            self.on_joined(handle.instance.link)  # last: reconnect() must not wait for its connections
        before.link.close(LinkClosedError("it was rewound."))

    def _note_activity(self) -> None:
        """Record the kernel's unfinished requests for the server that restores it."""
        assert self.handle is not None
        if not self.asleep:
            self.handle.describe({**self.handle.contents, **self.activity.record()})

    @property
    def asleep(self) -> bool:
        """True while the kernel is hibernated."""
        return self.handle is not None and self.handle.instance.state == State.CHECKPOINTED

    @asynccontextmanager
    async def _taking_over(self, handle: SandboxHandle, ending: Ending) -> AsyncIterator[None]:
        """End the previous kernel, open the listeners, and delete the instance of ``handle`` if the block raises."""
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
        """Remember how many requests the kernel has reacted to. Called by the manager before it saves the kernel."""
        self._answered = self.relay.answered

    def saved(self) -> None:
        """Wake the kernel if a request arrived while it was saved; the image may contain that request.

        Called by the manager after it has saved the kernel.
        """
        asked = self.relay.called or self.relay.sent > self._answered
        if asked or (self.handle and self.handle.instance.link.control_waits):
            self._called()

    def _called(self) -> None:
        if self.heeds_calls() and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake_up())

    async def _wake_up(self) -> None:
        """Wake the kernel for a client. Report any failure to ``on_trouble``, so that the client gets an answer."""
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
        for _ in range(IDENTIFY_TRIES):  # writes of others change the time that identifies a folder
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
            expect=await control(identity, start.folder, *start.watched),
        )

    @staticmethod
    async def _activate(sandbox: GVisorSandbox, start: Start) -> GuestProcess:
        """Turn the kernel of a template's copy into the requested one. Raises GuestError if the copy has no kernel."""
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
            expect=await control(identity, folder._replace(destination=CARRIED), *start.watched),
            outlive=sandbox.spec.outlives,
        )
        return process

    async def signal(self, signum: int) -> None:
        """Wake the kernel and signal its process group. SIGKILL ends the whole sandbox, which no guest can resist."""
        if signum == SIGKILL:
            await self.kill()
        elif self._process and self.status is None:
            await self.wake()
            with suppress(LinkClosedError):  # the kernel has already ended
                self._process.send_signal(signum)

    async def kill(self) -> None:
        """End the kernel and its sandbox now. If a rewind is in progress, also end the instance that it leaves."""
        if self.handle:
            await self.handle.instance.delete()  # operations in progress fail
        async with self._rewinding:
            if self.handle:
                await self.handle.instance.delete()

    async def ended(self) -> int:
        """Wait until the kernel has ended and its sandbox is removed. Return the exit status."""
        while (self._life and not self._life.done()) or self._rewinding.locked():
            async with self._rewinding:
                life = self._life
            if life:
                await asyncio.wait({life})
        return self.status or 0

    async def close(self) -> None:
        """End the kernel, if one runs, and close the listeners."""
        await self.kill()
        await self.ended()
        await self.relay.close()

    async def _live(self, handle: SandboxHandle, process: GuestProcess, ending: Ending) -> None:
        sandbox, copying = handle.instance, asyncio.create_task(self._copy(process, ending, handle.sandbox_id))
        try:
            status = await process.wait()
        except asyncio.CancelledError:  # a rewind: another process takes its place
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
                if log and log.dropping:  # read slowly: other kernels share this loop
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
    """Return the key and the signature scheme of a kernel's messages; None if the process is not a Jupyter kernel."""
    connection = contents.get("connection")
    return (connection["key"].encode(), connection["signature_scheme"]) if connection else None


async def _write(sink: int, data: bytes) -> None:
    """Write without blocking to a descriptor that others share, so it cannot be switched to non-blocking mode."""
    loop = asyncio.get_running_loop()
    view = memoryview(data)
    while view:
        writable = asyncio.Event()
        try:
            loop.add_writer(sink, writable.set)
        except PermissionError:  # a regular file: always writable, and rejected by epoll
            view = view[os.write(sink, view) :]
            continue
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sink)
        view = view[os.write(sink, view[: select.PIPE_BUF]) :]


_sweeping: dict[int, asyncio.Task[list[str]]] = {}


def _sweep_once() -> None:
    """On this process's first launch, start a background task that removes the leftovers of dead servers."""
    if os.getpid() not in _sweeping:
        _sweeping[os.getpid()] = asyncio.create_task(bulk(sweep))
