"""Test the installation of runsc: Google's release from an HTTP server, builds with Go, and Debian's package."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from machines import NEW, OLD, empty_machine, script, stand_in

from sandbox_provisioner.errors import RunscNotFoundError, SandboxError
from sandbox_provisioner.gvisor.runsc import find
from sandbox_provisioner.setup import runsc_install
from sandbox_provisioner.setup.progress import Note, Progress
from sandbox_provisioner.setup.runsc_install import DebianSource, GoSource, ReleaseSource, Source, install, release
from sandbox_provisioner.setup.runsc_install.go import MODULE, go_line, go_on_machine, pinned_version
from sandbox_provisioner.setup.runsc_install.source import run

pytestmark = pytest.mark.user

VERSION = "20260126.0"
GO_MOD = (MODULE / "go.mod").read_text()


class Releases(ThreadingHTTPServer):
    """A server of releases: ``files`` by path; ``missing`` bytes are cut off the end of each binary."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ReleasesHandler)
        self.files: dict[str, bytes] = {}
        self.missing = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def publish(self, binary: bytes) -> ReleaseSource:
        """Serve a release of VERSION and its digest. Return a source that accepts only this binary."""
        path = f"/{VERSION}/{platform.machine().replace('arm64', 'aarch64')}/runsc"
        digest = hashlib.sha512(binary).hexdigest()
        self.files = {path: binary, f"{path}.sha512": f"{digest}  runsc\n".encode()}
        return ReleaseSource(VERSION, digest, self.url)


class ReleasesHandler(BaseHTTPRequestHandler):
    server: Releases

    def do_GET(self) -> None:
        content = self.server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        cut = self.server.missing if self.path.endswith("/runsc") else 0
        self.wfile.write(content[: len(content) - cut])
        return None

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def releases() -> Iterator[Releases]:
    with Releases() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The empty bin folder of runsc on a new machine."""
    workspaces = tmp_path / "workspaces"
    workspaces.mkdir()
    monkeypatch.setenv("TMPDIR", str(workspaces))
    monkeypatch.setattr("tempfile.tempdir", None)
    return empty_machine(monkeypatch, tmp_path) / "sandbox" / "bin"


def nothing_is_left(folder: Path) -> bool:
    left = [path.name for path in folder.iterdir() if path.name != "runsc"]
    return not left and not list(Path(os.environ["TMPDIR"]).iterdir())


def binary(version: str = NEW) -> bytes:
    return f'#!/bin/sh\necho "runsc version {version}"\n'.encode()


def quiet() -> Progress:
    return Progress(io.StringIO())


class Shelf(Source):
    """A source that provides the given binary, or fails with the given reason."""

    name = "shelf"
    title = "the shelf"

    def __init__(self, content: bytes = b"", reason: str = "") -> None:
        self._content, self._reason = content, reason

    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        target.write_bytes(self._content)
        (workspace / "scrap").write_bytes(self._content)
        if self._reason:
            raise SandboxError(self._reason)


def test_release_with_the_given_digest_is_installed(releases: Releases, folder: Path) -> None:
    found = install([releases.publish(binary())], folder, quiet())
    assert (found.path, found.version) == (folder / "runsc", NEW)
    assert found.path.stat().st_mode & 0o777 == 0o755
    assert nothing_is_left(folder)


def test_release_replaced_with_its_digest_is_refused(releases: Releases, folder: Path) -> None:
    source = releases.publish(binary())
    releases.publish(binary() + b"# changed")
    with pytest.raises(RunscNotFoundError, match="differs from --sha512"):
        install([source], folder, quiet())
    assert not (folder / "runsc").exists()
    assert nothing_is_left(folder)


def test_truncated_release_is_refused(releases: Releases, folder: Path) -> None:
    source = releases.publish(binary() + b"#" * 3_000_000)
    releases.missing = 1000
    with pytest.raises(RunscNotFoundError, match=r"it ended after 29\d{5} of 30\d{5} bytes"):
        install([source], folder, quiet())
    assert nothing_is_left(folder)


def test_missing_release(releases: Releases, folder: Path) -> None:
    with pytest.raises(RunscNotFoundError, match=r"failed \(HTTP status 404\)"):
        install([ReleaseSource(VERSION, "0" * 128, releases.url)], folder, quiet())


def test_unreachable_release_server(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(RunscNotFoundError, match=r"failed \(Connection refused\)"):
            install([ReleaseSource(VERSION, "0" * 128, url)], folder, quiet())


def test_release_server_that_never_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "REACH_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunscNotFoundError, match="no answer within"):
            install([ReleaseSource(VERSION, "0" * 128, url)], folder, quiet())


def test_release_that_is_too_old_is_refused(releases: Releases, folder: Path) -> None:
    with pytest.raises(RunscNotFoundError, match="2024-07-29 or newer"):
        install([releases.publish(binary(OLD))], folder, quiet())
    assert nothing_is_left(folder)


@pytest.mark.parametrize(
    ("version", "digest"), [("latest", "0" * 128), ("../20260126", "0" * 128), (VERSION, "0" * 64)]
)
def test_release_needs_a_version_and_a_digest(version: str, digest: str) -> None:
    with pytest.raises(SandboxError, match=r"--release|--sha512"):
        ReleaseSource(version, digest)


def test_first_source_that_succeeds_is_used(folder: Path) -> None:
    said = io.StringIO()
    sources = [Shelf(reason="it is empty"), Shelf(binary(OLD)), Shelf(b"junk"), Shelf(binary()), Shelf(reason="no")]
    assert install(sources, folder, Progress(said)).version == NEW
    lines = said.getvalue().splitlines()
    assert [line[:2].strip() for line in lines] == ["NO", "NO", "NO", "ok"]
    assert "it is empty" in lines[0]
    assert nothing_is_left(folder)


def test_error_has_the_reason_of_every_source(folder: Path) -> None:
    with pytest.raises(RunscNotFoundError) as caught:
        install([Shelf(reason="it is empty"), Shelf(reason="it is locked")], folder, quiet())
    assert "shelf: it is empty" in str(caught.value)
    assert "shelf: it is locked" in str(caught.value)
    assert "SANDBOX_RUNSC" in caught.value.remedy


def test_old_runsc_stays_if_the_new_one_is_unusable(folder: Path) -> None:
    stand_in(folder / "runsc", "20250101-aaa")
    with pytest.raises(RunscNotFoundError):
        install([Shelf(b"#!/bin/sh\nexit 1\n")], folder, quiet())
    assert "20250101-aaa" in (folder / "runsc").read_text()
    assert nothing_is_left(folder)


@pytest.fixture
def go(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that takes the place of Go, and "builds" a file that reports a version of runsc."""
    asked = '[ "$1" = env ] && exec echo go1.99\n[ "$1" = build ] || exit 0\n'
    go = asked + 'while [ "$1" != -o ]; do shift; done\ncp "$(dirname "$0")/built" "$2"'
    script(tmp_path / "go" / "go", go)
    (tmp_path / "go" / "built").write_bytes(binary())
    monkeypatch.setenv("PATH", f"{tmp_path / 'go'}:/usr/bin:/bin")
    return tmp_path / "go" / "go"


def test_relative_folder(go: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert install([GoSource()], Path("here"), quiet()).path == tmp_path / "work" / "here" / "runsc"


def test_second_setup_copies_the_build_of_the_first(go: Path, folder: Path, tmp_path: Path) -> None:
    install([GoSource()], folder, quiet())
    script(go, '[ "$1" = env ] && exec echo go1.99\necho "built again" >&2\nexit 1')
    assert install([GoSource()], tmp_path / "other", quiet()).version == NEW
    assert (tmp_path / "other" / "runsc").read_bytes() == binary()
    (kept,) = (folder.parent / "builds").iterdir()
    kept.write_bytes(binary()[:-1])
    with pytest.raises(RunscNotFoundError, match="built again"):
        install([GoSource()], tmp_path / "third", quiet())
    kept.write_bytes(binary())
    kept.rename(kept.with_name("0" * 64 + kept.name[64:]))  # of another version of the source
    with pytest.raises(RunscNotFoundError, match="built again"):
        install([GoSource()], tmp_path / "third", quiet())


def test_build_that_others_can_change_is_not_copied(go: Path, folder: Path, tmp_path: Path) -> None:
    install([GoSource()], folder, quiet())
    script(go, '[ "$1" = env ] && exec echo go1.99\necho "built again" >&2\nexit 1')
    (kept,) = (folder.parent / "builds").iterdir()
    kept.chmod(0o666)
    with pytest.raises(RunscNotFoundError, match="built again"):
        install([GoSource()], tmp_path / "other", quiet())


def test_build_that_does_not_run_is_not_kept(go: Path, folder: Path) -> None:
    (go.parent / "built").write_bytes(b"#!/bin/sh\nexit 1\n")
    with pytest.raises(RunscNotFoundError):
        install([GoSource()], folder, quiet())
    assert not (folder.parent / "builds").exists()


def test_interrupted_download_leaves_no_files(folder: Path) -> None:
    class Interrupted(Shelf):
        def obtain(self, target: Path, workspace: Path, note: Note) -> None:
            super().obtain(target, workspace, note)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install([Interrupted(binary())], folder, quiet())
    assert not (folder / "runsc").exists()
    assert nothing_is_left(folder)


def test_files_of_a_killed_setup_are_removed(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / ".runsc-abandoned").touch()
    os.utime(folder / ".runsc-abandoned", (0, 0))
    install([Shelf(binary())], folder, quiet())
    assert nothing_is_left(folder)


def test_folder_that_cannot_be_created_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunscNotFoundError, match="Not a directory"):
        install([Shelf(binary())], tmp_path / "file" / "bin", quiet())


def test_sources_by_name() -> None:
    assert [source.name for source in runsc_install.choose(None)] == ["go", "debian"]
    for name in (None, "release"):
        assert [source.name for source in runsc_install.choose(name, VERSION, "0" * 128)] == ["release"]
    for wrong in (("release", "", ""), ("release", VERSION, ""), (None, "", "0" * 128), ("go", VERSION, "0" * 128)):
        with pytest.raises(SandboxError, match="--release"):
            runsc_install.choose(*wrong)
    assert [source.name for source in runsc_install.choose("go")] == ["go"]


def test_pinned_version_and_go_version() -> None:
    day, commit = pinned_version(GO_MOD).split("-")
    assert re.search(rf"gvisor v0\.0\.0-{day}\d{{6}}-{commit}$", GO_MOD, re.MULTILINE)
    assert f"\ngo {go_line(GO_MOD)}\n" in GO_MOD


@pytest.mark.parametrize("function", [pinned_version, go_line])
def test_module_without_pinned_version_is_refused(function: object) -> None:
    with pytest.raises(SandboxError, match=r"go\.mod"):
        function("module x\n")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("version", "good"), [("go1.26.3", True), ("go1.27rc1", True), ("go1.26.2", False), ("go1.3", False), ("", False)]
)
def test_go_on_the_machine_must_be_new_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, good: bool
) -> None:
    go = script(tmp_path / "go", f"echo {version}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert go_on_machine("1.26.3", "/nowhere") == (str(go) if good else None)


def test_go_in_the_usual_folder_is_found_after_an_old_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "old" / "go", "echo go1.19")
    usual = script(tmp_path / "usual" / "go", "echo go1.27.1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'old'}:/bin")
    assert go_on_machine("1.26.3", str(usual.parent)) == str(usual)


def test_failed_build_reports_the_reason(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    script(tmp_path / "go" / "go", '[ "$1" = env ] && exec echo go1.99\necho "no space left on device" >&2\nexit 1')
    monkeypatch.setenv("PATH", f"{tmp_path / 'go'}:/usr/bin:/bin")
    with pytest.raises(RunscNotFoundError, match="go failed: no space left on device"):
        install([GoSource()], folder, quiet())
    assert nothing_is_left(folder)


COMPILED_BEFOREHAND = (b'Platform="systrap" HostNetwork=false', b"UDSCreateEnabled=false ProfileEnabled=false")
"""Parts of the names of runsc's seccomp programs. runsc compiles missing programs at each start."""


def test_runsc_of_the_pinned_source_has_compiled_filters() -> None:
    found = find()
    text = found.path.read_bytes()
    assert found.version != pinned_version(GO_MOD) or all(name in text for name in COMPILED_BEFOREHAND)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pinned_source_is_built_with_go_from_pypi(folder: Path) -> None:
    found = install([GoSource(usual_folder="/nowhere")], folder, quiet())
    assert found.version == pinned_version(GO_MOD)
    assert all(filters in found.path.read_bytes() for filters in COMPILED_BEFOREHAND)
    assert nothing_is_left(folder)


RELEASE = platform.freedesktop_os_release().get("VERSION_CODENAME", "stable")


def apt_of_its_own(monkeypatch: pytest.MonkeyPatch, folder: Path, entries: str) -> None:
    """Let apt use ``entries`` instead of the machine's own sources."""
    (folder / "parts").mkdir()
    (folder / "sources.list").write_text(entries)
    (folder / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{folder}/sources.list";\nDir::Etc::sourceparts "{folder}/parts";\n'
        'Acquire::Retries "0";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(folder / "apt.conf"))


def test_package_comes_from_the_machines_mirror(folder: Path) -> None:
    lists = Path("/var/lib/apt/lists")
    before = {path.name: path.stat().st_mtime_ns for path in lists.iterdir()}
    found = install([DebianSource()], folder, quiet())
    assert found.built
    found.require_new_enough()
    assert before == {path.name: path.stat().st_mtime_ns for path in lists.iterdir()}
    assert nothing_is_left(folder)


def test_unreachable_mirror(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        mirror = f"http://127.0.0.1:{free.getsockname()[1]}/debian"
        apt_of_its_own(monkeypatch, tmp_path, f"deb {mirror} {RELEASE} main\n")
        with pytest.raises(RunscNotFoundError, match=r"Failed to fetch .*127\.0\.0\.1"):
            install([DebianSource()], folder, quiet())
    assert nothing_is_left(folder)


def test_machine_without_mirrors(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    apt_of_its_own(monkeypatch, tmp_path, "")
    with pytest.raises(RunscNotFoundError, match="this machine's suites: no package runsc"):
        install([DebianSource()], folder, quiet())


def test_machine_without_apt(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunscNotFoundError, match="no apt-get"):
        install([DebianSource()], folder, quiet())


def test_command_over_its_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    """The sleeping child holds the pipe that is read to its end: the call returns only when the child is gone."""
    with pytest.raises(SandboxError, match=r"sh was stopped after 0 s: started"):
        run(["sh", "-c", "sleep 1000 & echo started; wait"], print, cwd=tmp_path, limit=0.5)
