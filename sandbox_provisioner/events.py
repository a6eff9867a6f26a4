"""The journal: what happens to this process's sandboxes, with one line of the log for each, told to all who ask for it.

Nothing of what runs in a sandbox is in it: no code, no environment, no keys.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum

from .errors import SandboxError
from .words import printable

log = logging.getLogger(__name__)

PROGRESS_EVERY = 0.1
"""Seconds between two reports of the same work."""


class What(StrEnum):
    """What happened to a sandbox."""

    CREATED = "created"
    STARTED = "started"
    HIBERNATED = "hibernated"
    WOKEN = "woken"
    HANDED_OFF = "handed_off"
    SAVED = "saved"
    """A savepoint or a snapshot was made; it runs on."""
    REWOUND = "rewound"
    FORKED = "forked"
    ENDED = "ended"
    """Its kernel ended; what was saved of it stays."""
    DELETED = "deleted"
    LOST = "lost"
    FAILED = "failed"
    PROGRESS = "progress"
    """Not logged: so many bytes of what is under way have been moved."""


@dataclass(frozen=True)
class Entry:
    """One thing that happened. ``size`` is in bytes; ``doing`` is what failed or is under way, and ``reason`` why it
    failed: the name of the exception, which says nothing that a user wrote.
    """

    sandbox_id: str
    what: What
    seconds: float | None = None
    size: int | None = None
    doing: str = ""
    reason: str = ""
    kernel_name: str = ""
    user: str = ""
    time: str = field(default_factory=lambda: _now())


Listener = Callable[[Entry], None]
"""Called in whatever thread something happens in, and so must be quick and must not raise."""


class Journal:
    """What this process writes down. There is one, ``JOURNAL``."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` told of everything from now on; returns how to end that."""
        with self._guard:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._guard:
                self._listeners = tuple(known for known in self._listeners if known is not listener)

        return end

    def write(self, entry: Entry) -> None:
        """Log it, unless it is mere progress, and tell everybody."""
        if entry.what != What.PROGRESS:
            log.info("%s %s", entry.sandbox_id, _sentence(entry))
        self._tell(entry)

    def fail(self, entry: Entry, error: Exception) -> None:
        """What would have been ``entry`` did not come about: log why, and tell everybody what kind of error it was."""
        ours = isinstance(error, SandboxError)
        reason = type(error).__name__ if ours else "InternalError"
        failed = replace(entry, what=What.FAILED, doing=str(entry.what), reason=reason)
        log.error(
            "%s %s: %s", entry.sandbox_id, _sentence(failed), printable(str(error)) if ours else repr(type(error))
        )
        self._tell(failed)

    @contextmanager
    def doing(self, entry: Entry) -> Iterator[Work]:
        """``entry`` is what will have happened after the block; if that raises, a failure is written instead."""
        work = Work(self, entry)
        began = time.monotonic()
        try:
            yield work
        except Exception as error:
            self.fail(replace(entry, seconds=_since(began), time=_now()), error)
            raise
        self.write(replace(entry, seconds=_since(began), size=work.size, time=_now()))

    def _tell(self, entry: Entry) -> None:
        for listener in self._listeners:
            listener(entry)


class Work:
    """Something under way: ``advance`` is told of each piece, and ``size`` is what it came to in the end."""

    def __init__(self, journal: Journal, entry: Entry) -> None:
        self.size: int | None = None
        self._journal = journal
        self._entry = entry
        self._guard = threading.Lock()
        self._moved = 0
        self._next = 0.0

    def advance(self, amount: int) -> None:
        """So many further bytes have been moved; from any thread."""
        with self._guard:
            self._moved += amount
            now, moved = time.monotonic(), self._moved
            if now < self._next:
                return
            self._next = now + PROGRESS_EVERY
        entry = replace(self._entry, what=What.PROGRESS, doing=str(self._entry.what), size=moved, time=_now())
        self._journal.write(entry)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


def _sentence(entry: Entry) -> str:
    words = [f"was not {_words(entry.doing)}" if entry.what == What.FAILED else _words(entry.what)]
    if entry.seconds is not None:
        words.append(f"in {entry.seconds:.3f} s")
    if entry.size is not None:
        words.append(f"({entry.size} bytes)")
    return " ".join(words)


def _words(name: str) -> str:
    return name.replace("_", " ")


JOURNAL = Journal()
