"""Test KernelActivity, and ActivityWatch with a real publisher that sends valid and hostile messages."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from jupyter_client.session import Session

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.kernel.activity import (
    LARGEST_STATUS,
    MAX_HOLDS,
    MAX_REQUESTS,
    USER_HOLD,
    ActivityWatch,
    KernelActivity,
)

KEY = b"the kernel's key"
LARGEST = 20_000_000
PATIENCE = 60


def request(msg_id: str, msg_type: str = "execute_request", **more: str) -> dict[str, Any]:
    return {"msg_id": msg_id, "msg_type": msg_type, **more}


CELL = request("cell")


class Kernel:
    """A stand-in for a kernel's iopub channel."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.session = Session(key=KEY)
        self.socket = context.socket(zmq.XPUB)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # report each subscriber, even to an existing subscription

    def bind(self) -> None:
        self.url = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def client(self) -> Session:
        return Session(key=KEY)

    async def wait_for_subscriber(self) -> None:
        """Wait until a client subscribes."""
        async with asyncio.timeout(PATIENCE):
            while await self.socket.recv() != b"\x01":
                pass

    async def publish(
        self, kind: str, content: dict[str, object], session: Session | None = None, parent: dict[str, Any] = CELL
    ) -> None:
        session = session or self.session
        message = session.msg(kind, content, parent=parent)
        await self.socket.send_multipart([b"kernel.1.status", *session.serialize(message)])

    async def status(self, state: str, session: Session | None = None, parent: dict[str, Any] = CELL) -> None:
        await self.publish("status", {"execution_state": state}, session, parent)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def kernel(context: zmq.asyncio.Context) -> Kernel:
    kernel = Kernel(context)
    kernel.bind()
    return kernel


class CountingWatch(ActivityWatch):
    """A watch that counts the messages that it reports as activity."""

    def __init__(self) -> None:
        self.reported = 0
        self.activity = KernelActivity()
        super().__init__(self.activity, self._count, LARGEST)

    @property
    def busy(self) -> bool:
        return self.activity.busy

    def _count(self) -> None:
        self.reported += 1


@pytest.fixture
async def watch(kernel: Kernel) -> AsyncIterator[CountingWatch]:
    watch = CountingWatch()
    watch.listen(kernel.url, kernel.client(), None)
    await kernel.wait_for_subscriber()
    yield watch
    watch.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def test_busy_until_idle_status(kernel: Kernel, watch: CountingWatch) -> None:
    for _ in range(3):
        await kernel.status("busy")
        await until(lambda: watch.busy)
        await kernel.status("idle")
        await until(lambda: not watch.busy)


async def test_every_message_is_reported_but_only_status_changes_activity(kernel: Kernel, watch: CountingWatch) -> None:
    await kernel.status("busy")
    for number in range(100):
        await kernel.publish("stream", {"name": "stdout", "text": f'{number} "status" idle execution_state'})
    await kernel.publish("display_data", {"data": {"text/plain": json.dumps({"execution_state": "idle"})}})
    await until(lambda: watch.reported == 102)
    assert watch.busy


async def test_starting_kernel_is_not_busy(kernel: Kernel, watch: CountingWatch) -> None:
    await kernel.status("starting")
    await until(lambda: watch.reported == 1)
    assert not watch.busy


async def test_unsigned_status_is_ignored(kernel: Kernel, watch: CountingWatch) -> None:
    await kernel.status("busy")
    await kernel.status("idle", Session(key=b"another key"))
    await kernel.status("idle", Session(key=b""))
    await until(lambda: watch.reported == 3)
    assert watch.busy


async def test_replayed_status_is_ignored(kernel: Kernel, watch: CountingWatch) -> None:
    message = kernel.session.msg("status", {"execution_state": "idle"}, parent=CELL)
    idle = [b"kernel.1.status", *kernel.session.serialize(message)]
    await kernel.socket.send_multipart(idle)
    await kernel.status("busy")
    await kernel.socket.send_multipart(idle)
    await until(lambda: watch.reported == 3)
    assert watch.busy


SIGNED = (
    {"execution_state": []},
    {"execution_state": None},
    {"execution_state": {"busy": "idle"}},
    {},
)
UNSIGNED = (
    [b""],
    [b'"status"'],
    [b"<IDS|MSG>"],
    [b"<IDS|MSG>", b'"status"'],
    [b"", b"<IDS|MSG>", b"", b'"status"', b"{}", b"{}", b"{}"],
    [b"<IDS|MSG>", b"\xff\xfe", b'"status"', b"\0", b"{", b"["],
    [b'"status"'] * 50,
    [b"<IDS|MSG>", b'"status"', *[b"x"] * 1000],
    [b'"status"' + b"x" * 1_000_000],
)


async def test_hostile_messages_do_not_end_the_watch(kernel: Kernel, watch: CountingWatch) -> None:
    for content in SIGNED:
        await kernel.publish("status", dict(content))
    for frames in UNSIGNED:
        await kernel.socket.send_multipart(list(frames))
    await until(lambda: watch.reported == len(SIGNED) + len(UNSIGNED))
    await kernel.status("busy")
    await until(lambda: watch.busy)


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("part", [b"[]", b"7", b"null", b'"status"', b"\xff", b"{", b"[" * 100_000, b"9" * 10_000])
async def test_signed_hostile_messages_do_not_end_the_watch(
    kernel: Kernel, watch: CountingWatch, where: int, part: bytes
) -> None:
    message = kernel.session.msg("status", {"execution_state": "idle"}, parent=CELL)
    parts = [json.dumps(message[name], default=str).encode() for name in ("header", "parent_header", "metadata")]
    parts.append(b'{"execution_state": "idle"}')
    parts[where] = part
    parts[2] = parts[2] if where == 2 else b'{"x": "status"}'
    await kernel.socket.send_multipart([b"topic", b"<IDS|MSG>", kernel.session.sign(parts), *parts])
    await kernel.status("busy")
    await until(lambda: watch.busy)


async def test_encrypted_connection_is_watched(context: zmq.asyncio.Context) -> None:
    public, secret = zmq.curve_keypair()
    kernel, watch = Kernel(context), CountingWatch()
    kernel.socket.curve_server, kernel.socket.curve_secretkey, kernel.socket.curve_publickey = True, secret, public
    kernel.bind()
    watch.listen(kernel.url, kernel.client(), (public, secret))
    try:
        await kernel.wait_for_subscriber()
        await kernel.status("busy")
        await until(lambda: watch.busy)
    finally:
        watch.close()


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


async def test_closed_watch_leaves_no_threads_or_descriptors(kernel: Kernel) -> None:
    before = open_files(), threads(), len(asyncio.all_tasks())
    for _ in range(5):
        watch = CountingWatch()
        watch.listen(kernel.url, kernel.client(), None)
        await kernel.wait_for_subscriber()
        await kernel.status("busy")
        await until(lambda watch=watch: watch.busy)
        watch.close()
    await until(lambda: open_files() <= before[0] and threads() <= before[1] and len(asyncio.all_tasks()) <= before[2])


async def test_watch_that_never_listened_can_be_closed() -> None:
    before = open_files(), threads()
    CountingWatch().close()
    await until(lambda: open_files() <= before[0] and threads() <= before[1])


async def test_watch_without_a_kernel_can_be_closed(kernel: Kernel) -> None:
    kernel.socket.close()
    watch = CountingWatch()
    watch.listen(kernel.url, kernel.client(), None)
    await asyncio.sleep(0.1)
    watch.close()
    assert not watch.busy and watch.reported == 0


async def test_statuses_of_usage_requests_are_not_reported(kernel: Kernel, watch: CountingWatch) -> None:
    for state in ("busy", "idle"):
        await kernel.status(state, parent=request("usage", "usage_request"))
    await kernel.status("busy")
    await until(lambda: watch.busy)
    assert watch.reported == 1


# -- KernelActivity ------------------------------------------------------------------------------------------------


@pytest.fixture
def activity() -> KernelActivity:
    return KernelActivity()


def test_busy_from_request_to_reply(activity: KernelActivity) -> None:
    assert not activity.busy
    activity.requested(CELL)
    assert activity.busy
    activity.replied(CELL)
    assert not activity.busy


@pytest.mark.parametrize("kind", ["usage_request", "kernel_info_request", "debug_request", "interrupt_request"])
def test_idle_status_of_control_request_changes_nothing(activity: KernelActivity, kind: str) -> None:
    activity.requested(CELL)
    for state in ("busy", "idle"):
        activity.published(state, request("other", kind))
    assert activity.busy
    activity.published("idle", CELL)
    assert not activity.busy


def test_queued_cells_count_until_the_last(activity: KernelActivity) -> None:
    for number in range(5):
        activity.requested(request(f"cell {number}"))
    for number in range(5):
        assert activity.busy
        activity.published("busy", request(f"cell {number}"))
        activity.replied(request(f"cell {number}"))
        activity.published("idle", request(f"cell {number}"))
    assert not activity.busy


def test_late_end_of_a_subshell_cell(activity: KernelActivity) -> None:
    activity.requested(request("in subshell", subshell_id="s1"))
    activity.requested(CELL)
    activity.replied(CELL)
    assert activity.busy
    activity.replied(request("in subshell", subshell_id="s1"))
    assert not activity.busy


def test_widget_message_counts_while_the_kernel_handles_it(activity: KernelActivity) -> None:
    message = request("widget", "comm_msg")
    activity.requested(message)
    assert not activity.busy
    activity.published("busy", message)
    assert activity.busy
    activity.published("idle", message)
    assert not activity.busy


def test_control_request_does_not_end_the_callback_of_a_widget(activity: KernelActivity) -> None:
    activity.published("busy", request("widget", "comm_msg"))
    on_control = request("other", "kernel_info_request")
    activity.requested_on_control(on_control)
    for state in ("busy", "idle"):
        activity.published(state, on_control)
    assert activity.busy
    activity.published("idle", request("widget", "comm_msg"))
    assert not activity.busy


def test_later_reply_ends_unanswered_request(activity: KernelActivity) -> None:
    activity.requested(request("ignored", "history_request"))
    activity.requested(CELL)
    activity.replied(CELL)
    assert not activity.busy


def test_cell_is_not_ended_by_a_later_request(activity: KernelActivity) -> None:
    activity.requested(CELL)
    activity.requested(request("later", "complete_request"))
    activity.replied(request("later", "complete_request"))
    assert activity.busy


def test_replies_to_unknown_requests_change_nothing(activity: KernelActivity) -> None:
    activity.replied({})
    activity.replied({"msg_id": None})
    activity.published("idle", {"msg_id": ["x"]})
    activity.published("busy", {"msg_id": 7, "msg_type": "execute_request"})
    assert not activity.busy


def test_requests_are_bounded(activity: KernelActivity) -> None:
    for number in range(MAX_REQUESTS + 100):
        activity.published("busy", request(f"{number:05}" * 100))
    assert len(activity._requests) == MAX_REQUESTS
    assert all(len(name) <= 200 for name in activity._requests)


def test_reset_makes_the_kernel_idle(activity: KernelActivity) -> None:
    activity.requested(CELL)
    activity.keep_awake("notebook", None)
    activity.reset()
    assert not activity.busy and activity.reasons() == []


def test_requests_and_holds_are_recorded_for_the_next_server(activity: KernelActivity) -> None:
    activity.requested(CELL)
    activity.keep_awake("notebook", None)
    activity.keep_awake("thread", 1000)
    other = KernelActivity()
    other.reset(json.loads(json.dumps(activity.record())))
    assert other.executing and other.kept_awake
    other.published("idle", CELL)
    assert not other.executing
    assert other.record() == {**activity.record(), "busy": False, "pending": []}


def test_inherited_cells_end_with_a_later_answer(activity: KernelActivity) -> None:
    activity.reset({"pending": [["cell", "execute_request", ""], ["other", "execute_request", "subshell"]]})
    activity.end_inherited()
    assert list(activity._requests) == ["other"]


def test_checkpoint_without_recorded_requests(activity: KernelActivity) -> None:
    activity.reset({"busy": True})
    assert activity.busy
    activity.end_inherited()
    assert not activity.busy


@pytest.mark.parametrize(
    "saved", [{"pending": 7}, {"pending": [7, ["a"], [1, 2, 3]]}, {"keep_awake": 7}, {"keep_awake": {"a": "b"}}]
)
def test_damaged_record_is_ignored(activity: KernelActivity, saved: dict[str, Any]) -> None:
    activity.reset(saved)
    assert not activity.busy


def test_kept_awake_until_all_holds_end(activity: KernelActivity) -> None:
    activity.keep_awake("notebook", None)
    activity.keep_awake("thread", None)
    activity.keep_awake("notebook", 0)
    assert activity.busy and not activity.executing
    assert activity.reasons() == ["It is still kept awake by keep_awake() in the notebook"]
    activity.keep_awake("thread", 0)
    assert not activity.busy


@pytest.mark.parametrize("saved", [{"api": None}, {"notebook": None, "api": 1.0}, {"api": None, "notebook": 1.0}])
def test_off_ends_a_saved_hold_with_its_old_name(activity: KernelActivity, saved: dict[str, float | None]) -> None:
    activity.reset({"keep_awake": saved})
    assert activity.reasons() == ["It is kept awake"]
    activity.keep_awake(USER_HOLD, 0)
    assert not activity.busy


def test_old_name_ends_the_users_hold(activity: KernelActivity) -> None:
    activity.keep_awake(USER_HOLD, None)
    activity.keep_awake("api", 0)
    assert not activity.busy


def test_reasons_after_off_name_the_other_holds(activity: KernelActivity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_provisioner.kernel.activity.time.time", lambda: 1000.0)
    activity.keep_awake("with-outer", 7200)
    activity.keep_awake("with-inner", 60)
    activity.keep_awake(USER_HOLD, None)
    assert activity.reasons() == ["It is kept awake"]
    activity.keep_awake(USER_HOLD, 0)
    assert activity.reasons() == ["It is still kept awake by keep_awake() in the notebook, for another 2 hours"]
    activity.keep_awake("with-inner", 0)
    assert activity.kept_awake
    activity.keep_awake("with-outer", 0)
    assert not activity.kept_awake


def test_kept_awake_for_a_time(activity: KernelActivity, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("sandbox_provisioner.kernel.activity.time.time", lambda: now)
    activity.keep_awake("notebook", 3600)
    assert activity.reasons() == ["It is kept awake for another 60 minutes"]
    now += 3601
    assert not activity.busy


def test_holds_are_bounded(activity: KernelActivity) -> None:
    for number in range(MAX_HOLDS):
        activity.keep_awake(f"{number}", None)
    with pytest.raises(SandboxError, match="at most 100"):
        activity.keep_awake("one more", None)
    activity.keep_awake("0", 0)
    activity.keep_awake("one more", None)


def test_reasons_name_cells_and_other_requests(activity: KernelActivity) -> None:
    activity.requested(CELL)
    activity.requested(request("next"))
    activity.requested(request("complete", "complete_request"))
    assert activity.reasons() == [
        "A cell has been running for 0 seconds, with 1 more waiting",
        "The kernel has worked on 'complete_request' for 0 seconds",
    ]


async def test_statuses_are_received_after_a_frame_of_the_largest_size(kernel: Kernel, watch: CountingWatch) -> None:
    await kernel.socket.send_multipart([b"kernel.1.stream", b"x" * LARGEST])
    await kernel.status("busy")
    await until(lambda: watch.busy)


async def test_large_statuses_are_not_parsed(kernel: Kernel, watch: CountingWatch) -> None:
    await kernel.publish("status", {"execution_state": "busy", "more": "x" * LARGEST_STATUS})
    await until(lambda: watch.reported == 1)
    assert not watch.busy
