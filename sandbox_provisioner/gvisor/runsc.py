"""Find the runsc binary, check its version, and build its command lines.

Privileged and other users differ only here: each call of an unprivileged user goes through ``unshare -Ur``, because
runsc's own ``--rootless`` refuses to restore. Root is privileged only with CAP_SYS_ADMIN, which containers lack.
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

from jupyter_core.paths import jupyter_path

from .._text import one_line
from ..config import own_folder
from ..errors import (
    DiskFullError,
    ProgramNotFoundError,
    RunscError,
    RunscNotFoundError,
    RunscTooOldError,
    SandboxError,
    UserNamespacesForbiddenError,
)
from .programs import on_path, reason_for_distrust, trusted_program

OLDEST = date(2024, 7, 29)
"""Oldest usable build: earlier ones cannot checkpoint a process that polls a socket, and every kernel does."""

REFUSES_REMOUNT = date(2026, 9, 5)
"""Oldest tested build in which a guest cannot remount a read-only folder as writable; in that of 2024-07-29 it can."""

PLATFORMS = ("systrap", "ptrace", "kvm")
"""gVisor's ways to intercept system calls, the default first."""

SETUP_HINT = "Run `jupyter sandbox setup` to install one that works."
CAP_SYS_ADMIN = 21
"""The bit of this capability in /proc/PID/status."""
VERSION_TIMEOUT = 20.0
"""Seconds for ``runsc --version`` and for the test of user namespaces."""


def bin_folder() -> Path:
    """Return the folder into which ``jupyter sandbox setup`` installs runsc for this user."""
    return own_folder() / "bin"


def bin_folders() -> list[Path]:
    """Return every folder into which a setup may have installed runsc, even if HOME or Jupyter's paths have changed."""
    try:
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # a container that runs with any uid
        home = Path(os.path.expanduser("~"))
    fixed = (home / ".local" / "share" / "jupyter", Path(sys.prefix, "share", "jupyter"))
    return [bin_folder(), *map(Path, jupyter_path("sandbox", "bin")), *(path / "sandbox" / "bin" for path in fixed)]


def candidates(setting: str = "", environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, Path]]:
    """Yield the origin (a setting, a variable, PATH or our setup) and path of each possible runsc, the preferred first.

    A path from a setting or variable is yielded even if it does not exist, so that the caller reports the error.
    """
    variable = environ.get("SANDBOX_RUNSC", "")
    for name, value in (
        ("the runsc setting", "" if setting == variable else setting),
        ("SANDBOX_RUNSC", variable),
        ("RUNSC_PATH", environ.get("RUNSC_PATH", "")),
    ):
        if value:
            yield name, Path(value).expanduser()
    for found in on_path("runsc", environ):
        if not reason_for_distrust(found):
            yield "PATH", Path(found)
            break
    for folder in dict.fromkeys(bin_folders()):
        path = folder / "runsc"
        if os.access(path, os.F_OK) and not reason_for_distrust(str(path), ()):  # kernels see these folders read-only
            yield "jupyter sandbox setup", path


def untrusted_candidates(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a clause with the reason for each runsc that is not used because it is not trusted."""
    places = [(path, reason_for_distrust(path)) for path in on_path("runsc", environ)]
    own = [str(folder / "runsc") for folder in dict.fromkeys(bin_folders())]
    places += [(path, reason_for_distrust(path, ())) for path in own if os.access(path, os.F_OK)]
    return [f"{path} is not used, because {reason}" for path, reason in places if reason]


def find(setting: str = "", environ: Mapping[str, str] = os.environ) -> Runsc:
    """Return the first usable runsc. Raises RunscNotFoundError or RunscTooOldError.

    A configured runsc (setting, ``SANDBOX_RUNSC``, ``RUNSC_PATH``) must be usable. A runsc on PATH or in a data folder
    is skipped if it is too old or does not run.
    """
    too_old: RunscTooOldError | None = None
    for origin, path in candidates(setting, environ):
        explicit = origin not in ("PATH", "jupyter sandbox setup")
        remedy = f"Correct or unset {origin}, then run `jupyter sandbox setup`." if explicit else SETUP_HINT
        try:
            runsc = inspect(path, origin, remedy)
            runsc.require_new_enough(remedy)
        except RunscTooOldError as error:
            if explicit:
                raise
            too_old = too_old or error
        except RunscNotFoundError:
            if explicit:
                raise
        else:
            return runsc
    if too_old:
        raise too_old
    untrusted = "".join(f"; {clause}" for clause in untrusted_candidates(environ))
    raise RunscNotFoundError(f"No runsc (gVisor) was found on this machine{untrusted}.", SETUP_HINT)


def inspect(path: Path, origin: str = "", remedy: str = SETUP_HINT) -> Runsc:
    """Return the runsc at ``path``, even if it is too old. Raises RunscNotFoundError if it does not run."""
    privileged()  # remember it: later callers must not block
    named = f"{path} ({origin})" if origin else str(path)
    if not os.access(path, os.F_OK) or not path.is_file():
        raise RunscNotFoundError(f"No runsc at {named}.", remedy)
    if not os.access(path, os.X_OK):
        raise RunscNotFoundError(f"{named} is not executable.", f"Run `chmod +x {path}`.")
    stat = path.stat()
    return Runsc(path.absolute(), _read_version(path, stat.st_mtime_ns, stat.st_size, remedy))


@cache
def _read_version(path: Path, mtime: int, size: int, remedy: str) -> str:
    """Return the version of the binary. ``mtime`` and ``size`` are part of the cache's key: files are replaced."""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunscNotFoundError(f"{path} could not be run: {error}.", remedy) from error
    found = re.search(r"version (\S+)", answer.stdout)
    if answer.returncode or not found:
        message = (answer.stderr or answer.stdout).strip()[:200]
        raise RunscNotFoundError(f"{path} is not runsc: `{path} --version` answered {message!r}.", remedy)
    return found[1]


@cache
def _checksum(path: Path, mtime: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Runsc:
    """A runsc binary and the version that it reports."""

    path: Path
    version: str

    @property
    def built(self) -> date | None:
        """Date in a version such as release-20260126.0, 0.0~20240729.0 or 20260905-160fafc; None without one."""
        found = re.search(r"(20\d\d)(\d\d)(\d\d)", self.version)
        try:
            return date(int(found[1]), int(found[2]), int(found[3])) if found else None
        except ValueError:
            return None

    @property
    def sha256(self) -> str:
        """Checksum of the binary: distinguishes builds that report the same version."""
        stat = self.path.stat()
        return _checksum(self.path, stat.st_mtime_ns, stat.st_size)

    def settings(self, network: str, platform: str) -> list[str]:
        """Return the global flags of every call for a sandbox with this network and platform."""
        chosen = [f"--network={network}", f"--platform={platform}"]
        return [*chosen, "--ignore-cgroups", "--overlay2=root:memory", *self.extra_flags(privileged())]

    def extra_flags(self, privileged: bool) -> list[str]:
        """Return extra flags for a build that may let a guest remount a read-only folder writable.

        Without directfs the sandbox has no file descriptors of the host, and the host refuses such a write; small reads
        are slower. Only privileged users can use the flag; for others guest/seccomp.py is the only protection.
        """
        known = self.built is not None and self.built >= REFUSES_REMOUNT
        return ["--directfs=false"] if privileged and not known else []

    def require_new_enough(self, remedy: str = SETUP_HINT) -> None:
        """Raise RunscTooOldError if the build is older than ``OLDEST``; a build without a date is accepted."""
        if self.built and self.built < OLDEST:
            raise RunscTooOldError(
                str(self.path),
                self.version,
                f"{self.path} is runsc {self.version}, which cannot checkpoint a Jupyter kernel: "
                f"{OLDEST:%Y-%m-%d} or newer is needed.",
                remedy,
            )

    def command(self, root: Path, *arguments: str, settings: Sequence[str] = ()) -> list[str]:
        """Return the argv of a runsc call: ``root`` is runsc's state folder, ``settings`` its global flags."""
        return [*namespace_prefix(privileged()), str(self.path), f"--root={root}", *settings, *arguments]


def privileged() -> bool:
    """Return True if this thread can start sandboxes without a user namespace: as root with CAP_SYS_ADMIN."""
    return os.geteuid() == 0 and _may_mount()


@cache
def _may_mount() -> bool:
    """Return True if this process has CAP_SYS_ADMIN. Blocks; the first call is made when runsc is found."""
    status = Path("/proc/thread-self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> CAP_SYS_ADMIN & 1)


def namespace_prefix(privileged: bool) -> list[str]:
    """Return the prefix of a runsc command: empty for privileged users, ``unshare`` with its options for others."""
    return [] if privileged else [trusted_program("unshare"), "--user", "--map-root-user"]


def require_user_namespaces() -> None:
    """Raise UserNamespacesForbiddenError if this user needs a user namespace and cannot create one."""
    try:
        prefix = namespace_prefix(privileged())
        if not prefix:
            return
        argv = [*prefix, trusted_program("true")]
    except ProgramNotFoundError as error:
        raise UserNamespacesForbiddenError(
            f"A user without CAP_SYS_ADMIN needs the command `{error.name}` to start a sandbox. {error.problem}",
            "Install it (Debian's packages util-linux and coreutils have `unshare` and `true`).",
        ) from error
    attempt = subprocess.run(argv, capture_output=True, text=True, timeout=VERSION_TIMEOUT)
    if attempt.returncode:
        raise _namespaces_forbidden(attempt.stderr)


def _namespaces_forbidden(output: str) -> UserNamespacesForbiddenError:
    """Return the error for the ``output`` of a failed ``unshare``."""
    who = "root without CAP_SYS_ADMIN" if os.geteuid() == 0 else "ordinary users"
    problem = f"This system forbids user namespaces to {who} ({output.strip()})."
    return UserNamespacesForbiddenError(problem, namespace_remedy())


def namespace_remedy(proc: Path = Path("/proc/sys")) -> str:
    """Return advice on how to allow user namespaces: the command that sets the sysctl which forbids them, if any."""
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
    return "If this is a container, allow them in its seccomp profile, or add the capability SYS_ADMIN and run as root."


def checked(argv: Sequence[str], returncode: int | None, output: bytes) -> None:
    """Raise RunscError with runsc's own message unless the call succeeded."""
    if returncode != 0:
        raise RunscError(argv, returncode, clean_output(output))


def explain(argv: Sequence[str], returncode: int | None, output: str) -> SandboxError:
    """Return the error for a sandbox that did not start: a specific one for a known cause, else RunscError."""
    if "unshare failed" in output or "unshare: write failed" in output:
        return _namespaces_forbidden(output)
    if "no space left on device" in output.lower():
        return DiskFullError(output)
    return RunscError(argv, returncode, output, problem="The sandbox did not start: runsc")


def clean_output(raw: bytes, limit: int = 2000) -> str:
    """Return the last ``limit`` characters of runsc's output, without log prefixes and repeated lines."""
    text = raw.decode("utf-8", "replace")
    lines = [re.sub(r"^[IWEDF]\d{4} \S+\s+\d+ \S+\] ", "", one_line(line)).strip() for line in text.splitlines()]
    return "\n".join(line for line in dict.fromkeys(lines) if line)[-limit:]
