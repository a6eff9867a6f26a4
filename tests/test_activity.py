"""ActivityWatch against a real publisher: what a kernel says of itself, and what anybody else may say."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from jupyter_client.session import Session

from sandbox_provisioner.activity import ActivityWatch

KEY = b"the kernel's key"
PATIENCE = 60


class Kernel:
    """What a kernel's iopub channel is to those who listen."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.session = Session(key=KEY)
        self.socket = context.socket(zmq.XPUB)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of one who comes before the last one's end is known, too

    def bind(self) -> None:
        self.url = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def client(self) -> Session:
        return Session(key=KEY)

    async def heard(self) -> None:
        """Wait until somebody listens."""
        async with asyncio.timeout(PATIENCE):
            while await self.socket.recv() != b"\x01":
                pass

    async def say(self, kind: str, content: dict[str, object], session: Session | None = None) -> None:
        session = session or self.session
        await self.socket.send_multipart([b"kernel.1.status", *session.serialize(session.msg(kind, content))])

    async def status(self, state: str, session: Session | None = None) -> None:
        await self.say("status", {"execution_state": state}, session)


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


class Ear(ActivityWatch):
    """A watch that counts its news."""

    def __init__(self, busy: bool = False) -> None:
        self.news = 0
        super().__init__(busy, self._count)

    def _count(self) -> None:
        self.news += 1


@pytest.fixture
async def ear(kernel: Kernel) -> AsyncIterator[Ear]:
    ear = Ear()
    ear.listen(kernel.url, kernel.client(), None)
    await kernel.heard()
    yield ear
    ear.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_kernel_is_busy_from_when_it_says_so_until_it_says_that_it_is_idle(kernel: Kernel, ear: Ear) -> None:
    for _ in range(3):
        await kernel.status("busy")
        await until(lambda: ear.busy)
        await kernel.status("idle")
        await until(lambda: not ear.busy)


async def test_everything_that_is_published_is_news_and_only_a_status_changes_what_it_is(
    kernel: Kernel, ear: Ear
) -> None:
    await kernel.status("busy")
    for number in range(100):
        await kernel.say("stream", {"name": "stdout", "text": f'{number} "status" idle execution_state'})
    await kernel.say("display_data", {"data": {"text/plain": json.dumps({"execution_state": "idle"})}})
    await until(lambda: ear.news == 102)
    assert ear.busy


async def test_a_kernel_that_starts_is_not_busy(kernel: Kernel, ear: Ear) -> None:
    await kernel.status("starting")
    await until(lambda: ear.news == 1)
    assert not ear.busy


async def test_a_status_with_another_key_or_without_a_signature_is_not_believed(kernel: Kernel, ear: Ear) -> None:
    await kernel.status("busy")
    await kernel.status("idle", Session(key=b"another key"))
    await kernel.status("idle", Session(key=b""))
    await until(lambda: ear.news == 3)
    assert ear.busy


async def test_a_status_that_is_said_again_by_somebody_who_heard_it_is_not_believed(kernel: Kernel, ear: Ear) -> None:
    idle = [b"kernel.1.status", *kernel.session.serialize(kernel.session.msg("status", {"execution_state": "idle"}))]
    await kernel.socket.send_multipart(idle)
    await kernel.status("busy")
    await kernel.socket.send_multipart(idle)
    await until(lambda: ear.news == 3)
    assert ear.busy


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


async def test_hostile_messages_are_ignored_and_do_not_end_it(kernel: Kernel, ear: Ear) -> None:
    for content in SIGNED:
        await kernel.say("status", dict(content))
    for frames in UNSIGNED:
        await kernel.socket.send_multipart(list(frames))
    await until(lambda: ear.news == len(SIGNED) + len(UNSIGNED))
    await kernel.status("busy")
    await until(lambda: ear.busy)


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("part", [b"[]", b"7", b"null", b'"status"', b"\xff", b"{", b"[" * 100_000, b"9" * 10_000])
async def test_a_hostile_kernel_that_signs_what_it_says_does_not_end_it(
    kernel: Kernel, ear: Ear, where: int, part: bytes
) -> None:
    message = kernel.session.msg("status", {"execution_state": "idle"})
    parts = [json.dumps(message[name], default=str).encode() for name in ("header", "parent_header", "metadata")]
    parts.append(b'{"execution_state": "idle"}')
    parts[where] = part
    parts[2] = parts[2] if where == 2 else b'{"x": "status"}'
    await kernel.socket.send_multipart([b"topic", b"<IDS|MSG>", kernel.session.sign(parts), *parts])
    await kernel.status("busy")
    await until(lambda: ear.busy)


async def test_an_encrypted_kernel_is_heard(context: zmq.asyncio.Context) -> None:
    public, secret = zmq.curve_keypair()
    kernel, ear = Kernel(context), Ear()
    kernel.socket.curve_server, kernel.socket.curve_secretkey, kernel.socket.curve_publickey = True, secret, public
    kernel.bind()
    ear.listen(kernel.url, kernel.client(), (public, secret))
    try:
        await kernel.heard()
        await kernel.status("busy")
        await until(lambda: ear.busy)
    finally:
        ear.close()


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


async def test_nothing_is_left_of_one_that_was_closed(kernel: Kernel) -> None:
    before = open_files(), threads(), len(asyncio.all_tasks())
    for _ in range(5):
        ear = Ear()
        ear.listen(kernel.url, kernel.client(), None)
        await kernel.heard()
        await kernel.status("busy")
        await until(lambda ear=ear: ear.busy)
        ear.close()
    await until(lambda: open_files() <= before[0] and threads() <= before[1] and len(asyncio.all_tasks()) <= before[2])


async def test_one_that_never_listened_can_be_closed_too() -> None:
    before = open_files(), threads()
    Ear().close()
    Ear(busy=True).close()
    await until(lambda: open_files() <= before[0] and threads() <= before[1])


async def test_one_that_nobody_answers_can_be_closed(kernel: Kernel) -> None:
    kernel.socket.close()
    ear = Ear(busy=True)
    ear.listen(kernel.url, kernel.client(), None)
    await asyncio.sleep(0.1)
    ear.close()
    assert ear.busy and ear.news == 0
