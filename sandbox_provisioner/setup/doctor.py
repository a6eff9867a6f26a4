"""Check every precondition for a sandboxed kernel on this machine, and suggest a remedy for each that fails."""

from __future__ import annotations

import os
import platform
import pwd
import re
import resource
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TextIO

from jupyter_core.paths import jupyter_runtime_dir

from .. import config
from .._text import one_line
from ..errors import ConfigurationError, RunscTooOldError, SandboxError
from ..errors.signature import SignatureError
from ..gvisor.bundle import Mount, parse_mount
from ..gvisor.mounts import homes, within
from ..gvisor.reserved_dirs import require_unreserved, reserved_folders
from ..gvisor.runsc import (
    OLDEST,
    Runsc,
    candidates,
    find,
    inspect,
    privileged,
    require_user_namespaces,
    untrusted_candidates,
)
from ..gvisor.runtime_dir import runtime_root
from ..sandbox.listing import look
from ..sandbox.user_sandboxes import Persistence, registry
from .folders import nearest, writable
from .kernelspecs import PROVISIONER, Kernel, kernels, without_twin
from .progress import marks

SETUP = "`jupyter sandbox setup`"
OLDEST_LINUX = (4, 14, 77)
MACHINES = ("x86_64", "aarch64", "arm64")
PLATFORMS = ("systrap", "ptrace", "kvm")
STALE_DAYS = 550
MEGABYTE = 1 << 20
OPEN_FILES = 4096
MAX_LISTED = 10
"""Largest number of sandbox ids in a finding."""
LOST_KEY = (
    f"Restore the key: the file sandbox/key in Jupyter's data folder, or the value of {config.SIGNING_KEY}. If the "
    "key is lost, delete each sandbox with `jupyter sandbox delete --unverified ID`, or keep it: make sure that nobody "
    "else can write to the storage, start the server once with SANDBOX_TRUST_STORAGE=1, and open the sandbox."
)


@dataclass(frozen=True)
class Check:
    """The result of one check: a finding and, unless ``ok``, a remedy.

    If a ``required`` check fails, no kernel can start; any other check is advice.
    """

    name: str
    ok: bool
    finding: str
    remedy: str = ""
    required: bool = True


def examine(setting: str = "", environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Run all checks, in the order in which to fix failures. ``setting`` is the configured path of runsc."""
    return [
        *check_runsc(setting, environ),
        check_platform(platform.uname(), environ.get("SANDBOX_PLATFORM", "systrap")),
        check_namespaces(),
        check_user(),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        *check_disk(),
        *check_own_folders(environ),
        *check_kernels(list(kernels().values()), environ),
        *check_contents_manager(),
        *check_saved(),
    ]


def can_start(checks: Sequence[Check]) -> bool:
    """Return True if all required checks have passed."""
    return all(check.ok for check in checks if check.required)


def check_runsc(setting: str, environ: Mapping[str, str]) -> list[Check]:
    """Check that a usable, new enough runsc is found; also report its age, and each runsc that is not trusted."""
    try:
        runsc = find(setting, environ)
    except RunscTooOldError as error:
        found = Check("runsc", True, f"{error.version} at {error.path}")
        return [found, Check("runsc's age", False, error.problem, error.remedy)]
    except SandboxError as error:
        return [Check("runsc", False, error.problem, error.remedy)]
    origins = {path.absolute(): origin for origin, path in reversed(list(candidates(setting, environ)))}
    found = Check("runsc", True, f"{runsc.version} at {runsc.path} (from {origins[runsc.path]})")
    return [found, check_age(runsc, datetime.now(UTC).date()), *check_refused(environ)]


def check_refused(environ: Mapping[str, str]) -> list[Check]:
    """Return a failed check for each runsc that is not used because sandboxes or other users could write to it."""
    remedy = "Remove its folder from PATH, or change the permissions so that only root and you can write to it."
    return [Check("runsc on PATH", False, clause, remedy, required=False) for clause in untrusted_candidates(environ)]


def check_age(runsc: Runsc, today: date) -> Check:
    """Check that a usable runsc is at most STALE_DAYS old. An older one is advice only."""
    if runsc.built is None:
        return Check("runsc's age", True, "runsc's version has no date; it is assumed to be new enough")
    days = (today - runsc.built).days
    finding = f"built {runsc.built}, {age(days)} ago; {OLDEST} is the oldest supported version"
    if days <= STALE_DAYS:
        return Check("runsc's age", True, finding)
    remedy = "Run `jupyter sandbox setup --source go` to build a newer runsc, which wakes kernels faster."
    return Check("runsc's age", False, finding, remedy, required=False)


def age(days: int) -> str:
    """Return a number of days as text, in days, months or years."""
    if days < 60:
        return f"{max(days, 0)} days"
    return f"{days // 30} months" if days < 730 else f"{days / 365.25:.1f} years"


def check_platform(uname: platform.uname_result, chosen: str) -> Check:
    """Check that gVisor supports this system and processor, and that the platform ``chosen`` can be used."""
    here = f"{uname.system} {uname.release} on {uname.machine}"
    release = tuple(int(part) for part in re.findall(r"\d+", uname.release)[:3])
    if uname.system != "Linux":
        remedy = "Use Linux: WSL 2 on Windows, a virtual machine on macOS."
        return Check("platform", False, f"{here}: gVisor runs on Linux only", remedy)
    if uname.machine not in MACHINES:
        return Check("platform", False, f"{here}: gVisor supports only x86_64 and arm64", "Use another machine.")
    if release < OLDEST_LINUX:
        return Check("platform", False, f"{here}: gVisor needs Linux 4.14.77 or newer", "Update Linux.")
    if chosen not in PLATFORMS:
        remedy = "Run `unset SANDBOX_PLATFORM` to use the default platform, systrap."
        return Check("platform", False, f"SANDBOX_PLATFORM is {chosen!r}, which is not a platform of gVisor", remedy)
    if chosen == "kvm" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
        remedy = "Run `unset SANDBOX_PLATFORM` to use the default platform, systrap, which needs no KVM."
        return Check("platform", False, f"{here}, but /dev/kvm cannot be used", remedy)
    return Check("platform", True, f"{here}, {chosen}")


def check_namespaces() -> Check:
    """Check that this user may create the user namespace that runsc needs."""
    try:
        require_user_namespaces()
    except SandboxError as error:
        return Check("user namespaces", False, error.problem, error.remedy)
    return Check("user namespaces", True, "not needed: root with CAP_SYS_ADMIN" if privileged() else "allowed")


def check_user() -> Check:
    """Report the user, and check that the home folder is writable."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = "without a name"
    who = "root" if uid == 0 else f"ordinary user {name} (uid {uid})"
    home = os.path.expanduser("~")
    if os.path.isabs(home) and os.access(home, os.W_OK | os.X_OK):
        return Check("user", True, f"{who}, home {home}")
    home = home if os.path.isabs(home) else "folder is not known"
    remedy = "Set HOME, or both JUPYTER_DATA_DIR and JUPYTER_RUNTIME_DIR, to folders that you can write to."
    return Check("user", False, f"{who}, whose home {home} cannot be written", remedy, required=False)


def check_open_files(most: int) -> Check:
    """Check that the hard limit ``most`` is enough for a kernel's imports: gVisor uses several descriptors per file."""
    enough = most == resource.RLIM_INFINITY or most >= OPEN_FILES
    finding = "no limit" if most == resource.RLIM_INFINITY else f"{most} at most (hard limit)"
    remedy = (
        f"Raise the limit, for example with `LimitNOFILE={OPEN_FILES}` in the service's unit. "
        "Otherwise kernels die while they import modules."
    )
    return Check("open files", enough, finding, "" if enough else remedy)


def check_disk() -> list[Check]:
    """Check that the folders that a start writes to are writable and have enough free space."""
    return [
        check_runtime_root(),
        check_folder("connection files", Path(jupyter_runtime_dir()), 1, "JUPYTER_RUNTIME_DIR"),
        check_folder("data folder", config.own_folder(), 200, "JUPYTER_DATA_DIR", required=False),
    ]


def check_own_folders(environ: Mapping[str, str]) -> list[Check]:
    """Check that kernels cannot write to the folders with Jupyter's and the sandboxes' own files.

    The current folder counts as writable for kernels: they can write to the folder in which their server is started.
    """
    name = "own folders"
    try:
        reserved = reserved_folders(environ=environ)
        mounts = [mount for mount in map(parse_mount, config.words("SANDBOX_MOUNTS", environ)) if mount.writable]
        for mount in mounts:
            require_unreserved(mount, reserved, "SANDBOX_MOUNTS")
        if chosen := environ.get("SANDBOX_WORKING_FOLDER"):
            mounts.append(Mount(os.path.realpath(chosen), chosen, True))
            require_unreserved(mounts[-1], reserved, "SANDBOX_WORKING_FOLDER")
    except SandboxError as error:
        return [Check(name, False, error.problem, error.remedy)]
    except OSError as error:
        return [Check(name, False, f"they cannot be examined: {error}", "Correct the folder in this message.")]
    here = {os.path.realpath(os.getcwd())} - homes() - {"/"}  # kernels never get these as their folder
    places = [*(mount.source for mount in mounts), *here]
    inside = [
        Check(
            name,
            False,
            f"{own} ({setting}) lies in {place}; kernels that work in {place} see an empty folder there",
            f"Set {setting} to a folder that no kernel can write to. Kernels that work in {place} then start faster.",
            required=False,
        )
        for place in dict.fromkeys(places)
        for own, setting in reserved.items()
        if within(os.path.realpath(own), os.path.realpath(place))
    ]
    return inside or [Check(name, True, "no kernel can write to them")]


def check_runtime_root() -> Check:
    """Check that the folder for the state of running sandboxes is writable and has enough free space."""
    try:
        return check_folder("sandboxes' folder", runtime_root(), 50, "SANDBOX_RUNTIME_DIR")
    except SandboxError as error:
        return Check("sandboxes' folder", False, error.problem, error.remedy)
    except OSError as error:
        remedy = "Set SANDBOX_RUNTIME_DIR to a folder that you own."
        return Check("sandboxes' folder", False, f"it cannot be created: {error}", remedy)


def check_folder(name: str, folder: Path, megabytes: int, variable: str, required: bool = True) -> Check:
    """Check that ``folder`` is writable, or can be created, and that its disk has ``megabytes`` MB free."""
    if not writable(folder):
        remedy = f"Set {variable} to a folder that you own."
        return Check(name, False, f"{folder} cannot be written", remedy, required)
    free = shutil.disk_usage(nearest(folder)).free // MEGABYTE
    finding = f"{folder}, {free / 1024:.1f} GB free" if free >= 1024 else f"{folder}, {free} MB free"
    if free < megabytes:
        remedy = f"Free {megabytes} MB on this disk, or set {variable} to a folder on a disk with more free space."
        return Check(name, False, finding, remedy, required)
    return Check(name, True, finding, required=required)


def check_kernels(found: Sequence[Kernel], environ: Mapping[str, str]) -> list[Check]:
    """Check that a sandboxed kernel is installed, and that each program and runsc can be run; list missing twins."""
    sandboxed = [kernel for kernel in found if kernel.sandboxed]
    by_default = environ.get("JUPYTER_DEFAULT_PROVISIONER_NAME") == PROVISIONER
    if sandboxed:
        missing = "" if by_default else ", ".join(without_twin(found))
        remedy = f"Run {SETUP} to try them in a sandbox. It installs a sandboxed twin of each that works."
        advice = [Check("kernels", False, f"without a sandboxed twin: {missing}", remedy, required=False)]
        return [*map(_check_kernel, sandboxed), *(advice if missing else [])]
    if by_default:
        return [Check("kernels", bool(found), f"every kernel is sandboxed by default ({len(found)} found)")]
    return [Check("kernels", False, "no sandboxed kernel is installed", f"Run {SETUP}.")]


def _check_kernel(kernel: Kernel) -> Check:
    name = f"kernel {kernel.name}"
    argv = kernel.spec.get("argv")
    remove = f"Install the kernel again, or remove it with `jupyter kernelspec remove {kernel.name}`."
    if not isinstance(argv, list) or not argv:
        return Check(name, False, f"{kernel.folder / 'kernel.json'} has no argv", remove)
    program = str(argv[0]).replace("{resource_dir}", str(kernel.folder))
    if program in ("python", f"python{sys.version_info[0]}", "python{}.{}".format(*sys.version_info)):
        program = sys.executable
    if shutil.which(program) is None:
        return Check(name, False, f"{program} does not exist or cannot be run", remove)
    if kernel.config.get("runsc"):
        try:
            inspect(Path(str(kernel.config["runsc"])).expanduser(), "its kernelspec").require_new_enough()
        except SandboxError as error:
            return Check(name, False, error.problem, f"Correct runsc in {kernel.folder / 'kernel.json'}.")
    return Check(name, True, f"{kernel.display_name}, runs {program}")


def check_contents_manager() -> list[Check]:
    """Check that the contents manager in Jupyter Server's configuration files is one that the extension guards.

    Returns nothing if Jupyter Server is not installed.
    """
    try:
        from jupyter_server.serverapp import ServerApp

        from ..contents.managers import is_guarded
    except ImportError:
        return []
    name = "server's file access"
    try:
        server = ServerApp()
        server.load_config_file(suppress_errors=False)
        chosen = server.contents_manager_class
    except (Exception, SystemExit):  # a configuration file can raise anything; traitlets logs it and exits
        remedy = "Correct Jupyter Server's configuration: `jupyter server --show-config` shows the error."
        return [Check(name, False, "unknown: Jupyter Server's configuration cannot be used", remedy, required=False)]
    if is_guarded(chosen):
        return [Check(name, True, "guarded against links that a notebook's code makes", required=False)]
    finding = f"not guarded against links that a notebook's code makes: ServerApp.contents_manager_class is {chosen}"
    remedy = "Remove that setting, or do not run notebooks that you do not trust on this server."
    return [Check(name, False, finding, remedy, required=False)]


def check_saved() -> list[Check]:
    """Check that the records of the sandboxes in the user's registry are signed with the user's key.

    Returns an empty list if the registry is empty and the key can be used. Never creates a key: a new key would verify
    nothing.
    """
    name = "saved sandboxes"
    try:
        records = registry().list().records
        sandboxes = Persistence.open()
        ids = [str(record.id) for record in records]
        if sandboxes.stores.signer.has_key:
            if unusable := _unusable_key(sandboxes, name, ids):
                return [unusable]
        elif records:
            finding = f"the key that signed the records of {len(records)} sandboxes is missing. {_listed(ids)}"
            return [Check(name, False, finding, LOST_KEY, required=False)]
        if not records:
            return []
        problems = {str(stored.record.id): stored.problem for stored in look(sandboxes, records)}
    except SandboxError as error:
        return [Check(name, False, error.problem, error.remedy, required=False)]
    unproven = {found: error for found, error in problems.items() if isinstance(error, SignatureError)}
    if not unproven:
        return [Check(name, True, f"{len(records)}; no signature is missing or invalid", required=False)]
    reasons = Counter(error.reason for error in unproven.values())
    finding = f"{len(unproven)} of {len(records)} are not proven to be yours: " + "; ".join(
        f"the record of {count} {reason}" for reason, count in reasons.items()
    )
    return [Check(name, False, f"{finding}. {_listed(list(unproven))}", LOST_KEY, required=False)]


def _unusable_key(sandboxes: Persistence, name: str, ids: Sequence[str]) -> Check | None:
    """Return a failed check if the key cannot be used, because then no persistent kernel can start; else None."""
    try:
        sandboxes.stores.signer.require_usable_key()
    except ConfigurationError as error:
        unproven = f" Without a usable key, no saved sandbox can be proven to be yours. {_listed(ids)}" if ids else ""
        return Check(name, False, f"{error.problem}{unproven}", error.remedy)
    return None


def _listed(ids: Sequence[str]) -> str:
    """Return a phrase such as "Sandboxes: a, b and others" that lists at most MAX_LISTED ids."""
    label = "Sandboxes" if len(ids) > 1 else "Sandbox"
    return f"{label}: {', '.join(ids[:MAX_LISTED])}{' and others' if len(ids) > MAX_LISTED else ''}"


def print_table(checks: Sequence[Check], stream: TextIO) -> None:
    """Print one check per line, with the remedy of each that failed, and then if a kernel can start."""
    good, bad = marks(stream)
    width = max(len(check.name) for check in checks)
    room = max(shutil.get_terminal_size((100, 24)).columns - width - 5, 40)
    for check in checks:
        mark = good if check.ok else bad if check.required else "!"
        lines = textwrap.wrap(one_line(check.finding), room, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [one_line(check.remedy)] if not check.ok and check.remedy else []
        print(f"{mark:<2} {one_line(check.name):<{width}}  {lines[0]}", file=stream)
        for line in lines[1:]:
            print(f"{'':<{width + 5}}{line}", file=stream)
    verdict = "can start" if can_start(checks) else f"cannot start until the checks that are marked {bad} pass"
    print(f"\nA sandboxed kernel {verdict}.", file=stream)
