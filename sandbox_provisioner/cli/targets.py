"""Find the sandboxes that ``jupyter sandbox`` can act on: in this user's storage and on this user's local servers.

Servers report the sandboxes whose kernels they have; the others are read from storage. With ``--server``, that server
reports all sandboxes and storage is not read.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path

from ..client import NoServerError, ProblemError, Sandbox, SandboxClient, Stored, running_servers
from ..client.models import NamedState
from ..errors import AmbiguousSandboxError, SandboxError, UnknownSandboxError, UnreadableRecordError
from ..errors.kinds import Kind
from ..persistence import metadata
from ..persistence.records import SandboxRecord
from ..sandbox.listing import Sight, look
from ..sandbox.registry import Listing
from ..sandbox.user_sandboxes import Persistence

PATIENCE = 10.0
"""Timeout in seconds for servers that were found, not given with ``--server``."""

UNREAD = ("elsewhere", "unknown")
"""The states of a sandbox whose document could not be read."""


class UnreadSandboxError(SandboxError, kind=Kind.UNREACHABLE):
    """The command needs the document of a sandbox, which could not be read."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        super().__init__(sandbox.problem or f"Sandbox {sandbox.id} is {sandbox.state}: its document was not read.")


class NoKernelError(SandboxError, kind=Kind.WRONG_STATE):
    """The command needs a kernel, and no reachable server has the sandbox's kernel."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        remedy = f"`jupyter sandbox wake {sandbox.id}` starts one."
        if sandbox.state == "running":
            remedy = "Name the server that has it with --server."
        super().__init__(f"Sandbox {sandbox.id} is {sandbox.state}: no server of yours here has its kernel.", remedy)


@dataclass(frozen=True)
class Server:
    """A server that answered, with its sandboxes. ``root_dir`` is empty if the server may be on another machine."""

    client: SandboxClient
    root_dir: str
    sandboxes: Sequence[Sandbox]

    def knows(self, identity: str) -> bool:
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
        return title(self.sandbox)

    def after(self, sandbox: Sandbox, server: Server) -> Found:
        """Return it with the new state that ``server`` reported."""
        return Found(placed(sandbox, self.record, server), self.record, server)


@dataclass(frozen=True)
class Reach:
    """The ``storage`` and the ``servers`` of one command; ``storage`` is None with ``--server``."""

    storage: Persistence | None
    servers: Sequence[Server]
    complaints: Sequence[SandboxError] = field(default_factory=tuple)
    """Errors of local servers that could not be listed."""

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
    def _told(self) -> Mapping[str, Found]:
        """Sandboxes to change through servers, by id: those with a kernel there, and those without a record here."""
        told: dict[str, Found] = {}
        for server in self.servers:
            for sandbox in server.sandboxes:
                record = self._records.get(sandbox.id)
                if sandbox.kernel_id or not (record or sandbox.id in told):
                    told[sandbox.id] = Found(placed(sandbox, record, server), record, server)
        return told

    def all(self) -> Sequence[Found]:
        """Return all sandboxes, the last used first."""
        found = self._look({**self._records, **self._told})
        return sorted(found, key=lambda each: each.sandbox.last_used, reverse=True)

    def find(self, wanted: Iterable[str]) -> Sequence[Found]:
        """Return the given sandboxes, each once: by id, id in storage, unique prefix of the id, or notebook.

        Raises UnknownSandboxError with all ids, or AmbiguousSandboxError with the matching ones.
        """
        known = {
            **{identity: (each.sandbox_id, each.notebook_path) for identity, each in self._records.items()},
            **{
                identity: (each.sandbox.sandbox_id, each.sandbox.notebook_path) for identity, each in self._told.items()
            },
        }
        return self._look(dict.fromkeys(choose(each, known, self.unreadable) for each in wanted))

    def server_of(self, found: Found) -> Server:
        """Return the server that has its kernel. Raises NoServerError if none runs, NoKernelError if none has it."""
        if found.server:
            return found.server
        if not self.servers:
            self._complain()
            state = f"Sandbox {found.sandbox.id} is {found.sandbox.state}"
            raise NoServerError(f"{state}, and no Jupyter Server of yours that could do this runs here.")
        raise NoKernelError(found.sandbox)

    def starter_of(self, found: Found) -> Server:
        """Return the server that has its kernel, or one that can start it. Raises NoServerError without one."""
        if server := self.any_server(found):
            return server
        self._complain()
        raise NoServerError(f"No Jupyter Server of yours runs here that could start sandbox {found.sandbox.id}.")

    def any_server(self, found: Found) -> Server | None:
        """Return the server that has its kernel, or one that lists it; or None."""
        return found.server or next((server for server in self.servers if server.knows(found.sandbox.id)), None)

    def _complain(self) -> None:
        """Raise the error of a server that could not be listed: it may be the one that is missing."""
        if self.complaints:
            raise self.complaints[0]

    def _look(self, ids: Iterable[str]) -> list[Found]:
        """Return these sandboxes in order, from servers, else from storage."""
        ids = list(ids)
        kept = [self._records[identity] for identity in ids if identity not in self._told]
        sights = look(self.storage, kept) if self.storage and kept else []
        seen = {str(sight.record.id): Found(from_sight(sight), sight.record) for sight in sights}
        return [self._told.get(identity) or seen[identity] for identity in ids]


def title(known: Sandbox | SandboxRecord) -> str:
    """Return a sandbox's id, kernel and notebook, for messages."""
    about = ", ".join(words for words in (known.kernel_name, known.notebook_path) if words)
    return f"{known.id} ({about})" if about else str(known.id)


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
            yield Reach(storage, *_greet(stack, arguments.token))


def _greet(stack: ExitStack, token: str) -> tuple[Sequence[Server], Sequence[SandboxError]]:
    """Return this user's servers that have sandboxes, and the errors of those that could not be listed."""
    servers: list[Server] = []
    complaints: list[SandboxError] = []
    for running in running_servers():
        client = stack.enter_context(SandboxClient(running.url, running.token or token, PATIENCE))
        try:
            servers.append(Server(client, running.root_dir, client.list()))
        except ProblemError as error:
            if error.status != 404:
                complaints.append(error)
        except SandboxError as error:
            complaints.append(error)
    return servers, complaints


def choose(
    wanted: str, known: Mapping[str, tuple[str, str | None]], unreadable: Iterable[UnreadableRecordError]
) -> str:
    """Return the id that ``wanted`` refers to; ``known`` maps ids to ids in storage and notebooks.

    Raises AmbiguousSandboxError, UnknownSandboxError, or the error of an unreadable record with that id.
    """
    beginning = wanted.lower().replace("-", "")
    here = os.path.abspath(wanted)
    attempts: tuple[Callable[[str], bool], ...] = (
        lambda identity: wanted in (identity, known[identity][0]),
        lambda identity: bool(beginning) and identity.replace("-", "").startswith(beginning),
        lambda identity: bool(wanted) and known[identity][1] in (wanted, here),
    )
    for fits in attempts:
        found = [identity for identity in known if fits(identity)]
        if len(found) > 1:
            raise AmbiguousSandboxError(wanted, found)
        if found:
            return found[0]
    for report in unreadable:
        if beginning and Path(report.path).stem.replace("-", "").startswith(beginning):
            raise report
    raise UnknownSandboxError(wanted, list(known))


def from_sight(sight: Sight) -> Sandbox:
    """Return a stored sandbox in the format of the REST API's client."""
    record, summary = sight.record, sight.summary
    return Sandbox(
        id=str(record.id),
        sandbox_id=record.sandbox_id,
        state=sight.state,
        persistent=True,
        kernel_id=None,
        kernel_name=record.kernel_name,
        notebook_path=record.notebook_path or None,
        created=record.created,
        last_used=sight.last_used,
        size=sight.size,
        checkpoint=_stored(summary.checkpoint) if summary else None,
        previous=_stored(summary.previous) if summary else None,
        savepoints=_named(summary.savepoints) if summary else (),
        snapshots=_named(sight.snapshots),
        problem=str(sight.problem) if sight.problem else None,
    )


def _stored(kept: metadata.Stored | None) -> Stored | None:
    return Stored(datetime.fromisoformat(kept.created), kept.size) if kept else None


def _named(stored: Mapping[str, metadata.Stored]) -> tuple[NamedState, ...]:
    states = [NamedState(name, datetime.fromisoformat(each.created), each.size) for name, each in stored.items()]
    return tuple(sorted(states, key=lambda state: state.created))


def placed(sandbox: Sandbox, record: SandboxRecord | None, server: Server) -> Sandbox:
    """Return the sandbox with the absolute path of its notebook on this machine, if known."""
    if record and record.notebook_path:
        return replace(sandbox, notebook_path=record.notebook_path)
    if sandbox.notebook_path and server.root_dir:
        return replace(sandbox, notebook_path=os.path.join(server.root_dir, sandbox.notebook_path))
    return sandbox
