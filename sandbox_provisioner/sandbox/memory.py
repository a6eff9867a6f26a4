"""Run, save and restore the memory of one sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import CorruptObjectError, IncompatibleError, SandboxError, SavepointExistsError, StateError
from ..events import EVENT_BUS, Entry, EventKind
from ..gvisor.bundle import BundleSpec, Mount
from ..gvisor.mounts import require_itself, within
from ..gvisor.restore_plan import Grant, derive
from ..gvisor.runsc import Runsc
from ..gvisor.runtime_dir import RuntimeFolder
from ..gvisor.sandbox import GVisorSandbox
from ..gvisor.state import Action, State, after
from ..mux.connection import Hooks
from ..persistence import checkpoints
from ..persistence.metadata import Checkpoint, Note
from ..persistence.names import checkpoints_prefix, valid_id
from ..persistence.staging import staging
from ..storage.base import Advance, nothing
from ..workers import control, finished
from . import detached
from .detached import RESEED
from .stored_state import MOST_WITH_SAVEPOINT, StoredState

RESEED_SECONDS = 10.0
"""Minimum time limit, in seconds, of the guest's hook that gives a fork new random numbers."""


class SandboxMemory:
    """The memory of one sandbox: in its ``instance``, or saved as the checkpoint ``source``.

    Owned by a SandboxHandle, whose lock is held during each coroutine. ``stored`` is None for an ephemeral sandbox.
    ``hooks`` are the limits for the guest's hooks; a change takes effect at the next start or restore.
    """

    def __init__(self, sandbox_id: str, runsc: Runsc, stored: StoredState | None) -> None:
        self.contents: Mapping[str, Any] = {}
        self.source: Checkpoint | None = None
        self.hooks = Hooks()
        self._sandbox_id = sandbox_id
        self._runsc = runsc
        self._stored = stored
        self._instance: GVisorSandbox | None = None
        self._grant: Grant | None = None
        self._adopted = False
        if stored:
            stored.on_recorded = lambda: self.describe(self.contents)

    @property
    def stored(self) -> StoredState:
        """The document and checkpoints in storage. Raises SandboxError for an ephemeral sandbox."""
        if self._stored is None:
            raise SandboxError(f"Sandbox {self._sandbox_id} is ephemeral: its state is not stored.")
        return self._stored

    @property
    def instance(self) -> GVisorSandbox:
        """The driver. Raises SandboxError while the mounts are not known: before ``replace_instance`` or ``permit``."""
        if self._instance is None:
            raise SandboxError(f"Sandbox {self._sandbox_id} cannot run yet: no start has defined its mounts.")
        return self._instance

    @property
    def running(self) -> bool:
        """True while the instance runs."""
        return self._instance is not None and self._instance.state == State.RUNNING

    @property
    def can_save(self) -> bool:
        """True if the sandbox is persistent and this server has a store for checkpoints.

        Such a sandbox keeps running if this server is killed, so that another process can save it.
        """
        return self._stored is not None and self._stored.stores.checkpoints is not None

    def describe(self, contents: Mapping[str, Any]) -> None:
        """Set the description of the processes inside, which is stored with each checkpoint and in the rescue note."""
        self.contents = contents
        if self._stored and self._instance:
            where, document = self._stored.stores.metadata.where, self._stored.metadata
            token = document.tenancy.token if document.tenancy else None
            spec, platform = self._instance.spec, self._instance.platform
            note = Note(self._sandbox_id, where, spec, platform, contents, token, document.last)
            self._instance.leave_note(asdict(note))

    def entry(self, kind: EventKind) -> Entry:
        """Return an event of this ``kind`` about the sandbox."""
        if self._stored is None:
            return Entry(self._sandbox_id, kind)
        return self._stored.metadata.entry(kind)

    # -- start and end -----------------------------------------------------------------------------------------------

    def replace_instance(self, spec: BundleSpec, platform: str, grant: Grant | None = None) -> None:
        """Replace the instance, which has ended or never started, with a new, unstarted one of the same id.

        ``grant`` has the mounts for later restores; by default they do not change.
        """
        self._grant = grant or self._grant
        spec = replace(spec, outlives=self.can_save)
        self._instance = GVisorSandbox(self._sandbox_id, spec, self._runsc, platform)
        self._adopted = False
        self.describe({})

    def adopt(self, sandbox: GVisorSandbox) -> None:
        """Use a running copy of a template as the instance; ``start`` then only records that it runs."""
        sandbox.sandbox_id, sandbox.spec = self._sandbox_id, self.instance.spec
        self._instance = sandbox
        self._adopted = True
        self.describe(self.contents)

    def adopt_orphan(self, folder: RuntimeFolder, note: Note) -> None:
        """Use the sandbox of a killed server, with its runtime ``folder`` and rescue ``note``, as the instance."""
        spec = replace(note.spec, outlives=self.can_save)
        self._instance = GVisorSandbox.orphan(
            self._sandbox_id, spec, self._runsc, note.platform, folder, note.container_id
        )
        self.contents = note.contents  # not describe(): the note stays as the killed server wrote it

    async def start(self, template: Path | None = None) -> None:
        """Start the instance without saved state, or as a copy of ``template``, and record that it runs."""
        with EVENT_BUS.doing(self.entry(EventKind.STARTED if self._stored else EventKind.CREATED)):
            self.instance.connection.hooks = self.hooks
            if not self._adopted:
                await self.instance.start(template)
            self._adopted = False
            if self._stored:
                await self._stored.record_started(self.instance)

    async def end(self) -> None:
        """End the instance without saving it."""
        if self._instance:
            await self._instance.delete()

    # -- save --------------------------------------------------------------------------------------------------------

    async def checkpoint(self, insist: float | None = None) -> Checkpoint:
        """Save the memory as the current checkpoint and end the instance. Errors are those of SandboxHandle.save."""
        stored, instance = self.stored, self.instance
        stored.stores.required_checkpoints()
        after(self._sandbox_id, Action.CHECKPOINT, instance.state)
        with EVENT_BUS.doing(self.entry(EventKind.HIBERNATED)) as work:
            self.source, garbage = await stored.checkpoint(instance, lambda: self.contents, insist, work.advance)
            work.size = self.source.size
        await stored.delete(garbage)
        return self.source

    async def save_as(self, name: str) -> Checkpoint:
        """Save the memory as a savepoint; the instance runs on. Errors are those of SandboxHandle.save."""
        stored = self.stored
        if valid_id(name) in stored.metadata.savepoints:
            raise SavepointExistsError(self._sandbox_id, name)
        stored.require_room()
        with EVENT_BUS.doing(self.entry(EventKind.SAVED)) as work:
            saved = self.source if self.instance.state == State.CHECKPOINTED else None
            savepoint = saved or await self.copy_to(self._sandbox_id, advance=work.advance)
            work.size = savepoint.size
            garbage = await stored.change(
                lambda document: document.with_savepoint(name, savepoint), MOST_WITH_SAVEPOINT
            )
        await stored.delete(garbage)
        return savepoint

    async def copy_to(self, sandbox_id: str, savepoint: str = "", advance: Advance = nothing) -> Checkpoint:
        """Store a copy of a savepoint, or of the current memory, as a checkpoint of ``sandbox_id``; return the copy."""
        stored = self.stored
        source = stored.metadata.savepoint(savepoint) if savepoint else self.source
        if source and (savepoint or self.instance.state == State.CHECKPOINTED):
            return await detached.copy_checkpoint(stored.stores, self._sandbox_id, source, sandbox_id, advance)
        return await stored.copy(self.instance, lambda: self.contents, sandbox_id, advance)

    def give_up_waiting(self) -> None:
        """Interrupt a save or copy that waits for the guest. Called when the server stops."""
        if self._stored and self._instance:
            self._stored.give_up_waiting(self._instance)

    # -- restore -----------------------------------------------------------------------------------------------------

    async def plan_restore(self, source: Checkpoint, grant: Grant | None) -> None:
        """Make an instance for the restore of ``source`` with the mounts in ``grant``. Raises IncompatibleError.

        Without a grant, check only if this server's runsc and CPU fit; ``permit`` must follow.
        """
        self.source, self.contents, self._grant = source, source.contents, grant
        await self.require_fit(source)
        if grant:
            self._replace_for(source)

    async def permit(self, grant: Grant) -> None:
        """Plan the next restore with the mounts in ``grant``. Raises IncompatibleError."""
        try:
            if self.source:
                await self.plan_restore(self.source, grant)
        except SandboxError as error:
            EVENT_BUS.fail(self.entry(EventKind.WOKEN), error)
            raise

    async def require_fit(self, source: Checkpoint) -> None:
        """Raise IncompatibleError if this server cannot restore ``source`` with the mounts in the current grant."""
        if reasons := await self._obstacles(source):
            raise IncompatibleError(self._sandbox_id, reasons, await self._offers_previous(source))

    async def require_revertible(self) -> None:
        """Raise StateError or IncompatibleError unless this server can restore the previous checkpoint."""
        previous = self.stored.metadata.previous
        if previous is None:
            raise StateError(self._sandbox_id, "revert", "it has no previous checkpoint")
        await self.require_fit(previous)

    async def restore(self) -> None:
        """Restore ``source`` into the instance and record that it runs.

        Raises CorruptObjectError, whose remedy names the previous checkpoint if one exists.
        """
        stored, source, instance = self.stored, self.source, self.instance
        if source is None:
            raise SandboxError(f"Sandbox {self._sandbox_id} has no checkpoint to restore.")
        # Raise StateError if another task already restored it: here, before the event, because no wake has failed.
        after(self._sandbox_id, Action.RESTORE, instance.state)
        was_saved_here = instance.state == State.CHECKPOINTED
        for mount in filter(None, (self._working_folder(), *self._required_grant().watched)):
            require_itself(mount)
        checkpoints.check_names(source.artifact, checkpoints_prefix(self._sandbox_id))
        with EVENT_BUS.doing(self.entry(EventKind.WOKEN)) as work:
            work.lost_since = stored.metadata.lost_since
            async with staging(stored.stores.staging) as folder:
                work.size = source.size
                store = stored.stores.required_checkpoints()
                if was_saved_here:  # otherwise plan_restore or rewind has checked it
                    await self.require_fit(source)
                try:
                    image = await control(checkpoints.fetch, store, source.artifact, folder, work.advance)
                except CorruptObjectError as error:
                    error.offer_older(await self._offers_previous(source))
                    raise
                await finished(self._restore_image(image, source))

    async def rewind(self, target: Checkpoint) -> str:
        """Keep the current state as a savepoint, restore ``target``, and return the new savepoint's name.

        If the restore fails, the current state is restored and the error raised.
        """
        stored = self.stored
        with EVENT_BUS.doing(self.entry(EventKind.REWOUND)) as work:
            work.size = target.size
            if self.running:
                await self.checkpoint()
            current, kept = self.source, f"before-rewind-{checkpoints.new_name()}"
            if self.instance.state != State.CHECKPOINTED or current is None:
                raise StateError(self._sandbox_id, "rewind", f"it is {self.instance.state}")
            await stored.change(lambda document: document.told().with_savepoint(kept, current))
            self._replace_for(target)
            try:
                await self.restore()
            except BaseException:
                self._replace_for(current)
                await self.restore()
                with suppress(SandboxError):
                    await stored.drop_savepoint(kept)
                raise
            return kept

    # -- internals ---------------------------------------------------------------------------------------------------

    async def _restore_image(self, image: Path, source: Checkpoint) -> None:
        """Restore ``image``. A fork gets new random numbers, because the original sandbox has the same random state."""
        connection, is_fork = self.instance.connection, bool(self.contents.get(RESEED))
        forks_hooks = Hooks(max(self.hooks.seconds, RESEED_SECONDS), reseed=True)
        connection.hooks = forks_hooks if is_fork else self.hooks
        try:
            await self.instance.restore(image)
        finally:
            connection.hooks = self.hooks
        if is_fork:
            self.describe({name: value for name, value in self.contents.items() if name != RESEED})
        await self.stored.record_restored(self.instance, source)

    def _replace_for(self, source: Checkpoint) -> None:
        """Replace the instance with one that ``source`` can be restored into. Raises IncompatibleError."""
        grant = self._required_grant()
        self.replace_instance(self._derived_spec(source, grant), grant.platform)
        self.source = source
        self.describe(source.contents)

    def _derived_spec(self, source: Checkpoint, grant: Grant) -> BundleSpec:
        spec, reasons = derive(source.spec, source.contents.get("cwd"), grant)
        if reasons:
            raise IncompatibleError(self._sandbox_id, reasons, previous=False)
        return spec

    async def _obstacles(self, source: Checkpoint) -> list[str]:
        """Return why this server cannot restore ``source`` with the mounts in the current grant, as clauses."""
        reasons = await control(checkpoints.obstacles, source, self._runsc)
        if reasons or self._grant is None:
            return reasons
        spec, reasons = derive(source.spec, source.contents.get("cwd"), self._grant)
        return reasons or await control(checkpoints.file_obstacles, source, spec, self.stored.stores.digests)

    async def _offers_previous(self, source: Checkpoint) -> bool:
        """Return True if this server can restore the previous checkpoint instead of ``source``."""
        previous = self.stored.metadata.previous
        try:
            return previous is not None and previous is not source and not await self._obstacles(previous)
        except SandboxError:  # its description is invalid
            return False

    def _required_grant(self) -> Grant:
        if self._grant is None:
            raise SandboxError(f"Sandbox {self._sandbox_id} cannot be restored yet: its mounts are not known.")
        return self._grant

    def _working_folder(self) -> Mount | None:
        """Return the mount that contains the kernel's working folder; None if that exists only inside the sandbox."""
        spec, cwd = self.instance.spec, str(self.contents.get("cwd"))
        shown = [mount for mount in spec.mounts if mount.source and mount.writable and within(cwd, mount.destination)]
        return spec.carried or max(shown, key=lambda mount: len(mount.destination), default=None)
