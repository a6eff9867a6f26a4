"""Find the sandboxes that ``jupyter sandbox`` can act on: in this user's storage and on this user's local servers.

Servers report the sandboxes whose kernels they have; the others are read from storage. With ``--server``, that server
reports all sandboxes and storage is not read.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from ..client import NoServerError, ProblemError, SandboxClient, running_servers
from ..errors import SandboxError, UnknownSandboxError, UnreadableRecordError
from ..errors.kinds import Kind
from ..persistence.records import SandboxRecord
from ..sandbox.listing import StoredSandbox, look
from ..sandbox.lookup import look_up
from ..sandbox.model import Sandbox
from ..sandbox.registry import Listing
from ..sandbox.user_sandboxes import Persistence
from ..setup.timeouts import call_within

SERVER_TIMEOUT = 10.0
"""Timeout in seconds for servers that were found, not given with ``--server``."""
STORAGE_TIMEOUT = 60.0
"""Timeout in seconds for reading the sandboxes that a command names from storage."""

UNREAD = ("elsewhere", "unknown")
"""The states of a sandbox whose document could not be read."""


class UnreadSandboxError(SandboxError, kind=Kind.UNREACHABLE):
    """The command needs the document of a sandbox, which could not be read."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        super().__init__(sandbox.problem or f"Sandbox {sandbox.id} is {sandbox.state}: its document could not be read.")


class StorageTimeoutError(SandboxError, kind=Kind.UNREACHABLE):
    """Storage did not return the sandboxes' documents in time. A thread of this process still waits for storage."""

    def __init__(self, sandboxes: Iterable[SandboxRecord]) -> None:
        places = ", ".join(sorted({f"{record.storage}, {record.where}" for record in sandboxes}))
        super().__init__(
            f"The storage ({places}) did not answer within {STORAGE_TIMEOUT:g} s.",
            "Check the network, or the mounted folder, and try again.",
        )


class NoKernelError(SandboxError, kind=Kind.WRONG_STATE):
    """The command needs a kernel, and no reachable server has the sandbox's kernel."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        remedy = f"`jupyter sandbox wake {sandbox.id}` starts one."
        if sandbox.state == "running":
            remedy = "Name the server that has the kernel with --server URL."
        super().__init__(
            f"None of your servers on this machine has the kernel of sandbox {sandbox.id} (state: {sandbox.state}).",
            remedy,
        )


@dataclass(frozen=True)
class Server:
    """A server that answered, with its sandboxes. ``root_dir`` is empty if the server may be on another machine."""

    client: SandboxClient
    root_dir: str
    sandboxes: Sequence[Sandbox]

    def lists(self, identity: str) -> bool:
        """Return True if the server listed the sandbox."""
        return any(sandbox.id == identity for sandbox in self.sandboxes)


@dataclass(frozen=True)
class Found:
    """A sandbox, its ``record`` if this user has one, and the ``server`` through which to change it, if any."""

    sandbox: Sandbox
    record: SandboxRecord | None = None
    server: Server | None = None

    @property
    def title(self) -> str:
        """Id, kernel and notebook, for messages."""
        about = ", ".join(part for part in (self.sandbox.kernel_name, self.sandbox.notebook_path) if part)
        return f"{self.sandbox.id} ({about})" if about else self.sandbox.id

    def after(self, sandbox: Sandbox, server: Server) -> Found:
        """Return this sandbox in the state that ``server`` reported."""
        return Found(with_local_notebook(sandbox, self.record, server), self.record, server)


@dataclass(frozen=True)
class Reach:
    """The storage and the servers that one command may use. With ``--server`` it uses no storage (None)."""

    storage: Persistence | None
    servers: Sequence[Server]
    server_errors: Sequence[SandboxError] = field(default_factory=tuple)
    """Errors of local servers whose sandboxes could not be listed."""

    @cached_property
    def _listing(self) -> Listing:
        return self.storage.registry.list() if self.storage else Listing([], [])

    @property
    def unreadable(self) -> Sequence[UnreadableRecordError]:
        """Errors of unreadable records."""
        return self._listing.unreadable

    @cached_property
    def _records(self) -> Mapping[str, SandboxRecord]:
        return {str(record.id): record for record in self._listing.records}

    @cached_property
    def _on_servers(self) -> Mapping[str, Found]:
        """Sandboxes to change through servers, by id: those with a kernel there, and those without a record here."""
        found: dict[str, Found] = {}
        for server in self.servers:
            for sandbox in server.sandboxes:
                record = self._records.get(sandbox.id)
                if sandbox.kernel_id or not (record or sandbox.id in found):
                    found[sandbox.id] = Found(with_local_notebook(sandbox, record, server), record, server)
        return found

    def all(self) -> Sequence[Found]:
        """Return all sandboxes, the last used first."""
        found = self._read({**self._records, **self._on_servers})
        return sorted(found, key=lambda each: each.sandbox.last_used, reverse=True)

    def find(self, wanted: Iterable[str]) -> Sequence[Found]:
        """Return the given sandboxes, each once: by id, id in storage, unique prefix of the id, or notebook.

        Raises UnknownSandboxError with all ids, or AmbiguousSandboxError with the matching ones.
        """
        on_servers = {identity: each.sandbox for identity, each in self._on_servers.items()}
        known: Mapping[str, SandboxRecord | Sandbox] = {**self._records, **on_servers}
        try:
            found = [look_up(each, known.values(), self.unreadable) for each in wanted]
        except UnknownSandboxError as error:
            raise UnknownSandboxError(error.wanted, [_id_and_notebook(each) for each in known.values()]) from error
        return self._read(dict.fromkeys(str(each.id) for each in found), STORAGE_TIMEOUT)

    def server_of(self, found: Found) -> Server:
        """Return the server that has the sandbox's kernel.

        Raises NoServerError if no server runs, and NoKernelError if no server has the kernel.
        """
        if found.server:
            return found.server
        if not self.servers:
            self._raise_server_error()
            problem = (
                f"The command needs a running Jupyter Server: sandbox {found.sandbox.id} is {found.sandbox.state}."
            )
            raise NoServerError(problem)
        raise NoKernelError(found.sandbox)

    def starter_of(self, found: Found) -> Server:
        """Return the server that has the sandbox's kernel, or one that can start it. Raises NoServerError."""
        if server := self.any_server(found):
            return server
        self._raise_server_error()
        raise NoServerError(f"None of your Jupyter Servers on this machine can start sandbox {found.sandbox.id}.")

    def any_server(self, found: Found) -> Server | None:
        """Return the server that has the sandbox's kernel, or else a server that lists the sandbox, or else None."""
        return found.server or next((server for server in self.servers if server.lists(found.sandbox.id)), None)

    def _raise_server_error(self) -> None:
        """Raise the error of a server that did not list its sandboxes, if any: it may have the requested sandbox."""
        if self.server_errors:
            raise self.server_errors[0]

    def _read(self, ids: Iterable[str], timeout: float | None = None) -> list[Found]:
        """Return these sandboxes in order, from servers, else from storage. Raises StorageTimeoutError."""
        ids = list(ids)
        records = [self._records[identity] for identity in ids if identity not in self._on_servers]
        listed: Sequence[StoredSandbox] = ()
        if self.storage and records:
            try:
                listed = call_within(timeout, partial(look, self.storage, records))
            except TimeoutError:
                raise StorageTimeoutError(records) from None
        stored = {found.sandbox.id: Found(found.sandbox, found.record) for found in listed}
        return [self._on_servers.get(identity) or stored[identity] for identity in ids]


@contextmanager
def reach(arguments: argparse.Namespace) -> Iterator[Reach]:
    """Yield the storage and servers for the options ``--server``, ``--token`` and ``--no-server``."""
    with ExitStack() as stack:
        if arguments.server:
            client = stack.enter_context(SandboxClient(arguments.server, arguments.token))
            yield Reach(None, [Server(client, "", client.list())])
            return
        storage: Persistence = arguments.open()
        if arguments.no_server:
            yield Reach(storage, ())
        else:
            yield Reach(storage, *_connect(stack, arguments.token))


def _connect(stack: ExitStack, token: str) -> tuple[Sequence[Server], Sequence[SandboxError]]:
    """Return this user's servers that serve sandboxes, and the errors of those that did not list them."""
    servers: list[Server] = []
    server_errors: list[SandboxError] = []
    for running in running_servers():
        client = stack.enter_context(SandboxClient(running.url, running.token or token, SERVER_TIMEOUT))
        try:
            servers.append(Server(client, running.root_dir, client.list()))
        except ProblemError as error:
            if error.status != 404:
                server_errors.append(error)
        except SandboxError as error:
            server_errors.append(error)
    return servers, server_errors


def _id_and_notebook(sandbox: SandboxRecord | Sandbox) -> str:
    return f"{sandbox.id} ({sandbox.notebook_path})" if sandbox.notebook_path else str(sandbox.id)


def with_local_notebook(sandbox: Sandbox, record: SandboxRecord | None, server: Server) -> Sandbox:
    """Return the sandbox with the absolute path of its notebook on this machine, if known."""
    if record and record.notebook_path:
        return replace(sandbox, notebook_path=record.notebook_path)
    if sandbox.notebook_path and server.root_dir:
        return replace(sandbox, notebook_path=os.path.join(server.root_dir, sandbox.notebook_path))
    return sandbox
