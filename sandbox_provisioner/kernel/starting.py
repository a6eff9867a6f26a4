"""Start a kernel's process in a sandbox, or turn the kernel in a template's copy into the requested one."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import GuestError
from ..guest.capabilities import CARRIED
from ..gvisor.bundle import Mount, folder_cover
from ..gvisor.carried import parts
from ..gvisor.mounts import identity, replaced_error, within
from ..gvisor.sandbox import GVisorSandbox
from ..mux.activation import activate
from ..mux.process import GuestProcess
from ..workers import control

IDENTIFY_TRIES = 10
FIRST_PROCESS = 1
"""Number of a sandbox's first process: the kernel."""


@dataclass(frozen=True)
class Start:
    """The command, environment and files that a kernel is started with. ``remember`` is saved for a restore."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    folder: Mount | None = None
    watched: Sequence[Mount] = ()
    """Further mounts that other kernels could replace by links while this one starts."""
    files: Mapping[str, str] = field(default_factory=dict)
    connection_file: str = ""
    """Path of the connection file inside the sandbox; one of the ``files``."""
    remember: Mapping[str, Any] = field(default_factory=dict)


async def start_process(sandbox: GVisorSandbox, start: Start) -> GuestProcess:
    """Start the kernel and return its process. In a copy of a template, its kernel becomes the requested one.

    Raises ConfigurationError if the requested folder was replaced by another one while the sandbox started.
    """
    begin = _activate if sandbox.spec.carried else _execute
    for _ in range(IDENTIFY_TRIES):  # writes of other processes change the time that identifies a folder
        try:
            return await begin(sandbox, start)
        except GuestError as error:
            if error.errno != errno.ESTALE:
                raise
    raise replaced_error(*filter(None, (start.folder, *start.watched)))


async def _execute(sandbox: GVisorSandbox, start: Start) -> GuestProcess:
    return await sandbox.execute(
        start.argv,
        env=start.env,
        cwd=start.cwd,
        stdin=False,
        files=start.files,
        expect=await control(identity, start.folder, *start.watched),
    )


async def _activate(sandbox: GVisorSandbox, start: Start) -> GuestProcess:
    """Turn the kernel of a template's copy into the requested one. Raises GuestError if the copy has no kernel."""
    process, folder = sandbox.connection.process(FIRST_PROCESS), start.folder
    if process is None or folder is None:
        raise GuestError("The kernel in the copy of a template has ended.")
    settings = {
        **start.remember["connection"],
        "connection_file": start.connection_file,
        "env": dict(start.env),
        "cwd": start.cwd,
    }
    await activate(
        sandbox.connection,
        settings,
        folder=folder.destination,
        parts=await control(parts, sandbox.spec),
        cover=folder_cover(sandbox.spec),
        files=start.files,
        expect=await control(identity, *(_carried(mount, folder.destination) for mount in (folder, *start.watched))),
        outlive=sandbox.spec.outlives,
    )
    return process


def _carried(mount: Mount, folder: str) -> Mount:
    """Return ``mount`` with the destination that it has before the activation, if it lies in ``folder``."""
    inside = within(mount.destination, folder)
    return mount._replace(destination=CARRIED + mount.destination[len(folder) :]) if inside else mount
