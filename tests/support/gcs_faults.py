"""Faults on demand: what goes wrong between a client and Google Cloud Storage, when, and for which requests.

Also Google's limit on how often one object name can be changed.
"""

from __future__ import annotations

import random
import re
import threading
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["status", "cut", "lose", "truncate", "end", "short", "delay"]

OBJECTS = r"(?!.*bucket).*"
"""Matches the operations on objects."""


@dataclass
class Fault:
    """One thing that goes wrong.

    ``status``: the request is answered with ``code`` and not carried out. ``cut``: the connection ends before the
    request is carried out. ``lose``: it is carried out, and the connection ends instead of an answer. ``truncate``: the
    connection is reset in the middle of the answer's body. ``end``: it is closed there. ``short``: half of the body is
    sent as if it were all of it. ``delay``: it is carried out ``seconds`` later.

    It meets requests whose operation (``get``, ``media``, ``insert``, ``start``, ``chunk``, ``cancel``, ``patch``,
    ``delete``, ``compose``, ``rewrite``, ``list``) and object's name match the patterns. Of these it lets ``skip``
    pass, then strikes every ``every``-th with ``probability``, until it has struck ``times`` (None: for ever). Requests
    about buckets (``get_bucket`` and so on), which the client sends in the background, are met only if named.
    """

    kind: Kind
    code: int = 503
    seconds: float = 0.0
    operation: str = OBJECTS
    name: str = ".*"
    times: int | None = 1
    skip: int = 0
    every: int = 1
    probability: float = 1.0
    met: int = 0
    struck: int = 0


@dataclass
class Faults:
    """The faults that are set. Random ones are the same in each run."""

    faults: list[Fault] = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(4))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, description: dict[str, Any]) -> None:
        with self.lock:
            self.faults.append(Fault(**description))

    def clear(self) -> None:
        with self.lock:
            self.faults.clear()

    def strike(self, operation: str, name: str) -> list[Fault]:
        """Return the faults of this request: each delay that applies, and at most one other."""
        struck: list[Fault] = []
        with self.lock:
            for fault in self.faults:
                if not (re.fullmatch(fault.operation, operation) and re.fullmatch(fault.name, name, re.DOTALL)):
                    continue
                fault.met += 1
                turn = fault.met > fault.skip and (fault.met - fault.skip) % fault.every == 0
                left = fault.times is None or fault.struck < fault.times
                free = fault.kind == "delay" or all(other.kind == "delay" for other in struck)
                if turn and left and free and self.dice.random() < fault.probability:
                    fault.struck += 1
                    struck.append(fault)
        return struck


MUTATIONS = ("insert", "start", "patch", "delete", "compose", "rewrite")
"""Operations that count as a change of their object."""


@dataclass
class MutationLimit:
    """Allow ``rate`` changes per second of each object name, and ``burst`` at once; a rate of 0 allows all.

    A change that is then refused by its precondition counts too: Google does not document that it does not.
    """

    rate: float = 0.0
    burst: float = 2.0
    refused: int = 0
    _left: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, rate: float, burst: float) -> None:
        """Start with new numbers, and forget all changes that were made before."""
        with self._lock:
            self.rate, self.burst, self.refused = rate, burst, 0
            self._left.clear()

    def allows(self, bucket: str, name: str, now: float) -> bool:
        """Count one change of an object; return False if it is one too many."""
        with self._lock:
            if not self.rate:
                return True
            left, since = self._left.get((bucket, name), (self.burst, now))
            left = min(self.burst, left + (now - since) * self.rate)
            allowed = left >= 1
            self._left[bucket, name] = (left - allowed, now)
            self.refused += not allowed
            return allowed
