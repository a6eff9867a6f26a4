"""Leases: who may run a sandbox, one server at a time, with a polite way to ask for it.

A lease is a courtesy. What keeps a server that was paused past its lease from overwriting newer state is the
compare-and-swap of the sandbox's metadata, which carries the lease's token; without that, nothing here stops a
process that does not know yet that it has lost.

Not guaranteed:

- That an owner learns of a loss before the next one begins. A process that was stopped, or whose machine slept, finds
  out when it runs again, and whatever it had under way then goes on until it looks at ``lost``.
- That a dead owner's lease is free at once. On one machine it is; elsewhere it has to run out first, and in a shared
  folder, whose clock nobody can trust, a newcomer must have watched it for the whole of its time.
- That the waiter is next. A free lease goes to whoever asks first; the waiter asks about every second.
- That nothing of a failed attempt is ever left. A request that reaches its storage after its sender gave up on it, or
  a SIGKILL in the middle, leaves an object that nobody renews: it is taken over like a dead owner's.
- Anything where storage does not keep its word: a mounted bucket with caching of metadata, a network file system
  without atomic renames, two machines whose clocks run at speeds that differ by more than a twentieth.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

from ..config import user_name

LONGEST_WORD = 200


@dataclass(frozen=True)
class Owner:
    """Who holds a lease, in words fit for an error message; ``nonce`` is new for each attempt to get one."""

    server: str
    host: str
    pid: int
    user: str
    nonce: str

    def __str__(self) -> str:
        return f"{self.server} (process {self.pid} of {self.user} on {self.host})"

    @classmethod
    def here(cls, server: str) -> Owner:
        """This process, with a new nonce; ``server`` is what its users know it by."""
        return cls(server, socket.gethostname(), os.getpid(), user_name(), uuid4().hex)

    def to_json(self) -> str:
        """How it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Owner:
        """What ``to_json`` wrote. Anybody may have written it: what cannot be used is unknown, and no error."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        fields: dict[str, Any] = found if isinstance(found, dict) else {}
        words = {key: _printable(fields.get(key)) or f"an unknown {key}" for key in ("server", "host", "user", "nonce")}
        pid = fields.get("pid")
        return cls(pid=pid if type(pid) is int and 0 < pid < 1 << 32 else 0, **words)


def _printable(word: object) -> str:
    return "".join(filter(str.isprintable, word[:LONGEST_WORD])) if isinstance(word, str) else ""


class Lease(ABC):
    """One that was acquired. It renews itself until ``release``, or until it is lost."""

    name: str
    token: int
    """The fencing token: different for each lease of a name, now and ever."""
    owner: Owner
    wanted: asyncio.Event
    """Set while another server waits for it and would like it handed over."""
    lost: asyncio.Future[str]
    """Done, with the reason, when it was lost; cancelled by ``release``."""

    @abstractmethod
    async def release(self) -> None:
        """Give it up; when this returns nothing of it is left, no task and no object. May be called again.

        If storage cannot be reached it tries until the lease has run out, and then leaves it at that.
        """


class Leases(ABC):
    """Where leases are had from."""

    @abstractmethod
    async def acquire(self, name: str, owner: Owner, patience: float = 0.0) -> Lease:
        """Get the lease of ``name``; if another has it, ask for it and wait up to ``patience`` seconds.

        There is one waiter at a time. LeaseHeldError names the owner; nothing of the attempt remains.
        """

    @abstractmethod
    async def holder(self, name: str) -> Owner | None:
        """Who has the lease of ``name`` now; None if nobody alive does."""
