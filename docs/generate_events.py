"""Generate tables of the events and the metrics of a server."""

from __future__ import annotations

import yaml
from generate_settings import table
from prometheus_client import REGISTRY

from sandbox_provisioner.server import telemetry

PREFIX = "jupyter_sandbox_"
SUFFIXES = {"counter": "_total"}


def markdown() -> str:
    """Return the tables of events, their fields, and metrics."""
    schemas = [yaml.safe_load((telemetry.SCHEMAS / f"{what}.yaml").read_text()) for what in telemetry.EVENTS]
    events = [(f"`{schema['$id']}`", schema["description"]) for schema in schemas]
    names = dict.fromkeys(name for schema in schemas for name in schema["properties"])
    fields = [(f"`{name}`", _meaning(schemas, name)) for name in names]
    lines = [*table(("event", ""), events), "", *table(("field", ""), fields), ""]
    return "\n".join([*lines, *table(("metric", "", ""), _metrics()), ""])


def _meaning(schemas: list[dict[str, dict[str, dict[str, str]]]], name: str) -> str:
    """Return the description of a field: one text if it is the same in all events, otherwise one per event."""
    meant: dict[str, list[str]] = {}
    for schema in schemas:
        if name in schema["properties"]:
            short = str(schema["$id"]).split(":")[2]
            meant.setdefault(schema["properties"][name]["description"].rstrip("."), []).append(short)
    if len(meant) == 1:
        return next(iter(meant))
    return "; ".join(f"{', '.join(events)}: {text[0].lower()}{text[1:]}" for text, events in meant.items())


def _metrics() -> list[tuple[str, str, str]]:
    telemetry._count_events()
    found = (metric for metric in REGISTRY.collect() if metric.name.startswith(PREFIX))
    return [(f"`{metric.name}{SUFFIXES.get(metric.type, '')}`", metric.type, metric.documentation) for metric in found]
