"""What a Jupyter Server tells of its sandboxes to those who operate it: events, metrics and lines of its log.

All of it comes from the journal, and so has no code, environment, key or path in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

from jupyter_events.logger import EventLogger
from jupyter_server.serverapp import ServerApp
from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector
from tornado.ioloop import IOLoop

from .errors import SandboxError
from .journal import JOURNAL, Entry, What
from .kernelmanager import sandboxed_kernels
from .standby import STANDBY

EVENTS = (What.CREATED, What.HIBERNATED, What.WOKEN, What.HANDED_OFF, What.FAILED)
"""Of which there are events; each has a schema in ``events``."""

SCHEMAS = Path(__file__).with_name("events")

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds: from a wake of a small kernel to a checkpoint of a large one in a bucket far away."""

INTERNAL, OTHER = "InternalError", "other"
"""The reason that the journal gives for an error that is not one of ours; the label of what is in no fixed set."""

_attached: WeakSet[Any] = WeakSet()
"""The kernel managers of this process's servers."""


def attach(serverapp: ServerApp, kernel_manager: Any) -> None:
    """Let a server tell of its sandboxes. Further servers of a process tell their own events and share the metrics."""
    if kernel_manager in _attached:
        return
    _attached.add(kernel_manager)
    _show_log(serverapp.log)
    _start_counting()
    events = serverapp.event_logger
    assert events is not None  # the server made it before it loads extensions
    for what in EVENTS:
        events.register_event_schema(SCHEMAS / f"{what}.yaml")
    _start_telling(events, serverapp.io_loop)


def schema_id(what: What) -> str:
    """The ``$id`` of the schema of an event."""
    return f"urn:sandbox-provisioner:{what}:v1"


def _show_log(server_log: logging.Logger) -> None:
    """Have the package's lines where the server's are, unless somebody has said which go where."""
    ours = logging.getLogger(__package__)
    if ours.level == logging.NOTSET:
        ours.setLevel(server_log.level)
    if not ours.hasHandlers():
        for handler in server_log.handlers:
            ours.addHandler(handler)


# -- events --------------------------------------------------------------------------------------------------------


def _start_telling(logger: EventLogger, loop: IOLoop) -> None:
    """Until the server's loop is closed, emit in it, because the events' listeners are its tasks."""

    def tell(entry: Entry) -> None:
        if loop.asyncio_loop.is_closed():  # type: ignore[attr-defined]
            end()
        elif entry.what in EVENTS:
            loop.add_callback(logger.emit, schema_id=schema_id(entry.what), data=event(entry))

    end = JOURNAL.subscribe(tell)


def event(entry: Entry) -> dict[str, Any]:
    """An entry as the data of its event: who, what, how long and how big, as far as that is known."""
    data: dict[str, Any] = {"sandbox_id": entry.sandbox_id, "kernel_name": entry.kernel_name, "user": entry.user}
    if entry.what == What.FAILED:
        data |= {"doing": entry.doing, "reason": entry.reason}
    known = {"seconds": entry.seconds, "size": entry.size}
    return data | {name: value for name, value in known.items() if value is not None}


# -- metrics -------------------------------------------------------------------------------------------------------


class _Sandboxes(Collector):
    """Counts the servers' sandboxes when somebody asks, in the thread of the server that was asked."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called for each scrape."""
        family = GaugeMetricFamily(
            "jupyter_sandbox_sandboxes", "Sandboxes that this server's kernels have, by state.", labels=["state"]
        )
        kernels = [kernel for manager in _attached for kernel in sandboxed_kernels(manager).values()]
        asleep = [kernel.asleep for kernel in kernels]
        family.add_metric(["running"], asleep.count(False))
        family.add_metric(["hibernated"], asleep.count(True))
        family.add_metric(["standby"], len(STANDBY.copies))
        yield family
        busy = sum(kernel.busy and not kernel.asleep for kernel in kernels)
        yield GaugeMetricFamily("jupyter_sandbox_busy", "Sandboxes whose kernel is not idle.", value=busy)


@cache
def _start_counting() -> None:
    """Once in a process, which has one registry of metrics."""
    REGISTRY.register(_Sandboxes())
    transitions = Counter("jupyter_sandbox_transitions", "What happened to sandboxes.", ["what"])
    seconds = Histogram("jupyter_sandbox_transition_seconds", "How long that took.", ["what"], buckets=BUCKETS)
    size = Counter("jupyter_sandbox_bytes", "Bytes that were saved or brought back with it.", ["what"])
    failures = Counter("jupyter_sandbox_failures", "What was not done, and why.", ["doing", "reason"])

    def count(entry: Entry) -> None:
        if entry.what == What.PROGRESS:
            return
        if entry.what == What.FAILED:
            failures.labels(*failure(entry)).inc()
            return
        transitions.labels(entry.what).inc()
        if entry.seconds is not None:
            seconds.labels(entry.what).observe(entry.seconds)
        if entry.size is not None:
            size.labels(entry.what).inc(entry.size)

    JOURNAL.subscribe(count)


def failure(entry: Entry) -> tuple[str, str]:
    """The labels of a failure: one of what can happen, and the name of one of our errors."""
    doing = entry.doing if entry.doing in set(What) else OTHER
    return doing, entry.reason if entry.reason in _reasons(SandboxError) | {INTERNAL} else OTHER


def _reasons(root: type[SandboxError]) -> set[str]:
    return {root.__name__}.union(*(_reasons(below) for below in root.__subclasses__()))
