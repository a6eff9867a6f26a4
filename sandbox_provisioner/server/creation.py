"""Start kernels in new, stored or copied sandboxes for the REST API. A failed start leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from ..errors import (
    BadRequestError,
    ConfigurationError,
    NotebookInUseError,
    SandboxError,
    SandboxExistsError,
    SandboxNotFoundError,
    SavepointNotFoundError,
    SnapshotNotFoundError,
    StateError,
    UnknownSandboxError,
)
from ..persistence.records import SandboxRecord
from ..sandbox.listing import look
from ..sandbox.registry import Facts
from ..sandbox.start_request import StartRequest
from ..sandbox.user_sandboxes import Persistence
from .kernels import Live, Notebook
from .models import Subject
from .queries import Inventory

IDENTITY = {"kernel_name", "notebook_path", "sandbox_id", "gcs_sandbox_id"}
"""Fields of ``CreateSandbox`` that only identify a sandbox."""


class Creation:
    """The operations that start a kernel in a sandbox. Owned by ``Sandboxes``; server loop only."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._kernels = inventory.kernels

    async def create(self, body: Mapping[str, Any]) -> tuple[Subject, bool]:
        """Return the sandbox for a ``CreateSandbox`` body, and True if it was started, False if already open here.

        Raises BadRequestError, ConfigurationError, StateError, NotebookInUseError or the error of the start.
        """
        _require_consistent(body)
        self._inventory.config.require(
            gcs_sandbox_id=body.get("gcs_sandbox_id"),
            enable_handoff=body.get("enable_handoff", False),
            enable_checkpoint_at_idle=body.get("enable_checkpoint_at_idle", False),
            sandbox_id=body.get("sandbox_id"),
        )
        notebook = self._kernels.notebook(body["notebook_path"]) if "notebook_path" in body else None
        open_already = await self._find_open(body, notebook)
        if open_already:
            return open_already, False
        source = await self._find_source(body)
        before = source if "savepoint" in body else await self._find_previous(body, notebook)
        kernel_name = await self._choose_kernel(body.get("kernel_name", ""), before)
        request = StartRequest(
            sandbox_id=_chosen_id(body),
            gcs="gcs_sandbox_id" in body,
            enable_handoff=body.get("enable_handoff"),
            enable_checkpoint_at_idle=body.get("enable_checkpoint_at_idle"),
            idle_timeout=body.get("idle_timeout"),
        )
        if "savepoint" in body:
            assert source is not None
            return await self._start_copy(source, body["savepoint"]["name"], notebook, request), True
        async with self._delete_on_failure(body, notebook, kernel_name):
            live = await self._kernels.start(kernel_name, notebook, request)
            if source:
                await self._load(live, source, body["snapshot"]["name"])
        return Subject(live.record, live), True

    async def fork(self, source: Subject, body: Mapping[str, Any]) -> Subject:
        """Start a kernel with a copy of the memory of ``source`` for a ``Fork`` body, and return its sandbox.

        Copies the notebook if the new path does not exist yet. Raises StateError if ``source`` is ephemeral.
        """
        notebook = self._kernels.notebook(body["notebook_path"]) if "notebook_path" in body else None
        if not source.record:
            raise StateError(source.id, "fork", "it is ephemeral")
        await self._require_free(notebook)
        await self._choose_kernel("", source)
        before = self._kernels.relative(source.notebook_path)
        copied = bool(notebook and before and await self._kernels.copy_notebook(before, notebook))
        try:
            return await self._start_copy(source, body.get("savepoint", ""), notebook, StartRequest())
        except BaseException:
            if copied and notebook:
                await self._kernels.remove_notebook(notebook)
            raise

    async def open(self, subject: Subject) -> Subject:
        """Start the kernel of a stored sandbox that this server does not have open."""
        stored = await self._inventory.stored(subject)
        if stored and stored.problem:
            raise stored.problem
        path = self._kernels.relative(subject.notebook_path)
        notebook = Notebook(path, subject.notebook_path) if path else None
        await self._require_free(notebook)
        await self._choose_kernel("", subject)
        request = StartRequest(sandbox_id=subject.sandbox_id, notebook_path=subject.notebook_path)
        live = await self._kernels.start(subject.kernel_name, notebook, request)
        return Subject(live.record, live)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _find_source(self, body: Mapping[str, Any]) -> Subject | None:
        """Return the sandbox with the savepoint or snapshot to start from; None if the body names neither.

        Raises SandboxNotFoundError, SavepointNotFoundError or SnapshotNotFoundError.
        """
        kind = next((kind for kind in ("savepoint", "snapshot") if kind in body), None)
        if kind is None:
            return None
        wanted, name = body[kind]["id"], body[kind]["name"]
        source = await self._inventory.find(wanted)
        stored = await self._inventory.stored(source)
        savepoints = [each.name for each in stored.sandbox.savepoints] if stored else []
        if kind == "savepoint" and name not in savepoints:
            raise SavepointNotFoundError(source.id, name, sorted(savepoints))
        if kind == "snapshot" and (stored is None or name not in [each.name for each in stored.sandbox.snapshots]):
            raise SnapshotNotFoundError(f"Sandbox {source.id} has no snapshot {name}.")
        return source

    async def _find_previous(self, body: Mapping[str, Any], notebook: Notebook | None) -> Subject | None:
        """Return the last used stored sandbox with the chosen id, or of the notebook if no kernel is named; or None."""
        chosen = _chosen_id(body)
        path = notebook.absolute if notebook and "kernel_name" not in body else ""
        if not chosen and not path:
            return None
        records = (await asyncio.to_thread((await self._inventory.persistence()).registry.list)).records
        found = [one for one in records if (one.sandbox_id == chosen if chosen else one.notebook_path == path)]
        return Subject(max(found, key=lambda one: one.last_used), None) if found else None

    async def _choose_kernel(self, requested: str, before: Subject | None) -> str:
        """Return the name of the kernel to start: ``requested``, the kernel of ``before``, or the first sandboxed one.

        Raises BadRequestError for another kernel than that of ``before`` or for an unknown one, and StateError if this
        server does not have the kernel of ``before``.
        """
        names = await self._kernels.names()
        remedy = f"Sandboxed kernels: {', '.join(names)}." if names else "Run `jupyter sandbox setup` to install one."
        known = before.kernel_name if before else ""
        name = requested or known or next(iter(names), "")
        if known and name != known:
            raise BadRequestError(
                f"Sandbox {before and before.id} has the kernel {known}.", f"Request {known}.", "kernel_name"
            )
        if before and not requested and name not in names:
            raise StateError(
                before.id, "start the kernel of", f"its kernel {name!r:.200} is not installed on this server"
            )
        if name not in names:
            raise BadRequestError(f"No sandboxed kernel {name!r:.200} is installed.", remedy, "kernel_name")
        return name

    async def _find_open(self, body: Mapping[str, Any], notebook: Notebook | None) -> Subject | None:
        """Return the requested sandbox if this server has it open, else None.

        Raises StateError if the request contradicts the open sandbox or has fields that only a new sandbox can have,
        and NotebookInUseError if another kernel has the notebook.
        """
        chosen = _chosen_id(body)
        kernel_id = await self._kernels.kernel_of(notebook) if notebook else None
        for live in self._kernels.live():
            of_notebook = kernel_id == live.kernel_id
            of_id = bool(chosen and live.record and live.record.sandbox_id == chosen)
            if of_notebook or of_id:
                other = (notebook and not of_notebook) or (chosen and not of_id)
                if other or not set(body) <= IDENTITY or body.get("kernel_name", live.kernel_name) != live.kernel_name:
                    raise StateError(Subject(live.record, live).id, "create", "it is already open on this server")
                return Subject(live.record, live)
        await self._require_free(notebook)
        return None

    async def _require_free(self, notebook: Notebook | None) -> None:
        if notebook and await self._kernels.kernel_of(notebook):
            raise NotebookInUseError(notebook.path)

    # -- starting kernels --------------------------------------------------------------------------------------------

    async def _start_copy(
        self, source: Subject, savepoint: str, notebook: Notebook | None, request: StartRequest
    ) -> Subject:
        """Create a sandbox with the memory of ``source``, start its kernel and return it.

        Raises NotebookInUseError if a sandbox of the notebook has saved state.
        """
        persistence = await self._inventory.persistence()
        path = notebook.absolute if notebook else ""
        saved = await asyncio.to_thread(_has_saved_state, persistence, path, source.kernel_name)
        if notebook and saved:
            raise NotebookInUseError(notebook.path, "a saved kernel")
        folder = source.record.working_folder if source.record and not path else ""
        facts = Facts(kernel_name=source.kernel_name, notebook_path=path, folder=folder)
        record = await asyncio.to_thread(_new_record, persistence, request.sandbox_id, facts)
        forked = False
        try:
            if source.live:
                await source.live.provisioner.fork(record.sandbox_id, savepoint, path)
            else:
                assert source.record is not None
                await asyncio.to_thread(persistence.fork, source.record, record, savepoint)
            forked = True
            request = replace(request, sandbox_id=record.sandbox_id)
            live = await self._kernels.start(source.kernel_name, notebook, request)
        except BaseException:  # after a failed fork, stored state is not ours
            with suppress(SandboxError):
                undo = partial(delete, persistence) if forked else persistence.registry.forget
                await asyncio.to_thread(undo, record.id)
            raise
        return Subject(live.record, live)

    async def _load(self, live: Live, source: Subject, name: str) -> None:
        try:
            await live.provisioner.load_snapshot(name, source.sandbox_id)
        except BaseException:
            await self._kernels.end(live.kernel_id)
            raise

    @asynccontextmanager
    async def _delete_on_failure(
        self, body: Mapping[str, Any], notebook: Notebook | None, kernel_name: str
    ) -> AsyncIterator[None]:
        """If the block fails, delete the sandbox that it created, unless the sandbox has saved state."""
        chosen, path = _chosen_id(body), notebook.absolute if notebook else ""
        persistence = None
        if chosen or path:
            with suppress(ConfigurationError):  # without storage the block creates no persistent sandbox
                persistence = await self._inventory.persistence()
        if persistence is None:
            yield
            return
        before = await asyncio.to_thread(_matching_records, persistence, chosen, path, kernel_name)
        try:
            yield
        except BaseException:
            for identity in await asyncio.to_thread(_matching_records, persistence, chosen, path, kernel_name) - before:
                with suppress(SandboxError):
                    await asyncio.to_thread(persistence.registry.delete, identity, persistence.discard)
            raise


def _require_consistent(body: Mapping[str, Any]) -> None:
    """Raise BadRequestError if fields of the body contradict each other."""
    for one, other in (("sandbox_id", "gcs_sandbox_id"), ("savepoint", "snapshot")):
        if one in body and other in body:
            raise BadRequestError(f"Both {one} and {other} are given.", "Give only one of them.", other)
    persistent = {"notebook_path", "sandbox_id", "gcs_sandbox_id", "savepoint", "snapshot"}
    needs_storage = set(body) & {"enable_handoff", "enable_checkpoint_at_idle", "idle_timeout"}
    if "snapshot" in body and not persistent - {"snapshot"} & set(body):
        raise BadRequestError(
            "An ephemeral sandbox cannot start with the files of a file snapshot.",
            "Give a notebook_path or a sandbox_id, which makes the sandbox persistent.",
            "snapshot",
        )
    if needs_storage and not persistent & set(body):
        raise BadRequestError(
            f"{min(needs_storage)} cannot be set for an ephemeral sandbox.",
            "Give a notebook_path or a sandbox_id, which makes the sandbox persistent.",
            min(needs_storage),
        )


def _chosen_id(body: Mapping[str, Any]) -> str:
    """Return the sandbox id that the request chose, or an empty string."""
    return str(body.get("sandbox_id") or body.get("gcs_sandbox_id") or "")


def _new_record(persistence: Persistence, chosen: str, facts: Facts) -> SandboxRecord:
    """Record a new sandbox and return its record. Blocks. Raises SandboxExistsError if the chosen id is recorded."""
    if not chosen:
        return persistence.registry.allocate(persistence.stores, **facts)
    if _matching_records(persistence, chosen, "", ""):
        raise SandboxExistsError(chosen, "this server's storage")
    return persistence.registry.record(chosen, persistence.stores, **facts)


def _matching_records(persistence: Persistence, chosen: str, path: str, kernel_name: str) -> set[UUID]:
    """Return the ids of the records with a sandbox id, or else of a notebook and kernel. Blocks."""
    if not chosen:
        return {record.id for record in persistence.registry.find_notebook(path, kernel_name)}
    return {record.id for record in persistence.registry.list().records if record.sandbox_id == chosen}


def _has_saved_state(persistence: Persistence, path: str, kernel_name: str) -> bool:
    """Return True if a sandbox of the notebook and kernel has saved state. Blocks."""
    return bool(path) and any(
        one.sandbox.size for one in look(persistence, persistence.registry.find_notebook(path, kernel_name))
    )


def delete(persistence: Persistence, identity: UUID, unverified: bool = False) -> int:
    """Delete a sandbox and its record, and return the freed bytes; 0 if it does not exist. Blocks.

    ``unverified`` is passed to ``Persistence.destroy``.
    """
    try:
        return persistence.registry.delete(identity, lambda record: persistence.destroy(record, unverified))
    except (UnknownSandboxError, SandboxNotFoundError):
        return 0
