"""SandboxHandle: one sandbox as the rest of the program holds it, made only by its factories.

A persistent sandbox is its metadata.json: it exists from the moment that is written, and is gone from the moment that
is deleted; checkpoints that no document names are garbage, and are collected.
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

from . import capture, checkpoints, estates, ledger, snapshots
from .bundle import BundleSpec, Mount
from .checkpoints import now
from .errors import (
    CorruptObjectError,
    GuestError,
    IncompatibleError,
    ObjectNotFoundError,
    RunscError,
    SandboxError,
    SandboxNotFoundError,
    SavepointExistsError,
    StateError,
    StorageError,
    TooManySavepointsError,
    UnresponsiveError,
    UnsaveableError,
)
from .estates import RESEED, leased
from .folders import require_itself
from .gvisor import GVisorSandbox
from .journal import JOURNAL, Entry, What
from .ledger import Ledger
from .link import Hooks
from .lock.base import Lease, Owner
from .metadata import Checkpoint, GCSArtifact, GCSSandboxMetadata, Note
from .names import artifacts, checkpoints_prefix, metadata_name, snapshot_prefix, valid_id
from .restore_plan import Grant, derive
from .runsc import Runsc
from .runtime import RuntimeFolder
from .staging import staging
from .states import Action, State, after
from .storage.base import Advance, nothing
from .stores import Shelf, Stores, required_shelf
from .workers import bulk, control

log = logging.getLogger(__name__)

RESEED_SECONDS = 10.0
MAX_SAVEPOINTS = 64
MOST_WITH_SAVEPOINT = ledger.MOST_DOCUMENT - 2 * capture.MOST_RECORDED
"""Bytes that a new savepoint may make of a document: savepoints leave room for the next two checkpoints."""
UNPLANNED = BundleSpec(python=sys.executable, home="/home", user="user")
"""The spec of a sandbox that is not started before ``permit`` or ``begin_anew`` gives it another."""


@dataclass(frozen=True)
class Identity:
    """Whose sandbox it is, and what for: what its metadata tells besides its state."""

    kernel_name: str = ""
    notebook_path: str = ""
    user: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    shared_with: tuple[str, ...] = ()

    def document(self, sandbox_id: str) -> GCSSandboxMetadata:
        """The first one of a new sandbox."""
        return GCSSandboxMetadata(sandbox_id=sandbox_id, created=now(), last_used=now(), **vars(self))


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
        self.outdated = False
        """Of one that is rescued: whether another server has gone on without it."""
        self.last_activity = time.monotonic()
        self.idle_timeout: float | None = None
        self.cleanup_task: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[Checkpoint] | None = None
        self._inventory: asyncio.Task[dict[str, Any]] | None = None
        self._stores = stores
        self._ledger = book
        self._shelf = stores.shelf if stores else shelf
        self._source: Checkpoint | None = None
        self._taken_over = False
        self._grant: Grant | None = Grant.of(instance.spec, instance.platform)

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
        """A new persistent sandbox, not started yet. SandboxExistsError, LeaseHeldError: nothing is left behind.

        Nothing is left behind either if the caller is cancelled.
        """
        first = (identity or Identity()).document(sandbox_id)
        async with leased(sandbox_id, stores, owner) as lease:
            create = Ledger.create(stores.metadata, stores.signer, metadata_name(sandbox_id), lease, first)
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
        """The sandbox that there is, not running yet: ``restore`` it, or ``start`` it if it has no checkpoint.

        It gets the mounts of ``spec`` and nothing that only its record in storage names; without a ``spec``, ``permit``
        must be called before ``restore``. SandboxNotFoundError; LeaseHeldError after ``patience`` seconds;
        IncompatibleError if this server cannot restore it, which offers the ``previous`` checkpoint if there is one.
        """
        await control(_require_document, stores, sandbox_id)  # spares the lease of one that is to be created
        async with leased(sandbox_id, stores, owner, patience) as lease:
            book = await estates.open_document(stores, sandbox_id, lease)
            source = book.metadata.previous if previous else book.metadata.checkpoint
            if previous and source is None:
                raise SandboxError(f"Sandbox {sandbox_id} has no checkpoint before its last one.")
            grant = Grant.of(spec, platform) if spec else None
            if source:
                stores.required_checkpoints()
                spec = await _require_fit(book.metadata, source, runsc, stores, grant)
            await estates.sign(book, stores)
        handle = cls._persistent(spec or UNPLANNED, runsc, platform, stores, book, source)
        handle._grant = grant
        return handle

    @classmethod
    async def rescue(
        cls, folder: RuntimeFolder, note: Note, runsc: Runsc, stores: Stores, owner: Owner, patience: float = 0.0
    ) -> SandboxHandle:
        """The sandbox that runs on in ``folder`` though its server died: ``checkpoint`` it."""
        async with leased(note.sandbox_id, stores, owner, patience) as lease:
            book = await estates.open_document(stores, note.sandbox_id, lease)
            outdated = note.outdated(book.metadata)
            await estates.sign(book, stores)
        handle = cls._persistent(note.spec, runsc, note.platform, stores, book, book.metadata.checkpoint)
        handle.contents, handle.outdated = note.contents, outdated
        handle.instance = GVisorSandbox.orphan(
            note.sandbox_id, handle.instance.spec, runsc, note.platform, folder, note.container_id
        )
        return handle

    @classmethod
    def _persistent(
        cls, spec: BundleSpec, runsc: Runsc, platform: str, stores: Stores, book: Ledger, source: Checkpoint | None
    ) -> SandboxHandle:
        sandbox_id = book.metadata.sandbox_id
        instance = GVisorSandbox(sandbox_id, replace(spec, outlives=stores.checkpoints is not None), runsc, platform)
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
    def can_save(self) -> bool:
        """True if it is persistent and this server has a place for checkpoints."""
        return self._stores is not None and self._stores.checkpoints is not None

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
            spec, platform, document = self.instance.spec, self.instance.platform, self._ledger.metadata
            token = document.tenancy.token if document.tenancy else None
            note = Note(self.sandbox_id, where, spec, platform, contents, token, document.last)
            self.instance.leave_note(asdict(note))

    def entry(self, what: What) -> Entry:
        """For the journal, when that has happened to it."""
        if self._ledger is None:
            return Entry(self.sandbox_id, what)
        return Entry(self.sandbox_id, what, kernel_name=self.metadata.kernel_name, user=self.metadata.user)

    async def change(self, **fields: Any) -> None:
        """Record something else of it, such as another ``notebook_path``."""
        await self._book().change(lambda document: replace(document, **fields))

    # -- its life ----------------------------------------------------------------------------------------------------

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint that ``restore`` would bring back."""
        return self._source is not None

    async def permit(self, grant: Grant) -> None:
        """Set the mounts that restores of this sandbox may use, and plan the next one with them.

        IncompatibleError if this server cannot restore its checkpoint with them; the state is kept.
        """
        self._grant = grant
        if self._source:
            await _require_fit(self.metadata, self._source, self.instance.runsc, self._kept_in(), grant)
            self.go_to(self._source)

    def begin_anew(self, spec: BundleSpec, platform: str, grant: Grant | None = None) -> None:
        """Another sandbox, not started yet, in place of one that has ended or never began, under the same name.

        ``grant`` is for later restores of other checkpoints; without it the earlier one stays.
        """
        self._grant = grant or self._grant
        spec = replace(spec, outlives=self.can_save)
        hooks = self.instance.link.hooks
        self.instance = GVisorSandbox(self.sandbox_id, spec, self.instance.runsc, platform)
        self.instance.link.hooks = hooks
        self._taken_over = False
        self.describe({})

    def take_over(self, sandbox: GVisorSandbox) -> None:
        """Have a copy of a template that runs already in place of the sandbox that was to be started."""
        sandbox.sandbox_id, sandbox.spec = self.sandbox_id, self.instance.spec
        sandbox.link.hooks = self.instance.link.hooks
        self.instance = sandbox
        self._taken_over = True
        self.describe(self.contents)

    async def start(self, template: Path | None = None) -> None:
        """Start it afresh, or as a copy of a template. A checkpoint that there is stays until the next is made."""
        with JOURNAL.doing(self.entry(What.STARTED if self.persistent else What.CREATED)):
            if not self._taken_over:
                await self.instance.start(template)
            self._taken_over = False
            if self._ledger:
                await self._record_running(self._ledger.metadata.checkpoint, self._ledger.metadata.previous)

    async def restore(self) -> None:
        """Bring it back from its checkpoint; CorruptObjectError if that is damaged, which offers the previous one if
        there is one; nothing has changed then.
        """
        stores, source = self._kept_in(), self._source
        if source is None:
            raise SandboxError(f"Sandbox {self.sandbox_id} has no checkpoint to restore.")
        after(self.sandbox_id, Action.RESTORE, self.instance.state)  # somebody was quicker, which is no failure
        slept_here = self.instance.state == State.CHECKPOINTED
        grant = self._required_grant()
        for mount in filter(None, (self._working_folder(), *grant.watched)):
            require_itself(mount)
        checkpoints.check_names(source.artifact, checkpoints_prefix(self.sandbox_id))
        with JOURNAL.doing(self.entry(What.WOKEN)) as work, staging(stores.staging) as folder:
            work.size = source.size
            store = stores.required_checkpoints()
            if slept_here:  # whoever attached or rewound it has looked already
                await _require_fit(self.metadata, source, self.instance.runsc, stores, grant)
            try:
                image = await control(checkpoints.fetch, store, source.artifact, folder, work.advance)
            except CorruptObjectError as error:
                error.offer_older(self.metadata.previous not in (None, source))
                raise
            with self._reseeding():
                await self.instance.restore(image)
            await self._record_running(source, None)

    async def checkpoint(self, insist: float | None = None) -> Checkpoint:
        """Save its memory and end it. If that fails, it runs on, and the last checkpoint is still there.

        FencedError if another server has taken it over. It is brought to its end even if the caller is cancelled.

        A guest has ``insist`` seconds to help, if that is given: to run its hook, and to say which files it uses. After
        that, or if it refuses, it is saved without its help, as one whose server was killed; it then has to be restored
        by another handle. UnresponsiveError if runsc cannot save it like that: no server could.
        """
        self._saving = asyncio.create_task(self._checkpoint(insist))
        return await asyncio.shield(self._saving)

    # -- savepoints --------------------------------------------------------------------------------------------------

    async def savepoint(self, name: str) -> Checkpoint:
        """Keep its memory as it is now under a new ``name``; it runs on. SavepointExistsError if there is one."""
        if valid_id(name) in self.metadata.savepoints:
            raise SavepointExistsError(self.sandbox_id, name)
        self._require_room()
        self._saving = asyncio.create_task(self._savepoint(name))
        return await asyncio.shield(self._saving)

    async def copy(self, sandbox_id: str, savepoint: str = "", advance: Advance = nothing) -> Checkpoint:
        """Store a savepoint of it, or its present memory, as a checkpoint of the sandbox ``sandbox_id``; it runs on."""
        stores, began = self._kept_in(), time.monotonic()
        source = self.metadata.savepoint(savepoint) if savepoint else self._source
        if source and (savepoint or self.instance.state == State.CHECKPOINTED):
            return await estates.copy_checkpoint(stores, self.sandbox_id, source, sandbox_id, advance)
        below = f"{checkpoints_prefix(sandbox_id)}{checkpoints.new_name()}/"
        with staging(stores.staging) as folder:
            image = folder / "image"
            files = await self._take_inventory()
            await self.instance.copy(image)
            artifact = await bulk(checkpoints.save, stores.required_checkpoints(), below, image, advance)
        return capture.recorded(self.instance, artifact, files, self.contents, time.monotonic() - began)

    async def drop_savepoint(self, name: str) -> None:
        """Forget a savepoint. SavepointNotFoundError."""
        self.metadata.savepoint(name)
        await self._delete(await self._change(lambda document: document.without_savepoint(name)))

    async def find_savepoint(self, name: str) -> Checkpoint:
        """A savepoint that this server can restore, when there is room for one of the present.

        SavepointNotFoundError, IncompatibleError.
        """
        found = self.metadata.savepoint(name)
        self._require_room()
        await _require_fit(self.metadata, found, self.instance.runsc, self._kept_in(), self._required_grant())
        return found

    async def keep_present(self) -> str:
        """Make a savepoint of its checkpoint, so that it can ``go_to`` another; returns the savepoint's name."""
        present, name = self._source, f"before-rewind-{checkpoints.new_name()}"
        if self.instance.state != State.CHECKPOINTED or present is None:
            raise StateError(self.sandbox_id, "rewind", self.instance.state)
        await self._change(lambda document: document.with_savepoint(name, present))
        return name

    def go_to(self, source: Checkpoint) -> None:
        """Another sandbox, not running yet, that ``restore`` brings back from ``source``.

        Its mounts are the present ones; IncompatibleError if they do not fit.
        """
        grant = self._required_grant()
        self.begin_anew(_planned(self.metadata, source, grant), grant.platform)
        self._source = source
        self.describe(source.contents)

    async def release(self) -> None:
        """End it on this server without saving anything, and let others have it."""
        try:
            await self.instance.delete()
            if self.cleanup_task:
                self.cleanup_task.cancel()
                await asyncio.gather(self.cleanup_task, return_exceptions=True)
        finally:
            if self._ledger:  # also if the sandbox could not be ended: nothing else ends the lease's renewal
                await asyncio.shield(self._ledger.lease.release())

    async def regain(self, owner: Owner) -> None:
        """Get a lost lease again, if nobody had the sandbox in between; FencedError, LeaseHeldError if somebody did."""
        book = self._book()
        await book.lease.release()
        async with leased(self.sandbox_id, self._kept_in(), owner) as lease:
            await book.pass_on(lease)
        self.describe(self.contents)

    async def record_dead(self) -> None:
        """Say that it runs no more, though nobody saved it."""
        await self._book().change(GCSSandboxMetadata.stopped)

    # -- files -------------------------------------------------------------------------------------------------------

    async def save_snapshot(self, name: str) -> GCSArtifact:
        """Keep what was written in it, but not its memory, under a new ``name``; it runs on."""
        shelf, below = required_shelf(self._shelf), snapshot_prefix(self.sandbox_id, name)
        with JOURNAL.doing(self.entry(What.SAVED)) as work:
            made = await snapshots.save(shelf, below, self.instance, work.advance)
            work.size = made.size
        return made

    async def load_snapshot(self, sandbox_id: str, name: str) -> None:
        """Put the files of a snapshot, of this or of another sandbox, in their places in this one, which runs."""
        await snapshots.load(required_shelf(self._shelf), snapshot_prefix(sandbox_id, name), self.instance)

    # -- how ---------------------------------------------------------------------------------------------------------

    async def _checkpoint(self, insist: float | None) -> Checkpoint:
        stores, began = self._kept_in(), time.monotonic()
        store = stores.required_checkpoints()
        after(self.sandbox_id, Action.CHECKPOINT, self.instance.state)
        below = f"{checkpoints_prefix(self.sandbox_id)}{checkpoints.new_name()}/"
        made: list[Checkpoint] = []
        garbage: set[str] = set()
        with JOURNAL.doing(self.entry(What.HIBERNATED)) as work, staging(stores.staging) as folder:
            files = await self._prepare(insist)
            image = folder / "image"

            async def commit() -> None:
                artifact = await bulk(checkpoints.save, store, below, image, work.advance)
                made.append(capture.recorded(self.instance, artifact, files, self.contents, time.monotonic() - began))
                garbage.update(await self._change(lambda document: document.saved(made[0], now())))

            try:
                await self.instance.checkpoint(image, commit, insist=insist is not None)
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
        """Return the files that it depends on, as the guest and the host see them; ``give_up_inventory`` ends that."""
        self._inventory = asyncio.create_task(capture.prepare(self.instance, self._kept_in().fingerprints))
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

    def give_up_inventory(self) -> None:
        """Have a savepoint or copy fail that waits for the guest, so that a stopping server can go on."""
        if self._inventory:
            self._inventory.cancel()

    async def _prepare(self, insist: float | None) -> dict[str, Any]:
        """Return the files that it depends on; none if it does not help within ``insist`` seconds, and is cut off."""
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
        """The folder that its kernel works in, if it is one of the host's."""
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

    @contextmanager
    def _reseeding(self) -> Iterator[None]:
        """A restore in which a fork, which another sandbox has all random numbers of, gets others, this one time."""
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

    async def _record_running(self, checkpoint: Checkpoint | None, previous: Checkpoint | None) -> None:
        try:
            garbage = await self._change(lambda document: document.started(checkpoint, previous, now()))
        except BaseException:
            await asyncio.shield(self.instance.delete())
            raise
        self.describe(self.contents)
        self.cleanup_task = asyncio.create_task(self._delete(garbage))

    async def _change(self, change: ledger.Change, most: int = ledger.MOST_DOCUMENT) -> set[str]:
        """Change the document; the artifacts that nobody needs then: proven ones' predecessors, failed attempts.

        Only what was there before the change counts, because after it another server may have made its own.
        """
        store, found = self._kept_in().checkpoints, set[str]()
        if store:
            found = await control(artifacts, store, checkpoints_prefix(self.sandbox_id))
        await self._book().change(change, most)
        return found - self.metadata.kept

    async def _delete(self, garbage: set[str]) -> None:
        with suppress(StorageError):  # the next one collects
            for name in garbage:
                await bulk(self._kept_in().required_checkpoints().delete_all, name)

    def _required_grant(self) -> Grant:
        if self._grant is None:
            raise SandboxError(f"Sandbox {self.sandbox_id} cannot be restored before its mounts are planned.")
        return self._grant

    def _book(self) -> Ledger:
        if self._ledger is None:
            raise SandboxError(f"Sandbox {self.sandbox_id} is ephemeral: nothing of it is kept.")
        return self._ledger

    def _kept_in(self) -> Stores:
        self._book()
        assert self._stores is not None
        return self._stores


def _require_document(stores: Stores, sandbox_id: str) -> None:
    """Raise SandboxNotFoundError if there is no such sandbox. Blocks."""
    try:
        stores.metadata.info(metadata_name(sandbox_id))
    except ObjectNotFoundError as error:
        raise SandboxNotFoundError(sandbox_id, stores.metadata.where) from error


async def _undo(creating: asyncio.Task[Ledger], stores: Stores) -> None:
    """Delete the document of a sandbox whose creation was cancelled while it was being written."""
    await asyncio.wait({creating})
    if creating.exception():
        return
    book = creating.result()
    made = book.metadata
    with suppress(StorageError):  # then it is an empty sandbox, which can be opened
        await control(stores.metadata.delete, metadata_name(made.sandbox_id), book.generation)
        JOURNAL.write(Entry(made.sandbox_id, What.DELETED, kernel_name=made.kernel_name, user=made.user))


async def _require_fit(
    document: GCSSandboxMetadata, source: Checkpoint, runsc: Runsc, stores: Stores, grant: Grant | None
) -> BundleSpec | None:
    """Return the spec that ``source`` is restored with under ``grant``, None without one; IncompatibleError."""
    if reasons := await control(checkpoints.obstacles, source, runsc):
        raise _incompatible(document, source, reasons)
    if grant is None:
        return None
    spec = _planned(document, source, grant)
    if reasons := await control(checkpoints.file_obstacles, source, spec, stores.fingerprints):
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
