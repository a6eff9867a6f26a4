"""GVisorSandbox: the driver of one sandbox, with a strict state machine.

It knows runsc and simple paths, and neither Jupyter nor where checkpoints are kept. ``sandbox_id`` is the name
that stays; ``container_id`` is what runsc knows, new for every start and restore. All methods belong to one loop.
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

from . import bundle
from .bundle import BundleSpec
from .errors import (
    DiskFullError,
    LinkClosedError,
    ProtocolError,
    RunscNotFoundError,
    SandboxError,
    UnresponsiveError,
)
from .guestprocess import GuestProcess
from .link import GuestLink
from .process import LocalProcess
from .runsc import SETUP_HINT, Runsc, checked, explain, plain_words
from .runtime import RuntimeFolder, kill_processes
from .states import Action, State, after
from .workers import CONTROL, bulk, control, finished

log = logging.getLogger(__name__)

START_TIMEOUT = 120.0
COMMAND_TIMEOUT = 30.0
CHECKPOINT_TIMEOUT = 600.0
QUIESCE_TIMEOUT = 10.0
ORPHAN_NOTICES = 1.0
"""Seconds in which a sandbox that ran all the while has noticed that its server is gone, and let go of the pipe."""
PIPE_SIZE = 1 << 20
LAST_WORDS = 5.0
WORDS_KEPT = 1 << 14


Commit = Callable[[], Awaitable[None]]


async def _at_once() -> None:
    """Nothing more is needed for the image to count."""


class GVisorSandbox:
    """One sandbox: ``start`` or ``restore`` it, ``execute`` in it, ``checkpoint`` it, ``delete`` it.

    ``on_exit`` is called when a running sandbox ends without having been asked to."""

    def __init__(self, sandbox_id: str, spec: BundleSpec, runsc: Runsc, platform: str = "systrap") -> None:
        self.sandbox_id = sandbox_id
        self.container_id = ""
        self.spec = spec
        self.runsc = runsc
        self.link = GuestLink()
        self.link.on_lost = self._link_lost
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
        self._note: Mapping[str, Any] | None = None

    @classmethod
    def orphan(
        cls, sandbox_id: str, spec: BundleSpec, runsc: Runsc, platform: str, folder: RuntimeFolder, container_id: str
    ) -> GVisorSandbox:
        """One that runs in ``folder``, but whose server died: it can be checkpointed or deleted, and nothing else."""
        sandbox = cls(sandbox_id, spec, runsc, platform)
        sandbox.link.lose(LinkClosedError("its server died."))
        sandbox.container_id = container_id
        sandbox._folder = folder
        sandbox._orphaned = True
        sandbox._state = State.RUNNING
        return sandbox

    @property
    def state(self) -> State:
        """Where the sandbox is in its life; see states.py."""
        return self._state

    @property
    def reachable(self) -> bool:
        """Whether it can be talked to: one whose server died cannot."""
        return not self._orphaned

    def leave_note(self, note: Mapping[str, Any]) -> None:
        """Keep ``note``, with the container's id, where those look who find it running after we were killed."""
        self._note = note
        self._write_note()

    def _write_note(self) -> None:
        if self._note is not None and self._folder:
            self._folder.write_note({**self._note, "container_id": self.container_id})

    def _enter(self, action: Action) -> None:
        """The one place where the state changes."""
        self._state = after(self.sandbox_id, action, self._state)

    async def start(self, template: Path | None = None) -> None:
        """Start it afresh, or as a copy of the image of a ``template``, which has to be activated then.

        Returns when PID 1 answers. RunscError with runsc's words if it cannot.
        """
        async with self._acting:
            after(self.sandbox_id, Action.START, self._state)
            try:
                if template:
                    await self._launch("restore", lambda: self.link.adopt(hooks=False), f"--image-path={template}")
                else:
                    await self._launch("run", self.link.greeted)
            except BaseException:
                self._enter(Action.FAIL)
                raise
            self._enter(Action.START)

    async def restore(self, image: Path) -> None:
        """Bring it back from ``image``, in this or another process's name. On failure nothing has changed."""
        async with self._acting:
            after(self.sandbox_id, Action.RESTORE, self._state)
            if self._orphaned:  # its streams are gone, and its clients would wait for answers
                raise SandboxError(
                    f"Sandbox {self.sandbox_id} was saved without its help, and cannot go on with its old connections.",
                    "Open the notebook again: what was saved is restored then.",
                )
            awaken = self.link.adopt if self.link.fresh else self.link.resume
            await self._launch("restore", awaken, f"--image-path={image}")
            self._enter(Action.RESTORE)

    async def checkpoint(self, image: Path, commit: Commit = _at_once, insist: bool = False) -> None:
        """Write its memory to the new folder ``image``, ``commit`` to that, and end it.

        If any of it fails, it runs on and there is no image. It does not run between the writing and the commit. If
        PID 1 does not come to rest, UnresponsiveError is raised, or if we ``insist`` it is cut off and saved as it is.
        """
        async with self._acting:
            after(self.sandbox_id, Action.CHECKPOINT, self._state)
            partial = _draft(image)
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
        """Write its memory to the new folder ``image`` and let it run on; if that fails, there is no image."""
        async with self._acting:
            after(self.sandbox_id, Action.COPY, self._state)
            partial = _draft(image)
            try:
                await self._write_image(partial, image)
            except BaseException:
                await finished(bulk(shutil.rmtree, partial, ignore_errors=True))
                raise
            finally:
                await finished(self._carry_on())

    async def cut_off(self) -> None:
        """Stop talking to a running sandbox that does not answer, so that it can be checkpointed without its help.

        From now on it can be checkpointed or deleted, and nothing else, as one whose server died.
        """
        async with self._acting:
            after(self.sandbox_id, Action.CHECKPOINT, self._state)
            self._cut_off()

    def _cut_off(self) -> None:
        self.link.quiet = True
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
        """Run a further command in it, after writing ``files`` there; GuestError if it cannot be executed.

        ``expect`` has paths with the time of their last change (st_ctime_ns): if one is another, the errno is ESTALE.
        """
        after(self.sandbox_id, Action.EXECUTE, self._state)
        environment = dict(self.spec.environment) | dict(env or {})
        cwd = cwd or self.spec.home
        return await self.link.spawn(argv, environment, cwd, stdin=stdin, files=files, expect=expect)

    async def delete(self) -> None:
        """End it, whatever its state, and leave nothing behind on this machine. May be called again."""
        self._doomed = True
        if self._acting.locked() and self._main and self._folder:
            self._main.send_signal(SIGKILL)  # what is under way fails at once
            await control(kill_processes, self._folder.state)
        async with self._acting:
            self._enter(Action.DELETE)
            self.link.lose(LinkClosedError("it was deleted."))
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
            with suppress(OSError):  # a courtesy that the user's pipe quota may refuse
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
        """Wait until the guest answers, unless runsc ends before or nothing happens at all."""
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
                await asyncio.wait({end}, timeout=LAST_WORDS)  # the pipe closed first: its words are on their way
            if end.done():
                await asyncio.wait({listening}, timeout=LAST_WORDS)
            raise explain(self._argv("..."), self._main.returncode, plain_words(bytes(self._words)))
        finally:
            for task in (answer, end):
                task.cancel()
            await asyncio.gather(answer, end, return_exceptions=True)

    async def _listen(self, main: LocalProcess) -> None:
        """Keep the end of what runsc says, for the error that may need it."""
        async for piece in main.stream():
            self._words += piece.data
            del self._words[:-WORDS_KEPT]

    async def _watch_main(self) -> None:
        assert self._main is not None
        await self._main.wait()
        if self._state == State.RUNNING and not self._acting.locked():
            self._enter(Action.EXIT)
            self.link.lose(LinkClosedError("it ended by itself."))
            self.on_exit()

    def _link_lost(self, error: Exception) -> None:
        """A guest that we do not talk to any more does not run any more."""
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
        assert self._folder is not None
        try:
            async with asyncio.timeout(CHECKPOINT_TIMEOUT):
                await asyncio.sleep(ORPHAN_NOTICES)
                while await control(self._folder.runs, b"pause", b"checkpoint", b"resume"):
                    await asyncio.sleep(ORPHAN_NOTICES)
        except TimeoutError:
            raise SandboxError(f"A command of sandbox {self.sandbox_id}'s dead server does not end.") from None

    async def _paused(self) -> bool:
        """Whether an orphan was paused when its server died, which it is only when it had come to rest."""
        return self._orphaned and json.loads(await self._command("state", self.container_id))["status"] == "paused"

    async def _write_image(self, partial: Path, image: Path, insist: bool = False) -> None:
        """The sandbox rests afterwards, until it is ended or carries on."""
        await self._quiesce(insist)
        await self._save(partial)
        partial.rename(image)

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
        """Let a sandbox that rests run as before, or admit that it is lost."""
        try:
            with suppress(SandboxError):  # it may never have been paused
                await self._command("resume", self.container_id)
            if self._orphaned:
                return
            await asyncio.wait_for(self.link.resume(), QUIESCE_TIMEOUT + self.link.hooks.seconds)
        except (SandboxError, TimeoutError) as error:
            self._enter(Action.FAIL)
            self.link.lose(LinkClosedError(f"it did not go on after a checkpoint: {error}"))
            await self._end()

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
        """Kill what runs, and remove the folder with everything in it."""
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
    """A new, empty folder beside ``image``, which is not there yet."""
    if image.exists():
        raise SandboxError(f"A checkpoint cannot be written to {image}: it exists already.")
    partial = image.with_name(f".{image.name}.{uuid4().hex[:8]}")
    try:
        partial.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise SandboxError(f"A checkpoint cannot be written to {image}: {error.strerror}.") from error
    return partial
