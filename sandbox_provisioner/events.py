"""Publish the events of this process's sandboxes to subscribers, and log each in one line.

Events contain no data of the code that runs in a sandbox: no source, no environment, no keys.
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

from ._text import printable, titled
from .errors import SandboxError

log = logging.getLogger(__name__)

PROGRESS_EVERY = 0.1
"""Shortest time between two progress events of the same work, in seconds."""


class EventKind(StrEnum):
    """The kinds of events."""

    CREATED = "created"
    STARTED = "started"
    HIBERNATED = "hibernated"
    WOKEN = "woken"
    HANDED_OFF = "handed_off"
    SAVED = "saved"
    """A savepoint or a file snapshot was made; the sandbox continues."""
    REWOUND = "rewound"
    FORKED = "forked"
    ENDED = "ended"
    """The kernel ended; its saved state is kept."""
    DELETED = "deleted"
    LOST = "lost"
    """Another server owns the sandbox now."""
    FAILED = "failed"
    PROGRESS = "progress"
    """The current work has moved ``size`` bytes so far. Not logged."""


@dataclass(frozen=True)
class Entry:
    """An event of the kind ``what``. ``size`` is in bytes; ``doing`` is the kind of the failed or unfinished work.

    ``reason`` is the class name of the exception that caused a failure, not its text, which may contain a user's data.
    ``lost_since`` is set if a restored state is older than the lost one: the time of the restored checkpoint.
    """

    sandbox_id: str
    what: EventKind
    seconds: float | None = None
    size: int | None = None
    doing: str = ""
    reason: str = ""
    kernel_name: str = ""
    user: str = ""
    notebook: str = ""
    """Path of the notebook, for the log only; not published."""
    time: str = field(default_factory=lambda: _now())
    lost_since: str = ""


Listener = Callable[[Entry], None]
"""Called in the thread that publishes the event, so it must be quick and must not raise."""


class EventBus:
    """The event bus of this process; ``EVENT_BUS`` is the only instance. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event from now on. Return a function that ends the subscription."""
        with self._guard:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._guard:
                self._listeners = tuple(known for known in self._listeners if known is not listener)

        return end

    def write(self, entry: Entry) -> None:
        """Log an event, unless it is progress, and pass it to all listeners."""
        if entry.what != EventKind.PROGRESS:
            log.info("%s %s", titled(entry.sandbox_id, entry.notebook), _sentence(entry))
        self._publish(entry)

    def fail(self, entry: Entry, error: Exception) -> None:
        """Log that the work for ``entry`` failed, and publish a FAILED event with the name of the exception."""
        known = isinstance(error, SandboxError)
        reason = type(error).__name__ if known else "InternalError"
        failed = replace(entry, what=EventKind.FAILED, doing=str(entry.what), reason=reason)
        text = printable(str(error)) if known else repr(type(error))
        log.error("%s %s: %s", titled(entry.sandbox_id, entry.notebook), _sentence(failed), text)
        self._publish(failed)

    @contextmanager
    def doing(self, entry: Entry) -> Iterator[Work]:
        """Publish ``entry`` with its duration after the block, or a FAILED event if the block raises."""
        work = Work(self, entry)
        began = time.monotonic()
        try:
            yield work
        except Exception as error:
            self.fail(replace(entry, seconds=_since(began), time=_now()), error)
            raise
        lost_since = work.lost_since
        self.write(replace(entry, seconds=_since(began), size=work.size, lost_since=lost_since, time=_now()))

    def _publish(self, entry: Entry) -> None:
        for listener in self._listeners:
            listener(entry)


class Work:
    """Work in progress, from ``EventBus.doing``. The block sets ``size`` and ``lost_since`` for the final event."""

    def __init__(self, bus: EventBus, entry: Entry) -> None:
        self.size: int | None = None
        self.lost_since = ""
        self._bus = bus
        self._entry = entry
        self._guard = threading.Lock()
        self._moved = 0
        self._next = 0.0

    def advance(self, amount: int) -> None:
        """Count ``amount`` more bytes, and publish progress at most every PROGRESS_EVERY seconds. Thread-safe."""
        with self._guard:
            self._moved += amount
            now, moved = time.monotonic(), self._moved
            if now < self._next:
                return
            self._next = now + PROGRESS_EVERY
        entry = replace(self._entry, what=EventKind.PROGRESS, doing=str(self._entry.what), size=moved, time=_now())
        self._bus.write(entry)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


def _sentence(entry: Entry) -> str:
    words = [f"was not {_readable(entry.doing)}" if entry.what == EventKind.FAILED else _readable(entry.what)]
    if entry.seconds is not None:
        words.append(f"in {entry.seconds:.3f} s")
    if entry.size is not None:
        words.append(f"({entry.size} bytes)")
    if entry.lost_since:
        words.append(f"with its state of {entry.lost_since}; later changes are lost, because it ended unsaved")
    return " ".join(words)


def _readable(name: str) -> str:
    return name.replace("_", " ")


EVENT_BUS = EventBus()
