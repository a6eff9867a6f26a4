"""Carry the files in a kernel's home folder, such as the packages that it installed, over a restart.

The files are packed in the sandbox when its kernel ends, kept in the staging folder, and unpacked in the sandbox of the
next kernel. They are untrusted: the host only counts the bytes and checks the structure of the archive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from ..errors import LinkClosedError, SandboxError, SnapshotTooLargeError, StateError
from ..errors.redaction import without_paths
from ..persistence import snapshots
from ..persistence.staging import staging
from ..sandbox.handle import SandboxHandle

log = logging.getLogger(__name__)

RESET = "reset_home"
"""Key in a sandbox's contents: its user wants an empty home folder at the next restart."""
PLACES = ("home",)
TIME_LIMIT = 30.0
"""Maximum seconds for packing or unpacking."""
LOST = "the sandbox itself ended unexpectedly"
UNUSABLE = "a kernel with these files ended before it answered a request"


class HomeFiles:
    """The files from the home folder of a kernel that has ended, for the kernel that replaces it. I/O thread only.

    ``limit`` is their maximum size in bytes; with 0, none are kept. ``wanted`` returns True if the kernel may be
    restarted. ``settled`` is True once it is decided for the present kernel whether its files are kept. ``problem`` is
    the reason why the present kernel does not have the files of the previous one; empty if it has them all.
    """

    def __init__(self) -> None:
        self.limit = 0
        self.problem = ""
        self.settled = False
        self.wanted: Callable[[], bool] = lambda: False
        self._placed = False
        self._taking = asyncio.Lock()
        self._archive: Path | None = None
        self._folder = AsyncExitStack()

    async def take_before_kill(self, handle: SandboxHandle, wake: Callable[[], Awaitable[None]]) -> None:
        """Keep the files of a kernel that is about to be killed; ``wake`` restores it if it is hibernated.

        If the kernel has ended by itself, waits until its files are kept.
        """
        async with self._taking:
            if self.settled or not self.wanted():
                return
            try:
                if self._keeps(handle):
                    await wake()
            except SandboxError as error:
                await self.discard(f"the hibernated kernel could not be woken: {without_paths(error)}")
            else:
                await self._take(handle)
            self.settled = True

    async def take_at_end(self, handle: SandboxHandle, heard: bool) -> None:
        """Keep the files of a kernel that ended by itself; ``heard`` is True if it had answered a request.

        Files with which a kernel ends before it answers would make each restart fail, so they are given up.
        """
        async with self._taking:
            if self.settled or not self.wanted():
                return
            if self._placed and not heard:
                await self.discard(UNUSABLE)
            else:
                await self._take(handle)
            self.settled = True

    async def _take(self, handle: SandboxHandle) -> None:
        """Pack the files in the home folder of a running sandbox. After a failure, ``problem`` has the reason."""
        await self.discard()
        if not self._keeps(handle):
            return
        with self._problems("packing"):
            async with asyncio.timeout(TIME_LIMIT), handle.exclusive():
                folder = await self._folder.enter_async_context(staging(handle.memory.stored.stores.staging))
                await snapshots.pack(handle.instance, folder / "home.tar", self.limit, PLACES)
            self._archive = folder / "home.tar"

    def _keeps(self, handle: SandboxHandle) -> bool:
        return bool(self.limit) and not handle.closed and not handle.contents.get(RESET)

    async def place(self, handle: SandboxHandle, activated: bool) -> None:
        """Unpack the files in the running sandbox of the next kernel. Called before and after its start or activation.

        A copy of a template accepts files only after its activation. Files that it has open, such as IPython's history,
        are not replaced. Before the second call, all can be repeated in another sandbox.
        """
        if self._archive and activated == bool(handle.instance.spec.carried):
            await self._unpack(handle, self._archive)
        if activated:  # the kernel has started: the files are not needed again
            self._archive = None
            await self._folder.aclose()

    async def _unpack(self, handle: SandboxHandle, archive: Path) -> None:
        with self._problems("unpacking"):
            async with asyncio.timeout(TIME_LIMIT), handle.exclusive():
                await snapshots.unpack(handle.instance, archive, PLACES, "add")
            self._placed = True

    @contextmanager
    def _problems(self, work: str) -> Iterator[None]:
        """Turn an error of the block into the ``problem``: without its files, a kernel still ends and starts."""
        try:
            yield
        except SnapshotTooLargeError:
            self.problem = f"they have more than {self.limit:,} bytes, which is the setting home_limit"
        except TimeoutError:
            self.problem = f"{work} them took more than {TIME_LIMIT:.0f} seconds"
        except (LinkClosedError, StateError):
            self.problem = LOST
        except SandboxError as error:
            self.problem = without_paths(error)
        except Exception:
            log.exception("Internal error while %s the files in a kernel's home folder", work)
            self.problem = "an internal error occurred, which is in the server's log"

    async def discard(self, problem: str = "") -> None:
        """Remove the kept files. ``problem`` is the reason, if the next kernel should have had them."""
        self._archive, self._placed, self.problem = None, False, problem
        await self._folder.aclose()

    def notice(self) -> str:
        """Return the text that tells the user that files were lost; empty if none were."""
        if not self.problem:
            return ""
        return (
            f"The files in the home folder were not carried over the restart, because {self.problem}. Packages that "
            "were installed with %pip have to be installed again."
        )
