"""Test leases: the behaviour that all kinds share, then that of each kind, then competing processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from clocks import JumpingClock
from gcs_faults import MUTATIONS
from gcs_server import GCS
from google.cloud.storage import Client
from hypothesis import given
from hypothesis import strategies as st
from lease_process import SANDBOX, open_leases
from memory_store import MemoryStore

from sandbox_provisioner.errors import (
    ConfigurationError,
    LeaseHeldError,
    RateLimitedError,
    StorageError,
    StorageUnavailableError,
)
from sandbox_provisioner.lock.base import CLOCK, Lease, Leases, Owner, Pace
from sandbox_provisioner.lock.gcs import GCSLeases
from sandbox_provisioner.lock.local import LocalLeases
from sandbox_provisioner.lock.objects import ObjectLeases
from sandbox_provisioner.storage.base import ObjectInfo
from sandbox_provisioner.storage.disk import TEMPORARY

PACE = LEASE, RENEWAL, POLL = 2.0, 0.25, 0.1
JUMPS = 10
"""Factor on these times with a JumpingClock, so that no real delay comes near them."""
SOON = 30.0
SCALED_LIMIT = 8.0
"""Changes of an object per second: with leases renewed 20 times as often as by default, Google's limit would be 20."""


class Ground:
    """The place where leases of one kind are stored."""

    def __init__(self, kind: str, place: str, clock: JumpingClock | None = None) -> None:
        self.kind = kind
        self.place = place
        self.clock = clock
        self.factor = JUMPS if clock else 1
        self.lease, self.renewal, self.poll = (self.factor * seconds for seconds in PACE)

    def leases(self) -> Leases:
        """Return the leases of another server."""
        leases = open_leases(self.kind, self.place, self.lease, self.renewal, self.poll, self.clock or CLOCK)
        return self.clock.watch(leases) if self.clock else leases

    async def sleep(self, seconds: float) -> None:
        """Sleep according to the clock of the leases."""
        await (self.clock or CLOCK).sleep(seconds)

    def files(self) -> list[Path]:
        return [path for path in Path(self.place).rglob("*") if path.is_file()]

    def objects(self) -> list[str]:
        """Return the stored leases, without the temporary files of processes that were killed while they wrote."""
        leases = [path for path in self.files() if path.parent.name != TEMPORARY]
        return [path.name for path in leases if path.name not in ("last-token", ".generation")]

    def destroy(self) -> None:
        """Remove the stored lease of SANDBOX. Its owner is not informed."""
        for path in self.files():
            if path.name in ("lock", "sandboxes%2Fa%2Flock.lock"):
                path.unlink()

    def overwrite_owner(self, content: bytes) -> None:
        """Overwrite the stored owner, and keep the times of the file."""
        for path in self.files():
            if path.name in ("lock", "sandboxes%2Fa%2Flock.lock"):
                times = path.stat()
                path.write_bytes(content)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


class MemoryGround(Ground):
    def __init__(self, clock: JumpingClock | None = None, store: MemoryStore | None = None) -> None:
        super().__init__("memory", "", clock)
        self.store = store or MemoryStore()

    def leases(self) -> Leases:
        leases = ObjectLeases(self.store, Pace(self.lease, self.renewal, self.poll), self.clock or CLOCK)
        return self.clock.watch(leases) if self.clock else leases

    def objects(self) -> list[str]:
        return [info.name for info in self.store.list("")]

    def destroy(self) -> None:
        self.store.delete(SANDBOX)


class BucketGround(Ground):
    def __init__(self, gcs: GCS, clock: JumpingClock | None = None) -> None:
        super().__init__("gcs", gcs.bucket, clock)
        if clock:
            clock.on_jump = gcs.set_clock
        self.bucket = Client().bucket(gcs.bucket)

    def objects(self) -> list[str]:
        return [blob.name for blob in self.bucket.list_blobs()]

    def destroy(self) -> None:
        self.bucket.blob(f"servers/{SANDBOX}").delete()

    def overwrite_owner(self, content: bytes) -> None:
        blob = self.bucket.blob(f"servers/{SANDBOX}")
        blob.metadata = {"owner": content.decode(errors="replace"), "seconds": content.decode(errors="replace")}
        blob.patch()


@pytest.fixture
async def clock() -> AsyncIterator[JumpingClock]:
    clock = JumpingClock()
    jumping = asyncio.create_task(clock.run())
    yield clock
    jumping.cancel()


@pytest.fixture
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Ground:
    """Return the place of the parametrized kind. Its leases use the jumping clock if the test uses that fixture."""
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else None
    if request.param == "memory":
        return MemoryGround(clock)
    if request.param in ("gcs", "limited"):
        gcs: GCS = request.getfixturevalue("gcs")
        found = BucketGround(gcs, clock)
        if request.param == "limited":
            gcs.limit_mutations(SCALED_LIMIT / found.factor)
        return found
    return Ground(request.param, str(tmp_path / "leases"), clock)


every_in_real_time = pytest.mark.parametrize("ground", ["local", "mounted", "memory", "gcs", "limited"], indirect=True)
between_processes = pytest.mark.parametrize("ground", ["local", "mounted", "gcs", "limited"], indirect=True)


def every(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test with each kind of lease, with a jumping clock."""
    return pytest.mark.usefixtures("clock")(every_in_real_time(test))  # type: ignore[no-any-return]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.02)


async def soon(awaitable: Any) -> Any:
    async with asyncio.timeout(SOON):
        return await awaitable


def me(server: str = "server one") -> Owner:
    return Owner.here(server)


class Contenders:
    """Processes that compete for a lease."""

    def __init__(self, ground: Ground, count: int, lease: tuple[float, ...] = (LEASE, RENEWAL, POLL)) -> None:
        program = str(Path(__file__).parents[2] / "support" / "lease_process.py")
        self.processes = [
            subprocess.Popen(
                [sys.executable, program, ground.kind, ground.place, f"contender-{number}", *map(str, lease)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for number in range(count)
        ]
        for process in self.processes:
            assert read_answer(process) == {"ready": True}

    def __enter__(self) -> list[subprocess.Popen[bytes]]:
        return self.processes

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def send_command(process: subprocess.Popen[bytes], command: str) -> None:
    assert process.stdin
    process.stdin.write(f"{command}\n".encode())
    process.stdin.flush()


def read_answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def ask(process: subprocess.Popen[bytes], command: str) -> dict[str, Any]:
    send_command(process, command)
    return read_answer(process)


# --- Behaviour of all kinds


@every
async def test_free_lease_is_acquired(ground: Ground) -> None:
    owner = me()
    lease = await ground.leases().acquire(SANDBOX, owner)
    assert (lease.name, lease.owner) == (SANDBOX, owner)
    assert lease.token > 0
    assert not lease.wanted.is_set()
    assert not lease.lost.done()
    await lease.release()


@every
async def test_held_lease_is_refused_with_owner(ground: Ground) -> None:
    lease = await ground.leases().acquire(SANDBOX, me("the first server"))
    with pytest.raises(LeaseHeldError, match=rf"in use by the first server \(process {os.getpid()} of") as refusal:
        await ground.leases().acquire(SANDBOX, me("the second server"))
    assert refusal.value.owner == lease.owner
    await lease.release()


@every
async def test_same_server_cannot_acquire_twice(ground: Ground) -> None:
    leases, owner = ground.leases(), me()
    lease = await leases.acquire(SANDBOX, owner)
    with pytest.raises(LeaseHeldError):
        await leases.acquire(SANDBOX, owner)
    await lease.release()


@every
async def test_names_are_independent(ground: Ground) -> None:
    leases = ground.leases()
    names = ["sandboxes/a/lock", "sandboxes/b/lock", "sandboxes/a/lock.lock", "sandboxes-a-lock", "lock"]
    held = [await leases.acquire(name, me()) for name in names]
    for lease in held:
        await lease.release()


@every
async def test_release_leaves_nothing_and_tokens_increase(ground: Ground) -> None:
    leases, tokens = ground.leases(), []
    for _ in range(5):
        lease = await leases.acquire(SANDBOX, me())
        tokens.append(lease.token)
        await lease.release()
        assert lease.lost.cancelled()
        assert ground.objects() == []
    assert tokens == sorted(set(tokens))


@every
async def test_lease_is_renewed_past_its_lease_time(ground: Ground) -> None:
    lease = await ground.leases().acquire(SANDBOX, me())
    newcomer = ground.leases()
    with pytest.raises(LeaseHeldError):
        await newcomer.acquire(SANDBOX, me(), patience=1.5 * ground.lease)
    assert not lease.lost.done()
    await lease.release()


@every
async def test_holder_is_visible_to_others(ground: Ground) -> None:
    others = ground.leases()
    assert await others.holder(SANDBOX) is None
    lease = await ground.leases().acquire(SANDBOX, me())
    assert await others.holder(SANDBOX) == lease.owner
    assert await others.holder("sandboxes/b/lock") is None
    await lease.release()
    assert await others.holder(SANDBOX) is None
    assert ground.objects() == []


@every
async def test_released_lease_goes_to_the_waiter(ground: Ground) -> None:
    first = await ground.leases().acquire(SANDBOX, me())
    waiting = asyncio.create_task(ground.leases().acquire(SANDBOX, me("server two"), patience=100 * ground.lease))
    await soon(first.wanted.wait())
    assert not waiting.done()
    await first.release()
    second = await soon(waiting)
    assert second.token > first.token
    await ground.sleep(3 * ground.renewal)
    assert not second.wanted.is_set()
    await second.release()
    assert ground.objects() == []


@every
async def test_request_of_timed_out_waiter_is_removed(ground: Ground) -> None:
    first = await ground.leases().acquire(SANDBOX, me("the owner"))
    hasty = asyncio.create_task(ground.leases().acquire(SANDBOX, me("the hasty"), patience=6 * ground.renewal))
    await soon(first.wanted.wait())
    with pytest.raises(LeaseHeldError, match="in use by the owner"):
        await hasty
    await until(lambda: not first.wanted.is_set())
    patient = asyncio.create_task(ground.leases().acquire(SANDBOX, me(), patience=100 * ground.lease))
    await soon(first.wanted.wait())
    await first.release()
    await (await soon(patient)).release()
    assert ground.objects() == []


@every
async def test_cancelled_attempt_leaves_nothing(ground: Ground) -> None:
    first = await ground.leases().acquire(SANDBOX, me())
    before = sorted(ground.objects())
    waiting = asyncio.create_task(ground.leases().acquire(SANDBOX, me(), patience=100 * ground.lease))
    await soon(first.wanted.wait())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sorted(re.sub("beat.*", "beat", name) for name in ground.objects()) == [
        re.sub("beat.*", "beat", name) for name in before
    ]
    await first.release()


@every
async def test_attempt_cancelled_at_any_moment_leaves_nothing(ground: Ground) -> None:
    leases = ground.leases()
    for turn in range(20):
        attempt = asyncio.create_task(leases.acquire(SANDBOX, me()))
        await asyncio.sleep(turn * 0.0005)
        attempt.cancel()
        try:
            await (await attempt).release()
        except asyncio.CancelledError:
            pass
        assert ground.objects() == []


@every
async def test_second_waiter_is_refused(ground: Ground) -> None:
    first = await ground.leases().acquire(SANDBOX, me("the owner"))
    waiting = asyncio.create_task(ground.leases().acquire(SANDBOX, me("the waiter"), patience=100 * ground.lease))
    await soon(first.wanted.wait())
    with pytest.raises(LeaseHeldError, match="in use by the owner"):
        await ground.leases().acquire(SANDBOX, me("the late"), patience=2 * ground.renewal)
    await first.release()
    second = await soon(waiting)
    assert second.owner.server == "the waiter"
    await second.release()
    assert ground.objects() == []


@every
async def test_loss_is_reported_and_does_not_affect_next_owner(ground: Ground) -> None:
    first = await ground.leases().acquire(SANDBOX, me())
    ground.destroy()
    second = await ground.leases().acquire(SANDBOX, me("the thief"))
    reason = await soon(first.lost)
    assert re.search("removed or replaced|its entry was removed|the thief .* has it now", reason)
    await first.release()
    await first.release()
    assert first.lost.result() == reason
    assert await ground.leases().holder(SANDBOX) == second.owner
    await ground.sleep(3 * ground.renewal)
    assert not second.lost.done()
    await second.release()


@every
async def test_repeated_release_leaves_no_task(ground: Ground) -> None:
    before = asyncio.all_tasks()
    lease = await ground.leases().acquire(SANDBOX, me())
    await asyncio.gather(lease.release(), lease.release(), lease.release())
    await lease.release()
    assert asyncio.all_tasks() == before


@every_in_real_time
async def test_late_renewal_does_not_affect_next_lease(ground: Ground) -> None:
    leases = ground.leases()
    for turn in range(5):
        lease = await leases.acquire(SANDBOX, me())
        await asyncio.sleep(RENEWAL + (turn - 2) * 0.002)
        await lease.release()
        again = await leases.acquire(SANDBOX, me())
        await asyncio.sleep(0.02)
        assert not again.lost.done()
        await again.release()
        await asyncio.sleep(0.05)
        assert ground.objects() == []


async def test_renewal_with_busy_default_executor(clock: JumpingClock) -> None:
    ground = MemoryGround(clock)
    end = threading.Event()
    busy = ThreadPoolExecutor(2)
    asyncio.get_running_loop().set_default_executor(busy)
    try:
        for _ in range(4):
            asyncio.get_running_loop().run_in_executor(None, end.wait)
        lease = await ground.leases().acquire(SANDBOX, me())
        await ground.sleep(1.5 * ground.lease)
        assert not lease.lost.done()
        await lease.release()
    finally:
        end.set()


@every
@pytest.mark.parametrize("name", ["", "/", "..", "../a", "a/../b", "a//b", ".clock", "a\0b", "a b", "ü", "x" * 600])
async def test_invalid_name_is_refused(ground: Ground, name: str) -> None:
    leases = ground.leases()
    with pytest.raises(StorageError, match="is not a valid object name"):
        await leases.acquire(name, me())
    with pytest.raises(StorageError, match="is not a valid object name"):
        await leases.holder(name)
    assert ground.objects() == []


@pytest.mark.parametrize("ground", ["local", "mounted", "gcs"], indirect=True)
@pytest.mark.parametrize(
    "content", [b"[" * 9000, b"null", b'{"owner": 7}', b"\xff\xfe", b'{"seconds": "nan"}', b"1e999"]
)
async def test_unreadable_lease_counts_as_held(ground: Ground, content: bytes) -> None:
    lease = await ground.leases().acquire(SANDBOX, me())
    ground.overwrite_owner(content)
    with pytest.raises(LeaseHeldError, match="in use by an unknown server"):
        await ground.leases().acquire(SANDBOX, me())
    await lease.release()


@given(st.one_of(st.binary(), st.text(), st.dictionaries(st.text(), st.text()).map(json.dumps)))
def test_any_stored_owner_is_printable(content: str | bytes) -> None:
    assert str(Owner.from_json(content)).isprintable()


def test_owner_survives_storage() -> None:
    owner = me("a server, and its 'name'")
    assert Owner.from_json(owner.to_json()) == owner


@pytest.mark.parametrize("times", [(1.0, 2.0, 0.1), (30.0, 10.0, 10.0), (7200.0, 10.0, 1.0), (0.0, 0.0, 0.0)])
def test_inconsistent_times_are_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigurationError, match="A lease of"):
        Pace(*times)


# --- Processes that are killed, paused, or wait


@between_processes
async def test_lease_of_killed_owner_is_acquired(ground: Ground) -> None:
    with Contenders(ground, 1) as (contender,):
        token = ask(contender, "acquire 0")["token"]
        newcomer = ground.leases()
        with pytest.raises(LeaseHeldError, match="in use by contender-0"):
            await newcomer.acquire(SANDBOX, me())
        contender.kill()
        contender.wait()
        lease = await newcomer.acquire(SANDBOX, me(), patience=0 if ground.kind == "local" else SOON)
    assert lease.token > token
    await lease.release()
    assert ground.objects() == []


@between_processes
async def test_lease_of_killed_owner_expires(ground: Ground) -> None:
    newcomer = ground.leases()
    with Contenders(ground, 1) as (contender,):
        ask(contender, "acquire 0")
        assert await newcomer.holder(SANDBOX) is not None
    await asyncio.sleep(0 if ground.kind == "local" else 1.2 * LEASE + 1)  # times in a bucket are whole seconds
    assert await newcomer.holder(SANDBOX) is None or ground.kind == "mounted"
    lease = await newcomer.acquire(SANDBOX, me(), patience=0 if ground.kind != "mounted" else SOON)
    await lease.release()


@between_processes
async def test_another_server_can_wait_after_waiter_is_killed(ground: Ground) -> None:
    lease = await ground.leases().acquire(SANDBOX, me())
    with Contenders(ground, 1) as (contender,):
        send_command(contender, f"acquire {SOON}")
        await soon(lease.wanted.wait())
    await until(lambda: not lease.wanted.is_set())
    waiting = asyncio.create_task(ground.leases().acquire(SANDBOX, me(), patience=SOON))
    await soon(lease.wanted.wait())
    await lease.release()
    await (await soon(waiting)).release()
    assert ground.objects() == []


@between_processes
async def test_killed_waiter_does_not_request_from_next_owner(ground: Ground) -> None:
    lease = await ground.leases().acquire(SANDBOX, me())
    with Contenders(ground, 1) as (contender,):
        send_command(contender, f"acquire {SOON}")
        await soon(lease.wanted.wait())
    await lease.release()
    lease = await ground.leases().acquire(SANDBOX, me())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lease.wanted.wait(), 4 * RENEWAL)
    await lease.release()


@pytest.mark.parametrize("ground", ["mounted", "gcs"], indirect=True)
async def test_paused_owner_is_notified_of_lost_lease(ground: Ground) -> None:
    with Contenders(ground, 1) as (contender,):
        token = ask(contender, "acquire 0")["token"]
        contender.send_signal(signal.SIGSTOP)
        lease = await ground.leases().acquire(SANDBOX, me("the newcomer"), patience=SOON)
        assert lease.token > token
        contender.send_signal(signal.SIGCONT)
        reply = await soon(asyncio.to_thread(read_answer, contender))
        assert re.search("was suspended|the newcomer .* has it now|its entry was removed", reply["lost"])
        assert ask(contender, "release") == {"released": True}
    await asyncio.sleep(2 * RENEWAL)
    assert not lease.lost.done()
    await lease.release()
    assert ground.objects() == []


async def test_paused_local_owner_keeps_lease(tmp_path: Path) -> None:
    ground = Ground("local", str(tmp_path))
    with Contenders(ground, 1) as (contender,):
        ask(contender, "acquire 0")
        contender.send_signal(signal.SIGSTOP)
        with pytest.raises(LeaseHeldError, match="contender-0"):
            await ground.leases().acquire(SANDBOX, me(), patience=1.5)
        contender.send_signal(signal.SIGCONT)
        assert ask(contender, "release") == {"released": True}


# --- Local


async def test_local_lease_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    lease = await LocalLeases(folder).acquire(SANDBOX, me())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    await lease.release()


async def test_forked_child_does_not_keep_lease(tmp_path: Path) -> None:
    lease = await LocalLeases(tmp_path).acquire(SANDBOX, me())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"forked")
        signal.pause()
    os.read(reading, 6)
    files = [os.readlink(f"/proc/{child}/fd/{number}") for number in os.listdir(f"/proc/{child}/fd")]
    os.kill(child, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, child, 0)
    os.close(reading)
    os.close(writing)
    assert not [name for name in files if name.startswith(str(tmp_path))]
    await lease.release()


async def test_child_program_does_not_inherit_lease(tmp_path: Path) -> None:
    lease = await LocalLeases(tmp_path).acquire(SANDBOX, me())
    child = await asyncio.create_subprocess_exec(
        "ls", "-l", "/proc/self/fd", stdout=asyncio.subprocess.PIPE, close_fds=False
    )
    output, _ = await child.communicate()
    await lease.release()
    assert str(tmp_path).encode() not in output


async def test_lost_counter_does_not_repeat_tokens(tmp_path: Path) -> None:
    tokens = []
    for damage in (None, b"", b"nonsense", b"00000000000000000007"):
        counter = tmp_path / "last-token"
        if damage is None:
            counter.unlink(missing_ok=True)
        else:
            counter.write_bytes(damage)
        lease = await LocalLeases(tmp_path).acquire(SANDBOX, me())
        tokens.append(lease.token)
        await lease.release()
    assert tokens == sorted(set(tokens))


async def test_tokens_increase_after_clock_set_back(tmp_path: Path) -> None:
    ahead = time.time_ns() // 1000 + 10**12
    (tmp_path / "last-token").write_bytes(b"%020d" % ahead)
    lease = await LocalLeases(tmp_path).acquire(SANDBOX, me())
    assert lease.token == ahead + 1
    await lease.release()


async def test_unusable_lease_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"{tmp_path}/file/leases"):
        await LocalLeases(tmp_path / "file" / "leases").acquire(SANDBOX, me())


async def test_link_in_place_of_lease_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    folder = tmp_path / "leases"
    folder.mkdir()
    (folder / "sandboxes%2Fa%2Flock.lock").symlink_to(target)
    with pytest.raises(StorageError, match="cannot be used"):
        await LocalLeases(folder).acquire(SANDBOX, me())
    assert target.read_text() == "precious"


# --- Storage that fails


class FailingStore(MemoryStore):
    """A store that is unreachable while ``away`` is set. With ``late``, it still executes the requests."""

    away = False
    late = False

    def write(self, name: str, data: bytes, generation: int | None = None) -> ObjectInfo:
        if self.late or not self.away:
            written = super().write(name, data, generation)
        if self.away:
            raise StorageUnavailableError(self.where, "The storage does not answer.")
        return written


@pytest.mark.parametrize("late", [False, True])
async def test_transient_failures_are_retried(late: bool, clock: JumpingClock) -> None:
    store = FailingStore()
    ground = MemoryGround(clock, store)
    store.away, store.late = True, late
    attempt = asyncio.create_task(ground.leases().acquire(SANDBOX, me()))
    await ground.sleep(ground.renewal)
    assert not attempt.done()
    store.away = False
    lease = await soon(attempt)
    for _ in range(2):
        store.away = True
        await ground.sleep(2 * ground.renewal)
        store.away = False
        await ground.sleep(2 * ground.renewal)
    assert not lease.lost.done()
    await lease.release()
    assert store.list("") == []


async def test_early_failure_does_not_shorten_later_lease(clock: JumpingClock) -> None:
    store = FailingStore()
    ground = MemoryGround(clock, store)
    first = await ground.leases().acquire(SANDBOX, me())
    store.away = True
    waiting = asyncio.create_task(ground.leases().acquire(SANDBOX, me(), patience=100 * ground.lease))
    await ground.sleep(ground.renewal)
    store.away = False
    await ground.sleep(1.2 * ground.lease)
    store.away = store.late = True
    await first.release()
    await ground.sleep(ground.renewal)
    store.away = False
    second = await soon(waiting)
    await ground.sleep(2 * ground.renewal)
    assert not second.lost.done()
    await second.release()
    assert store.list("") == []


async def test_unrenewable_lease_is_lost_with_reason(clock: JumpingClock) -> None:
    store = FailingStore()
    ground = MemoryGround(clock, store)
    lease = await ground.leases().acquire(SANDBOX, me())
    store.away = True
    assert await soon(lease.lost) == f"it was not renewed for {ground.lease:g} s: The storage does not answer."
    await lease.release()


async def test_unavailable_storage_is_reported(clock: JumpingClock) -> None:
    store = FailingStore()
    ground = MemoryGround(clock, store)
    store.away = True
    with pytest.raises(StorageUnavailableError, match="The storage does not answer"):
        await soon(ground.leases().acquire(SANDBOX, me()))


FAULTS: list[dict[str, Any]] = [
    {"kind": "status", "code": 429},
    {"kind": "status", "code": 503},
    {"kind": "cut"},
    {"kind": "lose"},
    {"kind": "truncate"},
    {"kind": "short"},
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.get("code", fault["kind"])))
@pytest.mark.parametrize("operation", ["insert", "get", "patch", "delete"])
async def test_three_failures_lose_no_lease(
    gcs: GCS, clock: JumpingClock, operation: str, fault: dict[str, Any]
) -> None:
    ground = BucketGround(gcs, clock)
    gcs.fault(operation=operation, times=3, **fault)
    first = await ground.leases().acquire(SANDBOX, me("the owner"))
    with pytest.raises(LeaseHeldError, match="the owner"):
        await ground.leases().acquire(SANDBOX, me())
    waiting = asyncio.create_task(ground.leases().acquire(SANDBOX, me(), patience=100 * ground.lease))
    await soon(first.wanted.wait())
    assert not first.lost.done()
    await first.release()
    second = await soon(waiting)
    assert second.token > first.token
    await second.release()
    assert ground.objects() == []


async def test_lease_is_lost_while_bucket_fails(gcs: GCS, clock: JumpingClock) -> None:
    ground = BucketGround(gcs, clock)
    lease = await ground.leases().acquire(SANDBOX, me())
    gcs.fault("status", code=503, operation="patch", times=None)
    assert re.search(f"not renewed for {ground.lease:g} s: .*{gcs.bucket}.*503", await soon(lease.lost))
    await lease.release()
    assert ground.objects() == []


async def test_lost_lease_can_be_acquired_again(gcs: GCS, clock: JumpingClock) -> None:
    leases = BucketGround(gcs, clock).leases()
    first = await leases.acquire(SANDBOX, me())
    gcs.fault("status", code=503, operation="patch", times=None)
    await soon(first.lost)
    gcs.fault("status", code=503, operation="delete", times=3)
    await first.release()
    second = await leases.acquire(SANDBOX, me())
    assert second.token > first.token
    await second.release()


async def test_lease_is_lost_while_bucket_hangs(gcs: GCS) -> None:
    lease = await BucketGround(gcs).leases().acquire(SANDBOX, me())
    gcs.fault("delay", seconds=LEASE, operation="patch", times=None)
    assert f"not renewed for {LEASE:g} s" in await soon(lease.lost)
    await lease.release()


async def test_missing_bucket_fails_at_once(gcs: GCS) -> None:
    leases = open_leases("gcs", "no-such-bucket", LEASE, RENEWAL, POLL)
    with pytest.raises(StorageError, match="no-such-bucket") as error:
        await leases.acquire(SANDBOX, me())
    assert not isinstance(error.value, StorageUnavailableError)


# --- GCS


async def test_renewal_in_flight_at_release_has_no_effect(gcs: GCS) -> None:
    ground = BucketGround(gcs)
    gcs.fault("delay", seconds=0.5, operation="patch", times=None)
    lease = await ground.leases().acquire(SANDBOX, me())
    await until(lambda: ("patch", f"servers/{SANDBOX}") in gcs.requests())
    await lease.release()
    assert ground.objects() == []
    again = await ground.leases().acquire(SANDBOX, me())
    blob = ground.bucket.get_blob(f"servers/{SANDBOX}")
    await asyncio.sleep(0.6)
    found = ground.bucket.get_blob(f"servers/{SANDBOX}")
    assert (found.generation, found.metadata["owner"]) == (blob.generation, again.owner.to_json())
    assert not again.lost.done()
    await again.release()
    await asyncio.sleep(0.6)
    assert ground.objects() == []


@pytest.mark.parametrize("operation", ["insert", "patch", "delete"])
async def test_request_arriving_late_has_no_effect(gcs: GCS, operation: str) -> None:
    ground = BucketGround(gcs)
    gcs.fault("delay", seconds=LEASE / 2, operation=operation, times=1)
    first = await ground.leases().acquire(SANDBOX, me())
    await asyncio.sleep(2 * RENEWAL)
    await first.release()
    second = await ground.leases().acquire(SANDBOX, me())
    assert second.token > first.token
    await asyncio.sleep(LEASE)
    assert not second.lost.done()
    await second.release()
    assert ground.objects() == []


@pytest.mark.parametrize("offset", [-86400.0, 86400.0])
async def test_only_server_clock_counts(gcs: GCS, offset: float) -> None:
    gcs.set_clock(offset)
    ground = BucketGround(gcs)
    first = await ground.leases().acquire(SANDBOX, me())
    with pytest.raises(LeaseHeldError):
        await ground.leases().acquire(SANDBOX, me())
    second = await acquire_after_expiry(gcs, ground, offset)
    assert second.token > first.token
    assert re.search("has it now|its entry was removed", await soon(first.lost))
    await first.release()
    await second.release()
    assert ground.objects() == []


async def acquire_after_expiry(gcs: GCS, ground: Ground, offset: float) -> Lease:
    """Acquire a lease that another server renews, by setting the storage's clock ahead until the lease has expired."""
    for jump in range(1, 20):
        gcs.set_clock(offset + jump * 2 * LEASE)
        with suppress(LeaseHeldError):
            return await ground.leases().acquire(SANDBOX, me())
    raise AssertionError("the lease did not expire although the clock was set ahead")


async def test_owner_determines_lease_time(gcs: GCS) -> None:
    long = await open_leases("gcs", gcs.bucket, 60.0, 10.0, 1.0).acquire(SANDBOX, me())
    gcs.set_clock(30.0)
    with pytest.raises(LeaseHeldError):
        await BucketGround(gcs).leases().acquire(SANDBOX, me())
    gcs.set_clock(90.0)
    await (await BucketGround(gcs).leases().acquire(SANDBOX, me())).release()
    await long.release()


async def test_free_lease_needs_two_requests(gcs: GCS) -> None:
    leases = BucketGround(gcs).leases()
    lease = await leases.acquire(SANDBOX, me())
    await lease.release()
    requests = [operation for operation, name in gcs.requests() if name]
    assert requests == ["insert", "delete"]


@pytest.mark.parametrize("contenders", [1, 8])
async def test_lease_error_under_mutation_limit_names_the_owner(gcs: GCS, contenders: int) -> None:
    first = await GCSLeases(gcs.bucket).acquire(SANDBOX, me("the owner"))
    gcs.limit_mutations(1.0, 1.0)
    leases = [GCSLeases(gcs.bucket) for _ in range(contenders)]
    answers = await asyncio.gather(*(one.acquire(SANDBOX, me()) for one in leases), return_exceptions=True)
    assert [type(answer) for answer in answers] == [LeaseHeldError] * contenders
    assert {str(answer.owner) for answer in answers if isinstance(answer, LeaseHeldError)} == {str(first.owner)}
    assert {name for operation, name in gcs.requests() if operation in MUTATIONS} == {SANDBOX}
    await first.release()


@pytest.mark.parametrize("contenders", [1, 8])
async def test_expired_lease_is_acquired_despite_rate_limit(gcs: GCS, clock: JumpingClock, contenders: int) -> None:
    dead = await GCSLeases(gcs.bucket, pace=Pace(30.0, 29.0, 1.0)).acquire(SANDBOX, me("the owner"))
    gcs.limit_mutations(1.0, 1.0)
    gcs.set_clock(60.0)
    clock.on_jump = lambda elapsed: gcs.set_clock(60.0 + elapsed)
    leases = [clock.watch(GCSLeases(gcs.bucket, clock=clock)) for _ in range(contenders)]
    answers = await asyncio.gather(*(one.acquire(SANDBOX, me()) for one in leases), return_exceptions=True)
    [heir] = [answer for answer in answers if isinstance(answer, Lease)]
    losers = [answer.owner for answer in answers if isinstance(answer, LeaseHeldError)]
    assert losers == [heir.owner] * (contenders - 1)
    assert gcs.refused_mutations() > 0
    await asyncio.gather(heir.release(), dead.release())
    assert BucketGround(gcs).objects() == []


async def test_waiting_rarely_changes_objects(gcs: GCS, clock: JumpingClock) -> None:
    """Waiters read the lease. One of them renews its place, less often than Google's limit."""
    first = await clock.watch(GCSLeases(gcs.bucket, clock=clock)).acquire(SANDBOX, me())
    leases = [clock.watch(GCSLeases(gcs.bucket, clock=clock)) for _ in range(3)]
    gcs.reset_faults()
    clock.on_jump = gcs.set_clock
    waiting = [asyncio.create_task(one.acquire(SANDBOX, me(), patience=SOON)) for one in leases]
    await clock.sleep(4.5)
    assert gcs.requests().count(("get", SANDBOX)) >= 12
    changed = [name for operation, name in gcs.requests() if operation in ("insert", "delete")]
    assert changed.count(SANDBOX) == changed.count(f"{SANDBOX}.waiter") == len(leases)
    assert gcs.requests().count(("patch", f"{SANDBOX}.waiter")) < 3
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await first.release()


async def test_rate_limit_is_named_in_the_error(gcs: GCS, clock: JumpingClock) -> None:
    leases = BucketGround(gcs, clock).leases()
    gcs.fault("status", code=429, operation="insert", times=None)
    with pytest.raises(RateLimitedError, match="because of too many requests: 429") as error:
        await leases.acquire(SANDBOX, me())
    assert "0 s" not in str(error.value)


# --- Competing processes

PROCESSES = 16


def acquire_at_once(contenders: list[subprocess.Popen[bytes]]) -> list[tuple[subprocess.Popen[bytes], int]]:
    """Let all processes try to acquire the lease at once. Return the successful ones with their tokens."""
    for contender in contenders:
        send_command(contender, "acquire 0")
    answers = [(contender, read_answer(contender)) for contender in contenders]
    assert all(answer.keys() <= {"token", "held", "unreachable"} for _, answer in answers), answers
    return [(contender, answer["token"]) for contender, answer in answers if "token" in answer]


@pytest.fixture
def faulty(request: pytest.FixtureRequest, ground: Ground) -> Ground:
    """Return the place. If it is a bucket, about one in four requests fails or is delayed."""
    if ground.kind == "gcs":
        gcs: GCS = request.getfixturevalue("gcs")
        for fault in FAULTS:
            gcs.fault(times=None, probability=0.05, **fault)
        gcs.fault("delay", seconds=0.02, times=None, probability=0.05)
    return ground


@pytest.mark.parametrize("rounds", [6, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ground", ["local", "gcs"], indirect=True)
def test_one_of_sixteen_processes_acquires_the_lease(faulty: Ground, rounds: int) -> None:
    tokens = []
    with Contenders(faulty, PROCESSES, (30.0, 1.0, 0.2)) as contenders:
        for _ in range(rounds):
            owners = acquire_at_once(contenders)
            assert len(owners) == 1
            [(owner, token)] = owners
            tokens.append(token)
            assert ask(owner, "release") == {"released": True}
    assert tokens == sorted(set(tokens))


@between_processes
def test_one_process_acquires_lease_of_killed_owner(faulty: Ground) -> None:
    tokens = []
    with Contenders(faulty, 6, (2.0, 0.25, 0.1)) as everybody:
        contenders = list(everybody)
        while len(contenders) > 3:
            owners = acquire_at_once(contenders)
            while not owners:
                owners = acquire_at_once(contenders)
            assert len(owners) == 1
            [(owner, token)] = owners
            tokens.append(token)
            owner.kill()
            contenders.remove(owner)
    assert tokens == sorted(set(tokens))
