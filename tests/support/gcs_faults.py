"""Faults that tests inject into the emulated Google Cloud Storage, and Google's limit on changes of one object."""

from __future__ import annotations

import random
import re
import threading
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["status", "cut", "lose", "truncate", "end", "short", "delay"]

OBJECTS = r"(?!.*bucket).*"
"""Pattern of the operations on objects."""


@dataclass
class Fault:
    """A fault, and the requests to which it applies.

    The kinds:

    - ``status``: the request is answered with ``code`` and not executed.
    - ``cut``: the connection is reset, and the request is not executed.
    - ``lose``: the request is executed, and the connection is reset instead of a response.
    - ``truncate``: the connection is reset in the middle of the response's body.
    - ``end``: the connection is closed in the middle of the response's body.
    - ``short``: the response contains only half of its body, with a matching Content-Length.
    - ``delay``: the request is executed after ``seconds``.

    A fault applies to requests whose operation (``get``, ``media``, ``insert``, ``start``, ``chunk``, ``cancel``,
    ``patch``, ``delete``, ``list``) and object name match the patterns. It skips the first
    ``skip`` of them, then affects every ``every``-th with ``probability``, at most ``times`` times (None: no limit).
    Requests about buckets (``get_bucket`` and so on), which the client sends in the background, are affected only if
    ``operation`` names them. ``met`` counts the matching requests, ``struck`` the affected ones.
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
    """All current faults. Their random decisions are the same in each run."""

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
        """Return the faults that affect a request: all delays, and at most one other fault."""
        struck: list[Fault] = []
        with self.lock:
            for fault in self.faults:
                if not (re.fullmatch(fault.operation, operation) and re.fullmatch(fault.name, name, re.DOTALL)):
                    continue
                fault.met += 1
                due = fault.met > fault.skip and (fault.met - fault.skip) % fault.every == 0
                repeats = fault.times is None or fault.struck < fault.times
                combines = fault.kind == "delay" or all(other.kind == "delay" for other in struck)
                if due and repeats and combines and self.dice.random() < fault.probability:
                    fault.struck += 1
                    struck.append(fault)
        return struck


MUTATIONS = ("insert", "start", "patch", "delete")
"""Operations that count as a change of their object."""


@dataclass
class MutationLimit:
    """Allows ``rate`` changes per second of each object name, and ``burst`` at once. A rate of 0 disables the limit.

    Changes that fail because of their precondition count, too, because Google does not document an exception for them.
    """

    rate: float = 0.0
    burst: float = 2.0
    refused: int = 0
    _left: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, rate: float, burst: float) -> None:
        """Set the limit, and forget all earlier changes."""
        with self._lock:
            self.rate, self.burst, self.refused = rate, burst, 0
            self._left.clear()

    def allows(self, bucket: str, name: str, now: float) -> bool:
        """Count a change of an object. Return False if it exceeds the limit."""
        with self._lock:
            if not self.rate:
                return True
            left, since = self._left.get((bucket, name), (self.burst, now))
            left = min(self.burst, left + (now - since) * self.rate)
            allowed = left >= 1
            self._left[bucket, name] = (left - allowed, now)
            self.refused += not allowed
            return allowed
