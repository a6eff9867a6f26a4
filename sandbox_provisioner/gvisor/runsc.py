"""The runsc binary: where it is, whether it will do, and how it is called.

The one difference between root and an ordinary user is here: an ordinary user's every call goes through
``unshare -Ur``, because runsc's own ``--rootless`` refuses to restore.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from jupyter_core.paths import jupyter_data_dir, jupyter_path

from .errors import (
    DiskFullError,
    ProgramNotFoundError,
    RunscError,
    RunscNotFoundError,
    RunscTooOldError,
    SandboxError,
    UserNamespacesForbiddenError,
)
from .programs import distrust, on_path, trusted_program
from .words import one_line

OLDEST = date(2024, 7, 29)
"""Builds before this cannot checkpoint a process that polls a socket, which every kernel does."""

REFUSES_REMOUNT = date(2026, 9, 5)
"""The oldest build that was seen to refuse it; 2024-07-29 was seen to allow it."""

PLATFORMS = ("systrap", "ptrace", "kvm")
"""How gVisor can intercept system calls, the default first."""

SETUP_HINT = "Run `jupyter sandbox setup` to get a good one."
VERSION_TIMEOUT = 20.0


def bin_folder() -> Path:
    """Our own bin folder: where ``jupyter sandbox setup`` puts a runsc for this user."""
    return Path(jupyter_data_dir()) / "sandbox" / "bin"


def bin_folders() -> list[Path]:
    """Every folder where a setup may have put one for this user, also where HOME or Jupyter's paths are changed."""
    try:
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        home = Path("~").expanduser()
    fixed = (home / ".local" / "share" / "jupyter", Path(sys.prefix, "share", "jupyter"))
    return [bin_folder(), *map(Path, jupyter_path("sandbox", "bin")), *(path / "sandbox" / "bin" for path in fixed)]


def candidates(setting: str = "", environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, Path]]:
    """Every place a runsc may be, best first, each with the name of what points there.

    A place that somebody named explicitly is yielded even if nothing is there: that is their error to hear of.
    """
    for name, value in (
        ("the runsc setting", setting),
        ("SANDBOX_RUNSC", environ.get("SANDBOX_RUNSC", "")),
        ("RUNSC_PATH", environ.get("RUNSC_PATH", "")),
    ):
        if value:
            yield name, Path(value).expanduser()
    for found in on_path("runsc", environ):
        if not distrust(found):
            yield "PATH", Path(found)
            break
    for folder in dict.fromkeys(bin_folders()):
        path = folder / "runsc"
        if os.access(path, os.F_OK) and not distrust(str(path), ()):  # kernels see these folders read-only
            yield "jupyter sandbox setup", path


def refused(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return which runsc is passed over because it cannot be trusted, and why, as clauses."""
    places = [(path, distrust(path)) for path in on_path("runsc", environ)]
    own = [str(folder / "runsc") for folder in dict.fromkeys(bin_folders())]
    places += [(path, distrust(path, ())) for path in own if os.access(path, os.F_OK)]
    return [f"{path} is not used, because {reason}" for path, reason in places if reason]


def find(setting: str = "", environ: Mapping[str, str] = os.environ) -> Runsc:
    """The first runsc that will do.

    An explicitly named one (setting, ``SANDBOX_RUNSC``, ``RUNSC_PATH``) must do or the call fails; one that
    merely lies on PATH or in a data folder is passed over when it is too old.
    """
    passed_over: RunscTooOldError | None = None
    for origin, path in candidates(setting, environ):
        explicit = origin not in ("PATH", "jupyter sandbox setup")
        remedy = f"Correct or unset {origin}, then run `jupyter sandbox setup`." if explicit else SETUP_HINT
        try:
            runsc = inspect(path, origin, remedy)
            runsc.require_new_enough(remedy)
        except RunscTooOldError as error:
            if explicit:
                raise
            passed_over = passed_over or error
        except RunscNotFoundError:
            if explicit:
                raise
        else:
            return runsc
    if passed_over:
        raise passed_over
    untrusted = "".join(f"; {clause}" for clause in refused(environ))
    raise RunscNotFoundError(f"No runsc (gVisor) was found on this machine{untrusted}.", SETUP_HINT)


def inspect(path: Path, origin: str = "", remedy: str = SETUP_HINT) -> Runsc:
    """Ask the binary at ``path`` what it is, without judging its age."""
    named = f"{path} ({origin})" if origin else str(path)
    if not os.access(path, os.F_OK) or not path.is_file():
        raise RunscNotFoundError(f"There is no runsc at {named}.", remedy)
    if not os.access(path, os.X_OK):
        raise RunscNotFoundError(f"{named} is not executable.", f"`chmod +x {path}` makes it so.")
    version = _ask_version(path, path.stat(), remedy)
    return Runsc(path.absolute(), version)


_versions: dict[tuple[str, int, int], str] = {}


def _ask_version(path: Path, stat: os.stat_result, remedy: str) -> str:
    key = (str(path), stat.st_mtime_ns, stat.st_size)
    if key not in _versions:
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunscNotFoundError(f"{path} could not be run: {error}.", remedy) from error
        found = re.search(r"version (\S+)", answer.stdout)
        if answer.returncode or not found:
            words = (answer.stderr or answer.stdout).strip()[:200]
            raise RunscNotFoundError(f"{path} does not answer as runsc does: {words!r}.", remedy)
        _versions[key] = found[1]
    return _versions[key]


@cache
def _checksum(path: Path, mtime: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Runsc:
    """One runsc binary that was found and asked for its version."""

    path: Path
    version: str

    @property
    def built(self) -> date | None:
        """The day in the version, if it has one: release-20260126.0, 0.0~20240729.0, 20260905-160fafc."""
        found = re.search(r"(20\d\d)(\d\d)(\d\d)", self.version)
        try:
            return date(int(found[1]), int(found[2]), int(found[3])) if found else None
        except ValueError:
            return None

    @property
    def sha256(self) -> str:
        """The binary's checksum: what tells two builds apart that call themselves the same."""
        stat = self.path.stat()
        return _checksum(self.path, stat.st_mtime_ns, stat.st_size)

    def settings(self, network: str, platform: str) -> list[str]:
        """The global flags of every call for a sandbox with this network and platform."""
        chosen = [f"--network={network}", f"--platform={platform}"]
        return [*chosen, "--ignore-cgroups", "--overlay2=root:memory", *self.caution(os.geteuid())]

    def caution(self, uid: int) -> list[str]:
        """The flags for a build that is not known to refuse a guest that remounts a read-only folder writable.

        Without file descriptors of the host in the sandbox, the host itself refuses the write, at the price of some
        speed. Only root can have that; for others the guest's own filter (guest/confine.py) stands alone.
        """
        known = self.built is not None and self.built >= REFUSES_REMOUNT
        return [] if known or uid else ["--directfs=false"]

    def require_new_enough(self, remedy: str = SETUP_HINT) -> None:
        """Raise RunscTooOldError for a build that is known to fail; a build without a date is trusted."""
        if self.built and self.built < OLDEST:
            raise RunscTooOldError(
                str(self.path),
                self.version,
                f"{self.path} is runsc {self.version}, which cannot checkpoint a Jupyter kernel: "
                f"{OLDEST:%Y-%m-%d} or newer is needed.",
                remedy,
            )

    def command(self, root: Path, *arguments: str, settings: Sequence[str] = ()) -> list[str]:
        """The argv of a runsc call: ``root`` is runsc's state folder, ``settings`` its global flags."""
        return [*as_user(os.geteuid()), str(self.path), f"--root={root}", *settings, *arguments]


def as_user(uid: int) -> list[str]:
    """What stands before runsc for this user: nothing for root, a user namespace for everybody else."""
    return [] if uid == 0 else [trusted_program("unshare"), "--user", "--map-root-user"]


def require_user_namespaces() -> None:
    """Raise UserNamespacesForbiddenError if ordinary users may not make user namespaces here."""
    try:
        prefix = as_user(os.geteuid())
        if not prefix:
            return
        argv = [*prefix, trusted_program("true")]
    except ProgramNotFoundError as error:
        raise UserNamespacesForbiddenError(
            f"An ordinary user needs the `unshare` command to start a sandbox. {error.problem}",
            "It is in the package util-linux.",
        ) from error
    attempt = subprocess.run(argv, capture_output=True, text=True, timeout=VERSION_TIMEOUT)
    if attempt.returncode:
        raise UserNamespacesForbiddenError(
            f"This system forbids user namespaces to ordinary users ({attempt.stderr.strip()}).",
            namespace_remedy(),
        )


def namespace_remedy(proc: Path = Path("/proc/sys")) -> str:
    """The command that would allow user namespaces on this system, by the setting that forbids them."""
    for setting, good in (
        ("kernel/apparmor_restrict_unprivileged_userns", "0"),
        ("kernel/unprivileged_userns_clone", "1"),
        ("user/max_user_namespaces", "10000"),
    ):
        try:
            value = (proc / setting).read_text().strip()
        except OSError:
            continue
        if value != good and (value == "0" or good == "0"):
            return f"`sudo sysctl -w {setting.replace('/', '.')}={good}` allows them."
    return "In a container, its seccomp profile may forbid them; or start the server as root."


def checked(argv: Sequence[str], returncode: int | None, words: bytes) -> None:
    """Raise RunscError, with runsc's own words, unless the call succeeded."""
    if returncode != 0:
        raise RunscError(argv, returncode, plain_words(words))


def explain(argv: Sequence[str], returncode: int | None, words: str) -> SandboxError:
    """The error for a sandbox that did not come up: runsc's words, or a better explanation where we have one."""
    if "unshare failed" in words or "unshare: write failed" in words:
        return UserNamespacesForbiddenError(
            f"This system forbids user namespaces to ordinary users ({words.strip()}).", namespace_remedy()
        )
    if "no space left on device" in words.lower():
        return DiskFullError(words)
    return RunscError(argv, returncode, words, problem="The sandbox did not start: runsc")


def plain_words(raw: bytes, limit: int = 2000) -> str:
    """The end of what runsc said, as text, without its log prefixes."""
    text = raw.decode("utf-8", "replace")
    lines = [re.sub(r"^[IWEDF]\d{4} \S+\s+\d+ \S+\] ", "", one_line(line)).strip() for line in text.splitlines()]
    return "\n".join(line for line in dict.fromkeys(lines) if line)[-limit:]
