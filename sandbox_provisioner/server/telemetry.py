"""Publish a Jupyter Server's sandboxes as Jupyter events, Prometheus metrics and log lines for its operators.

All data comes from the event bus, which contains no code, environment, key or path.
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

from ..errors import subclasses
from ..events import EVENT_BUS, Entry, EventKind
from .kernel_manager import sandboxed_kernels

EVENTS = (EventKind.CREATED, EventKind.HIBERNATED, EventKind.WOKEN, EventKind.HANDED_OFF, EventKind.FAILED)
"""Entries that are emitted as Jupyter events; each has a schema in ``event_schemas``."""

SCHEMAS = Path(__file__).with_name("event_schemas")

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Histogram buckets in seconds: from waking a small kernel to storing a large checkpoint in a remote bucket."""

INTERNAL, OTHER = "InternalError", "other"
"""INTERNAL: the event bus's reason for errors that are no SandboxError. OTHER: the label for unknown values."""

_attached: WeakSet[Any] = WeakSet()
"""Kernel managers of this process's servers."""


def attach(serverapp: ServerApp, kernel_manager: Any) -> None:
    """Publish a server's events, metrics and log. Several servers in one process share the metrics."""
    if kernel_manager in _attached:
        return
    _attached.add(kernel_manager)
    _show_log(serverapp.log)
    _count_events()
    events = serverapp.event_logger
    assert events is not None  # the server creates it before it loads extensions
    for what in EVENTS:
        events.register_event_schema(SCHEMAS / f"{what}.yaml")
    _emit_events(events, serverapp.io_loop)


def schema_id(what: EventKind) -> str:
    """Return the ``$id`` of an event's schema."""
    return f"urn:sandbox-provisioner:{what}:v1"


def _show_log(server_log: logging.Logger) -> None:
    """Send the package's log lines to the server's handlers, unless logging is already configured for them."""
    ours = logging.getLogger("sandbox_provisioner")
    if ours.level == logging.NOTSET:
        ours.setLevel(server_log.level)
    if not ours.hasHandlers():
        for handler in server_log.handlers:
            ours.addHandler(handler)


# -- events --------------------------------------------------------------------------------------------------------


def _emit_events(logger: EventLogger, loop: IOLoop) -> None:
    """Subscribe to the event bus until the server's ``loop`` is closed, and emit each event on that loop.

    The listeners run on that loop."""

    def emit(entry: Entry) -> None:
        if loop.asyncio_loop.is_closed():  # type: ignore[attr-defined]
            end()
        elif entry.what in EVENTS:
            loop.add_callback(logger.emit, schema_id=schema_id(entry.what), data=event(entry))

    end = EVENT_BUS.subscribe(emit)


def event(entry: Entry) -> dict[str, Any]:
    """Return the data of an entry's event: sandbox, kernel, user, failure; duration, size and loss if known."""
    data: dict[str, Any] = {"sandbox_id": entry.sandbox_id, "kernel_name": entry.kernel_name, "user": entry.user}
    if entry.what == EventKind.FAILED:
        data |= {"doing": entry.doing, "reason": entry.reason}
    known = {"seconds": entry.seconds, "size": entry.size, "lost_since": entry.lost_since or None}
    return data | {name: value for name, value in known.items() if value is not None}


# -- metrics -------------------------------------------------------------------------------------------------------


class _Sandboxes(Collector):
    """Collector of the gauges for the sandboxes of all servers in this process.

    Runs in the thread of the server that received Prometheus's request."""

    def describe(self) -> list[GaugeMetricFamily]:
        """Return the gauges without values. Called by prometheus_client at the registration."""
        return [
            GaugeMetricFamily(
                "jupyter_sandbox_sandboxes", "Sandboxes of this server's kernels, by state.", labels=["state"]
            ),
            GaugeMetricFamily("jupyter_sandbox_busy", "Sandboxes whose kernel is not idle."),
        ]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges. Called by prometheus_client for each scrape."""
        from ..kernel.kernel import KernelState
        from ..templates.warm_pool import WARM_POOL

        family, busy = self.describe()
        kernels = [kernel for manager in _attached for kernel in sandboxed_kernels(manager).values()]
        asleep = [kernel.asleep for kernel in kernels if kernel.state != KernelState.GONE]
        family.add_metric(["running"], asleep.count(False))
        family.add_metric(["hibernated"], asleep.count(True))
        family.add_metric(["standby"], len(WARM_POOL.copies))
        yield family
        busy.add_metric([], sum(kernel.busy and not kernel.asleep for kernel in kernels))
        yield busy


@cache
def _count_events() -> None:
    """Register and update the metrics. Runs once per process, because the registry is shared."""
    REGISTRY.register(_Sandboxes())
    transitions = Counter("jupyter_sandbox_transitions", "Completed operations on sandboxes.", ["what"])
    seconds = Histogram(
        "jupyter_sandbox_transition_seconds", "Duration of operations on sandboxes.", ["what"], buckets=BUCKETS
    )
    size = Counter("jupyter_sandbox_bytes", "Bytes saved or restored by operations on sandboxes.", ["what"])
    failures = Counter("jupyter_sandbox_failures", "Failed operations on sandboxes, by error.", ["doing", "reason"])

    def count(entry: Entry) -> None:
        if entry.what == EventKind.PROGRESS:
            return
        if entry.what == EventKind.FAILED:
            failures.labels(*failure(entry)).inc()
            return
        transitions.labels(entry.what).inc()
        if entry.seconds is not None:
            seconds.labels(entry.what).observe(entry.seconds)
        if entry.size is not None:
            size.labels(entry.what).inc(entry.size)

    EVENT_BUS.subscribe(count)


def failure(entry: Entry) -> tuple[str, str]:
    """Return the labels of a failure: what failed, and the name of the SandboxError, both from fixed sets."""
    doing = entry.doing if entry.doing in set(EventKind) else OTHER
    reasons = {INTERNAL, *(error.__name__ for error in subclasses())}
    return doing, entry.reason if entry.reason in reasons else OTHER
