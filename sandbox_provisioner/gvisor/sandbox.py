"""GVisorSandbox: the driver of one sandbox, with a strict state machine.

The driver uses runsc and plain paths; Jupyter and checkpoint storage are unknown to it. ``sandbox_id`` is the stable
name; ``container_id`` is runsc's name, new for every start and restore. All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path
from signal import SIGKILL
from typing import Any
from uuid import uuid4

from ..errors import DiskFullError, LinkClosedError, ProtocolError, RunscNotFoundError, SandboxError, UnresponsiveError
from ..mux.connection import ConnectionState, GuestConnection
from ..mux.process import GuestProcess
from ..process import LocalProcess
from ..workers import CONTROL, bulk, control, finished
from . import bundle
from .bundle import BundleSpec
from .runsc import SETUP_HINT, Runsc, checked, explain, plain_words
from .runtime_dir import RuntimeFolder, kill_processes
from .state import Action, State, after

log = logging.getLogger(__name__)

# Timeouts in seconds.
START_TIMEOUT = 120.0
COMMAND_TIMEOUT = 30.0
CHECKPOINT_TIMEOUT = 600.0
QUIESCE_TIMEOUT = 10.0
CARRY_ON_TIMEOUT = 600.0
"""Seconds for an unsaved sandbox to answer after a checkpoint. Long, because a busy machine is slow and giving up early
could lose the only copy of its state."""
RESUME_AGAIN = 1.0
"""Seconds between two calls of ``runsc resume``."""
ORPHAN_NOTICES = 1.0
"""Seconds in which a running sandbox notices that its server is gone, and closes the pipe."""
PIPE_SIZE = 1 << 20
LAST_WORDS = 5.0
"""Seconds to wait for the rest of runsc's output after a failed start."""
WORDS_KEPT = 1 << 14
"""Bytes of runsc's output that are kept for the error message."""


Commit = Callable[[], Awaitable[None]]


async def _at_once() -> None:
    """Do nothing: the default ``commit``, for an image that needs no further step to be valid."""


class GVisorSandbox:
    """A sandbox: ``start`` or ``restore`` it, ``execute`` in it, ``checkpoint`` it, ``delete`` it.

    ``on_exit`` is called when a running sandbox exits unexpectedly."""

    def __init__(self, sandbox_id: str, spec: BundleSpec, runsc: Runsc, platform: str = "systrap") -> None:
        self.sandbox_id = sandbox_id
        self.container_id = ""
        self.spec = spec
        self.runsc = runsc
        self.link = GuestConnection()
        self.link.on_closed = self._link_lost
        self.link.on_hook_failed = lambda reason: log.warning(
            "Sandbox %s: its hook failed: %s", self.sandbox_id, reason
        )
        self.on_exit: Callable[[], None] = lambda: None
        self.platform = platform
        self._state = State.INITIALIZED
        self._acting = asyncio.Lock()
        self._folder: RuntimeFolder | None = None
        self._main: LocalProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._words = bytearray()
        self._doomed = False
        self._orphaned = False
        self._hurried = asyncio.Event()
        self._note: Mapping[str, Any] | None = None

    @classmethod
    def orphan(
        cls, sandbox_id: str, spec: BundleSpec, runsc: Runsc, platform: str, folder: RuntimeFolder, container_id: str
    ) -> GVisorSandbox:
        """Return a running sandbox whose server was killed: it can only be checkpointed or deleted."""
        sandbox = cls(sandbox_id, spec, runsc, platform)
        sandbox.link.close(LinkClosedError("its server died."))
        sandbox.container_id = container_id
        sandbox._folder = folder
        sandbox._orphaned = True
        sandbox._state = State.RUNNING
        return sandbox

    @property
    def state(self) -> State:
        """Present state of the sandbox; ``gvisor.state`` has the transitions."""
        return self._state

    @property
    def reachable(self) -> bool:
        """True unless the sandbox is an orphan or was cut off: PID 1 cannot be reached then."""
        return not self._orphaned

    def leave_note(self, note: Mapping[str, Any]) -> None:
        """Store ``note``, with the container's id, for a process that finds the sandbox after we were killed."""
        self._note = note
        self._write_note()

    def _write_note(self) -> None:
        if self._note is not None and self._folder:
            self._folder.write_note({**self._note, "container_id": self.container_id})

    def _enter(self, action: Action) -> None:
        """Change the state. No other method does. Raises StateError if ``action`` is not legal."""
        self._state = after(self.sandbox_id, action, self._state)

    async def start(self, template: Path | None = None) -> None:
        """Start a new sandbox, or a copy of the image of a ``template``, which must be activated afterwards.

        Return when PID 1 answers. Raises SandboxError, usually RunscError with runsc's message.
        """
        async with self._acting:
            after(self.sandbox_id, Action.START, self._state)
            try:
                if template:
                    await self._launch("restore", lambda: self.link.reattach(hooks=False), f"--image-path={template}")
                else:
                    await self._launch("run", self.link.greeted)
            except BaseException:
                self._enter(Action.FAIL)
                raise
            self._enter(Action.START)

    async def restore(self, image: Path) -> None:
        """Restore it from ``image``, which this or another process saved. A failure leaves the state unchanged."""
        async with self._acting:
            after(self.sandbox_id, Action.RESTORE, self._state)
            if self._orphaned:  # its streams are gone, and its clients would wait for replies forever
                raise SandboxError(
                    f"Sandbox {self.sandbox_id} was saved without its help, and cannot go on with its old connections.",
                    "Open the notebook again: what was saved is restored then.",
                )
            awaken = self.link.reattach if self.link.state is ConnectionState.NEW else self.link.resume
            await self._launch("restore", awaken, f"--image-path={image}")
            self._enter(Action.RESTORE)

    async def checkpoint(self, image: Path, commit: Commit = _at_once, insist: bool = False) -> None:
        """Write its memory to the new folder ``image``, await ``commit``, and end it.

        The sandbox stays paused from the write until the commit. If a step fails, the sandbox runs on and the image is
        removed. If PID 1 does not quiesce in time, raises UnresponsiveError, or with ``insist`` cuts the sandbox off
        and saves it as it is.
        """
        async with self._acting:
            after(self.sandbox_id, Action.CHECKPOINT, self._state)
            partial = await finished(control(_draft, image))
            try:
                await self._write_image(partial, image, insist)
                await commit()
            except BaseException:
                await finished(self._carry_on())
                for folder in (partial, image):
                    await finished(bulk(shutil.rmtree, folder, ignore_errors=True))
                raise
            self._enter(Action.CHECKPOINT)
            self.link.detach()
            await self._end()

    async def copy(self, image: Path) -> None:
        """Write its memory to the new folder ``image`` and let it run on. A failure leaves no image."""
        async with self._acting:
            after(self.sandbox_id, Action.COPY, self._state)
            partial = await finished(control(_draft, image))
            try:
                await self._write_image(partial, image)
            except BaseException:
                await finished(bulk(shutil.rmtree, partial, ignore_errors=True))
                raise
            finally:
                await finished(self._carry_on())

    async def cut_off(self) -> None:
        """Close the connection to a running sandbox that does not answer, so that it can be checkpointed without PID 1.

        Afterwards it can only be checkpointed or deleted, like an orphan.
        """
        async with self._acting:
            after(self.sandbox_id, Action.CHECKPOINT, self._state)
            self._cut_off()

    def _cut_off(self) -> None:
        self.link.detach()
        self._orphaned = True

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
        """Run a command in it, after writing ``files`` there. Raises GuestError if that fails.

        ``expect`` maps paths in the sandbox to their change time (st_ctime_ns): if one differs, the error's errno is
        ESTALE.
        """
        after(self.sandbox_id, Action.EXECUTE, self._state)
        environment = dict(self.spec.environment) | dict(env or {})
        cwd = cwd or self.spec.home
        return await self.link.spawn(argv, environment, cwd, stdin=stdin, files=files, expect=expect)

    async def delete(self) -> None:
        """End it in any state, and remove its folder and processes. May be called more than once."""
        self._doomed = True
        if self._acting.locked() and self._main and self._folder:
            self._main.send_signal(SIGKILL)  # the operation that holds the lock fails at once
            await control(kill_processes, self._folder.state)
        async with self._acting:
            self._enter(Action.DELETE)
            self.link.close(LinkClosedError("it was deleted."))
            await self._end()

    # -- starting ------------------------------------------------------------------------------------------------

    async def _launch(self, command: str, awaken: Callable[[], Awaitable[None]], *arguments: str) -> None:
        self._words.clear()
        self.container_id = uuid4().hex[:12]
        try:
            folder = await finished(control(self._prepare))
            await self._run_main(command, *arguments, f"--bundle={folder.bundle}", self.container_id)
            if self._doomed:
                raise LinkClosedError(f"Sandbox {self.sandbox_id} was deleted while it started.")
            await self._first(awaken)
        except BaseException:
            self.link.detach()
            await asyncio.shield(self._end())
            raise
        self._watch = asyncio.create_task(self._watch_main())

    def _prepare(self) -> RuntimeFolder:
        try:
            self._folder = RuntimeFolder.create()
            bundle.write(self._folder.bundle, self.spec)
            self._write_note()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError(str(error)) from error
            raise SandboxError(f"The sandbox's folder cannot be written: {error}.") from error
        return self._folder

    async def _run_main(self, command: str, *arguments: str) -> None:
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
        try:
            await self.link.attach(to_guest, from_guest)
            self._main = LocalProcess.start(self._argv(command, *arguments), stdin=guest_in, stdout=guest_out)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            os.close(guest_in)
            os.close(guest_out)

    async def _first(self, awaken: Callable[[], Awaitable[None]]) -> None:
        """Wait until the guest answers. Raises the error of ``explain`` if runsc exits before, or at the timeout."""
        assert self._main is not None
        listening = asyncio.create_task(self._listen(self._main))
        answer = asyncio.ensure_future(awaken())
        end = asyncio.create_task(self._main.wait())
        try:
            await asyncio.wait(
                {answer, end}, timeout=START_TIMEOUT + self.link.hooks.seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done() and not answer.exception():
                return
            if answer.done():
                if isinstance(error := answer.exception(), ProtocolError):
                    raise error
                await asyncio.wait({end}, timeout=LAST_WORDS)  # the pipe closed first: runsc's exit and message follow
            if end.done():
                await asyncio.wait({listening}, timeout=LAST_WORDS)
            raise explain(self._argv("..."), self._main.returncode, plain_words(bytes(self._words)))
        finally:
            for task in (answer, end):
                task.cancel()
            await asyncio.gather(answer, end, return_exceptions=True)

    async def _listen(self, main: LocalProcess) -> None:
        """Keep the end of runsc's output for an error message."""
        async for piece in main.stream():
            self._words += piece.data
            del self._words[:-WORDS_KEPT]

    async def _watch_main(self) -> None:
        """Report the unexpected exit of a running sandbox. An exit during an operation is left to that operation."""
        assert self._main is not None
        await self._main.wait()
        if self._state == State.RUNNING and not self._acting.locked():
            self._enter(Action.EXIT)
            self.link.close(LinkClosedError("it ended by itself."))
            self.on_exit()

    def _link_lost(self, error: Exception) -> None:
        """Kill a running guest whose connection is lost. Called by the link."""
        if self._state == State.RUNNING and self._folder:
            state = self._folder.state
            CONTROL.submit(lambda: kill_processes(state))

    # -- checkpointing -------------------------------------------------------------------------------------------

    async def _quiesce(self, insist: bool) -> None:
        if self._orphaned:
            await self._let_dead_servers_commands_end()
            return
        try:
            await asyncio.wait_for(self.link.quiesce(), QUIESCE_TIMEOUT)
        except TimeoutError:
            if insist:
                log.warning("Sandbox %s did not come to rest for a checkpoint; it is saved as it is", self.sandbox_id)
                self._cut_off()
                await self._let_dead_servers_commands_end()
                return
            raise UnresponsiveError(self.sandbox_id, "did not come to rest for a checkpoint") from None

    async def _let_dead_servers_commands_end(self) -> None:
        """Wait until no runsc command of a killed server acts on the sandbox. Raises SandboxError at the timeout."""
        assert self._folder is not None
        try:
            async with asyncio.timeout(CHECKPOINT_TIMEOUT):
                await asyncio.sleep(ORPHAN_NOTICES)
                while await control(self._folder.runs, b"pause", b"checkpoint", b"resume"):
                    await asyncio.sleep(ORPHAN_NOTICES)
        except TimeoutError:
            raise SandboxError(f"A command of sandbox {self.sandbox_id}'s dead server does not end.") from None

    async def _paused(self) -> bool:
        """Return True for an orphan that its server had paused before it was killed, always after it had quiesced."""
        return self._orphaned and json.loads(await self._command("state", self.container_id))["status"] == "paused"

    async def _write_image(self, partial: Path, image: Path, insist: bool = False) -> None:
        """Quiesce, pause and save. The sandbox stays paused until ``_end`` or ``_carry_on``."""
        await self._quiesce(insist)
        await self._save(partial)
        await finished(control(partial.rename, image))

    async def _save(self, partial: Path) -> None:
        if not await self._paused():
            await self._command("pause", self.container_id)
        await self._command(
            "checkpoint",
            "--leave-running",
            "--compression=none",
            "--exclude-committed-zero-pages",
            f"--image-path={partial}",
            self.container_id,
            timeout=CHECKPOINT_TIMEOUT,
        )

    async def _carry_on(self) -> None:
        """Resume a paused sandbox after a failed checkpoint or a copy.

        Its state is not saved, so a sandbox that does not answer is waited for. After ``CARRY_ON_TIMEOUT`` seconds, or
        when ``hurry`` is called, it is cut off, and can still be saved as it is; it is ended only if its spec does not
        let it outlive us.
        """
        try:
            await self._unpause()
            if not self._orphaned:
                await self._await_answer()
        except (SandboxError, TimeoutError) as error:
            log.error("Sandbox %s is lost: it did not go on after a checkpoint: %s", self.sandbox_id, error)
            self._enter(Action.FAIL)
            self.link.close(LinkClosedError(f"it did not go on after a checkpoint: {error}"))
            await self._end()
        finally:
            self._hurried.clear()

    async def _unpause(self) -> None:
        """Call ``runsc resume``; repeat it while it fails and the sandbox is paused, which it may never have been."""
        while True:
            try:
                await self._command("resume", self.container_id)
            except SandboxError as error:
                if self._orphaned or self._hurried.is_set() or self._ended or await self._known_to_run():
                    return
                log.warning("Sandbox %s is paused and not saved; runsc is asked again: %s", self.sandbox_id, error)
                await asyncio.sleep(RESUME_AGAIN)
            else:
                return

    @property
    def _ended(self) -> bool:
        return self._main is None or self._main.returncode is not None

    async def _known_to_run(self) -> bool:
        """Return True if runsc reports that the sandbox is not paused; False if it is, or runsc gives no answer."""
        with suppress(SandboxError, ValueError, LookupError, TypeError):
            return bool(json.loads(await self._command("state", self.container_id))["status"] != "paused")
        return False

    async def _await_answer(self) -> None:
        """Wait until the guest answers after a resume.

        Raises LinkClosedError if it exits. At the timeout, or when ``hurry`` is called, a guest that can outlive us is
        cut off; for others, raises TimeoutError.
        """
        assert self._main is not None
        patience = QUIESCE_TIMEOUT + self.link.hooks.seconds
        answer, end = asyncio.ensure_future(self.link.resume()), asyncio.ensure_future(self._main.wait())
        waits: list[asyncio.Future[Any]] = [answer, end, asyncio.ensure_future(self._hurried.wait())]
        waited = 0.0
        try:
            while waited < max(patience, CARRY_ON_TIMEOUT):
                pause = max(patience, waited)  # each warning comes after twice the time of the last
                done, _ = await asyncio.wait(waits, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    break
                waited += pause
                if waited < CARRY_ON_TIMEOUT:
                    log.warning(
                        "Sandbox %s has not answered for %d seconds. It is not saved, so it is waited for. If this "
                        "lasts, stop the server, which saves it as it is, or restart its kernel, which loses its state",
                        self.sandbox_id,
                        waited,
                    )
            if answer.done():
                return answer.result()
            if end.done():
                raise LinkClosedError("it ended.")
            if not self.spec.outlives:
                raise TimeoutError(f"it did not answer for {waited:g} seconds")
            log.error("Sandbox %s does not answer. It is cut off, and can only be saved as it is", self.sandbox_id)
            self._cut_off()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def hurry(self) -> None:
        """Stop waiting for a sandbox that does not answer after a checkpoint. Called when the server stops."""
        self._hurried.set()

    # -- runsc ---------------------------------------------------------------------------------------------------

    def _argv(self, *arguments: str) -> list[str]:
        assert self._folder is not None
        settings = self.runsc.settings(self.spec.network, self.platform)
        return self.runsc.command(self._folder.state, *arguments, settings=settings)

    async def _command(self, *arguments: str, timeout: float = COMMAND_TIMEOUT) -> bytes:
        argv = self._argv(*arguments)
        try:
            status, out, err = await LocalProcess.run(argv, timeout)
        except OSError as error:
            raise self._unusable(error) from error
        checked(argv, status, err or out)
        return out

    def _unusable(self, error: OSError) -> RunscNotFoundError:
        return RunscNotFoundError(f"{self.runsc.path} cannot be run: {error.strerror}.", SETUP_HINT)

    async def _end(self) -> None:
        """Kill the sandbox's processes and remove its folder."""
        folder, main, watch = self._folder, self._main, self._watch
        self._folder = self._main = self._watch = None
        if watch:
            watch.cancel()
        if main:
            main.send_signal(SIGKILL)
        if folder:
            try:
                await control(folder.remove)
            except RuntimeError:  # the interpreter is exiting, and starts no more threads
                folder.remove()
        if main:
            await main.stop(grace=0)
            main.close()


def _draft(image: Path) -> Path:
    """Create and return an empty folder beside ``image``. Raises SandboxError if ``image`` exists. Blocks."""
    if image.exists():
        raise SandboxError(f"A checkpoint cannot be written to {image}: it exists already.")
    partial = image.with_name(f".{image.name}.{uuid4().hex[:8]}")
    try:
        partial.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise SandboxError(f"A checkpoint cannot be written to {image}: {error.strerror}.") from error
    return partial
