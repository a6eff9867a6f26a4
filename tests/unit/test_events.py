"""The journal: one line of the log for each thing that happened, the sandbox's id first, and told to all listeners."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pytest

from sandbox_provisioner import events
from sandbox_provisioner.errors import LeaseHeldError
from sandbox_provisioner.events import Entry, EventBus, EventKind


@pytest.fixture
def book() -> EventBus:
    return EventBus()


@pytest.fixture
def told(book: EventBus) -> list[Entry]:
    """What a listener is told."""
    entries: list[Entry] = []
    book.subscribe(entries.append)
    return entries


def test_what_happened_is_one_line_that_begins_with_the_sandbox(
    book: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    book.write(Entry("box", EventKind.HIBERNATED, seconds=0.5, size=1024))
    book.write(Entry("box", EventKind.HANDED_OFF))
    assert caplog.messages == ["box hibernated in 0.500 s (1024 bytes)", "box handed off"]


def test_a_failure_is_logged_with_its_reason_and_told_with_the_name_of_that(
    book: EventBus, told: list[Entry], caplog: pytest.LogCaptureFixture
) -> None:
    error = LeaseHeldError("sandboxes/box/lock", "another server")
    book.fail(Entry("box", EventKind.HANDED_OFF, seconds=2), error)
    line = f"box was not handed off in 2.000 s: {error}"
    assert caplog.record_tuples == [(events.__name__, logging.ERROR, line)]
    assert [(entry.what, entry.doing, entry.reason) for entry in told] == [
        (EventKind.FAILED, "handed_off", "LeaseHeldError")
    ]


def test_progress_is_told_and_not_logged(book: EventBus, told: list[Entry], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    book.write(Entry("box", EventKind.PROGRESS, size=5, doing="woken"))
    assert [(entry.what, entry.size) for entry in told] == [(EventKind.PROGRESS, 5)]
    assert caplog.messages == []


def test_an_entry_knows_when_it_was_written() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    assert before <= datetime.fromisoformat(Entry("box", EventKind.CREATED).time) <= datetime.now(UTC)


def test_all_listeners_are_told_until_they_end_it(book: EventBus) -> None:
    first: list[str] = []
    second: list[str] = []
    end = book.subscribe(lambda entry: first.append(entry.sandbox_id))
    book.subscribe(lambda entry: second.append(entry.sandbox_id))
    book.write(Entry("a", EventKind.CREATED))
    end()
    end()
    book.write(Entry("b", EventKind.CREATED))
    assert (first, second) == (["a"], ["a", "b"])


def test_a_listener_may_end_it_while_it_is_told(book: EventBus, told: list[Entry]) -> None:
    def once(entry: Entry) -> None:
        end()

    end = book.subscribe(once)
    book.write(Entry("a", EventKind.CREATED))
    book.write(Entry("b", EventKind.CREATED))
    assert [entry.sandbox_id for entry in told] == ["a", "b"]


def test_work_that_succeeds_is_written_afterwards_with_its_size(book: EventBus, told: list[Entry]) -> None:
    with book.doing(Entry("box", EventKind.HIBERNATED, kernel_name="python3", user="me")) as work:
        work.size = 7
        assert told == []
    (entry,) = told
    assert (entry.what, entry.size, entry.kernel_name, entry.user) == (EventKind.HIBERNATED, 7, "python3", "me")
    assert entry.seconds is not None


def test_work_that_fails_is_written_as_a_failure_and_raises_on(book: EventBus, told: list[Entry]) -> None:
    with pytest.raises(LeaseHeldError), book.doing(Entry("box", EventKind.WOKEN, user="me")):
        raise LeaseHeldError("sandboxes/box/lock", "another server")
    (entry,) = told
    assert (entry.what, entry.doing, entry.reason, entry.user) == (EventKind.FAILED, "woken", "LeaseHeldError", "me")
    assert entry.seconds is not None


def test_of_an_error_that_is_not_ours_listeners_hear_no_more_than_that(book: EventBus, told: list[Entry]) -> None:
    with pytest.raises(ValueError, match="secret"), book.doing(Entry("box", EventKind.WOKEN)):
        raise ValueError("secret")
    assert told[0].reason == "InternalError"
    assert "secret" not in str(told)


def test_progress_adds_up_and_is_not_told_more_often_than_anybody_looks(
    book: EventBus, told: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PROGRESS_EVERY", 3600.0)
    with book.doing(Entry("box", EventKind.WOKEN)) as work:
        for _ in range(100):
            work.advance(10)
    assert [(entry.what, entry.size) for entry in told] == [(EventKind.PROGRESS, 10), (EventKind.WOKEN, None)]
    assert told[0].doing == "woken"
    monkeypatch.setattr(events, "PROGRESS_EVERY", 0.0)
    with book.doing(Entry("box", EventKind.WOKEN)) as work:
        for _ in range(3):
            work.advance(10)
    assert [entry.size for entry in told[2:]] == [10, 20, 30, None]
