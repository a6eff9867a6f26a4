"""Store the checkpoints of an open sandbox, and change its document.

A checkpoint is stored in two steps: its image is uploaded, then the document names it. Images that no document names
are garbage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import (
    FencedError,
    ForeignSandboxError,
    GuestError,
    MetadataError,
    RunscError,
    SandboxError,
    SandboxNotFoundError,
    StorageError,
    TooManySavepointsError,
    UnresponsiveError,
    UnsaveableError,
)
from ..errors.saving import ReplacedFilesError
from ..errors.signature import SignatureError
from ..events import EVENT_BUS, EventKind
from ..gvisor.sandbox import GVisorSandbox
from ..gvisor.state import State
from ..lock.base import Owner
from ..persistence import capture, checkpoints, compatibility
from ..persistence import document as documents
from ..persistence.backends import Stores
from ..persistence.checkpoints import now
from ..persistence.document import Document
from ..persistence.metadata import Checkpoint, GCSArtifact, GCSSandboxMetadata
from ..persistence.names import artifacts, checkpoints_prefix, metadata_name
from ..persistence.staging import staging
from ..storage.base import Advance
from ..workers import bulk, control
from .detached import exists, leased, open_document, sign

log = logging.getLogger(__name__)

RECORD_AGAIN = 5.0
"""Seconds between attempts to record in storage that a restored sandbox runs."""
PERMANENT_ERRORS = (FencedError, ForeignSandboxError, MetadataError, SandboxNotFoundError, SignatureError)
"""Errors which mean that this server may no longer change the document: do not retry."""
MAX_SAVEPOINTS = 64
MOST_WITH_SAVEPOINT = documents.MOST_DOCUMENT - 2 * capture.MOST_RECORDED
"""Maximum bytes of a document with a new savepoint: leaves room for the next two checkpoints."""

Contents = Callable[[], Mapping[str, Any]]
"""Returns the description of the processes in the sandbox. Called when an image is written, and stored with it."""


class StoredState:
    """The document and the checkpoints of a sandbox whose lease this server holds. Owned by a SandboxHandle.

    ``on_recorded`` is called after the start of the sandbox or the token of a new lease was written to the document.
    """

    def __init__(self, stores: Stores, document: Document) -> None:
        self.stores = stores
        self.document = document
        self.cleanup_task: asyncio.Task[None] | None = None
        self.on_recorded: Callable[[], None] = lambda: None
        self._sandbox_id = document.metadata.sandbox_id
        self._recording: asyncio.Task[None] | None = None
        self._given_up: asyncio.Future[None] | None = None
        """While the sandbox lists its files: done when this server no longer waits for the list."""

    @classmethod
    async def create(cls, stores: Stores, owner: Owner, first: GCSSandboxMetadata) -> StoredState:
        """Acquire the lease and write the first document. A failure or cancellation leaves nothing in storage.

        Raises SandboxExistsError, LeaseHeldError.
        """
        name = metadata_name(first.sandbox_id)
        async with leased(first.sandbox_id, stores, owner) as lease:
            creating = asyncio.create_task(Document.create(stores.metadata, stores.signer, name, lease, first))
            try:
                return cls(stores, await asyncio.shield(creating))
            except asyncio.CancelledError:
                await asyncio.shield(_undo(creating, stores))
                raise

    @classmethod
    @asynccontextmanager
    async def attached(
        cls, sandbox_id: str, stores: Stores, owner: Owner, patience: float = 0.0, runs_on: bool = False
    ) -> AsyncIterator[StoredState]:
        """Acquire the lease, read the document, and record the lease in it after the block. Release it on failure.

        ``runs_on`` is True if the sandbox still runs, although its server was killed. Raises SandboxNotFoundError, and
        the errors of ``detached.leased`` and ``detached.open_document``.
        """
        if not await control(exists, stores, sandbox_id):  # first, because acquiring a lease takes longer
            raise SandboxNotFoundError(sandbox_id, stores.metadata.where)
        async with leased(sandbox_id, stores, owner, patience) as lease:
            document = await open_document(stores, sandbox_id, lease)
            yield cls(stores, document)
            await sign(document, stores, runs_on)

    async def replace_lease(self, owner: Owner) -> None:
        """Replace a lost lease. Raises FencedError or LeaseHeldError if another server took the sandbox meanwhile."""
        await self.document.lease.release()
        async with leased(self._sandbox_id, self.stores, owner) as lease:
            await self.document.continue_under(lease)
        self.on_recorded()

    @property
    def metadata(self) -> GCSSandboxMetadata:
        """The current document."""
        return self.document.metadata

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def checkpoint(
        self, instance: GVisorSandbox, contents: Contents, insist: float | None, advance: Advance
    ) -> tuple[Checkpoint, set[str]]:
        """Store the memory of ``instance`` as the current checkpoint, then end the instance; on failure it runs on.

        Return the checkpoint, and the garbage for ``delete``. Errors and ``insist`` are those of SandboxHandle.save.
        """
        began, saved, garbage = time.monotonic(), list[Checkpoint](), set[str]()
        async with staging(self.stores.staging) as folder:
            files, image = await self._prepare(instance, insist), folder / "image"

            async def commit() -> None:
                """Upload the image and name it in the document. Called while the sandbox is paused."""
                artifact = await self._upload(image, self._sandbox_id, advance)
                seconds = time.monotonic() - began
                made = await control(capture.describe_image, instance, artifact, files, contents(), seconds)
                garbage.update(await self.change(lambda document: document.saved(made, now())))
                saved.append(made)

            try:
                await instance.checkpoint(image, commit, force=insist is not None)
            except RunscError as error:
                await self._explain(instance, error)
                if insist is None or instance.reachable or error.hosts_fault:
                    raise
                problem = f"did not answer, and runsc could not save it without its help: {error.problem}"
                raise UnresponsiveError(self._sandbox_id, problem) from error
        return saved[0], garbage

    async def copy(self, instance: GVisorSandbox, contents: Contents, sandbox_id: str, advance: Advance) -> Checkpoint:
        """Store a copy of the memory of ``instance`` as a checkpoint of ``sandbox_id``, and return the checkpoint.

        The instance continues to run. No document names the checkpoint yet.
        """
        self.stores.required_checkpoints()
        began = time.monotonic()
        async with staging(self.stores.staging) as folder:
            files, image = await self._list_files(instance), folder / "image"
            try:
                await instance.copy(image)
            except RunscError as error:
                await self._explain(instance, error)
                raise
            artifact = await self._upload(image, sandbox_id, advance)
        return await control(capture.describe_image, instance, artifact, files, contents(), time.monotonic() - began)

    async def _explain(self, instance: GVisorSandbox, error: RunscError) -> None:
        """Raise ReplacedFilesError, which names the files, if runsc failed because of files that were replaced."""
        if not error.files_replaced:
            return
        reasons: list[str] = []
        with suppress(SandboxError):
            reasons = compatibility.detached(await compatibility.inventory(instance, self.stores.digests))
        raise ReplacedFilesError(self._sandbox_id, reasons or [error.problem.removesuffix(".")]) from error

    async def _upload(self, image: Path, sandbox_id: str, advance: Advance) -> GCSArtifact:
        """Upload ``image`` as a checkpoint of ``sandbox_id``, which no document names yet."""
        name = f"{checkpoints_prefix(sandbox_id)}{checkpoints.new_name()}/"
        return await bulk(checkpoints.save, self.stores.required_checkpoints(), name, image, advance)

    def give_up_waiting(self, instance: GVisorSandbox) -> None:
        """Interrupt a checkpoint or copy that waits for the guest. Called when the server stops."""
        if self._given_up and not self._given_up.done():
            self._given_up.set_result(None)
        instance.hurry()

    async def _prepare(self, instance: GVisorSandbox, insist: float | None) -> dict[str, Any]:
        """Return the host files that ``instance`` depends on.

        With ``insist``, a guest that fails or takes longer than that many seconds is cut off, and the result is empty.
        Raises ReplacedFilesError in any case: runsc could not save the sandbox.
        """
        if insist is None:
            return await self._list_files(instance)
        listing = asyncio.create_task(self._list_files(instance))
        try:
            await asyncio.wait({listing}, timeout=insist)
            if listing.done():
                return listing.result()
            reason = f"it did not answer within {insist:g} seconds"
        except ReplacedFilesError:
            raise
        except (GuestError, UnsaveableError) as error:
            reason = str(error)
        finally:
            _cancel(listing)
        log.warning("Sandbox %s did not prepare for its save; saving it anyway: %s", self.metadata.title, reason)
        await instance.cut_off()
        return {}

    async def _list_files(self, instance: GVisorSandbox) -> dict[str, Any]:
        """Return the host files that ``instance`` depends on. Raises SandboxError if ``give_up_waiting`` is called."""
        listing = asyncio.create_task(capture.prepare(instance, self.stores.digests))
        self._given_up = asyncio.get_running_loop().create_future()
        first: set[asyncio.Future[Any]] = {listing, self._given_up}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            listing.cancel()
            await asyncio.wait({listing})
            raise
        finally:
            self._given_up = None
        if listing.done():
            return listing.result()
        _cancel(listing)
        raise SandboxError(f"Sandbox {self._sandbox_id} did not report in time which files it uses.")

    # -- document ----------------------------------------------------------------------------------------------------

    async def change(self, change: documents.Change, most: int = documents.MOST_DOCUMENT) -> set[str]:
        """Change the document and return the garbage: artifacts that the document does not name.

        Artifacts that are stored after the change are not returned: another server may have added them.
        """
        store, found = self.stores.checkpoints, set[str]()
        if store:
            found = await control(artifacts, store, checkpoints_prefix(self._sandbox_id))
        await self.document.change(change, most)
        return found - self.metadata.kept

    async def delete(self, garbage: set[str]) -> None:
        """Delete artifacts. Those that storage does not delete are returned again by the next ``change``."""
        with suppress(StorageError):
            for name in garbage:
                await bulk(self.stores.required_checkpoints().delete_all, name)

    async def drop_savepoint(self, name: str) -> None:
        """Delete a savepoint. Raises SavepointNotFoundError."""
        self.metadata.savepoint(name)
        await self.delete(await self.change(lambda document: document.without_savepoint(name)))

    def require_room(self) -> None:
        """Raise TooManySavepointsError or UnsaveableError if the document has no room for another savepoint."""
        if len(self.metadata.savepoints) >= MAX_SAVEPOINTS:
            raise TooManySavepointsError(self._sandbox_id, MAX_SAVEPOINTS)
        if self.document.size > MOST_WITH_SAVEPOINT:
            problem = f"its document in storage already has {self.document.size:,} bytes; delete some of its savepoints"
            raise UnsaveableError(self._sandbox_id, [problem])

    async def record_told(self) -> None:
        """Record that the user was told that the present state is older than the lost one. Errors are logged."""
        try:
            await self.document.change(GCSSandboxMetadata.told)
        except SandboxError as error:
            log.warning("Sandbox %s: the notice about its older state will be repeated: %s", self._sandbox_id, error)

    async def record_left_running(self) -> None:
        """Record that the sandbox runs without a server, because it could not be saved."""
        await self.document.change(GCSSandboxMetadata.left_running)

    async def record_stopped(self) -> None:
        """Record that the sandbox no longer runs, although it was not saved."""
        await self.document.change(GCSSandboxMetadata.stopped)

    async def record_started(self, instance: GVisorSandbox) -> None:
        """Record that ``instance`` runs, without saved state. If that fails, delete the instance and raise."""
        checkpoint, previous = self.metadata.checkpoint, self.metadata.previous
        try:
            garbage = await self.change(lambda document: document.told().started(checkpoint, previous, now()))
        except BaseException:
            await asyncio.shield(instance.delete())
            raise
        self.on_recorded()
        self.cleanup_task = asyncio.create_task(self.delete(garbage))

    async def record_restored(self, instance: GVisorSandbox, source: Checkpoint) -> None:
        """Record that ``instance`` runs again. If storage fails, retry in the background: clients already use it.

        If this server may no longer change the document, or the I/O thread ends, delete the instance and raise.
        """
        last = self.metadata.last
        try:
            garbage = await self.change(lambda document: document.started(source, None, now()))
        except Exception as error:
            if isinstance(error, PERMANENT_ERRORS):
                await asyncio.shield(instance.delete())
                raise
            log.warning(
                "Sandbox %s was woken and runs, but the storage could not record this: %s Until then, it is not saved. "
                "Trying again every %g seconds; check that the storage can be written to",
                self.metadata.title,
                error,
                RECORD_AGAIN,
            )
            self._recording = asyncio.create_task(self._record_later(instance, source, last))
        except BaseException:
            await asyncio.shield(instance.delete())
            raise
        else:
            self.cleanup_task = asyncio.create_task(self.delete(garbage))
        self.on_recorded()

    async def _record_later(self, instance: GVisorSandbox, source: Checkpoint, last: str) -> None:
        """Retry recording that ``instance`` runs, until it is saved or ended. The next change deletes the garbage.

        ``last`` is the latest checkpoint in the document at the time of the restore.
        """

        def runs() -> bool:
            return instance.state == State.RUNNING

        def change(document: GCSSandboxMetadata) -> GCSSandboxMetadata:
            return document.started(source, None, now()) if runs() and document.last == last else document

        while runs() and self.metadata.last == last:
            await asyncio.sleep(RECORD_AGAIN)
            try:
                await self.document.change(change)
            except PERMANENT_ERRORS as error:
                log.error("Sandbox %s runs, but this server can no longer save it: %s", self.metadata.title, error)
                return
            except Exception as error:
                log.info("Sandbox %s is still not recorded as running: %s", self.metadata.title, error)
            else:
                log.warning("Sandbox %s is now recorded as running", self.metadata.title)
                self.on_recorded()
                return

    async def end_tasks(self) -> None:
        """Cancel the background tasks and wait for their end."""
        for task in filter(None, (self.cleanup_task, self._recording)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task without waiting for its end, which the guest could delay. Its error is ignored."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def _undo(creating: asyncio.Task[Document], stores: Stores) -> None:
    """Delete the document of a sandbox whose creation was cancelled while it was being written."""
    await asyncio.wait({creating})
    if creating.exception():
        return
    document = creating.result()
    made = document.metadata
    with suppress(StorageError):  # if this fails, an empty sandbox remains, which can be opened
        await control(stores.metadata.delete, metadata_name(made.sandbox_id), document.generation)
        EVENT_BUS.write(made.entry(EventKind.DELETED))
