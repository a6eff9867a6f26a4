"""Run a kernel process in a sandbox and connect it to its clients. I/O thread only; independent of jupyter_client."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from signal import SIGKILL
from typing import Any

from ..errors import LinkClosedError, SandboxError, StateError
from ..events import EVENT_BUS, EventKind
from ..gvisor.runtime_dir import sweep
from ..gvisor.sandbox import GVisorSandbox
from ..gvisor.state import State
from ..mux.connection import GuestConnection
from ..mux.process import GuestProcess
from ..persistence.metadata import Checkpoint
from ..sandbox.handle import HandleObserver, SandboxHandle
from ..workers import bulk
from .activity import KernelActivity
from .home import HomeFiles
from .output import Ending, copy_output
from .relay import ChannelRelay
from .starting import FIRST_PROCESS, Start, start_process

log = logging.getLogger(__name__)

LAST_OUTPUT = 1.0
"""Seconds to wait for the last messages and output of a kernel that has ended."""
INTERNAL = "An internal error occurred; the server's log has the details."
LOST = 1
"""Exit status of a kernel that could not be restored."""

LastMessages = Callable[[str, SandboxError | None], tuple[bytes, bytes]]
"""Makes the last messages of a kernel that a rewind replaced, for clients on shell and on iopub.

Called with the name of the savepoint that has the state from before, and the error if the rewind failed."""


class KernelState(StrEnum):
    """The state of a kernel and its sandbox."""

    STARTING = "starting"
    RUNNING = "running"
    SAVING = "saving"
    ASLEEP = "asleep"
    WAKING = "waking"
    GONE = "gone"


AWAKE = frozenset({KernelState.RUNNING, KernelState.SAVING})
"""States in which the kernel runs, so that its memory has changes that no checkpoint contains."""


class SandboxedKernel(HandleObserver):
    """A kernel and the listeners for its clients. ``launch`` or ``resume`` replaces the kernel and keeps the listeners.

    Owned by the provisioner; observes the handle of its sandbox. The first request of a client wakes a hibernated
    kernel if ``may_wake`` returns True. If that fails, ``on_wake_failed`` is called with the error. ``on_connected`` is
    called with the connection of each new sandbox, ``on_gone`` with the reason why this server has lost the sandbox.
    """

    def __init__(self) -> None:
        self.activity = KernelActivity()
        self.restored = False  # if True, the kernel may be working on requests that did not pass through this server
        self.relay = ChannelRelay(self.activity)
        self.relay.on_call = self._wake_for_client
        self.on_wake_failed: Callable[[SandboxError], None] = lambda error: None
        self.on_connected: Callable[[GuestConnection], None] = lambda connection: None
        self.on_gone: Callable[[str], None] = lambda reason: None
        self.may_wake: Callable[[], bool] = lambda: True
        self.home = HomeFiles()  # the files of a kernel that has ended, for the next launch
        self.handle: SandboxHandle | None = None
        self._waking: asyncio.Task[None] | None = None
        self._starting = self._restoring = False
        self._answered = 0  # requests that the kernel had reacted to when the current save began
        self.status: int | None = 0
        self._process: GuestProcess | None = None
        self._life: asyncio.Task[None] | None = None
        self._ending = Ending()
        self._rewinds = 0  # rewinds in progress: each holds the handle's lock, or waits for it

    async def launch(
        self, handle: SandboxHandle, start: Start, targets: Mapping[str, str], ending: Ending, template: Path | None
    ) -> None:
        """Start the sandbox and its kernel, and connect the clients to its ``targets``.

        With a ``template``, the kernel is a copy of it, perhaps from the warm pool. On failure the instance is deleted.
        """
        async with self._replacing(handle, ending):
            contents = {"targets": dict(targets), **start.remember}
            handle.describe({"process": FIRST_PROCESS, **contents})  # before the start: it may outlive this server
            await handle.start(template)
            await self.home.place(handle, activated=False)
            self._process = await start_process(handle.instance, start)
            await self.home.place(handle, activated=True)
            handle.describe({"process": self._process.number, **contents})
        self._connect(handle, ending, restored=False)

    async def resume(self, handle: SandboxHandle, ending: Ending) -> None:
        """Restore a kernel that this or another server saved, and connect its clients.

        On failure the instance is deleted and the saved state stays. Raises SandboxError if the kernel had ended before
        it was saved.
        """
        async with self._replacing(handle, ending):
            await handle.restore()
            self._process = _restored_process(handle)
        self._connect(handle, ending, restored=True)

    async def hibernate(self, insist: float | None = None) -> None:
        """Save a persistent kernel and free its memory. Its clients stay connected, and their next request wakes it.

        Waits for a wake in progress. Does nothing if the kernel is already hibernated. ``insist`` is passed to
        SandboxHandle.save; set it if this server will not wake the kernel again.
        """
        assert self.handle is not None
        self._note_activity()
        try:
            await self.handle.save(insist=insist)
        except StateError:  # already hibernated
            if not self.asleep:
                raise

    async def wake(self) -> None:
        """Restore a hibernated kernel. Does nothing if it is awake."""
        if self.asleep and self.handle:
            self._restoring = True
            try:
                await self.handle.restore()
            except StateError:  # another task already restored it
                if self.handle.instance.state != State.RUNNING:
                    raise
            finally:
                self._restoring = False
                if self.handle.instance.state == State.RUNNING:  # also if the caller was cancelled during the restore
                    self.relay.reconnect_heartbeats()

    async def keep_awake(self, name: str, seconds: float | None) -> str:
        """Prevent hibernation for idleness for ``seconds``, on behalf of ``name``: None for no limit, 0 to stop.

        Return a sentence that states how long the kernel is now kept awake. Raises SandboxError for too many names.
        """
        self.activity.keep_awake(name, seconds)
        if self.handle and self.handle.persistent:
            self._note_activity()
        return self.activity.awake_for() or "The kernel is not kept awake"

    async def savepoint(self, name: str) -> Checkpoint:
        """Save a persistent kernel's memory as a savepoint and return it. The kernel stays running or hibernated."""
        assert self.handle is not None
        self._note_activity()
        return await self.handle.save(name)

    async def rewind(self, name: str, last_messages: LastMessages | None = None) -> str:
        """Restore a persistent kernel to a savepoint. Return the name of the savepoint that has the state from before.

        Clients have to reconnect, as after a restart. If one of the kernel's own cells requested it, ``last_messages``
        makes the messages that end the cell. On failure the kernel continues in its previous state; if that cannot be
        restored either, the kernel has ended.
        """
        assert self.handle is not None
        handle, was_asleep = self.handle, self.asleep
        self._rewinds += 1
        try:
            async with handle.exclusive():
                return await self._rewind_locked(handle, name, last_messages)
        finally:
            self._rewinds -= 1
            if self.asleep and not was_asleep:
                await self.wake()

    async def _rewind_locked(self, handle: SandboxHandle, name: str, last_messages: LastMessages | None) -> str:
        """Rewind and reconnect the clients. The caller holds the handle's lock: no other save may come in between."""
        if self.status is not None:
            raise StateError(handle.sandbox_id, "rewind", "it has no kernel")
        _require_same_keys(handle, name)
        present, kept, problem = handle.instance, "", None
        self._note_activity()
        try:
            kept = await handle.rewind_locked(name)
        except Exception as error:
            problem = error if isinstance(error, SandboxError) else SandboxError(INTERNAL)
            raise
        finally:
            if handle.instance is not present:
                messages = last_messages(kept, problem) if last_messages else (b"", b"")
                await self._reconnect(handle, present, messages)
        return kept

    async def _reconnect(self, handle: SandboxHandle, before: GVisorSandbox, messages: tuple[bytes, bytes]) -> None:
        """Connect the clients, which were connected to the instance ``before``, to the handle's new one."""
        assert self._life is not None
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        self._process = handle.instance.connection.process(handle.contents["process"])
        if self._process is None:
            self.relay.disconnect()
            self._ending.close()
            self._ending.tell(LOST)
            self.status, self._life = LOST, None
        else:
            self.status, self.restored = None, True
            self.activity.reset(handle.contents)
            self._life = asyncio.create_task(self._run(handle, self._process, self._ending))
            signing = _signing(handle.contents)
            await self.relay.reconnect(handle.instance.connection, handle.contents["targets"], signing, *messages)
            self.on_connected(handle.instance.connection)  # last: reconnect() must not wait for its connections
        before.connection.close(LinkClosedError("it was rewound."))

    def _note_activity(self) -> None:
        """Record the kernel's unfinished requests with the sandbox, for the server that restores it."""
        if self.handle and not self.asleep:
            self.handle.describe({**self.handle.contents, **self.activity.record()})

    @property
    def last_words(self) -> bytes:
        """The last output of the kernel."""
        return self._ending.last_words

    @property
    def state(self) -> KernelState:
        """The kernel's state, from its process, its sandbox and the operation in progress."""
        if self._starting:
            return KernelState.STARTING
        if self.handle is None or self.status is not None:
            return KernelState.GONE
        if self.handle.instance.state == State.CHECKPOINTED:
            return KernelState.WAKING if self._restoring else KernelState.ASLEEP
        return KernelState.SAVING if self.handle.saving else KernelState.RUNNING

    @property
    def asleep(self) -> bool:
        """True while the kernel is hibernated or waking: until its restore is complete."""
        return self.state in (KernelState.ASLEEP, KernelState.WAKING)

    @asynccontextmanager
    async def _replacing(self, handle: SandboxHandle, ending: Ending) -> AsyncIterator[None]:
        """End the previous kernel, open the listeners, and delete the instance of ``handle`` if the block raises."""
        _sweep_once()
        if self.handle is not handle:
            await self.kill()
        await self.ended()
        self.handle, handle.observer, self._starting = handle, self, True
        try:
            await self.relay.listen()
            yield
        except BaseException:
            ending.close()
            await asyncio.shield(handle.instance.delete())
            raise
        finally:
            self._starting = False

    def _connect(self, handle: SandboxHandle, ending: Ending, restored: bool) -> None:
        """Connect the clients to the kernel ``_process`` that was started or restored."""
        assert self._process is not None
        self.status, self.restored = None, restored
        self.activity.reset(handle.contents if restored else None)
        self._ending = ending
        self.on_connected(handle.instance.connection)
        self.relay.connect(handle.instance.connection, handle.contents["targets"], _signing(handle.contents))
        self._life = asyncio.create_task(self._run(handle, self._process, ending))

    def busy(self) -> bool:
        """Return True while a client waits for the kernel (``waited_for``) or ``activity`` is busy."""
        return self.relay.waited_for or self.activity.busy

    def saving(self) -> None:
        """Record how many requests the kernel has reacted to."""
        self._answered = self.relay.answered

    def saved(self) -> None:
        """Answer or wake the kernel for requests that arrived during the save; the image may contain them."""
        self.relay.answer_observers()
        called = self.relay.called or self.relay.sent > self._answered
        if called or (self.handle and self.handle.instance.connection.control_waits):
            self._wake_for_client()

    def gone(self, reason: str) -> None:
        """Pass the reason why this server no longer has the sandbox to ``on_gone``."""
        self.on_gone(reason)

    def _wake_for_client(self) -> None:
        if self.may_wake() and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake_up())

    async def _wake_up(self) -> None:
        """Wake the kernel for a client. Report any failure to ``on_wake_failed``, so that the client gets an answer."""
        try:
            await self.wake()
        except SandboxError as error:
            self.on_wake_failed(error)
        except Exception as error:
            log.exception("Kernel could not be woken")
            remedy = "The server's log has the details. Run the cell again."
            self.on_wake_failed(SandboxError(f"{type(error).__name__}: {error}.", remedy))

    async def signal(self, signum: int) -> None:
        """Wake the kernel and signal its process group. SIGKILL ends the whole sandbox instead, without PID 1."""
        if signum == SIGKILL:
            await self.kill()
        elif self._process and self.status is None:
            await self.wake()
            with suppress(LinkClosedError):  # the kernel has already ended
                self._process.send_signal(signum)

    async def kill(self) -> None:
        """End the kernel and its sandbox now. If a rewind is in progress, also end its new instance."""
        self.home.settled = True
        if self.handle:
            await self.handle.instance.delete()  # operations in progress fail
            if self._rewinds:
                async with self.handle.lock:
                    await self.handle.instance.delete()

    async def ended(self) -> int:
        """Wait until the kernel has ended and its sandbox is removed. Return the exit status."""
        while True:
            while self._rewinds and self.handle:  # a rewind replaces the process
                async with self.handle.lock:
                    pass
            if self._life is None or self._life.done():
                return self.status or 0
            await asyncio.wait({self._life})

    async def close(self) -> None:
        """End the kernel, if one runs, and close the listeners."""
        await self.kill()
        await self.ended()
        await self.home.discard()
        await self.relay.close()

    async def _run(self, handle: SandboxHandle, process: GuestProcess, ending: Ending) -> None:
        """Copy the kernel's output until it ends, then report its status and delete the sandbox."""
        sandbox, copying = handle.instance, asyncio.create_task(copy_output(process, ending, _title(handle)))
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
        await self.home.take_at_end(handle, self.relay.heard)
        ending.close()
        ending.tell(status)
        self.status = status
        self.activity.reset()
        self.relay.disconnect()
        await sandbox.delete()
        EVENT_BUS.write(handle.entry(EventKind.ENDED))


def _title(handle: SandboxHandle) -> str:
    """Return the sandbox's id and its notebook, for the log."""
    return handle.metadata.title if handle.persistent else handle.sandbox_id


def _restored_process(handle: SandboxHandle) -> GuestProcess:
    """Return the kernel's process in a restored sandbox. Raises SandboxError if it had ended before the save."""
    process = handle.instance.connection.process(handle.contents["process"])
    if process is None:
        raise SandboxError(
            f"The kernel in sandbox {handle.sandbox_id} had ended before it was saved.",
            f"`jupyter sandbox delete {handle.sandbox_id}` deletes it; the notebook then starts a new one.",
        )
    return process


def _require_same_keys(handle: SandboxHandle, savepoint: str) -> None:
    saved = handle.metadata.savepoint(savepoint).contents
    if saved.get("connection") != handle.contents.get("connection"):
        raise SandboxError(
            f"Cannot rewind to savepoint {savepoint}: its message key differs from that of the running kernel, so the "
            "connected clients could not use it.",
            "Fork from the savepoint instead.",
        )


def _signing(contents: Mapping[str, Any]) -> tuple[bytes, str] | None:
    """Return the key and the signature scheme of a kernel's messages; None if the process is not a Jupyter kernel."""
    connection = contents.get("connection")
    return (connection["key"].encode(), connection["signature_scheme"]) if connection else None


_sweeping: dict[int, asyncio.Task[list[str]]] = {}


def _sweep_once() -> None:
    """On this process's first launch, start a background task that removes the leftovers of dead servers."""
    if os.getpid() not in _sweeping:
        _sweeping[os.getpid()] = asyncio.create_task(bulk(sweep))
