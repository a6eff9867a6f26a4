"""Test the events, metrics and log lines of a real Jupyter Server."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from jupyter_server.serverapp import ServerApp
from leftovers import leftovers
from notebooks import Notebook, until
from prometheus_client import REGISTRY
from servers import Server

from sandbox_provisioner.events import EVENT_BUS, Entry, EventKind
from sandbox_provisioner.server import telemetry
from sandbox_provisioner.server.telemetry import EVENTS, attach, schema_id

Serve = Callable[..., Server]
Sandboxed = Callable[..., str]
MakeApp = Callable[[], ServerApp]

CREATED = "2026-11-16T15:50:00.000+00:00"
ENTRIES = {
    EventKind.CREATED: Entry("box", EventKind.CREATED, kernel_name="python3", user="me"),
    EventKind.HIBERNATED: Entry("box", EventKind.HIBERNATED, 0.5, 1024, kernel_name="python3", user="me"),
    EventKind.WOKEN: Entry("box", EventKind.WOKEN, 0.25, 1024, "", "", "python3", "me", lost_since=CREATED),
    EventKind.HANDED_OFF: Entry("box", EventKind.HANDED_OFF, 1.5, 2048, kernel_name="python3", user="me"),
    EventKind.FAILED: Entry("box", EventKind.FAILED, 3.0, None, "woken", "IncompatibleError", "python3", "me"),
}
CULLING = (
    "--MappingKernelManager.cull_idle_timeout=1",
    "--MappingKernelManager.cull_interval=1",
    "--MappingKernelManager.cull_connected=True",
)
MAP = """
import mmap
file = open("library", "rb")
mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
"""


@pytest.fixture
def make_app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MakeApp:
    """Return a function that makes servers in this process; ``app.emitted`` has their events."""
    for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
        monkeypatch.setenv(f"JUPYTER_{name}", str(tmp_path / name))

    def make() -> ServerApp:
        app = ServerApp()
        app.initialize(["--allow-root", "--port=0", f"--ServerApp.root_dir={tmp_path}"], new_httpserver=False)
        app.emitted = io.StringIO()
        app.event_logger.register_handler(logging.StreamHandler(app.emitted))
        attach(app, app.kernel_manager)
        return app

    return make


def emitted(app: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in app.emitted.getvalue().splitlines()]


async def settled() -> None:
    """Wait until the loop has run all pending callbacks."""
    for _ in range(3):
        await asyncio.sleep(0)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"jupyter_sandbox_{name}", labels) or 0.0


@pytest.mark.parametrize("what", EVENTS)
async def test_event_data(make_app: MakeApp, what: EventKind) -> None:
    app, entry = make_app(), ENTRIES[what]
    EVENT_BUS.write(entry)
    await settled()
    (event,) = emitted(app)
    assert (event.pop("__schema__"), event.pop("__schema_version__")) == (schema_id(what), "1")
    about = {"sandbox_id": "box", "kernel_name": "python3", "user": "me"}
    measured = {"seconds": entry.seconds, "size": entry.size, "lost_since": entry.lost_since or None}
    failure = {"doing": "woken", "reason": "IncompatibleError"} if what == EventKind.FAILED else {}
    known = {name: value for name, value in measured.items() if value is not None}
    assert {name: value for name, value in event.items() if not name.startswith("__")} == about | known | failure


async def test_other_entries_emit_no_event(make_app: MakeApp) -> None:
    app = make_app()
    for what in set(EventKind) - set(EVENTS):
        EVENT_BUS.write(Entry("box", what))
    await settled()
    assert emitted(app) == []


async def test_event_schemas_refuse_other_fields(make_app: MakeApp) -> None:
    app = make_app()
    assert app.event_logger is not None
    allowed = {"sandbox_id", "kernel_name", "user", "seconds", "size", "doing", "reason", "lost_since"}
    for what in EVENTS:
        schema = app.event_logger.schemas.get(schema_id(what))
        assert set(schema.properties) <= allowed
        assert schema._schema["additionalProperties"] is False


async def test_events_are_emitted_on_the_server_loop(make_app: MakeApp) -> None:
    app, received = make_app(), asyncio.Event()
    threads = []

    async def listen(logger: Any, schema_id: str, data: dict[str, Any]) -> None:
        threads.append(threading.current_thread())
        received.set()

    assert app.event_logger is not None
    app.event_logger.add_listener(schema_id=schema_id(EventKind.WOKEN), listener=listen)
    await asyncio.to_thread(EVENT_BUS.write, ENTRIES[EventKind.WOKEN])
    await asyncio.wait_for(received.wait(), 60)
    assert threads == [threading.current_thread()]


async def test_transition_metrics(make_app: MakeApp) -> None:
    make_app()
    names = ("transitions_total", "transition_seconds_count", "transition_seconds_sum", "bytes_total")
    before = [metric(name, what="hibernated") for name in names]
    EVENT_BUS.write(ENTRIES[EventKind.HIBERNATED])
    after = [metric(name, what="hibernated") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx([1, 1, 0.5, 1024])


async def test_failure_metrics(make_app: MakeApp) -> None:
    make_app()
    before = metric("failures_total", doing="woken", reason="IncompatibleError")
    EVENT_BUS.write(ENTRIES[EventKind.FAILED])
    assert metric("failures_total", doing="woken", reason="IncompatibleError") == before + 1


async def test_labels_are_from_fixed_sets(make_app: MakeApp) -> None:
    make_app()
    EVENT_BUS.write(Entry("box", EventKind.FAILED, doing="/home/me", reason="a secret"))
    EVENT_BUS.write(Entry("box", EventKind.FAILED, doing="hibernated", reason="InternalError"))
    assert metric("failures_total", doing="other", reason="other") >= 1
    assert metric("failures_total", doing="hibernated", reason="InternalError") >= 1
    labels = {value for family in REGISTRY.collect() for sample in family.samples for value in sample.labels.values()}
    assert labels.isdisjoint({"/home/me", "a secret", "box"})


async def test_progress_is_not_counted(make_app: MakeApp) -> None:
    make_app()
    EVENT_BUS.write(Entry("box", EventKind.PROGRESS, size=5, doing="woken"))
    assert metric("transitions_total", what="progress") == 0


async def test_two_servers_share_the_metrics(make_app: MakeApp) -> None:
    apps = [make_app(), make_app()]
    attach(apps[0], apps[0].kernel_manager)
    before = metric("transitions_total", what="woken")
    EVENT_BUS.write(ENTRIES[EventKind.WOKEN])
    await settled()
    assert [len(emitted(app)) for app in apps] == [1, 1]
    assert metric("transitions_total", what="woken") == before + 1


def test_stopped_server_emits_no_events(make_app: MakeApp) -> None:
    async def make() -> ServerApp:
        return make_app()

    EVENT_BUS.write(ENTRIES[EventKind.WOKEN])  # remove the handlers of ended servers of other tests
    app = asyncio.run(make())
    known = len(EVENT_BUS._listeners)
    EVENT_BUS.write(ENTRIES[EventKind.WOKEN])
    assert emitted(app) == []
    assert len(EVENT_BUS._listeners) == known - 1


@contextmanager
def logging_to(*handlers: logging.Handler) -> Iterator[None]:
    """Configure only these handlers, on the root logger, in place of those of pytest."""
    ours, root = logging.getLogger("sandbox_provisioner"), logging.getLogger()
    level = ours.level
    ours.setLevel(logging.NOTSET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "handlers", [])
        patch.setattr(root, "handlers", list(handlers))
        yield
    ours.setLevel(level)


@pytest.fixture
def server_log() -> tuple[logging.Logger, io.StringIO]:
    """Return the log of a server, and its lines."""
    log = logging.Logger("server", logging.INFO)
    log.addHandler(logging.StreamHandler(text := io.StringIO()))
    return log, text


def test_log_lines_are_in_the_server_log_once(server_log: tuple[logging.Logger, io.StringIO]) -> None:
    log, text = server_log
    with logging_to():
        telemetry._show_log(log)
        telemetry._show_log(log)
        EVENT_BUS.write(Entry("box", EventKind.WOKEN))
    assert text.getvalue() == "box woken\n"


def test_configured_logging_is_kept(server_log: tuple[logging.Logger, io.StringIO]) -> None:
    log, text = server_log
    with logging_to(logging.StreamHandler(theirs := io.StringIO())):
        telemetry._show_log(log)
        EVENT_BUS.write(Entry("box", EventKind.WOKEN))
    assert (theirs.getvalue(), text.getvalue()) == ("box woken\n", "")


# -- a real server -------------------------------------------------------------------------------------------------


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """Return the file into which servers that are started now write their events."""
    file = tmp_path / "events.jsonl"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "jupyter_server_config.py").write_text(
        f"import logging\nc.EventLogger.handlers = [logging.FileHandler({str(file)!r})]\n"
    )
    return file


def happened(events: Path) -> list[dict[str, Any]]:
    lines = events.read_text().splitlines() if events.exists() else []
    return [event for event in map(json.loads, lines) if event["__schema__"].startswith("urn:sandbox-provisioner:")]


def scrape(server: Server) -> dict[str, float]:
    """Return the server's metrics of sandboxes."""
    with urlopen(f"{server.url}metrics?token=t") as answer:
        lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith("jupyter_sandbox_")]
    return {name: float(value) for name, value in lines}


def sandboxes(runtime: Path) -> list[str]:
    return [line for line in leftovers(runtime) if line.startswith("folder")]


@pytest.mark.runsc
def test_hibernate_and_wake_in_events_metrics_and_log(
    serve: Serve, sandboxed: Sandboxed, runtime: Path, events: Path
) -> None:
    server = serve(*CULLING)
    kernel = sandboxed()
    notebook = Notebook(server, kernel)
    assert scrape(server)['jupyter_sandbox_sandboxes{state="running"}'] == 1
    notebook.run("x = 'not to be told'")
    until(lambda: sandboxes(runtime) == [])
    until(lambda: scrape(server)['jupyter_sandbox_sandboxes{state="hibernated"}'] == 1)
    notebook.run("x")
    until(lambda: 'jupyter_sandbox_transitions_total{what="woken"}' in scrape(server))
    metrics = scrape(server)
    notebook.close()
    assert server.ask("DELETE", f"sessions/{notebook.session['id']}")[0] == 204
    server.stop()

    for what in ("created", "hibernated", "woken"):
        assert metrics[f'jupyter_sandbox_transitions_total{{what="{what}"}}'] >= 1
    assert metrics['jupyter_sandbox_bytes_total{what="hibernated"}'] > 1_000_000
    assert metrics['jupyter_sandbox_transition_seconds_count{what="woken"}'] >= 1

    found = happened(events)
    assert [event["__schema__"] for event in found[:3]] == [schema_id(what) for what in list(EVENTS)[:3]]
    assert len({event["sandbox_id"] for event in found}) == 1
    assert {event["kernel_name"] for event in found} == {kernel}
    assert found[0]["user"]
    assert found[1]["size"] > 1_000_000

    lines = [line.partition("] ")[2] for line in server.log.read_text().splitlines()]
    begins = Counter(" ".join(line.split()[:3]) for line in lines if line.startswith(found[0]["sandbox_id"]))
    for what in (EventKind.CREATED, EventKind.HIBERNATED, EventKind.WOKEN):
        counted = sum(event["__schema__"] == schema_id(what) for event in found)
        assert begins[f"{found[0]['sandbox_id']} (notebooks/a.ipynb) {what}"] == counted >= 1
    assert "not to be told" not in events.read_text() + server.log.read_text()


@pytest.mark.runsc
def test_failed_hibernation_is_reported_with_reason(
    serve: Serve, sandboxed: Sandboxed, events: Path, notebook_folder: Path
) -> None:
    library = notebook_folder / "library"
    library.write_bytes(b"x" * 4096)
    server = serve(*CULLING)
    notebook = Notebook(server, sandboxed())
    notebook.run(MAP)
    library.unlink()  # the mapped file would be lost with the sandbox
    name = 'jupyter_sandbox_failures_total{doing="hibernated",reason="ReplacedFilesError"}'
    until(lambda: name in scrape(server))
    failed = [event for event in happened(events) if event["__schema__"] == schema_id(EventKind.FAILED)]
    assert (failed[0]["doing"], failed[0]["reason"]) == ("hibernated", "ReplacedFilesError")
    assert scrape(server)['jupyter_sandbox_sandboxes{state="running"}'] == 1
    assert server.ask("DELETE", f"sessions/{notebook.session['id']}")[0] == 204
    notebook.close()
    assert f"{failed[0]['sandbox_id']} (notebooks/a.ipynb) was not hibernated" in server.log.read_text()
