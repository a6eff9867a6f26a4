"""SandboxHandle: one sandbox as the rest of the program holds it, made only by its factories.

A persistent sandbox is its metadata.json: it exists from the moment that is written, and is gone from the moment that
is deleted; checkpoints that no document names are garbage, and are collected.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from . import checkpoints, environment, ledger, snapshots
from .bundle import BundleSpec
from .checkpoints import now
from .errors import (
    ConfigurationError,
    CorruptObjectError,
    IncompatibleError,
    SandboxError,
    StorageError,
    UnsaveableError,
)
from .estates import leased
from .fingerprints import Fingerprints
from .gvisor import GVisorSandbox
from .ledger import Ledger
from .link import AFTER_RESTORE, BEFORE_CHECKPOINT
from .lock.base import Lease, Owner
from .metadata import Checkpoint, GCSArtifact, GCSSandboxMetadata, Note
from .names import artifacts, checkpoints_prefix, metadata_name, snapshot_prefix, valid_id
from .runsc import Runsc
from .runtime import RuntimeFolder
from .staging import staging
from .storage.base import Advance, nothing
from .stores import Shelf, Stores


@dataclass(frozen=True)
class Identity:
    """Whose sandbox it is, and what for: what its metadata tells besides its state."""

    kernel_name: str = ""
    notebook_path: str = ""
    user: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


class SandboxHandle:
    """A sandbox's name, its driver, and, if it is persistent, its ledger.

    ``instance``, ``last_activity``, ``idle_timeout`` and ``cleanup_task`` are of its present run on this server. The
    constructor only sets what it is given: use a factory.
    """

    def __init__(
        self,
        sandbox_id: str,
        instance: GVisorSandbox,
        stores: Stores | None = None,
        book: Ledger | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.instance = instance
        self.contents: Mapping[str, Any] = {}
        self.last_activity = time.monotonic()
        self.idle_timeout: float | None = None
        self.cleanup_task: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[Checkpoint] | None = None
        self._stores = stores
        self._ledger = book
        self._shelf = stores.shelf if stores else shelf
        self._source: Checkpoint | None = None

    # -- factories -------------------------------------------------------------------------------------------------

    @classmethod
    def create_ephemeral(
        cls, sandbox_id: str, spec: BundleSpec, runsc: Runsc, platform: str = "systrap", shelf: Shelf | None = None
    ) -> SandboxHandle:
        """A sandbox that leaves nothing behind but the snapshots it is asked for; it is not started yet."""
        return cls(valid_id(sandbox_id), GVisorSandbox(sandbox_id, spec, runsc, platform), shelf=shelf)

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
        """A new persistent sandbox, not started yet. SandboxExistsError, LeaseHeldError: nothing is left behind."""
        _require_checkpoints(stores)
        about = vars(identity or Identity())
        first = GCSSandboxMetadata(sandbox_id=sandbox_id, created=now(), last_used=now(), **about)
        async with leased(sandbox_id, stores, owner) as lease:
            book = await Ledger.create(stores.metadata, metadata_name(sandbox_id), lease, first)
        return cls._persistent(spec, runsc, platform, stores, book, None)

    @classmethod
    async def attach_persistent(
        cls,
        sandbox_id: str,
        spec: BundleSpec,
        runsc: Runsc,
        stores: Stores,
        owner: Owner,
        platform: str = "systrap",
        patience: float = 0.0,
        previous: bool = False,
    ) -> SandboxHandle:
        """The sandbox that there is, not running yet: ``restore`` it, or ``start`` it if it has no checkpoint.

        ``spec`` and ``platform`` are for one without. SandboxNotFoundError; LeaseHeldError after ``patience`` seconds;
        IncompatibleError if this server cannot restore it, which offers the ``previous`` checkpoint if there is one.
        """
        _require_checkpoints(stores)
        async with leased(sandbox_id, stores, owner, patience) as lease:
            book = await Ledger.open(stores.metadata, metadata_name(sandbox_id), lease, sandbox_id)
            source = book.metadata.previous if previous else book.metadata.checkpoint
            if previous and source is None:
                raise SandboxError(f"Sandbox {sandbox_id} has no checkpoint before its last one.")
            if source:
                await _require_fit(book.metadata, source, runsc, stores)
                spec, platform = source.spec, source.platform
            await book.sign()
        return cls._persistent(spec, runsc, platform, stores, book, source)

    @classmethod
    async def rescue(
        cls, folder: RuntimeFolder, note: Note, runsc: Runsc, stores: Stores, owner: Owner, patience: float = 0.0
    ) -> SandboxHandle:
        """The sandbox that runs on in ``folder`` though its server died: ``checkpoint`` it."""
        async with leased(note.sandbox_id, stores, owner, patience) as lease:
            book = await Ledger.open(stores.metadata, metadata_name(note.sandbox_id), lease, note.sandbox_id)
            await book.sign()
        handle = cls._persistent(note.spec, runsc, note.platform, stores, book, book.metadata.checkpoint)
        handle.contents = note.contents
        handle.instance = GVisorSandbox.orphan(
            note.sandbox_id, handle.instance.spec, runsc, note.platform, folder, note.container_id
        )
        return handle

    @classmethod
    def _persistent(
        cls, spec: BundleSpec, runsc: Runsc, platform: str, stores: Stores, book: Ledger, source: Checkpoint | None
    ) -> SandboxHandle:
        sandbox_id = book.metadata.sandbox_id
        instance = GVisorSandbox(sandbox_id, replace(spec, outlives=True), runsc, platform)
        handle = cls(sandbox_id, instance, stores, book)
        handle._source = source
        handle.describe(source.contents if source else {})
        return handle

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def persistent(self) -> bool:
        """Whether its state can be kept."""
        return self._ledger is not None

    @property
    def metadata(self) -> GCSSandboxMetadata:
        """What is recorded of it now; StateError for an ephemeral one."""
        return self._book().metadata

    @property
    def lease(self) -> Lease:
        """By which this server has it."""
        return self._book().lease

    def describe(self, contents: Mapping[str, Any]) -> None:
        """Say what runs inside, for whoever restores it: it is kept with each checkpoint, and for a rescue."""
        self.contents = contents
        if self._stores and self._ledger:
            where = self._stores.metadata.where
            note = Note(self.sandbox_id, where, self.instance.spec, self.instance.platform, contents)
            self.instance.leave_note(asdict(note))

    async def change(self, **fields: Any) -> None:
        """Record something else of it, such as another ``notebook_path``."""
        await self._book().change(lambda document: replace(document, **fields))

    # -- its life ----------------------------------------------------------------------------------------------------

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint that ``restore`` would bring back."""
        return self._source is not None

    def begin_anew(self, spec: BundleSpec, platform: str) -> None:
        """Another sandbox, not started yet, in place of one that has ended or never began, under the same name."""
        spec = replace(spec, outlives=self.persistent)
        hooks = self.instance.link.hooks
        self.instance = GVisorSandbox(self.sandbox_id, spec, self.instance.runsc, platform)
        self.instance.link.hooks = hooks
        self.describe({})

    async def start(self) -> None:
        """Start it afresh. A checkpoint that there is stays until the next takes its place."""
        await self.instance.start()
        if self._ledger:
            await self._record_running(self._ledger.metadata.checkpoint, self._ledger.metadata.previous)

    async def restore(self, advance: Advance = nothing) -> None:
        """Bring it back from its checkpoint; CorruptObjectError if that is damaged, which offers the previous one if
        there is one; nothing has changed then.
        """
        self._book()
        stores, source = self._stores, self._source
        if source is None or stores is None or stores.checkpoints is None:
            raise SandboxError(f"Sandbox {self.sandbox_id} has no checkpoint to restore.")
        checkpoints.check_names(source.artifact, checkpoints_prefix(self.sandbox_id))
        with staging(stores.staging) as folder:
            try:
                image = await asyncio.to_thread(checkpoints.fetch, stores.checkpoints, source.artifact, folder, advance)
            except CorruptObjectError as error:
                error.offer_older(self.metadata.previous not in (None, source))
                raise
            await self.instance.restore(image)
        await self._record_running(source, None)

    async def checkpoint(self, advance: Advance = nothing) -> Checkpoint:
        """Save its memory and end it. If that fails, it runs on, and the last checkpoint is still there.

        FencedError if another server has taken it over. It is brought to its end even if the caller is cancelled.
        """
        self._saving = asyncio.create_task(self._checkpoint(advance))
        return await asyncio.shield(self._saving)

    async def release(self) -> None:
        """End it on this server without saving anything, and let others have it."""
        await self.instance.delete()
        if self.cleanup_task:
            self.cleanup_task.cancel()
            await asyncio.gather(self.cleanup_task, return_exceptions=True)
        if self._ledger:
            await self._ledger.lease.release()

    async def regain(self, owner: Owner) -> None:
        """Get a lost lease again, if nobody had the sandbox in between; FencedError, LeaseHeldError if somebody did."""
        assert self._stores is not None
        book = self._book()
        await book.lease.release()
        async with leased(self.sandbox_id, self._stores, owner) as lease:
            await book.pass_on(lease)

    async def record_dead(self) -> None:
        """Say that it runs no more, though nobody saved it."""
        await self._book().change(GCSSandboxMetadata.stopped)

    # -- files -------------------------------------------------------------------------------------------------------

    async def save_snapshot(self, name: str, advance: Advance = nothing) -> GCSArtifact:
        """Keep what was written in it, but not its memory, under a new ``name``; it runs on."""
        below = snapshot_prefix(self.sandbox_id, name)
        return await snapshots.save(self._required_shelf(), below, self.instance, advance)

    async def load_snapshot(self, sandbox_id: str, name: str, advance: Advance = nothing) -> None:
        """Put the files of a snapshot, of this or of another sandbox, in their places in this one, which runs."""
        await snapshots.load(self._required_shelf(), snapshot_prefix(sandbox_id, name), self.instance, advance)

    def _required_shelf(self) -> Shelf:
        if self._shelf is None:
            raise ConfigurationError(
                "FILESYSTEM_SNAPSHOT_BUCKET",
                "This server has no place for snapshots: FILESYSTEM_SNAPSHOT_BUCKET is not set.",
                "Set it, or FILESYSTEM_SNAPSHOT_MOUNT_PATH.",
            )
        return self._shelf

    # -- how ---------------------------------------------------------------------------------------------------------

    async def _checkpoint(self, advance: Advance) -> Checkpoint:
        self._book()
        stores = self._stores
        assert stores is not None and stores.checkpoints is not None
        store, began = stores.checkpoints, time.monotonic()
        below = f"{checkpoints_prefix(self.sandbox_id)}{checkpoints.new_name()}/"
        files = await self._prepare(stores.fingerprints) if self.instance.reachable else {}
        made: list[Checkpoint] = []
        garbage: set[str] = set()
        with staging(stores.staging) as folder:
            image = folder / "image"

            async def commit() -> None:
                artifact = await asyncio.to_thread(checkpoints.save, store, below, image, advance)
                made.append(self._recorded(artifact, files, time.monotonic() - began))
                garbage.update(await self._change(lambda document: document.saved(made[0], now())))

            await self.instance.checkpoint(image, commit)
        self._source = made[0]
        await self._delete(garbage)
        return made[0]

    async def _prepare(self, fingerprints: Fingerprints) -> dict[str, Any]:
        """Tell it what is coming, and which host files it depends on; UnsaveableError if it cannot be saved."""
        await self.instance.link.call(BEFORE_CHECKPOINT)
        try:
            return await self._files(fingerprints)
        except BaseException:
            await asyncio.shield(self.instance.link.call(AFTER_RESTORE))
            raise

    async def _files(self, fingerprints: Fingerprints) -> dict[str, Any]:
        files = await environment.inventory(self.instance, fingerprints)
        if reasons := environment.unsaveable(files):
            raise UnsaveableError(self.sandbox_id, reasons)
        return environment.to_json(files)

    def _recorded(self, artifact: GCSArtifact, files: Mapping[str, Any], seconds: float) -> Checkpoint:
        return Checkpoint(
            artifact=artifact,
            runsc_version=self.instance.runsc.version,
            runsc_sha256=self.instance.runsc.sha256,
            platform=self.instance.platform,
            architecture=os.uname().machine,
            cpu_features=environment.cpu_features(),
            spec=self.instance.spec,
            files=files,
            contents=self.contents,
            seconds=round(seconds, 3),
        )

    async def _record_running(self, checkpoint: Checkpoint | None, previous: Checkpoint | None) -> None:
        try:
            garbage = await self._change(lambda document: document.started(checkpoint, previous, now()))
        except BaseException:
            await asyncio.shield(self.instance.delete())
            raise
        self.cleanup_task = asyncio.create_task(self._delete(garbage))

    async def _change(self, change: ledger.Change) -> set[str]:
        """Change the document; the artifacts that nobody needs then: proven ones' predecessors, failed attempts.

        Only what was there before the change counts, because after it another server may have made its own.
        """
        assert self._stores is not None and self._stores.checkpoints is not None
        found = await asyncio.to_thread(artifacts, self._stores.checkpoints, checkpoints_prefix(self.sandbox_id))
        await self._book().change(change)
        document = self._book().metadata
        return found - {kept.artifact.name for kept in (document.checkpoint, document.previous) if kept}

    async def _delete(self, garbage: set[str]) -> None:
        assert self._stores is not None and self._stores.checkpoints is not None
        with suppress(StorageError):  # the next one collects
            for name in garbage:
                await asyncio.to_thread(self._stores.checkpoints.delete_all, name)

    def _book(self) -> Ledger:
        if self._ledger is None:
            raise SandboxError(f"Sandbox {self.sandbox_id} is ephemeral: nothing of it is kept.")
        return self._ledger


def _require_checkpoints(stores: Stores) -> None:
    if stores.checkpoints is None:
        raise ConfigurationError(
            "SANDBOX_CHECKPOINT_BUCKET",
            "A persistent sandbox needs a place for checkpoints, and SANDBOX_CHECKPOINT_BUCKET is not set.",
            "Set it, or SANDBOX_CHECKPOINT_MOUNT_PATH.",
        )


async def _require_fit(document: GCSSandboxMetadata, source: Checkpoint, runsc: Runsc, stores: Stores) -> None:
    reasons = await asyncio.to_thread(checkpoints.obstacles, source, runsc, stores.fingerprints)
    if reasons:
        offered = document.previous is not None and source is not document.previous
        raise IncompatibleError(document.sandbox_id, reasons, offered)
