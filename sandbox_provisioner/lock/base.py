"""Interface of leases: the right to run a sandbox, held by one server at a time, with a way to request a hand-off.

A lease alone does not protect stored state. A server that was paused past its lease is kept from overwriting newer
state by the compare-and-swap of the sandbox's document, which carries the lease's token. Without that, a process that
has not yet noticed its loss could still write.

Limits:

- An owner may learn of a loss only after the next owner has begun. A process that was stopped, or whose machine was
  suspended, notices when it runs again, and its work in progress continues until it checks ``lost``.
- The lease of a crashed owner is free at once only on one machine. Elsewhere it must expire first, and in a shared
  folder, which has no trusted clock, a newcomer must watch it for its whole lease time.
- The waiter is not always next. A free lease goes to the first server that tries; the waiter tries about every second.
- A failed attempt may leave an object behind: if a request reaches storage after its sender gave up, or after a SIGKILL
  in the middle. Such an object is not renewed, and is taken over like the lease of a crashed owner.
- Nothing is guaranteed on storage that breaks its contract: a mounted bucket with cached metadata, a network file
  system without atomic renames, two machines whose clocks run at speeds that differ by more than a twentieth.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from uuid import uuid4

from .._text import json_object
from ..config import user_name

LONGEST_WORD = 200


@dataclass(frozen=True)
class Owner:
    """The server that holds a lease, described for error messages. ``nonce`` is new for each attempt to acquire one."""

    server: str
    host: str
    pid: int
    user: str
    nonce: str

    def __str__(self) -> str:
        return f"{self.server} (process {self.pid} of {self.user} on {self.host})"

    @classmethod
    def here(cls, server: str) -> Owner:
        """Return this process as an owner with a new nonce; ``server`` is the name that its users know."""
        return cls(server, socket.gethostname(), os.getpid(), user_name(), uuid4().hex)

    def to_json(self) -> str:
        """Return the stored form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Owner:
        """Parse the result of ``to_json``, or any other, untrusted text.

        Unusable fields become "an unknown ..." (0 for ``pid``); nothing is raised.
        """
        fields = json_object(text)
        words = {key: _printable(fields.get(key)) or f"an unknown {key}" for key in ("server", "host", "user", "nonce")}
        pid = fields.get("pid")
        return cls(pid=pid if type(pid) is int and 0 < pid < 1 << 32 else 0, **words)


def _printable(word: object) -> str:
    return "".join(filter(str.isprintable, word[:LONGEST_WORD])) if isinstance(word, str) else ""


class Lease(ABC):
    """An acquired lease. It renews itself until ``release``, or until it is lost. Belongs to one event loop."""

    name: str
    token: int
    """The fencing token: never the same for two leases of a name."""
    owner: Owner
    wanted: asyncio.Event
    """Set while another server waits for a hand-off."""
    lost: asyncio.Future[str]
    """Done, with the reason, when the lease was lost; cancelled by ``release``."""

    @abstractmethod
    async def release(self) -> None:
        """Release the lease, and return when no task and no object of it is left. May be called again.

        If storage cannot be reached, it retries until other servers treat the lease as expired, and then gives up.
        """


class Leases(ABC):
    """A place that leases are acquired from."""

    @abstractmethod
    async def acquire(self, name: str, owner: Owner, patience: float = 0.0) -> Lease:
        """Acquire the lease of ``name``. If another server holds it, request it and wait up to ``patience`` seconds.

        Only one server at a time can be the waiter. Raises LeaseHeldError, which names the owner, and leaves nothing.
        """

    @abstractmethod
    async def holder(self, name: str) -> Owner | None:
        """Return the current owner of the lease of ``name``, or None if it is free or expired."""
