"""Change the document of an open sandbox, and delete the checkpoints that the document no longer names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from ..errors import (
    FencedError,
    ForeignSandboxError,
    MetadataError,
    ObjectNotFoundError,
    SandboxNotFoundError,
    SignatureError,
    StorageError,
    TooManySavepointsError,
    UnsaveableError,
)
from ..events import EVENT_BUS, Entry, EventKind
from ..gvisor.sandbox import GVisorSandbox
from ..gvisor.state import State
from ..lock.base import Owner
from ..persistence import capture
from ..persistence import document as documents
from ..persistence.backends import Stores
from ..persistence.checkpoints import now
from ..persistence.document import Document
from ..persistence.metadata import Checkpoint, GCSSandboxMetadata
from ..persistence.names import artifacts, checkpoints_prefix, metadata_name
from ..workers import bulk, control
from .detached import leased, open_document, sign

log = logging.getLogger(__name__)

RECORD_AGAIN = 5.0
"""Seconds between attempts to record in storage that a restored sandbox runs."""
NOT_OURS = (FencedError, ForeignSandboxError, MetadataError, SandboxNotFoundError, SignatureError)
"""Errors that mean that this server may no longer change the document; a retry does not help."""
MAX_SAVEPOINTS = 64
MOST_WITH_SAVEPOINT = documents.MOST_DOCUMENT - 2 * capture.MOST_RECORDED
"""Maximum bytes of a document with a new savepoint: leaves room for the next two checkpoints."""


class StoredState:
    """The document and the checkpoints of a sandbox whose lease this server holds. Owned by a SandboxHandle.

    ``on_recorded`` is called after the document says that the sandbox runs.
    """

    def __init__(self, stores: Stores, document: Document) -> None:
        self.stores = stores
        self.document = document
        self.cleanup_task: asyncio.Task[None] | None = None
        self.on_recorded: Callable[[], None] = lambda: None
        self._sandbox_id = document.metadata.sandbox_id
        self._recording: asyncio.Task[None] | None = None

    @classmethod
    async def create(cls, stores: Stores, owner: Owner, first: GCSSandboxMetadata) -> StoredState:
        """Acquire the lease and write the first document. Nothing is left if this fails or the caller is cancelled.

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
        cls, sandbox_id: str, stores: Stores, owner: Owner, patience: float = 0.0
    ) -> AsyncIterator[StoredState]:
        """Acquire the lease, read the document, and sign it after the block. The block's failure releases the lease.

        Raises SandboxNotFoundError, and the errors of ``detached.leased`` and ``detached.open_document``.
        """
        await control(_require_document, stores, sandbox_id)  # a sandbox that does not exist yet costs no lease
        async with leased(sandbox_id, stores, owner, patience) as lease:
            document = await open_document(stores, sandbox_id, lease)
            yield cls(stores, document)
            await sign(document, stores)

    async def replace_lease(self, owner: Owner) -> None:
        """Replace a lost lease. Raises FencedError or LeaseHeldError if another server took the sandbox meanwhile."""
        await self.document.lease.release()
        async with leased(self._sandbox_id, self.stores, owner) as lease:
            await self.document.continue_under(lease)

    @property
    def metadata(self) -> GCSSandboxMetadata:
        """The current document."""
        return self.document.metadata

    async def change(self, change: documents.Change, most: int = documents.MOST_DOCUMENT) -> set[str]:
        """Change the document and return the artifacts that it no longer needs: superseded ones and failed attempts.

        Only artifacts from before the change are returned: after it, another server may have added its own.
        """
        store, found = self.stores.checkpoints, set[str]()
        if store:
            found = await control(artifacts, store, checkpoints_prefix(self._sandbox_id))
        await self.document.change(change, most)
        return found - self.metadata.kept

    async def delete(self, garbage: set[str]) -> None:
        """Delete artifacts. If that fails, the next change returns them again."""
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
            problem = f"its record in storage has {self.document.size:,} bytes already: delete some of its savepoints"
            raise UnsaveableError(self._sandbox_id, [problem])

    async def record_stopped(self) -> None:
        """Record that it no longer runs, although it was not saved."""
        await self.document.change(GCSSandboxMetadata.stopped)

    async def record_started(self, instance: GVisorSandbox) -> None:
        """Record that ``instance`` runs, without saved state. If that fails, delete the instance and raise."""
        checkpoint, previous = self.metadata.checkpoint, self.metadata.previous
        try:
            garbage = await self.change(lambda document: document.started(checkpoint, previous, now()))
        except BaseException:
            await asyncio.shield(instance.delete())
            raise
        self.on_recorded()
        self.cleanup_task = asyncio.create_task(self.delete(garbage))

    async def record_restored(self, instance: GVisorSandbox, source: Checkpoint) -> None:
        """Record that it runs again; if storage fails, retry in the background, because clients already use it.

        The sandbox is ended and the error raised only if this server may no longer change the document, or if the I/O
        thread ends.
        """
        last = self.metadata.last
        try:
            garbage = await self.change(lambda document: document.started(source, None, now()))
        except Exception as error:
            if isinstance(error, NOT_OURS):
                await asyncio.shield(instance.delete())
                raise
            log.warning(
                "Sandbox %s was woken, but that could not be recorded in storage: %s It runs on, and the record is "
                "tried again every %g seconds. If this lasts, it cannot be saved: see that storage can be written to",
                self._sandbox_id,
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
            except NOT_OURS as error:
                log.error("Sandbox %s cannot be recorded as running: %s", self._sandbox_id, error)
                return
            except Exception as error:
                log.info("Sandbox %s is still not recorded as running: %s", self._sandbox_id, error)
            else:
                log.warning("Sandbox %s is recorded in storage again", self._sandbox_id)
                self.on_recorded()
                return

    async def end_tasks(self) -> None:
        """Cancel the background tasks and wait for their end."""
        for task in filter(None, (self.cleanup_task, self._recording)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _require_document(stores: Stores, sandbox_id: str) -> None:
    """Raise SandboxNotFoundError unless the sandbox has a document. Blocks."""
    try:
        stores.metadata.info(metadata_name(sandbox_id))
    except ObjectNotFoundError as error:
        raise SandboxNotFoundError(sandbox_id, stores.metadata.where) from error


async def _undo(creating: asyncio.Task[Document], stores: Stores) -> None:
    """Delete the document of a sandbox whose creation was cancelled while it was being written."""
    await asyncio.wait({creating})
    if creating.exception():
        return
    document = creating.result()
    made = document.metadata
    with suppress(StorageError):  # an empty sandbox is left, which can be opened
        await control(stores.metadata.delete, metadata_name(made.sandbox_id), document.generation)
        EVENT_BUS.write(Entry(made.sandbox_id, EventKind.DELETED, kernel_name=made.kernel_name, user=made.user))
