"""Pause a running sandbox, write its image, and let it continue.

No failed step loses the state: runsc kills a sandbox when a checkpoint without ``--leave-running`` fails, so this flag
is used. The sandbox stays paused until its image is stored, and is ended only then.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LinkClosedError, SandboxError, UnresponsiveError
from ..mux.connection import GuestConnection
from ..workers import control, finished
from .container import Container

log = logging.getLogger(__name__)

# Timeouts in seconds.
CHECKPOINT_TIMEOUT = 600.0
QUIESCE_TIMEOUT = 10.0
RESUME_TIMEOUT = 600.0
"""Time for an unsaved sandbox to answer after a checkpoint. Long, because a busy machine is slow and giving up early
could lose the only copy of its state."""
RESUME_INTERVAL = 1.0
"""Time between two calls of ``runsc resume``."""
ORPHAN_NOTICES = 1.0
"""Time in which a running sandbox notices that its server has exited, and closes the pipe."""


@dataclass(frozen=True)
class Pause:
    """The pause of one running sandbox: ``write_image``, then ``resume`` unless the sandbox is ended."""

    sandbox_id: str
    container: Container
    connection: GuestConnection

    async def write_image(self, partial: Path, image: Path, force: bool = False) -> None:
        """Quiesce and pause the sandbox; write its memory to ``partial``, which is then renamed to ``image``.

        If PID 1 does not quiesce in time, raises UnresponsiveError, or with ``force`` calls ``cut_off``.
        """
        await self._quiesce(force)
        # The killed server of an orphan may have paused it, and runsc refuses to pause it again.
        if self.container.reachable or await self.container.status() != "paused":
            await self.container.command("pause")
        # Debian's runsc compresses by default, which takes ten times as long.
        options = ("--leave-running", "--compression=none", "--exclude-committed-zero-pages", f"--image-path={partial}")
        await self.container.command("checkpoint", *options, timeout=CHECKPOINT_TIMEOUT)
        await finished(control(partial.rename, image))

    async def resume(self, outlives: bool, hurried: asyncio.Event) -> None:
        """Let the sandbox continue after a failed checkpoint or a copy. Raises SandboxError or TimeoutError if lost.

        Waits for an answer until ``RESUME_TIMEOUT`` or until ``hurried`` is set, because the state is not saved.
        Without an answer, calls ``cut_off`` for a sandbox that ``outlives`` this server: it can be saved as it is.
        """
        await self._unpause(hurried)
        if self.container.reachable:
            await self._await_answer(outlives, hurried)

    def cut_off(self) -> None:
        """Close the connection, because PID 1 does not answer: the sandbox can only be saved as it is, or deleted."""
        self.connection.detach()
        self.container.reachable = False

    async def _quiesce(self, force: bool) -> None:
        if self.container.reachable:
            try:
                await asyncio.wait_for(self.connection.quiesce(), QUIESCE_TIMEOUT)
                return
            except TimeoutError:
                problem = f"did not stop its traffic for a checkpoint within {QUIESCE_TIMEOUT:g} seconds"
                if not force:
                    raise UnresponsiveError(self.sandbox_id, problem) from None
            log.warning("Sandbox %s %s; saving it as it is", self.sandbox_id, problem)
            self.cut_off()
        await self._wait_for_other_commands()

    async def _wait_for_other_commands(self) -> None:
        """Wait until no runsc command of a killed server acts on the sandbox. Raises SandboxError at the timeout."""
        assert self.container.folder is not None
        try:
            async with asyncio.timeout(CHECKPOINT_TIMEOUT):
                await asyncio.sleep(ORPHAN_NOTICES)
                while await control(self.container.folder.runs, b"pause", b"checkpoint", b"resume"):
                    await asyncio.sleep(ORPHAN_NOTICES)
        except TimeoutError:
            raise SandboxError(
                f"Sandbox {self.sandbox_id} was not saved: a runsc command on it, which a killed server started, has "
                f"not ended for {CHECKPOINT_TIMEOUT:g} seconds.",
                f"End that command (its arguments contain {self.container.folder.state}), then try again.",
            ) from None

    async def _unpause(self, hurried: asyncio.Event) -> None:
        """Call ``runsc resume``, and repeat it while it fails and the sandbox is paused."""
        while True:
            try:
                await self.container.command("resume")
                return
            except SandboxError as error:
                if not self.container.reachable or hurried.is_set() or self.container.ended or await self._runs():
                    return
                log.warning("Sandbox %s is paused and not saved; trying to resume it again: %s", self.sandbox_id, error)
            await asyncio.sleep(RESUME_INTERVAL)

    async def _runs(self) -> bool:
        """Return True if runsc reports that the sandbox is not paused; False if it is, or runsc gives no answer."""
        with suppress(SandboxError):
            return await self.container.status() != "paused"
        return False

    async def _await_answer(self, outlives: bool, hurried: asyncio.Event) -> None:
        """Wait until the guest answers after a resume.

        Raises LinkClosedError if it exits. At the timeout, or when ``hurried`` is set, calls ``cut_off`` for a guest
        that ``outlives`` this server, and raises TimeoutError for others.
        """
        assert self.container.main is not None
        answer = asyncio.ensure_future(self.connection.resume())
        end = asyncio.ensure_future(self.container.main.wait())
        waits: list[asyncio.Future[Any]] = [answer, end, asyncio.ensure_future(hurried.wait())]
        try:
            waited = await self._wait_for_first(waits)
            if answer.done():
                return answer.result()
            if end.done():
                raise LinkClosedError("it ended.")
            if not outlives:
                raise TimeoutError(f"it did not answer for {waited:g} seconds")
            log.error("Sandbox %s does not answer: connection closed. It can only be saved as it is", self.sandbox_id)
            self.cut_off()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _wait_for_first(self, waits: list[asyncio.Future[Any]]) -> float:
        """Wait for the first of ``waits`` or the timeout, with a warning each time that the waiting time has doubled.

        Return the seconds that passed without a result.
        """
        step, waited = QUIESCE_TIMEOUT + self.connection.hooks.seconds, 0.0
        while True:
            done, _ = await asyncio.wait(waits, timeout=step, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return waited
            waited += step
            if waited >= RESUME_TIMEOUT:
                return waited
            step = waited
            log.warning(
                "Sandbox %s has not answered for %d seconds, so its state could not be saved yet. The server keeps "
                "waiting. Stop the server to save the present state, or restart the kernel to give that state up",
                self.sandbox_id,
                waited,
            )
