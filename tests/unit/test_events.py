"""Test the event bus: each event is logged in one line and published to all listeners."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pytest

from sandbox_provisioner import events
from sandbox_provisioner.errors import LeaseHeldError
from sandbox_provisioner.events import Entry, EventBus, EventKind


@pytest.fixture
def bus() -> EventBus:
    return EventBus()


@pytest.fixture
def published(bus: EventBus) -> list[Entry]:
    """A list to which a listener adds all published entries."""
    entries: list[Entry] = []
    bus.subscribe(entries.append)
    return entries


def test_event_is_logged_in_one_line_with_the_sandbox_id(bus: EventBus, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bus.write(Entry("box", EventKind.HIBERNATED, seconds=0.5, size=1024))
    bus.write(Entry("box", EventKind.HANDED_OFF, notebook="/home/me/work/a.ipynb"))
    assert caplog.messages == ["box hibernated in 0.500 s (1024 bytes)", "box (work/a.ipynb) handed off"]


def test_failure_is_logged_with_its_text_and_published_with_its_name(
    bus: EventBus, published: list[Entry], caplog: pytest.LogCaptureFixture
) -> None:
    error = LeaseHeldError("sandboxes/box/lock", "another server")
    bus.fail(Entry("box", EventKind.HANDED_OFF, seconds=2), error)
    line = f"box was not handed off in 2.000 s: {error}"
    assert caplog.record_tuples == [(events.__name__, logging.ERROR, line)]
    assert [(entry.what, entry.doing, entry.reason) for entry in published] == [
        (EventKind.FAILED, "handed_off", "LeaseHeldError")
    ]


def test_progress_is_published_and_not_logged(
    bus: EventBus, published: list[Entry], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bus.write(Entry("box", EventKind.PROGRESS, size=5, doing="woken"))
    assert [(entry.what, entry.size) for entry in published] == [(EventKind.PROGRESS, 5)]
    assert caplog.messages == []


def test_entry_has_its_time() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    assert before <= datetime.fromisoformat(Entry("box", EventKind.CREATED).time) <= datetime.now(UTC)


def test_listeners_are_called_until_they_unsubscribe(bus: EventBus) -> None:
    first: list[str] = []
    second: list[str] = []
    end = bus.subscribe(lambda entry: first.append(entry.sandbox_id))
    bus.subscribe(lambda entry: second.append(entry.sandbox_id))
    bus.write(Entry("a", EventKind.CREATED))
    end()
    end()
    bus.write(Entry("b", EventKind.CREATED))
    assert (first, second) == (["a"], ["a", "b"])


def test_listener_can_unsubscribe_while_it_is_called(bus: EventBus, published: list[Entry]) -> None:
    def once(entry: Entry) -> None:
        end()

    end = bus.subscribe(once)
    bus.write(Entry("a", EventKind.CREATED))
    bus.write(Entry("b", EventKind.CREATED))
    assert [entry.sandbox_id for entry in published] == ["a", "b"]


def test_successful_work_is_published_with_its_size(bus: EventBus, published: list[Entry]) -> None:
    with bus.doing(Entry("box", EventKind.HIBERNATED, kernel_name="python3", user="me")) as work:
        work.size = 7
        assert published == []
    (entry,) = published
    assert (entry.what, entry.size, entry.kernel_name, entry.user) == (EventKind.HIBERNATED, 7, "python3", "me")
    assert entry.seconds is not None


def test_failed_work_is_published_and_the_error_is_raised(bus: EventBus, published: list[Entry]) -> None:
    with pytest.raises(LeaseHeldError), bus.doing(Entry("box", EventKind.WOKEN, user="me")):
        raise LeaseHeldError("sandboxes/box/lock", "another server")
    (entry,) = published
    assert (entry.what, entry.doing, entry.reason, entry.user) == (EventKind.FAILED, "woken", "LeaseHeldError", "me")
    assert entry.seconds is not None


def test_unknown_errors_are_published_as_internal_error(bus: EventBus, published: list[Entry]) -> None:
    with pytest.raises(ValueError, match="secret"), bus.doing(Entry("box", EventKind.WOKEN)):
        raise ValueError("secret")
    assert published[0].reason == "InternalError"
    assert "secret" not in str(published)


def test_progress_is_a_sum_and_limited_in_rate(
    bus: EventBus, published: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PROGRESS_EVERY", 3600.0)
    with bus.doing(Entry("box", EventKind.WOKEN)) as work:
        for _ in range(100):
            work.advance(10)
    assert [(entry.what, entry.size) for entry in published] == [(EventKind.PROGRESS, 10), (EventKind.WOKEN, None)]
    assert published[0].doing == "woken"
    monkeypatch.setattr(events, "PROGRESS_EVERY", 0.0)
    with bus.doing(Entry("box", EventKind.WOKEN)) as work:
        for _ in range(3):
            work.advance(10)
    assert [entry.size for entry in published[2:]] == [10, 20, 30, None]
