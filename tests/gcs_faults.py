"""Faults on demand: what goes wrong between a client and Google Cloud Storage, when, and for which requests."""

from __future__ import annotations

import random
import re
import threading
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["status", "cut", "lose", "truncate", "delay"]

OBJECTS = r"(?!.*bucket).*"
"""Matches the operations on objects."""


@dataclass
class Fault:
    """One thing that goes wrong.

    ``status``: the request is answered with ``code`` and not carried out. ``cut``: the connection ends before the
    request is carried out. ``lose``: it is carried out, and the connection ends instead of an answer. ``truncate``: the
    connection ends in the middle of the answer's body. ``delay``: it is carried out ``seconds`` later.

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
    """Those that are set. The dice are the same ones in each run."""

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
        """What goes wrong with this request: each delay that applies, and at most one other fault."""
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
