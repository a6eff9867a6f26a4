"""Fork a sandbox for ``jupyter sandbox``: through a server, which starts the new kernel, or else only in storage."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from ..errors import ConfigurationError, NotebookInUseError, SandboxError
from ..persistence.records import SandboxRecord
from ..sandbox.listing import look
from ..sandbox.registry import Facts
from ..sandbox.user_sandboxes import Persistence
from .targets import Found, Reach, Server, placed


def fork(reached: Reach, found: Found, savepoint: str, notebook: str) -> Found:
    """Create a sandbox with the memory of ``found`` and return it.

    ``notebook`` is a path on this machine, or relative to the root folder of a server given with ``--server``.
    """
    server = reached.any_server(found)
    if server:
        path = below_root(server, notebook) if notebook else None
        made = server.client.fork(found.sandbox.id, savepoint or None, path)
        return Found(placed(made, None, server), server=server)
    assert reached.storage and found.record
    return _fork_stored(reached.storage, found.record, savepoint, os.path.abspath(notebook) if notebook else "")


def below_root(server: Server, notebook: str) -> str:
    """Return a notebook's path relative to the server's root folder. Raises ConfigurationError if it is outside."""
    if not server.root_dir:
        return notebook
    path = os.path.relpath(os.path.realpath(notebook), os.path.realpath(server.root_dir))
    if path.split(os.sep)[0] == os.pardir:
        problem = f"{os.path.abspath(notebook)} is outside {server.root_dir}, the root folder of {server.client.url}."
        raise ConfigurationError("notebook", problem, "Choose a notebook in that folder.")
    return path


def _fork_stored(storage: Persistence, record: SandboxRecord, savepoint: str, notebook: str) -> Found:
    if notebook and not os.path.isdir(os.path.dirname(notebook)):
        raise SandboxError(f"The folder of {notebook} does not exist.", "Create it first.")
    taken = storage.registry.find_notebook(notebook, record.kernel_name) if notebook else ()
    if taken:
        raise NotebookInUseError(notebook, f"the sandbox {taken[0].id}")
    facts = Facts(kernel_name=record.kernel_name, settings=record.settings, notebook_path=notebook)
    new = storage.registry.allocate(storage.stores, **facts)
    try:
        storage.fork(record, new, savepoint)
        if notebook and os.path.exists(record.notebook_path) and not os.path.exists(notebook):
            shutil.copyfile(record.notebook_path, notebook)
    except BaseException:
        with suppress(SandboxError):
            storage.registry.delete(new.id, storage.destroy)
        raise
    return Found(look(storage, [new])[0].sandbox, new)
