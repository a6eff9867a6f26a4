"""Test that files that a checkpoint needs are found, compared by content, and named if they are missing.

The guest's report is hostile here: only files that are mounted in the sandbox are opened, whatever it contains.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_provisioner.errors import GuestError, MetadataError
from sandbox_provisioner.guest.open_files import mappings
from sandbox_provisioner.gvisor import guest_tool
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount, all_mounts
from sandbox_provisioner.gvisor.mounts import within
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox
from sandbox_provisioner.mux.process import GuestProcess
from sandbox_provisioner.persistence import compatibility
from sandbox_provisioner.persistence.compatibility import (
    FilePrint,
    detached,
    differences,
    examine,
    from_json,
    inventory,
    to_json,
    unsaveable,
)
from sandbox_provisioner.persistence.digest_cache import DigestCache, GivenUpError

LONG = 60
slow_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


class Machine:
    """A host with an environment, a notebook folder, and a secret file outside of both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library = folder / "env" / "lib.so"
        self.data = folder / "work" / "data.csv"
        self.secret = folder / "outside" / "secret"
        for path in (self.library, self.data, self.secret):
            path.parent.mkdir(parents=True)
            path.write_bytes(path.name.encode() * 1000)
        self.prints = DigestCache(folder / "memory")

    @property
    def spec(self) -> BundleSpec:
        mounts = (
            Mount(str(self.folder / "env"), "/env"),
            Mount(str(self.folder / "work"), "/work", True),
            Mount("", "/work/masked", True),
        )
        return BundleSpec("/usr/bin/python3", "/home/tester", "tester", mounts)

    def examine(self, *sightings: tuple[str, str, str]) -> dict[str, FilePrint]:
        return examine(json.dumps(sightings).encode(), self.spec, self.prints)

    def differences(self, recorded: dict[str, FilePrint]) -> list[str]:
        return differences(recorded, self.spec, self.prints)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.fixture
def recorded(machine: Machine) -> dict[str, FilePrint]:
    """The recorded files of a sandbox: a library, an open data file, and the notebook's folder."""
    return machine.examine(("/env/lib.so", "mapped", ""), ("/work/data.csv", "open", ""), ("/work", "folder", ""))


# -- accepted and refused differences ------------------------------------------------------------------------------


def test_unchanged_files_have_no_differences(machine: Machine, recorded: dict[str, FilePrint]) -> None:
    assert set(recorded) == {"/env/lib.so", "/work/data.csv", "/work"}
    assert unsaveable(recorded) == []
    assert machine.differences(recorded) == []


def test_touched_files_and_new_packages_are_ignored(machine: Machine, recorded: dict[str, FilePrint]) -> None:
    os.utime(machine.library, (1, 1))
    machine.library.with_name("another.so").write_bytes(b"new")
    assert machine.differences(recorded) == []


def test_same_environment_on_another_machine_is_accepted(
    machine: Machine, recorded: dict[str, FilePrint], tmp_path: Path
) -> None:
    other = Machine(tmp_path / "another machine")
    assert other.library.stat().st_ino != machine.library.stat().st_ino
    assert other.differences(recorded) == []


def test_upgraded_library_is_named(machine: Machine, recorded: dict[str, FilePrint]) -> None:
    content = machine.library.read_bytes()
    for other in (content[:-1] + b"!", content + b"!", b""):
        machine.library.write_bytes(other)
        assert machine.differences(recorded) == ["/env/lib.so has changed since the sandbox was saved"]
    machine.library.write_bytes(content)
    assert machine.differences(recorded) == []


def test_missing_file_is_named(machine: Machine, recorded: dict[str, FilePrint]) -> None:
    machine.library.unlink()
    shutil.rmtree(machine.folder / "work")
    assert machine.differences(recorded) == [
        "/env/lib.so is not there",
        "/work is not there",
        "/work/data.csv is not there",
    ]


def test_file_outside_the_mounts_is_named(machine: Machine, recorded: dict[str, FilePrint]) -> None:
    blind = replace(machine.spec, mounts=machine.spec.mounts[1:])
    assert differences(recorded, blind, machine.prints) == ["/env/lib.so is not in a folder that is mounted here"]


def test_open_file_may_change_only_in_a_writable_folder(machine: Machine) -> None:
    notes = machine.library.with_name("notes")
    notes.write_text("before")
    recorded = machine.examine(("/env/notes", "open", ""), ("/work/data.csv", "open", ""))
    machine.data.write_text("after")
    assert machine.differences(recorded) == []
    notes.write_text("after")
    assert machine.differences(recorded) == ["/env/notes has changed since the sandbox was saved"]


def test_in_a_writable_folder_only_private_mappings_need_the_same_bytes(machine: Machine) -> None:
    private = machine.examine(("/work/data.csv", "mapped", ""), ("/work/data.csv", "open", ""))
    shared = machine.examine(("/work/data.csv", "open", ""), ("/work/data.csv", "shared", ""))
    machine.data.write_text("after")
    assert machine.differences(private) == ["/work/data.csv has changed since the sandbox was saved"]
    assert machine.differences(shared) == []


def test_only_files_of_the_host_are_recorded(machine: Machine) -> None:
    (machine.folder / "work" / "masked").mkdir()
    (machine.folder / "work" / "masked" / "file").touch()
    elsewhere = ("/home/tester/x", "/tmp/x", "/etc/passwd", "/.sandbox/__main__.py", "/proc/1/maps", "/memfd:x", "/x")
    assert machine.examine(*((path, "mapped", "") for path in (*elsewhere, "/work/masked/file"))) == {}


def test_replaced_library_in_use_prevents_saving(machine: Machine) -> None:
    recorded = machine.examine(("/env/lib.so", "mapped", "lost"), ("/env/lib.so", "mapped", ""))
    words = ["/env/lib.so was removed or replaced while the sandbox had it in memory"]
    assert unsaveable(recorded) == words
    assert machine.differences(recorded) == words


def test_file_deleted_by_the_sandbox_is_ignored(machine: Machine) -> None:
    recorded = machine.examine(("/work/gone", "open", "deleted"))
    assert recorded == {"/work/gone": FilePrint("open", "deleted")}
    assert unsaveable(recorded) == machine.differences(recorded) == []


def test_file_deleted_in_a_read_only_folder_is_lost(machine: Machine) -> None:
    recorded = machine.examine(("/env/gone", "open", "deleted"))
    assert recorded == {"/env/gone": FilePrint("open", "lost")}


def test_unprintable_path_is_quoted(machine: Machine) -> None:
    name = os.fsdecode(b"bad\x1b[31m\n\xff")
    machine.library.with_name(name).touch()
    recorded = machine.examine((f"/env/{name}", "mapped", ""))
    machine.library.with_name(name).unlink()
    (words,) = machine.differences(from_json(json.loads(json.dumps(to_json(recorded)))))
    assert words == r"'/env/bad\x1b[31m\n\udcff' is not there"


# -- a hostile sandbox ---------------------------------------------------------------------------------------------

watching: list[list[str]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Record each file that is opened for reading. O_PATH does not open for reading."""
    if event == "open" and watching:
        path, _, flags = arguments
        if isinstance(path, str) and not flags & os.O_PATH:
            watching[-1].append(os.readlink(path) if path.startswith("/proc/self/fd/") else path)


sys.addaudithook(_audit)


@contextmanager
def watched() -> Iterator[list[str]]:
    watching.append([])
    try:
        yield watching[-1]
    finally:
        watching.pop()


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine whose notebook folder contains links that lead out of it."""
    machine = Machine(tmp_path_factory.mktemp("trap"))
    work, outside = machine.folder / "work", machine.folder / "outside"
    (work / "to-file").symlink_to(machine.secret)
    (work / "to-folder").symlink_to(outside)
    (work / "up").symlink_to("../outside")
    (work / "self").symlink_to(".")
    (work / "env").symlink_to("/env")
    os.mkfifo(work / "pipe")
    (work / "folder").mkdir()
    (work / "folder" / "file").write_text("file")
    return machine


NAMES = (
    ".. . work env outside secret to-file to-folder up self pipe folder file lib.so data.csv masked proc root etc usr"
)
steps = st.sampled_from([*NAMES.split(), "", "\0", "\udcff", "\ud800", "x" * 300])
paths = st.one_of(
    st.lists(steps, max_size=7).map(lambda parts: "/" + "/".join(parts)),
    st.lists(steps, max_size=4).map(lambda parts: "/work/" + "/".join(parts)),
    st.text(max_size=20),
)
sightings = st.tuples(paths, st.sampled_from(compatibility.USES), st.sampled_from(compatibility.STATES))


@slow_fixtures
@given(st.lists(sightings, max_size=8))
def test_no_report_opens_a_file_outside_the_mounts(trap: Machine, report: list[tuple[str, str, str]]) -> None:
    with watched() as opened:
        found = examine(json.dumps(report).encode(), trap.spec, DigestCache(trap.folder / "none"))
    sources = [os.path.realpath(mount.source) for mount in all_mounts(trap.spec) if mount.source]
    memory = str(trap.folder / "none")
    assert [path for path in opened if not any(within(path, source) for source in (*sources, memory))] == []
    assert set(found) <= {path for path, _, _ in report}
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


@pytest.mark.parametrize(
    "path", ["/work/to-file", "/work/to-folder/secret", "/work/up/secret", "/work/../outside/secret"]
)
@pytest.mark.parametrize("use", compatibility.USES)
def test_links_and_dots_do_not_lead_out_of_a_mount(trap: Machine, path: str, use: str) -> None:
    assert trap.examine((path, use, "")) == {}
    wanted = {path: FilePrint(use, "", trap.secret.stat().st_size, "0" * 64)}
    with watched() as opened:
        assert trap.differences(wanted)
    assert str(trap.secret) not in opened


@slow_fixtures
@given(
    st.binary(max_size=50)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | sightings,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    ).map(lambda value: json.dumps(value).encode())
)
def test_malformed_report_raises_guest_error(trap: Machine, text: bytes) -> None:
    try:
        examine(text, trap.spec, DigestCache(trap.folder / "none"))
    except GuestError:
        pass


@pytest.mark.parametrize("text", [b"[" * 100_000, b"9" * 100_000, b"[" + b"1," * 100_000 + b"1]"])
def test_huge_report_raises_guest_error(machine: Machine, text: bytes) -> None:
    with pytest.raises(GuestError, match="is invalid"):
        examine(text, machine.spec, machine.prints)


@pytest.mark.parametrize(("folder", "limit"), [("work", "MOST_WRITABLE_BYTES"), ("env", "MOST_BYTES")])
def test_bytes_to_hash_are_limited(machine: Machine, monkeypatch: pytest.MonkeyPatch, folder: str, limit: str) -> None:
    monkeypatch.setattr(compatibility, limit, 100_000)
    report = []
    for number in range(40):
        (machine.folder / folder / str(number)).write_bytes(bytes(5000))
        report.append((f"/{folder}/{number}", "mapped", ""))
    assert machine.examine(*report[:15])
    with pytest.raises(GuestError, match="more than 100,000 bytes"):
        machine.examine(*report)


def sparse(path: Path, size: int, offset: int = 0, byte: bytes = b"x") -> None:
    """Write a sparse file of this size with one byte of data."""
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(offset)
        file.write(byte)


def test_large_files_are_sampled_only_in_writable_folders(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "SAMPLED_ABOVE", 1 << 20)
    between = (1 << 16) + 7  # after the first sample and before the second
    for folder in ("work", "env"):
        sparse(machine.folder / folder / "big", 20 << 20)
    report = [(f"/{folder}/big", "mapped", "") for folder in ("work", "env")]
    recorded = machine.examine(*report)
    assert [recorded[f"/{folder}/big"].sampled for folder in ("work", "env")] == [True, False]
    assert compatibility.from_json(json.loads(json.dumps(compatibility.to_json(recorded)))) == recorded
    assert machine.differences(recorded) == []
    for folder in ("work", "env"):
        sparse(machine.folder / folder / "big", 20 << 20)
        with (machine.folder / folder / "big").open("r+b") as file:
            file.seek(between)
            file.write(b"y")
    assert machine.differences(recorded) == ["/env/big has changed since the sandbox was saved"]
    for folder in ("work", "env"):
        sparse(machine.folder / folder / "big", 20 << 20, (20 << 20) - 1)
    assert len(machine.differences(recorded)) == 2
    sparse(machine.folder / "work" / "big", 21 << 20)
    assert "/work/big has changed since the sandbox was saved" in machine.differences(recorded)


def test_hashing_ends_when_given_up(machine: Machine) -> None:
    given_up = Event()
    given_up.set()
    report = json.dumps([("/env/lib.so", "mapped", "")]).encode()
    with pytest.raises(GivenUpError):
        examine(report, machine.spec, machine.prints, given_up)


# -- documents -------------------------------------------------------------------------------------------------------

prints = st.builds(
    FilePrint,
    st.sampled_from(compatibility.USES),
    st.sampled_from(compatibility.STATES),
    st.integers(0, 1 << 60),
    st.sampled_from(["", "0" * 64, "abcdef0123456789" * 4]),
)


@given(st.dictionaries(st.text("ab/\udc80é ", min_size=1).map(lambda text: os.path.normpath("/x" + text)), prints))
def test_prints_survive_storage(recorded: dict[str, FilePrint]) -> None:
    assert from_json(json.loads(json.dumps(to_json(recorded)))) == recorded


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("mapped"),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["/a", "/a/../b", "use", "state", "size", "digest", "x"]), inner, max_size=5
            )
        ),
        max_leaves=12,
    )
)
def test_malformed_prints_raise_metadata_error(document: object) -> None:
    try:
        found = from_json(document)
    except MetadataError as error:
        assert len(str(error)) < 500
    else:
        assert found == from_json(to_json(found))


@pytest.mark.parametrize("path", ["", "relative", "/a/../b", "//a", "/a/", "/a\0b", "/\ud800", "/" + "x" * 5000])
def test_invalid_path_in_prints_is_refused(path: str) -> None:
    with pytest.raises(MetadataError, match="not a full path"):
        from_json({path: {"use": "open"}})


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"use": "eaten"},
        {"use": ["open"]},
        {"use": "open", "state": "eaten"},
        {"use": "open", "size": -1},
        {"use": "open", "size": True},
        {"use": "open", "digest": "0" * 63},
        {"use": "open", "digest": None},
        {"use": "open", "more": 1},
        "open",
        None,
    ],
)
def test_invalid_print_is_refused_with_its_path(value: object) -> None:
    with pytest.raises(MetadataError, match="/some/file"):
        from_json({"/some/file": value})


# -- the CPU ---------------------------------------------------------------------------------------------------------


def test_this_cpu_lacks_none_of_its_own_features() -> None:
    features = compatibility.cpu_features()
    assert features
    assert list(features) == sorted(features)
    assert compatibility.missing_cpu_features(os.uname().machine, features) == []


def test_missing_features_and_another_architecture_are_named() -> None:
    here = compatibility.cpu_features()
    assert compatibility.missing_cpu_features(os.uname().machine, [*here, "avx9000", "amx_magic"]) == [
        "this machine's CPU lacks amx_magic, avx9000"
    ]
    (words,) = compatibility.missing_cpu_features("vax", here)
    assert words == f"it was saved on vax, and this machine is {os.uname().machine}"


def test_cpu_flags_of_the_kernel_are_ignored(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu rep_good avx2 md_clear sse4_2 ibrs\nbugs\t: spectre_v1\n")
    assert compatibility.cpu_features(cpuinfo) == ("avx2", "sse4_2")
    cpuinfo.write_text("Features\t: fp asimd sve\n")
    assert compatibility.cpu_features(cpuinfo) == ("asimd", "fp", "sve")


# -- the guest's side ------------------------------------------------------------------------------------------------


def test_mapped_files_with_any_name_are_reported() -> None:
    text = (
        "00063000-00068000 r-xp 00000000 00:00 0                                  [usertrap]\n"
        "55d22cf61000-55d22cf62000 r--p 00000000 00:24 3                          /bin/py thon\n"
        "7ed15fedc000-7ed15ff5e000 rw-p 00000000 00:00 0 \n"
        "7ec1e86b8000-7ec1e86ba000 r--s 00000000 00:1b 5                          /data/we ird\n"
        "name\n"
        "7ec1e86b8000-7ec1e86ba000 rw-s 00000000 00:05 2                          /dev/zero (deleted)\n"
    )
    assert list(mappings(text)) == [
        ("/bin/py thon", "mapped", (os.makedev(0, 0x24), 3)),
        ("/data/we ird\nname", "shared", (os.makedev(0, 0x1B), 5)),
        ("/dev/zero (deleted)", "shared", (os.makedev(0, 5), 2)),
    ]


# -- real sandboxes --------------------------------------------------------------------------------------------------

Start = Callable[..., Any]


@pytest.fixture
async def start(spec: BundleSpec, runsc: Runsc) -> AsyncIterator[Start]:
    """Return a function that starts sandboxes with additional mounts."""
    made: list[GVisorSandbox] = []

    async def start(*mounts: Mount, restore: Path | None = None) -> GVisorSandbox:
        made.append(GVisorSandbox("box", replace(spec, mounts=(*spec.mounts, *mounts)), runsc))
        await asyncio.wait_for(made[-1].restore(restore) if restore else made[-1].start(), LONG)
        return made[-1]

    yield start
    for sandbox in made:
        await asyncio.wait_for(sandbox.delete(), LONG)


async def occupied(sandbox: GVisorSandbox, code: str) -> GuestProcess:
    """Run ``code`` in the sandbox, and return its process, which then waits for input."""
    code = f"import mmap, os\n{textwrap.dedent(code)}\nprint('done')\ninput()"
    process = await sandbox.execute([sandbox.spec.python, "-u", "-c", code])
    async with asyncio.timeout(LONG):
        async for piece in process.stream():
            assert piece.stream == "stdout", piece.data
            break
    return process


MAPS_AND_OPENS = """
    library = open("/env/lib.so", "rb")
    mapping = mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_COPY)
    data = open("/work/data.csv")
    follow = mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ)
    log = open("/work/log", "w")
    scratch = open("/work/scratch", "w"); os.unlink("/work/scratch")
    private = [open(path, "w") for path in ("/home/tester/x", "/tmp/x", "/etc/x")]
    os.chdir("/work")
"""


@pytest.mark.runsc
async def test_files_in_use_are_found(machine: Machine, start: Start) -> None:
    sandbox = await start(*machine.spec.mounts)
    before = await inventory(sandbox, machine.prints)
    process = await occupied(sandbox, MAPS_AND_OPENS)
    found = await inventory(sandbox, machine.prints)
    assert os.path.realpath(sys.executable) in before
    assert {print.use for print in before.values()} <= {"mapped", "shared"}
    ours = {path: print for path, print in found.items() if path.startswith(("/env", "/work", "/home", "/tmp", "/etc"))}
    ours.pop("/work", None)  # Debian's runsc hides the folder of a process from other processes
    assert {path: (print.use, print.state) for path, print in ours.items()} == {
        "/env/lib.so": ("mapped", ""),
        "/work/data.csv": ("shared", ""),
        "/work/log": ("open", ""),
        "/work/scratch": ("open", "deleted"),
    }
    assert found["/env/lib.so"].size == machine.library.stat().st_size
    assert differences(found, sandbox.spec, machine.prints) == []
    await process.stop(grace=0)
    assert await inventory(sandbox, machine.prints) == before


LOST = r"/env/lib\.so was removed or replaced while python\S* \(process [0-9]+\) had it in memory"


@pytest.mark.runsc
async def test_replaced_library_is_refused_and_data_file_accepted(machine: Machine, start: Start) -> None:
    sandbox = await start(*machine.spec.mounts)
    await occupied(sandbox, MAPS_AND_OPENS)
    for path in (machine.library, machine.data):
        new = path.with_name("new")
        new.write_bytes(path.read_bytes())
        new.rename(path)
    for _ in range(2):
        found = await inventory(sandbox, machine.prints)
        assert re.fullmatch(LOST, *unsaveable(found))
    assert found["/work/data.csv"] == FilePrint("shared")


@pytest.mark.runsc
async def test_removed_library_is_noticed(machine: Machine, start: Start) -> None:
    sandbox = await start(*machine.spec.mounts)
    await occupied(sandbox, MAPS_AND_OPENS)
    machine.library.unlink()
    found = await inventory(sandbox, machine.prints)
    assert re.fullmatch(LOST, *unsaveable(found))


@pytest.mark.runsc
async def test_sandbox_restored_elsewhere_uses_the_same_files(machine: Machine, start: Start, tmp_path: Path) -> None:
    sandbox = await start(*machine.spec.mounts)
    await occupied(sandbox, MAPS_AND_OPENS.replace("scratch = ", "# "))
    recorded = await inventory(sandbox, machine.prints)
    await sandbox.checkpoint(tmp_path / "image")
    other = Machine(tmp_path / "another machine")
    (other.folder / "work" / "log").touch()
    there = await start(*other.spec.mounts, restore=tmp_path / "image")
    assert differences(recorded, there.spec, other.prints) == []
    assert await inventory(there, other.prints) == recorded


LIES = {
    "it fails": ("sys.exit('no\\x1b[31m way')", r"no.\[31m way"),
    "it says nothing": ("", "is invalid"),
    "it says too much": ("while True: sys.stdout.write('x' * 65536)", "is longer than"),
    "it says nothing for ever": ("import time; time.sleep(1000)", "no input or output"),
    "it ignores being told to end": (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
        "no input or output",
    ),
}


@pytest.mark.runsc
async def test_false_report_of_a_sandbox_raises_guest_error(
    machine: Machine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_tool, "STALL", 2.0)
    sandbox = await start()
    for lie, words in LIES.values():
        script = f"import sys\n{lie}\n"
        change = ["sh", "-c", 'printf %s "$1" > /.sandbox/open_files.py', "sh", script]
        assert await (await sandbox.execute(change)).wait() == 0
        with pytest.raises(GuestError, match=words):
            await asyncio.wait_for(inventory(sandbox, machine.prints), LONG)
    assert sandbox.connection._processes == {}


def test_process_of_a_replaced_file_is_named_but_not_stored(machine: Machine) -> None:
    report = [["/work/a", "open", "deleted", "python (process 7)"], ["/env/b", "mapped", "lost", "x\n" * 100]]
    prints = examine(json.dumps(report).encode(), machine.spec, machine.prints)
    first, second = detached(prints)
    assert first.startswith("/env/b was removed or replaced while 'x\\nx")
    assert len(first) < 300
    assert second == "/work/a was removed or replaced while python (process 7) had it open"
    assert all("process" not in document for document in to_json(prints).values())
