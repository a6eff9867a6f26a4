"""Run, save and restore one sandbox: its instance, and the checkpoint that it is restored from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import CorruptObjectError, IncompatibleError, SandboxError, SavepointExistsError, StateError
from ..events import EVENT_BUS, Entry, EventKind
from ..gvisor.bundle import BundleSpec, Mount
from ..gvisor.mounts import require_itself
from ..gvisor.restore_plan import Grant, derive
from ..gvisor.runsc import Runsc
from ..gvisor.sandbox import GVisorSandbox
from ..gvisor.state import Action, State, after
from ..mux.connection import Hooks
from ..persistence import checkpoints, snapshots
from ..persistence.backends import SnapshotStorage, Stores
from ..persistence.checkpoints import now
from ..persistence.metadata import Checkpoint, GCSArtifact, GCSSandboxMetadata, Note
from ..persistence.names import checkpoints_prefix, snapshot_prefix, valid_id
from ..persistence.staging import staging
from ..storage.base import Advance, nothing
from ..workers import control, finished
from . import detached
from .detached import RESEED
from .image_writer import ImageWriter
from .stored_state import MOST_WITH_SAVEPOINT, StoredState

RESEED_SECONDS = 10.0


class SandboxMemory:
    """The memory of one sandbox: in its running ``instance``, or saved as a checkpoint (``source``).

    Owned by a SandboxHandle, whose lock is held during each coroutine. ``stored`` is None for an ephemeral sandbox.
    ``grant`` has the mounts that a restore may use; None until they are planned.
    """

    def __init__(
        self,
        sandbox_id: str,
        instance: GVisorSandbox,
        stored: StoredState | None,
        source: Checkpoint | None = None,
        grant: Grant | None = None,
    ) -> None:
        self.instance = instance
        self.contents: Mapping[str, Any] = {}
        self.source = source
        self.images = ImageWriter(stored.stores) if stored else None
        self._sandbox_id = sandbox_id
        self._stored = stored
        self._grant = grant
        self._adopted = False
        if stored:
            stored.on_recorded = lambda: self.describe(self.contents)

    @property
    def stored(self) -> StoredState:
        """The document in storage. Raises SandboxError for an ephemeral sandbox."""
        if self._stored is None:
            raise SandboxError(f"Sandbox {self._sandbox_id} is ephemeral: nothing of it is kept.")
        return self._stored

    def describe(self, contents: Mapping[str, Any]) -> None:
        """Set the description of the processes inside, which is stored with each checkpoint and in the rescue note."""
        self.contents = contents
        if self._stored:
            where, document = self._stored.stores.metadata.where, self._stored.metadata
            token = document.tenancy.token if document.tenancy else None
            spec, platform = self.instance.spec, self.instance.platform
            note = Note(self._sandbox_id, where, spec, platform, contents, token, document.last)
            self.instance.leave_note(asdict(note))

    def entry(self, what: EventKind) -> Entry:
        """Return an entry for the event bus that reports the event ``what``."""
        if self._stored is None:
            return Entry(self._sandbox_id, what)
        document = self._stored.metadata
        return Entry(self._sandbox_id, what, kernel_name=document.kernel_name, user=document.user)

    # -- start -------------------------------------------------------------------------------------------------------

    def replace_instance(self, spec: BundleSpec, platform: str, grant: Grant | None = None) -> None:
        """Replace the instance, which has ended or never started, with a new, unstarted one of the same id.

        ``grant`` is for later restores of other checkpoints; without it the current one is kept.
        """
        self._grant = grant or self._grant
        hooks, runsc = self.instance.connection.hooks, self.instance.runsc
        outlives = self._stored is not None and self._stored.stores.checkpoints is not None
        self.instance = GVisorSandbox(self._sandbox_id, replace(spec, outlives=outlives), runsc, platform)
        self.instance.connection.hooks = hooks
        self._adopted = False
        self.describe({})

    def adopt(self, sandbox: GVisorSandbox) -> None:
        """Use a running copy of a template as the instance; ``start`` then only records that it runs."""
        sandbox.sandbox_id, sandbox.spec = self._sandbox_id, self.instance.spec
        sandbox.connection.hooks = self.instance.connection.hooks
        self.instance = sandbox
        self._adopted = True
        self.describe(self.contents)

    async def start(self, template: Path | None = None) -> None:
        """Start the instance without saved state, or as a copy of ``template``, and record that it runs."""
        with EVENT_BUS.doing(self.entry(EventKind.STARTED if self._stored else EventKind.CREATED)):
            if not self._adopted:
                await self.instance.start(template)
            self._adopted = False
            if self._stored:
                await self._stored.record_started(self.instance)

    # -- save --------------------------------------------------------------------------------------------------------

    async def checkpoint(self, insist: float | None = None) -> Checkpoint:
        """Save the memory as the current checkpoint and end the instance. Errors are those of SandboxHandle.save."""
        stored, images = self.stored, self._writer()
        stored.stores.required_checkpoints()
        after(self._sandbox_id, Action.CHECKPOINT, self.instance.state)
        garbage: set[str] = set()

        async def record(made: Checkpoint) -> None:
            garbage.update(await stored.change(lambda document: document.saved(made, now())))

        with EVENT_BUS.doing(self.entry(EventKind.HIBERNATED)) as work:
            made = await images.checkpoint(self.instance, lambda: self.contents, record, insist, work.advance)
            work.size = made.size
        self.source = made
        await stored.delete(garbage)
        return made

    async def save_as(self, name: str) -> Checkpoint:
        """Save the memory as a savepoint; the instance runs on. Errors are those of SandboxHandle.save."""
        stored = self.stored
        if valid_id(name) in stored.metadata.savepoints:
            raise SavepointExistsError(self._sandbox_id, name)
        stored.require_room()
        with EVENT_BUS.doing(self.entry(EventKind.SAVED)) as work:
            made = self.source if self.instance.state == State.CHECKPOINTED else None
            made = made or await self.copy(self._sandbox_id, advance=work.advance)
            work.size = made.size
            garbage = await stored.change(lambda document: document.with_savepoint(name, made), MOST_WITH_SAVEPOINT)
        await stored.delete(garbage)
        return made

    async def copy(self, sandbox_id: str, savepoint: str = "", advance: Advance = nothing) -> Checkpoint:
        """Store a savepoint, or the current memory, as a checkpoint of ``sandbox_id``; the instance runs on."""
        source = self.stored.metadata.savepoint(savepoint) if savepoint else self.source
        if source and (savepoint or self.instance.state == State.CHECKPOINTED):
            return await detached.copy_checkpoint(self.stored.stores, self._sandbox_id, source, sandbox_id, advance)
        return await self._writer().copy(self.instance, lambda: self.contents, sandbox_id, advance)

    async def save_snapshot(self, storage: SnapshotStorage, name: str) -> GCSArtifact:
        """Save the files, without the memory, as the snapshot ``name``; the instance runs on."""
        with EVENT_BUS.doing(self.entry(EventKind.SAVED)) as work:
            made = await snapshots.save(storage, snapshot_prefix(self._sandbox_id, name), self.instance, work.advance)
            work.size = made.size
        return made

    def give_up_waiting(self) -> None:
        """Interrupt a save or copy that waits for the guest. Called when the server stops."""
        if self.images:
            self.images.give_up_waiting(self.instance)

    # -- restore -----------------------------------------------------------------------------------------------------

    async def permit(self, grant: Grant) -> None:
        """Set the mounts that restores may use, and plan the next restore with them. Raises IncompatibleError."""
        self._grant = grant
        try:
            if self.source:
                await self.require_fit(self.source)
                self._plan_restore(self.source)
        except SandboxError as error:
            EVENT_BUS.fail(Entry(self._sandbox_id, EventKind.WOKEN), error)
            raise

    async def require_fit(self, source: Checkpoint) -> None:
        """Raise IncompatibleError if this server cannot restore ``source`` with the mounts granted now."""
        stored = self.stored
        await planned_spec(stored.metadata, source, self.instance.runsc, stored.stores, self._required_grant())

    async def restore(self) -> None:
        """Restore ``source`` into the instance and record that it runs.

        Raises CorruptObjectError, which offers the previous checkpoint if it exists.
        """
        stored, source = self.stored, self.source
        if source is None:
            raise SandboxError(f"Sandbox {self._sandbox_id} has no checkpoint to restore.")
        # StateError if another task already restored it; raised here, it is not reported as a failed wake.
        after(self._sandbox_id, Action.RESTORE, self.instance.state)
        slept_here = self.instance.state == State.CHECKPOINTED
        for mount in filter(None, (self._working_folder(), *self._required_grant().watched)):
            require_itself(mount)
        checkpoints.check_names(source.artifact, checkpoints_prefix(self._sandbox_id))
        with EVENT_BUS.doing(self.entry(EventKind.WOKEN)) as work:
            async with staging(stored.stores.staging) as folder:
                work.size = source.size
                store = stored.stores.required_checkpoints()
                if slept_here:  # otherwise attach_persistent, permit or rewind has checked it
                    await self.require_fit(source)
                try:
                    image = await control(checkpoints.fetch, store, source.artifact, folder, work.advance)
                except CorruptObjectError as error:
                    error.offer_older(stored.metadata.previous not in (None, source))
                    raise
                await finished(self._restore_image(image, source))

    async def rewind(self, target: Checkpoint) -> str:
        """Keep the current state as a savepoint, restore ``target``, and return the savepoint's name.

        If that fails, the current state is restored and the error raised.
        """
        stored = self.stored
        with EVENT_BUS.doing(self.entry(EventKind.REWOUND)) as work:
            work.size = target.size
            present = stored.metadata.checkpoint
            if self.instance.state == State.RUNNING:
                present = await self.checkpoint()
            current, kept = self.source, f"before-rewind-{checkpoints.new_name()}"
            if self.instance.state != State.CHECKPOINTED or present is None or current is None:
                raise StateError(self._sandbox_id, "rewind", self.instance.state)
            await stored.change(lambda document: document.with_savepoint(kept, current))
            self._plan_restore(target)
            try:
                await self.restore()
            except BaseException:
                self._plan_restore(present)
                await self.restore()
                with suppress(SandboxError):
                    await stored.drop_savepoint(kept)
                raise
            return kept

    # -- internals ---------------------------------------------------------------------------------------------------

    async def _restore_image(self, image: Path, source: Checkpoint) -> None:
        with self._reseeding():
            await self.instance.restore(image)
        await self.stored.record_restored(self.instance, source)

    @contextmanager
    def _reseeding(self) -> Iterator[None]:
        """Reseed a fork at its first restore: the original sandbox has the same random state."""
        connection = self.instance.connection
        hooks = connection.hooks
        if self.contents.get(RESEED):
            connection.hooks = Hooks(max(hooks.seconds, RESEED_SECONDS), reseed=True)
        try:
            yield
        finally:
            connection.hooks = hooks
        if self.contents.get(RESEED):
            self.describe({name: value for name, value in self.contents.items() if name != RESEED})

    def _plan_restore(self, source: Checkpoint) -> None:
        """Replace the instance with a new one that is restored from ``source``, with the mounts granted now.

        Raises IncompatibleError if they do not fit.
        """
        grant = self._required_grant()
        self.replace_instance(_derived_spec(self.stored.metadata, source, grant), grant.platform)
        self.source = source
        self.describe(source.contents)

    def _working_folder(self) -> Mount | None:
        """Return the mount of its kernel's working folder; None if that is not a folder of the host."""
        spec, cwd = self.instance.spec, self.contents.get("cwd")
        shown = (mount for mount in spec.mounts if mount.source and mount.writable and mount.destination == cwd)
        return spec.carried or next(shown, None)

    def _required_grant(self) -> Grant:
        if self._grant is None:
            raise SandboxError(f"Sandbox {self._sandbox_id} cannot be restored before its mounts are planned.")
        return self._grant

    def _writer(self) -> ImageWriter:
        assert self.stored and self.images
        return self.images


async def planned_spec(
    document: GCSSandboxMetadata, source: Checkpoint, runsc: Runsc, stores: Stores, grant: Grant | None
) -> BundleSpec | None:
    """Return the spec for restoring ``source`` with ``grant``; None without a grant. Raises IncompatibleError."""
    if reasons := await control(checkpoints.obstacles, source, runsc):
        raise _incompatible(document, source, reasons)
    if grant is None:
        return None
    spec = _derived_spec(document, source, grant)
    if reasons := await control(checkpoints.file_obstacles, source, spec, stores.digests):
        raise _incompatible(document, source, reasons)
    return spec


def _derived_spec(document: GCSSandboxMetadata, source: Checkpoint, grant: Grant) -> BundleSpec:
    spec, reasons = derive(source.spec, source.contents.get("cwd"), grant)
    if reasons:
        raise _incompatible(document, source, reasons)
    return spec


def _incompatible(document: GCSSandboxMetadata, source: Checkpoint, reasons: list[str]) -> IncompatibleError:
    offered = document.previous is not None and source is not document.previous
    return IncompatibleError(document.sandbox_id, reasons, offered)
