"""Test file snapshots: a new sandbox gets the files of another one, and a hostile tar cannot affect the host."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import stat
import tarfile
import textwrap
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_provisioner.errors import DiskFullError, GuestError, SandboxError, SnapshotError
from sandbox_provisioner.guest.archive import FixedSizeReader, Notes
from sandbox_provisioner.gvisor import guest_tool
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox
from sandbox_provisioner.persistence import snapshots

LONG = 60
ENOUGH = 1 << 28

Start = Callable[..., Any]


@pytest.fixture
async def start(spec: BundleSpec, runsc: Runsc) -> AsyncIterator[Start]:
    """Return a function that starts sandboxes with the given mounts and settings."""
    made: list[GVisorSandbox] = []

    async def start(*mounts: Mount, restore: Path | None = None, **settings: Any) -> GVisorSandbox:
        own = replace(spec, mounts=(*spec.mounts, *mounts), **settings)
        made.append(GVisorSandbox(f"box-{len(made)}", own, runsc))
        await asyncio.wait_for(made[-1].restore(restore) if restore else made[-1].start(), LONG)
        return made[-1]

    yield start
    for sandbox in made:
        await asyncio.wait_for(sandbox.delete(), LONG)


async def python(sandbox: GVisorSandbox, code: str) -> Any:
    """Run ``code``, and return what it printed, as JSON."""
    process = await sandbox.execute([sandbox.spec.python, "-c", f"import json, os\n{textwrap.dedent(code)}"])
    out, err = await asyncio.wait_for(process.read(), LONG)
    assert err == b""
    return json.loads(out or b"null")


async def replace_script(sandbox: GVisorSandbox, code: str) -> None:
    await python(sandbox, f"open('/.sandbox/archive.py', 'w').write({code!r})")


def contents(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for header, data in members:
            tar.addfile(header, io.BytesIO(data))
    return stream.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", data: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.size = kind, target, len(data)
    return header, data


# -- pack and unpack -----------------------------------------------------------------------------------------------

WRITE = """
    for place in (HOME, "/tmp", "/opt/new"):
        os.makedirs(place + "/folder/empty")
        with open(place + "/folder/file", "wb") as file: file.write(bytes(range(256)) * 3000)
        os.link(place + "/folder/file", place + "/folder/twin")
        os.symlink("folder/file", place + "/link")
        os.symlink("/nowhere", place + "/dangling")
        os.mkfifo(place + "/pipe")
        os.makedirs(place + "/" + "deep" * 20 + "/" + "deeper" * 20)
        open(os.fsencode(place) + b"/b\\xffd \\n n\\xc3\\xa4me", "w").close()
        os.chmod(place + "/folder/file", 0o640)
        os.utime(place + "/folder/file", (1, 1_000_000_000))
        os.chmod(place + "/folder", 0o500)
        os.utime(place + "/folder", (1, 1_100_000_000))
"""
LOOK = """
    def look(place):
        found = {}
        for folder, folders, files in os.walk(place):
            # An interpreter below /tmp is a mount there: no part of what the sandbox wrote.
            folders[:] = [name for name in folders if not os.path.ismount(os.path.join(folder, name))]
            for name in folders + files:
                path = os.path.join(folder, name)
                status = os.lstat(path)
                link = os.readlink(path) if os.path.islink(path) else None
                data = open(path, "rb").read().hex() if os.path.isfile(path) and not link else None
                time = int(status.st_mtime) if name in ("file", "folder") else None
                twins = status.st_nlink if data is not None else None
                found[ascii(os.path.relpath(path, place))] = [status.st_mode, time, twins, link, data]
        return found
    print(json.dumps([look(place) for place in (HOME, "/tmp", "/opt/new")]))
"""


@pytest.mark.runsc
async def test_files_are_unpacked_in_a_sandbox_with_another_home(start: Start, tmp_path: Path) -> None:
    first = await start()
    target = tmp_path / "snapshot.tar"
    await python(first, f"HOME = {first.spec.home!r}\n" + textwrap.dedent(WRITE))
    before = await python(first, f"HOME = {first.spec.home!r}\n" + textwrap.dedent(LOOK))
    size = await snapshots.pack(first, target, ENOUGH)
    assert size == target.stat().st_size
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [target.name]
    second = await start(home="/home/another")
    await snapshots.unpack(second, target)
    after = await python(second, "HOME = '/home/another'\n" + textwrap.dedent(LOOK))
    for place in before:
        assert stat.S_ISFIFO(place.pop("'pipe'")[0])
    assert after == before
    assert len(before[0]) == 9


@pytest.mark.runsc
async def test_only_changed_files_are_packed(start: Start, tmp_path: Path) -> None:
    sandbox = await start()
    assert await snapshots.pack(sandbox, tmp_path / "empty", ENOUGH)
    assert [name for name in contents(tmp_path / "empty") if not name.startswith("root/etc")] == []
    await python(sandbox, "open('/etc/hosts', 'a').write('10.0.0.1 friend'); open('/run/x', 'w').close()")
    await python(sandbox, "os.unlink('/etc/passwd'); os.symlink('/etc/group', '/etc/passwd')")
    await snapshots.pack(sandbox, tmp_path / "changed", ENOUGH)
    changed = set(contents(tmp_path / "changed")) - set(contents(tmp_path / "empty"))
    assert changed == {"root/etc/hosts", "root/etc/passwd"}
    other = await start()
    await snapshots.unpack(other, tmp_path / "changed")
    look = "print(json.dumps([open('/etc/hosts').read()[-6:], os.readlink('/etc/passwd')]))"
    assert await python(other, look) == ["friend", "/etc/group"]


@pytest.mark.runsc
async def test_very_deep_folder_is_unpacked(start: Start, tmp_path: Path) -> None:
    first = await start()
    deep = "/home/tester" + "/d" * 200
    await python(first, f"os.makedirs({deep!r}); open({deep!r} + '/file', 'w').close()")
    await snapshots.pack(first, tmp_path / "snapshot", ENOUGH)
    second = await start()
    await snapshots.unpack(second, tmp_path / "snapshot")
    assert await python(second, f"print(json.dumps(os.listdir({deep!r})))") == ["file"]


@pytest.mark.runsc
async def test_restored_sandbox_can_be_packed(start: Start, tmp_path: Path) -> None:
    first = await start()
    await python(first, "open('/home/tester/kept', 'w').close(); open('/etc/hosts', 'a').close(); os.mkdir('/new')")
    await snapshots.pack(first, tmp_path / "before", ENOUGH)
    await first.checkpoint(tmp_path / "image")
    second = await start(restore=tmp_path / "image")
    await snapshots.pack(second, tmp_path / "after", ENOUGH)
    assert contents(tmp_path / "after") == contents(tmp_path / "before")
    assert {"home/kept", "root/new"} < set(contents(tmp_path / "after"))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    (folder / "folder").mkdir(parents=True)
    (folder / "file").write_text("the host's")
    return folder


def mounts_of(host: Path) -> list[Mount]:
    folder, file = str(host), str(host / "file")
    places = ("/data", "/home/tester/data", "/tmp/deep/data")
    return [*(Mount(folder, place, True) for place in places), Mount(file, "/srv/file", True)]


@pytest.mark.runsc
async def test_mounted_folders_and_files_are_not_packed(start: Start, host: Path, tmp_path: Path) -> None:
    sandbox = await start(*mounts_of(host))
    await python(sandbox, "open('/tmp/deep/own', 'w').close(); open('/srv/own', 'w').close()")
    await snapshots.pack(sandbox, tmp_path / "snapshot", ENOUGH)
    names = contents(tmp_path / "snapshot")
    assert {"tmp/deep/own", "root/srv/own"} <= set(names)
    assert [name for name in names if "data" in name or name.endswith("file")] == []


@pytest.mark.runsc
async def test_mounted_home_is_neither_packed_nor_unpacked(
    start: Start, host: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await start(Mount(str(host), "/home/tester", True))
    await snapshots.pack(sandbox, tmp_path / "snapshot", ENOUGH)
    assert [name for name in contents(tmp_path / "snapshot") if name.startswith("home")] == []
    (tmp_path / "other").write_bytes(tar_of(member("home/file", data=b"!"), member("root/opt/file", data=b"!")))
    await snapshots.unpack(sandbox, tmp_path / "other")
    assert (host / "file").read_text() == "the host's"
    assert await python(sandbox, "print(json.dumps(open('/opt/file').read()))") == "!"
    assert "home/file" in caplog.text


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.runsc
async def test_files_may_change_while_they_are_packed(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await start()
    restless = """
        import os, random
        names = [f"/home/tester/{number}" for number in range(20)]
        print("ready", flush=True)
        while True:
            name = random.choice(names)
            try:
                if random.random() < 0.3: os.unlink(name)
                elif random.random() < 0.5: os.truncate(name, random.randrange(1 << 20))
            except OSError: pass
            with open(name, "ab") as file: file.write(bytes(random.randrange(1 << 20)))
    """
    process = await sandbox.execute([sandbox.spec.python, "-c", textwrap.dedent(restless)])
    async for _ in process.stream():
        break
    for _ in range(5):
        await snapshots.pack(sandbox, tmp_path / "snapshot", ENOUGH)
    await process.stop(grace=0)
    await snapshots.unpack(await start(), tmp_path / "snapshot")


@pytest.mark.runsc
async def test_chosen_places_are_packed_and_existing_files_stay(start: Start, tmp_path: Path) -> None:
    first, second, target = await start(), await start(), tmp_path / "home.tar"
    for sandbox, files in ((first, ("~/kept", "~/new", "/tmp/other")), (second, ("~/kept",))):
        write = f"open(os.path.expanduser(path), 'w').write({sandbox.container_id!r})"
        await python(sandbox, f"for path in {files}: {write}")
    await snapshots.pack(first, target, ENOUGH, ("home",))
    await snapshots.unpack(second, target, ("home",), "add")
    look = "[os.path.exists(p) and open(p).read() for p in map(os.path.expanduser, ('~/kept', '~/new', '/tmp/other'))]"
    found = await python(second, f"print(json.dumps({look}))")
    assert found == [second.container_id, first.container_id, False]


def test_shrinking_file_is_filled_up_and_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    notes = Notes()
    shrunk = FixedSizeReader(io.BytesIO(b"123456"), "home/shrunk", notes)
    assert [shrunk.read(4), shrunk.read(4), shrunk.read(4)] == [b"1234", b"56\0\0", b"\0\0\0\0"]
    assert FixedSizeReader(Failing(), "home/failing", notes).read(3) == b"\0\0\0"
    for number in range(30):
        notes.add(f"home/\n{number}", "vanished")
    notes.end()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "'home/shrunk' shrank while it was read"
    assert said[1] == "'home/failing' could not be read to the end: Input/output error"
    assert said[-2:] == [r"'home/\n17' vanished", "and 12 more"]


@pytest.mark.runsc
async def test_oversized_snapshot_is_refused_and_leaves_no_file(start: Start, tmp_path: Path) -> None:
    sandbox = await start()
    await python(sandbox, "file = open('/tmp/sparse', 'wb'); file.truncate(1 << 40)")
    with pytest.raises(SnapshotError, match=r"box-0 is larger than 3,000,000 bytes.*Delete"):
        await asyncio.wait_for(snapshots.pack(sandbox, tmp_path / "snapshot", 3_000_000), LONG)
    assert os.listdir(tmp_path) == []
    assert sandbox.connection._processes == {}
    assert await python(sandbox, "print(json.dumps('usable'))") == "usable"


LIES = {
    "it is no tar": ("print('x' * 100000)", SnapshotError, "invalid tar"),
    "it is incomplete": ("import os; os.write(1, bytes(512))", SnapshotError, "incomplete"),
    "it fails at the end": (
        "import os, sys; os.write(1, bytes(10240)); sys.exit('so\\nsorry')",
        GuestError,
        r"so \| sorry",
    ),
    "it stands still": ("import time; time.sleep(1000)", GuestError, "no input or output"),
}


@pytest.mark.runsc
async def test_malformed_tar_from_a_sandbox_is_refused_and_leaves_no_file(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_tool, "STALL", 2.0)
    sandbox = await start()
    for code, kind, words in LIES.values():
        await replace_script(sandbox, code)
        with pytest.raises(kind, match=words):
            await asyncio.wait_for(snapshots.pack(sandbox, tmp_path / "snapshot", ENOUGH), LONG)
        assert os.listdir(tmp_path) == []
    assert sandbox.connection._processes == {}


@pytest.mark.runsc
async def test_interrupted_save_leaves_no_file(start: Start, tmp_path: Path) -> None:
    for end in ("cancel", "delete"):
        sandbox = await start()
        await replace_script(
            sandbox, "import sys, time; sys.stdout.write('\\0' * 512); sys.stdout.flush(); time.sleep(1000)"
        )
        saving = asyncio.create_task(snapshots.pack(sandbox, tmp_path / "snapshot", ENOUGH))
        while not os.listdir(tmp_path):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        if end == "cancel":
            saving.cancel()
        else:
            await sandbox.delete()
        with pytest.raises(asyncio.CancelledError if end == "cancel" else SandboxError):
            await asyncio.wait_for(saving, LONG)
        assert os.listdir(tmp_path) == []


@pytest.mark.runsc
async def test_full_or_missing_disk_raises_sandbox_error(start: Start, tmp_path: Path) -> None:
    sandbox = await start()
    with pytest.raises(SnapshotError, match=f"{tmp_path}/no/such.*No such file"):
        await snapshots.pack(sandbox, tmp_path / "no" / "such", ENOUGH)
    with pytest.raises(SnapshotError, match=f"{tmp_path}/nothing.*No such file"):
        await snapshots.unpack(sandbox, tmp_path / "nothing")


def test_full_disk_is_reported() -> None:
    with (
        pytest.raises(DiskFullError),
        snapshots._disk_errors(Path("target")),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        snapshots._write(full, b"x")


# -- a hostile tar ---------------------------------------------------------------------------------------------------


@pytest.mark.runsc
async def test_damaged_snapshot_is_refused(start: Start, tmp_path: Path) -> None:
    sandbox = await start()
    whole = tar_of(member("home/a", data=bytes(100_000)), member("home/b", data=b"b"))
    for damaged in (b"", b"junk" * 1000, whole[:50_000], whole[:-9000], b"\1" + whole[1:]):
        (tmp_path / "snapshot").write_bytes(damaged)
        with pytest.raises((SnapshotError, GuestError)) as failure:
            await asyncio.wait_for(snapshots.unpack(sandbox, tmp_path / "snapshot"), LONG)
        assert len(str(failure.value)) < 500
    assert sandbox.connection._processes == {}


WAYS_OUT = [
    member("home/l", tarfile.SYMTYPE, "/data"),
    member("home/l/new", data=b"!"),
    member("home/l", tarfile.DIRTYPE),
    member("home/m", tarfile.SYMTYPE, "data"),
    member("home/m/new", data=b"!"),
    member("root/data/new", data=b"!"),
    member("root/data/file", data=b"!"),
    member("root/data", data=b"!"),
    member("root/srv/file", data=b"!"),
    member("root/srv/hard", tarfile.LNKTYPE, "root/data/file"),
    member("root/srv/hard2", tarfile.LNKTYPE, "root/srv/file"),
    member("home/hard", tarfile.LNKTYPE, "home/data/file"),
    member("home/data/new", data=b"!"),
    member("home/data", tarfile.SYMTYPE, "/tmp"),
    member("home/data/folder", tarfile.DIRTYPE),
    member("tmp/deep/data/new", data=b"!"),
    member("tmp/../data/new", data=b"!"),
    member("home/./data/new", data=b"!"),
    member("/data/new", data=b"!"),
    member("../data/new", data=b"!"),
    member("data/new", data=b"!"),
    member("home", data=b"!"),
    member("home//data/new", data=b"!"),
    member("home/device", tarfile.CHRTYPE),
]


@pytest.mark.runsc
async def test_hostile_members_of_a_tar_do_not_reach_the_host(
    start: Start, host: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "TarCheck", Lenient)
    caplog.set_level(logging.WARNING)
    sandbox = await start(*mounts_of(host))
    odd = tarfile.TarInfo("home/odd")
    odd.pax_headers = {"mtime": "inf"}
    after = (odd, b""), member("home/after", data=b"after")
    (tmp_path / "snapshot").write_bytes(tar_of(*WAYS_OUT, *after))
    before = {path: path.stat() for path in (host, *host.rglob("*"))}
    await asyncio.wait_for(snapshots.unpack(sandbox, tmp_path / "snapshot"), LONG)
    assert {path: path.stat() for path in (host, *host.rglob("*"))} == before
    assert (host / "file").read_text() == "the host's"
    assert await python(sandbox, "print(json.dumps(open('/home/tester/after').read()))") == "after"
    assert "box-0" in caplog.text


class Lenient:
    """A TarCheck that accepts everything, so that the guest receives hostile archives."""

    def feed(self, data: bytes) -> None:
        pass

    def end(self) -> None:
        pass


parts = st.sampled_from(["home", "tmp", "root", "data", "deep", "srv", "file", "folder", "..", ".", "", "l", "new"])
hostile = st.builds(
    member,
    st.lists(parts, min_size=1, max_size=5).map("/".join),
    st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]),
    st.lists(parts, max_size=4).map("/".join),
)


@pytest.mark.runsc
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(hostile, min_size=150, max_size=250))
def test_no_generated_tar_reaches_the_host(
    spec: BundleSpec,
    runsc: Runsc,
    tmp_path_factory: pytest.TempPathFactory,
    members: list[tuple[tarfile.TarInfo, bytes]],
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    host = folder / "host"
    (host / "folder").mkdir(parents=True)
    (host / "file").write_text("the host's")
    (folder / "snapshot").write_bytes(tar_of(*members))
    before = {path: path.stat() for path in (host, *host.rglob("*"))}

    async def unpack() -> None:
        sandbox = GVisorSandbox("box", replace(spec, mounts=(*spec.mounts, *mounts_of(host))), runsc)
        await sandbox.start()
        try:
            await asyncio.wait_for(snapshots.unpack(sandbox, folder / "snapshot"), LONG)
        finally:
            await sandbox.delete()

    asyncio.run(unpack())
    assert {path: path.stat() for path in (host, *host.rglob("*"))} == before


@pytest.mark.runsc
async def test_failure_to_unpack_is_reported_with_the_reason(start: Start, tmp_path: Path) -> None:
    sandbox = await start()
    await replace_script(sandbox, "raise SystemExit('OSError: No space left on device')")
    (tmp_path / "snapshot").write_bytes(tar_of(member("home/large", data=bytes(5_000_000))))
    with pytest.raises(GuestError, match="failed in the sandbox: OSError: No space left on device"):
        await asyncio.wait_for(snapshots.unpack(sandbox, tmp_path / "snapshot"), LONG)
    await sandbox.delete()
    with pytest.raises(SandboxError, match="stopped"):
        await snapshots.unpack(sandbox, tmp_path / "snapshot")
