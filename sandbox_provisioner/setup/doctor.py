"""Whether a sandboxed kernel could start here: every precondition as data, and what would mend it."""

from __future__ import annotations

import os
import platform
import pwd
import re
import resource
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TextIO

from jupyter_core.paths import jupyter_data_dir, jupyter_runtime_dir

from . import config
from .bundle import Mount, parse_mount
from .errors import RunscTooOldError, SandboxError
from .folders import homes, within
from .kernelspecs import PROVISIONER, Kernel, kernels
from .progress import marks
from .reserved import require_unreserved, reserved_folders
from .runsc import OLDEST, Runsc, candidates, find, inspect, refused, require_user_namespaces
from .runsc_sources import nearest, writable
from .runtime import runtime_root
from .words import one_line

SETUP = "`jupyter sandbox setup`"
OLDEST_LINUX = (4, 14, 77)
MACHINES = ("x86_64", "aarch64", "arm64")
PLATFORMS = ("systrap", "ptrace", "kvm")
STALE_DAYS = 550
MEGABYTE = 1 << 20
OPEN_FILES = 4096


@dataclass(frozen=True)
class Check:
    """One precondition: what was found and, unless ``ok``, what would mend it.

    Without a ``required`` one no kernel starts; another one is advice.
    """

    name: str
    ok: bool
    finding: str
    remedy: str = ""
    required: bool = True


def examine(setting: str = "", environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Every precondition, in the order in which to mend them; ``setting`` is the configured path of runsc."""
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
    ]


def can_start(checks: Sequence[Check]) -> bool:
    """Whether a sandboxed kernel could start."""
    return all(check.ok for check in checks if check.required)


def check_runsc(setting: str, environ: Mapping[str, str]) -> list[Check]:
    """Which runsc would be used, and whether it is new enough."""
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
    """Which runsc is passed over because sandboxes or other users could have written it."""
    remedy = "Take its folder off PATH, or let only root or you write to it."
    return [Check("runsc on PATH", False, clause, remedy, required=False) for clause in refused(environ)]


def check_age(runsc: Runsc, today: date) -> Check:
    """How old a runsc is that is new enough."""
    if runsc.built is None:
        return Check("runsc's age", True, "its version has no date; it is trusted to be new enough")
    days = (today - runsc.built).days
    finding = f"built {runsc.built}, {age(days)} ago; {OLDEST} is the oldest that will do"
    if days <= STALE_DAYS:
        return Check("runsc's age", True, finding)
    remedy = "`jupyter sandbox setup --source go` builds a newer one, which wakes kernels faster."
    return Check("runsc's age", False, finding, remedy, required=False)


def age(days: int) -> str:
    """A number of days as people say it."""
    if days < 60:
        return f"{max(days, 0)} days"
    return f"{days // 30} months" if days < 730 else f"{days / 365.25:.1f} years"


def check_platform(uname: platform.uname_result, chosen: str) -> Check:
    """Whether gVisor runs on this system at all, with the platform that was chosen."""
    here = f"{uname.system} {uname.release} on {uname.machine}"
    release = tuple(int(part) for part in re.findall(r"\d+", uname.release)[:3])
    if uname.system != "Linux":
        remedy = "Use a Linux machine: on Windows WSL 2, on macOS a virtual machine."
        return Check("platform", False, f"{here}: gVisor runs on Linux only", remedy)
    if uname.machine not in MACHINES:
        return Check("platform", False, f"{here}: gVisor knows only x86_64 and arm64", "Use another machine.")
    if release < OLDEST_LINUX:
        return Check("platform", False, f"{here}: gVisor needs Linux 4.14.77", "Update the system's kernel.")
    if chosen not in PLATFORMS:
        remedy = "`unset SANDBOX_PLATFORM` means systrap."
        return Check("platform", False, f"SANDBOX_PLATFORM is {chosen!r}, which is no platform", remedy)
    if chosen == "kvm" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
        remedy = "`unset SANDBOX_PLATFORM` means systrap, which needs no KVM."
        return Check("platform", False, f"{here}, but /dev/kvm cannot be used", remedy)
    return Check("platform", True, f"{here}, {chosen}")


def check_namespaces() -> Check:
    """Whether this user may make the user namespace that runsc needs."""
    try:
        require_user_namespaces()
    except SandboxError as error:
        return Check("user namespaces", False, error.problem, error.remedy)
    return Check("user namespaces", True, "not needed by root" if os.geteuid() == 0 else "allowed")


def check_user() -> Check:
    """Who we are, and whether we have a home."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = "without a name"
    who = "root" if uid == 0 else f"ordinary user {name} (uid {uid})"
    home = Path("~").expanduser()
    if os.access(home, os.W_OK | os.X_OK):
        return Check("user", True, f"{who}, home {home}")
    remedy = "`export HOME=...` to a folder of yours, or set JUPYTER_DATA_DIR and JUPYTER_RUNTIME_DIR."
    return Check("user", False, f"{who}, whose home {home} cannot be written", remedy, required=False)


def check_open_files(most: int) -> Check:
    """Whether a sandbox may have as many files open as a kernel's imports need; each costs gVisor more than one."""
    enough = most == resource.RLIM_INFINITY or most >= OPEN_FILES
    finding = "no limit" if most == resource.RLIM_INFINITY else f"{most} at most (hard limit)"
    remedy = f"Raise it, as with `LimitNOFILE={OPEN_FILES}` in a service's unit: kernels die while they import."
    return Check("open files", enough, finding, "" if enough else remedy)


def check_disk() -> list[Check]:
    """Whether the folders that a start writes to can be written and have room."""
    return [
        check_runtime_root(),
        check_folder("connection files", Path(jupyter_runtime_dir()), 1, "JUPYTER_RUNTIME_DIR"),
        check_folder("data folder", Path(jupyter_data_dir()), 200, "JUPYTER_DATA_DIR", required=False),
    ]


def check_own_folders(environ: Mapping[str, str]) -> list[Check]:
    """Whether kernels could write to the folders of Jupyter's and the sandboxes' own files, as far as is known here.

    The folder that the command is run in counts as one that kernels can write to: a server started here would let them.
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
        return [Check(name, False, f"they cannot be examined: {error}", "Correct the folder that is named.")]
    here = {os.path.realpath(os.getcwd())} - homes() - {"/"}  # kernels do not work in these
    places = [*(mount.source for mount in mounts), *here]
    inside = [
        Check(
            name,
            False,
            f"{own} ({setting}) lies in {place}; kernels that work in {place} see an empty folder there",
            f"Set {setting} to a folder that no kernel can write to: these kernels start faster then.",
            required=False,
        )
        for place in dict.fromkeys(places)
        for own, setting in reserved.items()
        if within(os.path.realpath(own), os.path.realpath(place))
    ]
    return inside or [Check(name, True, "no kernel can write to them")]


def check_runtime_root() -> Check:
    """Whether live sandboxes can keep their state where it belongs."""
    try:
        return check_folder("sandboxes' folder", runtime_root(), 50, "SANDBOX_RUNTIME_DIR")
    except SandboxError as error:
        return Check("sandboxes' folder", False, error.problem, error.remedy)
    except OSError as error:
        remedy = "`export SANDBOX_RUNTIME_DIR=...` to a folder of yours."
        return Check("sandboxes' folder", False, f"it cannot be made: {error}", remedy)


def check_folder(name: str, folder: Path, megabytes: int, variable: str, required: bool = True) -> Check:
    """Whether ``folder`` can be written, or made, and has that much room."""
    if not writable(folder):
        remedy = f"`export {variable}=...` to a folder of yours."
        return Check(name, False, f"{folder} cannot be written", remedy, required)
    free = shutil.disk_usage(nearest(folder)).free // MEGABYTE
    finding = f"{folder}, {free / 1024:.1f} GB free" if free >= 1024 else f"{folder}, {free} MB free"
    if free < megabytes:
        remedy = f"Free {megabytes} MB there, or `export {variable}=...` to a folder with room."
        return Check(name, False, finding, remedy, required)
    return Check(name, True, finding, required=required)


def check_kernels(found: Sequence[Kernel], environ: Mapping[str, str]) -> list[Check]:
    """The sandboxed kernels that Jupyter offers, and whether what they run is there."""
    sandboxed = [kernel for kernel in found if kernel.sandboxed]
    if sandboxed:
        return [_check_kernel(kernel) for kernel in sandboxed]
    if environ.get("JUPYTER_DEFAULT_PROVISIONER_NAME") == PROVISIONER:
        return [Check("kernels", bool(found), f"every kernel is sandboxed by default ({len(found)} found)")]
    return [Check("kernels", False, "no sandboxed kernel is installed", f"{SETUP} installs them.")]


def _check_kernel(kernel: Kernel) -> Check:
    name = f"kernel {kernel.name}"
    argv = kernel.spec.get("argv")
    remove = f"`jupyter kernelspec remove {kernel.name}` removes it."
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

        from .guarded_contents import is_guarded
    except ImportError:
        return []
    name = "server's file access"
    try:
        server = ServerApp()
        server.load_config_file(suppress_errors=False)
        chosen = server.contents_manager_class
    except (Exception, SystemExit):  # a configuration file can raise anything; traitlets logs it and exits
        remedy = "Correct Jupyter Server's configuration: `jupyter server --show-config` says what is wrong."
        return [Check(name, False, "unknown: Jupyter Server's configuration cannot be used", remedy, required=False)]
    if is_guarded(chosen):
        return [Check(name, True, "guarded against links that a notebook's code makes", required=False)]
    finding = f"not guarded against links that a notebook's code makes: ServerApp.contents_manager_class is {chosen}"
    remedy = "Remove that setting, or do not run notebooks that you do not trust on this server."
    return [Check(name, False, finding, remedy, required=False)]


def print_table(checks: Sequence[Check], stream: TextIO) -> None:
    """Print the checks, one below the other, each that failed with its remedy, and what it comes to."""
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
    verdict = "can start" if can_start(checks) else f"cannot start before what is marked {bad} is mended"
    print(f"\nA sandboxed kernel {verdict}.", file=stream)
