"""Start, save, restore and release one sandbox: SandboxHandle, made only by its factories.

A persistent sandbox exists exactly as long as its metadata.json. Checkpoints that no document names are garbage and
are deleted.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import (
    CorruptObjectError,
    FencedError,
    ForeignSandboxError,
    GuestError,
    IncompatibleError,
    MetadataError,
    ObjectNotFoundError,
    RunscError,
    SandboxError,
    SandboxNotFoundError,
    SavepointExistsError,
    SignatureError,
    StateError,
    StorageError,
    TooManySavepointsError,
    UnresponsiveError,
    UnsaveableError,
)
from ..events import JOURNAL, Entry, What
from ..gvisor.bundle import BundleSpec, Mount
from ..gvisor.mounts import require_itself
from ..gvisor.restore_plan import Grant, derive
from ..gvisor.runsc import Runsc
from ..gvisor.runtime_dir import RuntimeFolder
from ..gvisor.sandbox import GVisorSandbox
from ..gvisor.state import Action, State, after
from ..lock.base import Lease, Owner
from ..mux.connection import Hooks
from ..persistence import capture, checkpoints, snapshots
from ..persistence import document as ledger
from ..persistence.backends import SnapshotStorage, Stores, require_snapshots
from ..persistence.checkpoints import now
from ..persistence.document import Document
from ..persistence.metadata import Checkpoint, GCSArtifact, GCSSandboxMetadata, Note
from ..persistence.names import artifacts, checkpoints_prefix, metadata_name, snapshot_prefix, valid_id
from ..persistence.staging import staging
from ..storage.base import Advance, nothing
from ..workers import bulk, control, finished
from . import detached
from .detached import RESEED, leased

log = logging.getLogger(__name__)

RESEED_SECONDS = 10.0
RECORD_AGAIN = 5.0
"""Seconds between attempts to record in storage that a restored sandbox runs."""
NOT_OURS = (FencedError, ForeignSandboxError, MetadataError, SandboxNotFoundError, SignatureError)
"""Errors that mean that this server may no longer change the document; a retry does not help."""
MAX_SAVEPOINTS = 64
MOST_WITH_SAVEPOINT = ledger.MOST_DOCUMENT - 2 * capture.MOST_RECORDED
"""Maximum bytes of a document with a new savepoint: leaves room for the next two checkpoints."""
UNPLANNED = BundleSpec(python=sys.executable, home="/home", user="user")
"""Placeholder spec of an unstarted sandbox; ``permit`` or ``begin_anew`` replaces it before a start or restore."""


@dataclass(frozen=True)
class Identity:
    """The owner, purpose and settings of a sandbox: its metadata without its state."""

    kernel_name: str = ""
    notebook_path: str = ""
    user: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    shared_with: tuple[str, ...] = ()

    def document(self, sandbox_id: str) -> GCSSandboxMetadata:
        """Return the first document of a new sandbox."""
        return GCSSandboxMetadata(sandbox_id=sandbox_id, created=now(), last_used=now(), **vars(self))


class SandboxHandle:
    """A sandbox that this process holds: its id, its driver ``instance`` and, if persistent, its document and lease.

    Owned by a SandboxManager; if ephemeral, by the provisioner; during a rescue, by Recovery. ``instance``,
    ``last_activity``, ``idle_timeout`` and ``cleanup_task`` belong to the current run on this server. Use a factory
    instead of the constructor.
    """

    def __init__(
        self,
        sandbox_id: str,
        instance: GVisorSandbox,
        stores: Stores | None = None,
        book: Document | None = None,
        storage: SnapshotStorage | None = None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.instance = instance
        self.contents: Mapping[str, Any] = {}
        self.outdated = False
        """True for a rescued sandbox if another server has since saved a newer state."""
        self.last_activity = time.monotonic()
        self.idle_timeout: float | None = None
        self.cleanup_task: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[Checkpoint] | None = None
        self._recording: asyncio.Task[None] | None = None
        self._inventory: asyncio.Task[dict[str, Any]] | None = None
        self._stores = stores
        self._ledger = book
        self._storage = stores.snapshot_storage if stores else storage
        self._source: Checkpoint | None = None
        self._taken_over = False
        self._grant: Grant | None = Grant.of(instance.spec, instance.platform)

    # -- factories -------------------------------------------------------------------------------------------------

    @classmethod
    def create_ephemeral(
        cls,
        sandbox_id: str,
        spec: BundleSpec,
        runsc: Runsc,
        platform: str = "systrap",
        storage: SnapshotStorage | None = None,
    ) -> SandboxHandle:
        """Return an unstarted sandbox that stores nothing except snapshots on request."""
        return cls(valid_id(sandbox_id), GVisorSandbox(sandbox_id, spec, runsc, platform), storage=storage)

    @classmethod
    async def create_persistent(
        cls,
        sandbox_id: str,
        spec: BundleSpec,
        runsc: Runsc,
        stores: Stores,
        owner: Owner,
        identity: Identity | None = None,
        platform: str = "systrap",
    ) -> SandboxHandle:
        """Return a new, unstarted persistent sandbox. Raises SandboxExistsError, LeaseHeldError.

        Nothing is left in storage if this fails or the caller is cancelled.
        """
        first = (identity or Identity()).document(sandbox_id)
        async with leased(sandbox_id, stores, owner) as lease:
            create = Document.create(stores.metadata, stores.signer, metadata_name(sandbox_id), lease, first)
            creating = asyncio.create_task(create)
            try:
                book = await asyncio.shield(creating)
            except asyncio.CancelledError:
                await asyncio.shield(_undo(creating, stores))
                raise
        return cls._persistent(spec, runsc, platform, stores, book, None)

    @classmethod
    async def attach_persistent(
        cls,
        sandbox_id: str,
        spec: BundleSpec | None,
        runsc: Runsc,
        stores: Stores,
        owner: Owner,
        platform: str = "systrap",
        patience: float = 0.0,
        previous: bool = False,
    ) -> SandboxHandle:
        """Return an existing sandbox, not running yet. Call ``restore`` next, or ``start`` if it has no checkpoint.

        Its mounts come from ``spec``, never from its document alone. Without a ``spec``, ``permit`` must be called
        before ``restore``. ``previous`` selects the checkpoint before the latest one. Raises SandboxNotFoundError,
        LeaseHeldError after ``patience`` seconds, and IncompatibleError if this server cannot restore the checkpoint;
        that error offers the previous checkpoint if one exists.
        """
        await control(_require_document, stores, sandbox_id)  # a sandbox that does not exist yet costs no lease
        async with leased(sandbox_id, stores, owner, patience) as lease:
            book = await detached.open_document(stores, sandbox_id, lease)
            source = book.metadata.previous if previous else book.metadata.checkpoint
            if previous and source is None:
                raise SandboxError(f"Sandbox {sandbox_id} has no checkpoint before its last one.")
            grant = Grant.of(spec, platform) if spec else None
            if source:
                stores.required_checkpoints()
                spec = await _require_fit(book.metadata, source, runsc, stores, grant)
            await detached.sign(book, stores)
        handle = cls._persistent(spec or UNPLANNED, runsc, platform, stores, book, source)
        handle._grant = grant
        return handle

    @classmethod
    async def rescue(
        cls, folder: RuntimeFolder, note: Note, runsc: Runsc, stores: Stores, owner: Owner, patience: float = 0.0
    ) -> SandboxHandle:
        """Return the sandbox of a killed server from its runtime ``folder`` and ``note``. Called by Recovery only.

        The sandbox may still run; then call ``checkpoint`` or ``savepoint``, otherwise ``record_dead``.
        """
        async with leased(note.sandbox_id, stores, owner, patience) as lease:
            book = await detached.open_document(stores, note.sandbox_id, lease)
            outdated = note.outdated(book.metadata)
            await detached.sign(book, stores)
        handle = cls._persistent(note.spec, runsc, note.platform, stores, book, book.metadata.checkpoint)
        handle.contents, handle.outdated = note.contents, outdated
        handle.instance = GVisorSandbox.orphan(
            note.sandbox_id, handle.instance.spec, runsc, note.platform, folder, note.container_id
        )
        return handle

    @classmethod
    def _persistent(
        cls, spec: BundleSpec, runsc: Runsc, platform: str, stores: Stores, book: Document, source: Checkpoint | None
    ) -> SandboxHandle:
        sandbox_id = book.metadata.sandbox_id
        instance = GVisorSandbox(sandbox_id, replace(spec, outlives=stores.checkpoints is not None), runsc, platform)
        handle = cls(sandbox_id, instance, stores, book)
        handle._source = source
        handle.describe(source.contents if source else {})
        return handle

    # -- identity and metadata ---------------------------------------------------------------------------------------

    @property
    def persistent(self) -> bool:
        """True if it has a document in storage."""
        return self._ledger is not None

    @property
    def can_save(self) -> bool:
        """True if it is persistent and this server has a store for checkpoints."""
        return self._stores is not None and self._stores.checkpoints is not None

    @property
    def metadata(self) -> GCSSandboxMetadata:
        """The current document. Raises SandboxError for an ephemeral sandbox."""
        return self._book().metadata

    @property
    def lease(self) -> Lease:
        """The lease by which this server holds it. Raises SandboxError for an ephemeral sandbox."""
        return self._book().lease

    def describe(self, contents: Mapping[str, Any]) -> None:
        """Set the description of the processes inside, which is stored with each checkpoint and in the rescue note."""
        self.contents = contents
        if self._stores and self._ledger:
            where = self._stores.metadata.where
            spec, platform, document = self.instance.spec, self.instance.platform, self._ledger.metadata
            token = document.tenancy.token if document.tenancy else None
            note = Note(self.sandbox_id, where, spec, platform, contents, token, document.last)
            self.instance.leave_note(asdict(note))

    def entry(self, what: What) -> Entry:
        """Return a journal entry that reports the event ``what``."""
        if self._ledger is None:
            return Entry(self.sandbox_id, what)
        return Entry(self.sandbox_id, what, kernel_name=self.metadata.kernel_name, user=self.metadata.user)

    async def change(self, **fields: Any) -> None:
        """Change fields of the document, such as ``notebook_path``."""
        await self._book().change(lambda document: replace(document, **fields))

    # -- start, restore, checkpoint ----------------------------------------------------------------------------------

    @property
    def saved(self) -> bool:
        """True if it has a checkpoint for ``restore``."""
        return self._source is not None

    async def permit(self, grant: Grant) -> None:
        """Set the mounts that restores of this sandbox may use, and plan the next restore with them.

        Raises IncompatibleError if this server cannot restore its checkpoint with them; the saved state is kept.
        """
        self._grant = grant
        if self._source:
            await _require_fit(self.metadata, self._source, self.instance.runsc, self._kept_in(), grant)
            self.go_to(self._source)

    def begin_anew(self, spec: BundleSpec, platform: str, grant: Grant | None = None) -> None:
        """Replace the instance, which has ended or never started, with a new, unstarted one of the same id.

        ``grant`` is for later restores of other checkpoints; without it the current one is kept.
        """
        self._grant = grant or self._grant
        spec = replace(spec, outlives=self.can_save)
        hooks = self.instance.link.hooks
        self.instance = GVisorSandbox(self.sandbox_id, spec, self.instance.runsc, platform)
        self.instance.link.hooks = hooks
        self._taken_over = False
        self.describe({})

    def take_over(self, sandbox: GVisorSandbox) -> None:
        """Use a running copy of a template as the instance; ``start`` then only records that it runs."""
        sandbox.sandbox_id, sandbox.spec = self.sandbox_id, self.instance.spec
        sandbox.link.hooks = self.instance.link.hooks
        self.instance = sandbox
        self._taken_over = True
        self.describe(self.contents)

    async def start(self, template: Path | None = None) -> None:
        """Start it without saved state, or as a copy of ``template``. A checkpoint is kept until the next is made."""
        with JOURNAL.doing(self.entry(What.STARTED if self.persistent else What.CREATED)):
            if not self._taken_over:
                await self.instance.start(template)
            self._taken_over = False
            if self._ledger:
                await self._record_running(self._ledger.metadata.checkpoint, self._ledger.metadata.previous)

    async def restore(self) -> None:
        """Restore it from its checkpoint.

        Raises CorruptObjectError if the checkpoint is damaged; the error offers the previous one if it exists, and
        nothing has changed. If storage cannot record that the sandbox runs, it runs all the same and is recorded later.
        Once runsc has the image, a cancellation is raised only after that: clients may already use the sandbox.
        """
        stores, source = self._kept_in(), self._source
        if source is None:
            raise SandboxError(f"Sandbox {self.sandbox_id} has no checkpoint to restore.")
        # StateError if another task already restored it; raised here, it is not reported as a failed wake.
        after(self.sandbox_id, Action.RESTORE, self.instance.state)
        slept_here = self.instance.state == State.CHECKPOINTED
        grant = self._required_grant()
        for mount in filter(None, (self._working_folder(), *grant.watched)):
            require_itself(mount)
        checkpoints.check_names(source.artifact, checkpoints_prefix(self.sandbox_id))
        with JOURNAL.doing(self.entry(What.WOKEN)) as work:
            async with staging(stores.staging) as folder:
                work.size = source.size
                store = stores.required_checkpoints()
                if slept_here:  # otherwise attach_persistent, permit or find_savepoint has checked it
                    await _require_fit(self.metadata, source, self.instance.runsc, stores, grant)
                try:
                    image = await control(checkpoints.fetch, store, source.artifact, folder, work.advance)
                except CorruptObjectError as error:
                    error.offer_older(self.metadata.previous not in (None, source))
                    raise
                await finished(self._restore(image, source))

    async def checkpoint(self, insist: float | None = None) -> Checkpoint:
        """Save its memory and end it. If that fails, it continues to run, and the latest checkpoint is kept.

        Raises FencedError if another server owns it now. The save continues if the caller is cancelled.

        With ``insist``, the guest has that many seconds to run its hook and to list the files it uses. After that, or
        if it fails to, the sandbox is saved without the guest's help, like the sandbox of a killed server; only another
        handle can restore it then. Raises UnresponsiveError if runsc cannot save it that way: no other server could
        save it either.
        """
        self._saving = asyncio.create_task(self._checkpoint(insist))
        return await asyncio.shield(self._saving)

    # -- savepoints --------------------------------------------------------------------------------------------------

    async def savepoint(self, name: str) -> Checkpoint:
        """Save its current memory as the savepoint ``name``; it continues to run.

        Raises SavepointExistsError if the name is taken, TooManySavepointsError, and UnsaveableError if the document is
        too long. The save continues if the caller is cancelled.
        """
        if valid_id(name) in self.metadata.savepoints:
            raise SavepointExistsError(self.sandbox_id, name)
        self._require_room()
        self._saving = asyncio.create_task(self._savepoint(name))
        return await asyncio.shield(self._saving)

    async def copy(self, sandbox_id: str, savepoint: str = "", advance: Advance = nothing) -> Checkpoint:
        """Store a savepoint, or the current memory, as a checkpoint of ``sandbox_id``; this sandbox runs on."""
        stores, began = self._kept_in(), time.monotonic()
        source = self.metadata.savepoint(savepoint) if savepoint else self._source
        if source and (savepoint or self.instance.state == State.CHECKPOINTED):
            return await detached.copy_checkpoint(stores, self.sandbox_id, source, sandbox_id, advance)
        below = f"{checkpoints_prefix(sandbox_id)}{checkpoints.new_name()}/"
        async with staging(stores.staging) as folder:
            image = folder / "image"
            files = await self._take_inventory()
            await self.instance.copy(image)
            artifact = await bulk(checkpoints.save, stores.required_checkpoints(), below, image, advance)
        seconds = time.monotonic() - began
        return await control(capture.recorded, self.instance, artifact, files, self.contents, seconds)

    async def drop_savepoint(self, name: str) -> None:
        """Delete a savepoint. Raises SavepointNotFoundError."""
        self.metadata.savepoint(name)
        await self._delete(await self._change(lambda document: document.without_savepoint(name)))

    async def find_savepoint(self, name: str) -> Checkpoint:
        """Return the savepoint ``name`` for a rewind, which adds another savepoint.

        Raises SavepointNotFoundError, IncompatibleError if this server cannot restore it, and TooManySavepointsError or
        UnsaveableError if the document has no room for another savepoint.
        """
        found = self.metadata.savepoint(name)
        self._require_room()
        await _require_fit(self.metadata, found, self.instance.runsc, self._kept_in(), self._required_grant())
        return found

    async def keep_present(self) -> str:
        """Keep its checkpoint as a savepoint before ``go_to``, and return the savepoint's name. Raises StateError."""
        present, name = self._source, f"before-rewind-{checkpoints.new_name()}"
        if self.instance.state != State.CHECKPOINTED or present is None:
            raise StateError(self.sandbox_id, "rewind", self.instance.state)
        await self._change(lambda document: document.with_savepoint(name, present))
        return name

    def go_to(self, source: Checkpoint) -> None:
        """Replace the instance with a new one that ``restore`` restores from ``source``.

        Its mounts are the currently granted ones. Raises IncompatibleError if they do not fit.
        """
        grant = self._required_grant()
        self.begin_anew(_planned(self.metadata, source, grant), grant.platform)
        self._source = source
        self.describe(source.contents)

    async def release(self) -> None:
        """End it on this server without saving it, and release the lease."""
        try:
            await self.instance.delete()
            for task in filter(None, (self.cleanup_task, self._recording)):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        finally:
            if self._ledger:  # even if the sandbox did not end: nothing else stops the renewal of the lease
                await asyncio.shield(self._ledger.lease.release())

    async def regain(self, owner: Owner) -> None:
        """Replace a lost lease. Raises FencedError or LeaseHeldError if another server took the sandbox meanwhile."""
        book = self._book()
        await book.lease.release()
        async with leased(self.sandbox_id, self._kept_in(), owner) as lease:
            await book.continue_under(lease)
        self.describe(self.contents)

    async def record_dead(self) -> None:
        """Record that it no longer runs, although it was not saved."""
        await self._book().change(GCSSandboxMetadata.stopped)

    # -- files -------------------------------------------------------------------------------------------------------

    async def save_snapshot(self, name: str) -> GCSArtifact:
        """Save its files, without its memory, as the snapshot ``name``; it continues to run."""
        storage, below = require_snapshots(self._storage), snapshot_prefix(self.sandbox_id, name)
        with JOURNAL.doing(self.entry(What.SAVED)) as work:
            made = await snapshots.save(storage, below, self.instance, work.advance)
            work.size = made.size
        return made

    async def load_snapshot(self, sandbox_id: str, name: str) -> None:
        """Unpack a snapshot of this or another sandbox in this one, which must be running."""
        await snapshots.load(require_snapshots(self._storage), snapshot_prefix(sandbox_id, name), self.instance)

    # -- internals ---------------------------------------------------------------------------------------------------

    async def _checkpoint(self, insist: float | None) -> Checkpoint:
        stores, began = self._kept_in(), time.monotonic()
        store = stores.required_checkpoints()
        after(self.sandbox_id, Action.CHECKPOINT, self.instance.state)
        below = f"{checkpoints_prefix(self.sandbox_id)}{checkpoints.new_name()}/"
        made: list[Checkpoint] = []
        garbage: set[str] = set()
        with JOURNAL.doing(self.entry(What.HIBERNATED)) as work:
            async with staging(stores.staging) as folder:
                files = await self._prepare(insist)
                image = folder / "image"

                async def commit() -> None:
                    artifact = await bulk(checkpoints.save, store, below, image, work.advance)
                    seconds = time.monotonic() - began
                    made.append(await control(capture.recorded, self.instance, artifact, files, self.contents, seconds))
                    garbage.update(await self._change(lambda document: document.saved(made[0], now())))

                try:
                    await self.instance.checkpoint(image, commit, force=insist is not None)
                except RunscError as error:
                    if insist is None or self.instance.reachable or error.hosts_fault:
                        raise
                    problem = f"did not help to save itself, and runsc cannot save it without: {error.problem}"
                    raise UnresponsiveError(self.sandbox_id, problem) from error
                work.size = made[0].size
        self._source = made[0]
        await self._delete(garbage)
        return made[0]

    async def _take_inventory(self) -> dict[str, Any]:
        """Return the host files that it depends on. Raises SandboxError if ``give_up_waiting`` interrupts that."""
        self._inventory = asyncio.create_task(capture.prepare(self.instance, self._kept_in().digests))
        try:
            return await self._inventory
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                self._inventory.cancel()
                raise
            raise SandboxError(f"Sandbox {self.sandbox_id} did not say in time which files it uses.") from None
        finally:
            self._inventory = None

    def give_up_waiting(self) -> None:
        """Interrupt a checkpoint, savepoint or copy that waits for the guest. Called when the server stops."""
        if self._inventory:
            self._inventory.cancel()
        self.instance.hurry()

    async def _prepare(self, insist: float | None) -> dict[str, Any]:
        """Return the host files that it depends on.

        With ``insist``, a guest that fails or takes longer than that many seconds is cut off, and the result is empty.
        """
        try:
            async with asyncio.timeout(insist):
                return await self._take_inventory()
        except (TimeoutError, GuestError, UnsaveableError) as error:
            if insist is None:
                raise
            reason = str(error) or f"it did not answer within {insist:g} seconds"
            log.warning("Sandbox %s is saved without its help: %s", self.sandbox_id, reason)
            await self.instance.cut_off()
            return {}

    def _working_folder(self) -> Mount | None:
        """Return the mount of its kernel's working folder; None if that is not a folder of the host."""
        spec, cwd = self.instance.spec, self.contents.get("cwd")
        shown = (mount for mount in spec.mounts if mount.source and mount.writable and mount.destination == cwd)
        return spec.carried or next(shown, None)

    def _require_room(self) -> None:
        if len(self.metadata.savepoints) >= MAX_SAVEPOINTS:
            raise TooManySavepointsError(self.sandbox_id, MAX_SAVEPOINTS)
        if self._book().size > MOST_WITH_SAVEPOINT:
            problem = f"its record in storage has {self._book().size:,} bytes already: delete some of its savepoints"
            raise UnsaveableError(self.sandbox_id, [problem])

    async def _savepoint(self, name: str) -> Checkpoint:
        with JOURNAL.doing(self.entry(What.SAVED)) as work:
            made = self._source if self.instance.state == State.CHECKPOINTED else None
            made = made or await self.copy(self.sandbox_id, advance=work.advance)
            work.size = made.size
            garbage = await self._change(lambda document: document.with_savepoint(name, made), MOST_WITH_SAVEPOINT)
        await self._delete(garbage)
        return made

    async def _restore(self, image: Path, source: Checkpoint) -> None:
        with self._reseeding():
            await self.instance.restore(image)
        await self._record_restored(source)

    @contextmanager
    def _reseeding(self) -> Iterator[None]:
        """Reseed a fork at its first restore: the original sandbox has the same random state."""
        link = self.instance.link
        hooks = link.hooks
        if self.contents.get(RESEED):
            link.hooks = Hooks(max(hooks.seconds, RESEED_SECONDS), reseed=True)
        try:
            yield
        finally:
            link.hooks = hooks
        if self.contents.get(RESEED):
            self.describe({name: value for name, value in self.contents.items() if name != RESEED})

    async def _record_restored(self, source: Checkpoint) -> None:
        """Record that it runs again; if storage fails, retry in the background, because clients already use it.

        The sandbox is ended and the error raised only if this server may no longer change the document, or if the I/O
        thread ends.
        """
        last = self.metadata.last
        try:
            garbage = await self._change(lambda document: document.started(source, None, now()))
        except Exception as error:
            if isinstance(error, NOT_OURS):
                await asyncio.shield(self.instance.delete())
                raise
            log.warning(
                "Sandbox %s was woken, but that could not be recorded in storage: %s It runs on, and the record is "
                "tried again every %g seconds. If this lasts, it cannot be saved: see that storage can be written to",
                self.sandbox_id,
                error,
                RECORD_AGAIN,
            )
            self._recording = asyncio.create_task(self._record_later(self.instance, source, last))
        except BaseException:
            await asyncio.shield(self.instance.delete())
            raise
        else:
            self.cleanup_task = asyncio.create_task(self._delete(garbage))
        self.describe(self.contents)

    async def _record_later(self, instance: GVisorSandbox, source: Checkpoint, last: str) -> None:
        """Retry recording that ``instance`` runs, until it is saved or ended. The next change deletes the garbage.

        ``last`` is the latest checkpoint in the document at the time of the restore.
        """

        def runs() -> bool:
            return self.instance is instance and instance.state == State.RUNNING

        def change(document: GCSSandboxMetadata) -> GCSSandboxMetadata:
            return document.started(source, None, now()) if runs() and document.last == last else document

        while runs() and self.metadata.last == last:
            await asyncio.sleep(RECORD_AGAIN)
            try:
                await self._book().change(change)
            except NOT_OURS as error:
                log.error("Sandbox %s cannot be recorded as running: %s", self.sandbox_id, error)
                return
            except Exception as error:
                log.info("Sandbox %s is still not recorded as running: %s", self.sandbox_id, error)
            else:
                log.warning("Sandbox %s is recorded in storage again", self.sandbox_id)
                self.describe(self.contents)
                return

    async def _record_running(self, checkpoint: Checkpoint | None, previous: Checkpoint | None) -> None:
        try:
            garbage = await self._change(lambda document: document.started(checkpoint, previous, now()))
        except BaseException:
            await asyncio.shield(self.instance.delete())
            raise
        self.describe(self.contents)
        self.cleanup_task = asyncio.create_task(self._delete(garbage))

    async def _change(self, change: ledger.Change, most: int = ledger.MOST_DOCUMENT) -> set[str]:
        """Change the document and return the artifacts that it no longer needs: superseded ones and failed attempts.

        Only artifacts from before the change are returned: after it, another server may have added its own.
        """
        store, found = self._kept_in().checkpoints, set[str]()
        if store:
            found = await control(artifacts, store, checkpoints_prefix(self.sandbox_id))
        await self._book().change(change, most)
        return found - self.metadata.kept

    async def _delete(self, garbage: set[str]) -> None:
        with suppress(StorageError):  # the next change deletes it
            for name in garbage:
                await bulk(self._kept_in().required_checkpoints().delete_all, name)

    def _required_grant(self) -> Grant:
        if self._grant is None:
            raise SandboxError(f"Sandbox {self.sandbox_id} cannot be restored before its mounts are planned.")
        return self._grant

    def _book(self) -> Document:
        if self._ledger is None:
            raise SandboxError(f"Sandbox {self.sandbox_id} is ephemeral: nothing of it is kept.")
        return self._ledger

    def _kept_in(self) -> Stores:
        self._book()
        assert self._stores is not None
        return self._stores


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
    book = creating.result()
    made = book.metadata
    with suppress(StorageError):  # an empty sandbox is left, which can be opened
        await control(stores.metadata.delete, metadata_name(made.sandbox_id), book.generation)
        JOURNAL.write(Entry(made.sandbox_id, What.DELETED, kernel_name=made.kernel_name, user=made.user))


async def _require_fit(
    document: GCSSandboxMetadata, source: Checkpoint, runsc: Runsc, stores: Stores, grant: Grant | None
) -> BundleSpec | None:
    """Return the spec for restoring ``source`` with ``grant``; None without a grant. Raises IncompatibleError."""
    if reasons := await control(checkpoints.obstacles, source, runsc):
        raise _incompatible(document, source, reasons)
    if grant is None:
        return None
    spec = _planned(document, source, grant)
    if reasons := await control(checkpoints.file_obstacles, source, spec, stores.digests):
        raise _incompatible(document, source, reasons)
    return spec


def _planned(document: GCSSandboxMetadata, source: Checkpoint, grant: Grant) -> BundleSpec:
    spec, reasons = derive(source.spec, source.contents.get("cwd"), grant)
    if reasons:
        raise _incompatible(document, source, reasons)
    return spec


def _incompatible(document: GCSSandboxMetadata, source: Checkpoint, reasons: list[str]) -> IncompatibleError:
    offered = document.previous is not None and source is not document.previous
    return IncompatibleError(document.sandbox_id, reasons, offered)
