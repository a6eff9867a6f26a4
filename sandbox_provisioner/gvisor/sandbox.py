"""GVisorSandbox: the driver of one sandbox, with a strict state machine. All methods run on one event loop.

``sandbox_id`` is the stable name; ``container_id`` is runsc's name, new for every start and restore. PID 1 starts the
commands in the sandbox, because an image with a process of ``runsc exec`` cannot be restored.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..errors import LinkClosedError, SandboxError
from ..mux.connection import ConnectionState, GuestConnection
from ..mux.process import GuestProcess
from ..workers import bulk, control, finished
from .bundle import BundleSpec
from .container import Container
from .pause import Pause
from .runsc import Runsc
from .runtime_dir import RuntimeFolder
from .state import Action, State, after

log = logging.getLogger(__name__)

Commit = Callable[[], Awaitable[None]]


class GVisorSandbox:
    """A sandbox: ``start`` or ``restore`` it, ``execute`` in it, ``checkpoint`` it, ``delete`` it."""

    def __init__(self, sandbox_id: str, spec: BundleSpec, runsc: Runsc, platform: str = "systrap") -> None:
        self.sandbox_id = sandbox_id
        self.spec = spec
        self.runsc = runsc
        self.platform = platform
        self.connection = GuestConnection()
        self.connection.on_closed = self._connection_closed
        self.connection.on_hook_failed = self._hook_failed
        self._state = State.INITIALIZED
        self._lock = asyncio.Lock()
        self._container: Container | None = None
        self._watch: asyncio.Task[None] | None = None
        self._deleting = False
        self._hurried = asyncio.Event()
        self._note: Mapping[str, Any] | None = None

    @classmethod
    def orphan(
        cls, sandbox_id: str, spec: BundleSpec, runsc: Runsc, platform: str, folder: RuntimeFolder, container_id: str
    ) -> GVisorSandbox:
        """Return a running sandbox whose server was killed: it can only be checkpointed or deleted."""
        sandbox = cls(sandbox_id, spec, runsc, platform)
        sandbox.connection.close(LinkClosedError("its server was killed."))
        container = sandbox._container = Container(runsc, spec, platform)
        container.id, container.folder, container.reachable = container_id, folder, False
        sandbox._state = State.RUNNING
        return sandbox

    @property
    def container_id(self) -> str:
        """Name of the last container in runsc; empty before the first start."""
        return self._container.id if self._container else ""

    @property
    def state(self) -> State:
        """Present state of the sandbox; ``gvisor.state`` has the transitions."""
        return self._state

    @property
    def reachable(self) -> bool:
        """False if PID 1 cannot be reached, because the sandbox is an orphan or was cut off."""
        return self._container is None or self._container.reachable

    def leave_note(self, note: Mapping[str, Any]) -> None:
        """Write the rescue note, from which another process learns how to save the sandbox if this one is killed."""
        self._note = note
        if self._container:
            self._container.write_note(note)

    def _enter(self, action: Action) -> None:
        """Change the state. Raises StateError if ``action`` is not legal."""
        self._state = after(self.sandbox_id, action, self._state)

    async def start(self, template: Path | None = None) -> None:
        """Start a new sandbox, or a copy of the image of a ``template``, which must be activated afterwards.

        Return when PID 1 answers. Raises SandboxError, usually RunscError with runsc's message.
        """
        async with self._lock:
            after(self.sandbox_id, Action.START, self._state)
            try:
                if template:
                    greet = partial(self.connection.reattach, hooks=False)
                    await self._launch(greet, "restore", f"--image-path={template}")
                else:
                    await self._launch(self.connection.greeted, "run")
            except BaseException:
                self._enter(Action.FAIL)
                raise
            self._enter(Action.START)

    async def restore(self, image: Path) -> None:
        """Restore the sandbox from ``image``, saved by any process. A failure leaves the state unchanged."""
        async with self._lock:
            after(self.sandbox_id, Action.RESTORE, self._state)
            if not self.reachable:  # its streams have ended, and its clients would wait for replies forever
                raise SandboxError(
                    f"Sandbox {self.sandbox_id} was saved while it did not respond, so its clients must connect again.",
                    "Open the notebook again: this restores its saved state.",
                )
            greet = self.connection.reattach if self.connection.state is ConnectionState.NEW else self.connection.resume
            await self._launch(greet, "restore", f"--image-path={image}")
            self._enter(Action.RESTORE)

    async def checkpoint(self, image: Path, commit: Commit | None = None, force: bool = False) -> None:
        """Write the sandbox's memory to the new folder ``image``, await ``commit`` if given, and end the sandbox.

        The sandbox stays paused from the write until the commit. If a step fails, the sandbox runs on and the image is
        removed. If PID 1 does not quiesce in time, raises UnresponsiveError, or with ``force`` calls ``cut_off`` and
        saves the sandbox as it is.
        """
        async with self._lock:
            after(self.sandbox_id, Action.CHECKPOINT, self._state)
            draft = await finished(control(_new_draft, image))
            try:
                await self._pause().write_image(draft, image, force)
                if commit:
                    await commit()
            except BaseException:
                await finished(self._resume(draft, image))
                raise
            self._enter(Action.CHECKPOINT)
            self.connection.detach()
            await self._end()

    async def copy(self, image: Path) -> None:
        """Write the sandbox's memory to the new folder ``image``, and let it run on. A failure leaves no image."""
        async with self._lock:
            after(self.sandbox_id, Action.COPY, self._state)
            draft = await finished(control(_new_draft, image))
            try:
                await self._pause().write_image(draft, image)
            except BaseException:
                await finished(self._resume(draft, image))
                raise
            await finished(self._resume())

    async def cut_off(self) -> None:
        """Close the connection to a running sandbox that does not answer, so that it can be checkpointed without PID 1.

        Afterwards it can only be checkpointed or deleted, like an orphan.
        """
        async with self._lock:
            after(self.sandbox_id, Action.CHECKPOINT, self._state)
            self._pause().cut_off()

    async def execute(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bool = True,
        files: Mapping[str, str] | None = None,
        expect: Mapping[str, int] | None = None,
    ) -> GuestProcess:
        """Write ``files`` in the sandbox, then run a command there. Raises GuestError if that fails.

        ``expect`` maps paths in the sandbox to their change time (st_ctime_ns): if one differs, the error's errno is
        ESTALE.
        """
        after(self.sandbox_id, Action.EXECUTE, self._state)
        environment = dict(self.spec.environment) | dict(env or {})
        cwd = cwd or self.spec.home
        return await self.connection.spawn(argv, environment, cwd, stdin=stdin, files=files, expect=expect)

    async def execute_in_orphan(self, code: str) -> bytes:
        """Run Python ``code`` in an orphan and return its output; see ``Container.execute``. Raises SandboxError."""
        async with self._lock:
            after(self.sandbox_id, Action.EXECUTE, self._state)
            assert self._container is not None
            return await self._container.execute(code, self.spec.python)

    def hurry(self) -> None:
        """Stop waiting for a sandbox that does not answer after a resume. Called when the server stops."""
        self._hurried.set()

    async def delete(self) -> None:
        """End the sandbox in any state; remove its folder and processes. May be called more than once."""
        self._deleting = True
        if self._lock.locked() and self._container:
            await self._container.kill_now()  # the operation that holds the lock fails at once
        async with self._lock:
            self._enter(Action.DELETE)
            self.connection.close(LinkClosedError("it was deleted."))
            await self._end()

    async def _launch(self, greet: Callable[[], Awaitable[None]], command: str, *arguments: str) -> None:
        container = self._container = Container(self.runsc, self.spec, self.platform)
        try:
            await finished(control(container.prepare, self.spec, self._note))
            await container.run(self.connection, command, *arguments)
            if self._deleting:
                raise LinkClosedError(f"Sandbox {self.sandbox_id} was deleted while it started.")
            await container.wait_until_started(greet, self.connection.hooks.seconds)
        except BaseException:
            self.connection.detach()
            await asyncio.shield(self._end())
            raise
        self._watch = asyncio.create_task(self._watch_main(container))

    async def _watch_main(self, container: Container) -> None:
        """Wait for the container's exit. Close the connection, unless an operation runs and reports the exit."""
        assert container.main is not None
        await container.main.wait()
        if self._state == State.RUNNING and not self._lock.locked():
            self._enter(Action.EXIT)
            self.connection.close(LinkClosedError("its processes ended unexpectedly."))

    def _connection_closed(self, error: Exception) -> None:
        """Kill a running guest whose connection is closed. Called by the connection."""
        if self._state == State.RUNNING and self._container:
            self._container.kill()

    def _hook_failed(self, reason: str) -> None:
        log.warning("Sandbox %s: hook failed: %s", self.sandbox_id, reason)

    def _pause(self) -> Pause:
        assert self._container is not None
        return Pause(self.sandbox_id, self._container, self.connection)

    async def _resume(self, *unfinished: Path) -> None:
        """Let a paused sandbox continue, or end it if that fails. Then remove the ``unfinished`` images."""
        try:
            await self._pause().resume(self.spec.outlives, self._hurried)
        except (SandboxError, TimeoutError) as error:
            log.error("Sandbox %s is lost: it did not continue after a checkpoint: %s", self.sandbox_id, error)
            self._enter(Action.FAIL)
            self.connection.close(LinkClosedError(f"it did not continue after a checkpoint: {error}"))
            await self._end()
        finally:
            self._hurried.clear()
        for folder in unfinished:
            await bulk(shutil.rmtree, folder, ignore_errors=True)

    async def _end(self) -> None:
        """Kill the sandbox's processes and remove its folder."""
        if self._watch:
            self._watch.cancel()
            self._watch = None
        if self._container:
            await self._container.remove()


def _new_draft(image: Path) -> Path:
    """Create and return an empty folder beside ``image``. Raises SandboxError if ``image`` exists. Blocks."""
    if image.exists():
        raise SandboxError(f"A checkpoint cannot be written to {image}: it exists already.", "Choose another folder.")
    draft = image.with_name(f".{image.name}.{uuid4().hex[:8]}")
    try:
        draft.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise SandboxError(f"A checkpoint cannot be written to {image}: {error.strerror}.") from error
    return draft
