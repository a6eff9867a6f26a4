"""Implement ``jupyter sandbox hibernate|wake|keep-awake|restart|exec|rewind|savepoint|snapshot|fork``.

Most of these commands need the server that has the kernel open. Forking, and listing or deleting savepoints and
snapshots, also work without a server.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ..client import Exit, SandboxClient
from ..errors import ConfigurationError, NotebookInUseError, SandboxError
from ..persistence.records import SandboxRecord
from ..sandbox.listing import look
from ..sandbox.model import NamedState, Sandbox, encode
from ..sandbox.registry import Facts
from ..sandbox.user_sandboxes import Persistence
from . import options
from .exit_codes import exit_status
from .options import Commands, add_ids, add_name, add_reach, name, span
from .output import as_json, print_json, print_named, say, size, warn
from .progress import watched
from .targets import UNREAD, Found, Reach, Server, UnreadSandboxError, reach, with_local_notebook

EXEC_HELP = (
    "run a command in the kernel's sandbox; write the command after `--`. Its stdin is empty. `exec` returns the "
    "command's exit status. If `exec` is interrupted, the command is killed"
)

Choose = Callable[[Reach, Found], Server]
Change = Callable[[SandboxClient, str], Sandbox]


@dataclass(frozen=True)
class SavedKind:
    """The texts and functions by which the commands ``savepoint`` and ``snapshot`` differ."""

    word: str
    about: str
    states: Callable[[Sandbox], Sequence[NamedState]]
    create: Callable[[SandboxClient, str, str], NamedState]
    delete: Callable[[SandboxClient, str, str], None]
    delete_stored: Callable[[Persistence, SandboxRecord, str], None]
    completer: options.Completer


SAVED_KINDS = (
    SavedKind(
        "savepoint",
        "save a kernel's current memory",
        lambda sandbox: sandbox.savepoints,
        SandboxClient.savepoint,
        SandboxClient.delete_savepoint,
        Persistence.drop_savepoint,
        options.complete_savepoints,
    ),
    SavedKind(
        "snapshot",
        "save the files that a sandbox wrote outside the notebook's folder",
        lambda sandbox: sandbox.snapshots,
        SandboxClient.snapshot,
        SandboxClient.delete_snapshot,
        Persistence.drop_snapshot,
        options.complete_snapshots,
    ),
)


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the commands to the parser."""
    about = "save kernels and free their memory; they stay listed, and the next cell wakes them"
    hibernate = add_reach(commands, "hibernate", run_hibernate, about)
    add_ids(hibernate)
    about = "also hibernate a kernel with a running cell; the cell continues only after the kernel's next message"
    hibernate.add_argument("--force", action="store_true", help=about)
    about = "wake hibernated kernels, or start kernels for saved sandboxes"
    wake = partial(_each, "Wake", Reach.starter_of, SandboxClient.wake)
    add_ids(add_reach(commands, "wake", wake, about))
    about = "keep an idle kernel from being hibernated while its threads or subprocesses work"
    awake = add_reach(commands, "keep-awake", run_keep_awake, about)
    add_ids(awake, 1)
    how = "on (default), off, or a duration: a number with the unit s, m, h, d or w, such as 2h"
    awake.add_argument("how", nargs="?", default=None, type=awake_for, metavar="on|off|DURATION", help=how)
    restart = partial(_each, "Restart", Reach.server_of, SandboxClient.restart)
    add_ids(add_reach(commands, "restart", restart, "restart kernels; their savepoints are kept"))
    exec_ = add_reach(commands, "exec", run_exec, EXEC_HELP, json=False)
    exec_.add_argument("--cwd", metavar="FOLDER", help="working folder in the sandbox; default: the kernel's")
    add_ids(exec_, 1)
    exec_.add_argument("command", nargs="*", metavar="COMMAND", help="the command and its arguments")
    exec_.set_defaults(usage_error=exec_.error, interrupted="the command in the sandbox is killed.")
    for kind in SAVED_KINDS:
        _add_saved_kind(commands, kind)
    about = "rewind a kernel to a savepoint; its current state is first saved as another savepoint"
    rewind = add_reach(commands, "rewind", run_rewind, about)
    add_ids(rewind, 1)
    add_name(rewind, "name", options.complete_savepoints)
    about = "start a second kernel from a savepoint or the current state; the first one keeps running"
    fork_ = add_reach(commands, "fork", run_fork, about)
    add_ids(fork_, 1)
    about = "savepoint to start from; default: the current state"
    add_name(fork_, "--savepoint", options.complete_savepoints, about)
    about = "notebook of the new kernel; if it does not exist, the first kernel's notebook is copied"
    fork_.add_argument("--notebook", metavar="PATH", help=about)


def _add_saved_kind(commands: Commands[argparse.ArgumentParser], kind: SavedKind) -> None:
    word, about = kind.word, f"{kind.about} under a name; without a name, list the {kind.word}s"
    parser = add_reach(commands, word, partial(_run_saved_kind, kind), about)
    add_ids(parser, 1)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("name", nargs="?", metavar="NAME", type=name, help=f"name of the new {word}")
    add_name(one, "--delete", kind.completer, f"delete this {word}")


def run_hibernate(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox hibernate`` and return its exit status."""
    change = partial(SandboxClient.hibernate, force=arguments.force)
    return _each("Hibernate", Reach.server_of, change, arguments, done="saved")


def awake_for(text: str) -> float | None:
    """Return the seconds to keep a kernel awake: None for no limit, 0 for ``off``. Raises ArgumentTypeError."""
    return {"on": None, "off": 0.0}[text] if text in ("on", "off") else span(text).total_seconds()


def run_keep_awake(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox keep-awake`` and return its exit status."""
    with reach(arguments) as reached:
        (found,) = reached.find(arguments.ids)
        server = reached.server_of(found)
        after = found.after(server.client.keep_awake(found.sandbox.id, arguments.how), server)
        if arguments.json:
            print_json(as_json(after))
        else:
            say(f"{after.title}: {'. '.join(after.sandbox.busy_reasons) or 'The kernel is not kept awake'}.")
    return 0


def _each(verb: str, choose: Choose, change: Change, arguments: argparse.Namespace, done: str = "") -> int:
    """Run a command that changes each given sandbox, and return its exit status. A failure does not stop the others.

    A sandbox in the state ``done`` is changed only if a server has it open.
    """
    changed, status = [], 0
    with reach(arguments) as reached:
        for found in reached.find(arguments.ids):
            checkpoint = found.sandbox.checkpoint
            try:
                server = found.server if found.sandbox.state == done else choose(reached, found)
                total = checkpoint.size if verb == "Wake" and checkpoint else None
                with watched(arguments, verb, found, server, total) as step:
                    after = found.after(change(server.client, found.sandbox.id), server) if server else found
                    notes = [f"{reason}." for reason in after.sandbox.busy_reasons if not after.sandbox.busy]
                    step.result = " ".join([f"{after.sandbox.state}, {size(after.sandbox.size)}", *notes])
            except SandboxError as error:
                warn(error)
                status = max(status, exit_status(error))
            else:
                changed.append(after)
    if arguments.json:
        print_json({"sandboxes": [as_json(each) for each in changed]})
    return status


def run_exec(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox exec`` and return the command's exit status: 128 plus the signal's number if killed."""
    if not arguments.command:
        arguments.usage_error("no command given; write it after `--`")
    with reach(arguments) as reached:
        (found,) = reached.find(arguments.ids)
        client = reached.server_of(found).client
        for piece in client.execute(found.sandbox.id, arguments.command, arguments.cwd):
            if isinstance(piece, Exit):
                return piece.status if piece.status >= 0 else 128 - piece.status
            stream = sys.stderr if piece.stream == "stderr" else sys.stdout
            stream.buffer.write(piece.data)
            stream.flush()
    raise AssertionError("the output ended without an exit status")


def _run_saved_kind(kind: SavedKind, arguments: argparse.Namespace) -> int:
    with reach(arguments) as reached:
        (found,) = reached.find(arguments.ids)
        if arguments.name:
            return _create(kind, arguments, found, reached.server_of(found))
        if arguments.delete:
            return _delete(kind, arguments, reached, found)
        if found.sandbox.state in UNREAD:
            raise UnreadSandboxError(found.sandbox)
        states = kind.states(found.sandbox)
        if arguments.json:
            print_json({"items": [encode(state) for state in states]})
        elif states:
            print_named(states)
        else:
            say(f"No {kind.word}s.")
    return 0


def _create(kind: SavedKind, arguments: argparse.Namespace, found: Found, server: Server) -> int:
    with watched(arguments, f"{kind.word.capitalize()} {arguments.name} of", found, server) as step:
        created = kind.create(server.client, found.sandbox.id, arguments.name)
        step.result = size(created.size)
    if arguments.json:
        print_json(encode(created))
    return 0


def _delete(kind: SavedKind, arguments: argparse.Namespace, reached: Reach, found: Found) -> int:
    if found.server:
        kind.delete(found.server.client, found.sandbox.id, arguments.delete)
    else:
        assert reached.storage and found.record
        kind.delete_stored(reached.storage, found.record, arguments.delete)
    if arguments.json:
        print_json({"deleted": arguments.delete})
    else:
        say(f"Deleted {kind.word} {arguments.delete}.")
    return 0


def run_rewind(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox rewind`` and return its exit status."""
    with reach(arguments) as reached:
        (found,) = reached.find(arguments.ids)
        server = reached.server_of(found)
        with watched(arguments, "Rewind", found, server) as step:
            rewound = server.client.rewind(found.sandbox.id, arguments.name)
            step.result = f"rewound to {arguments.name}; the state before the rewind is savepoint {rewound.kept}"
        if arguments.json:
            print_json({"sandbox": as_json(found.after(rewound.sandbox, server)), "kept": rewound.kept})
    return 0


def run_fork(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox fork`` and return its exit status."""
    with reach(arguments) as reached:
        (found,) = reached.find(arguments.ids)
        with watched(arguments, "Fork", found, reached.any_server(found)) as step:
            created = _fork(reached, found, arguments.savepoint or "", arguments.notebook or "")
            step.result = f"{created.sandbox.state}, {created.title}"
        if arguments.json:
            print_json(as_json(created))
    return 0


def _fork(reached: Reach, found: Found, savepoint: str, notebook: str) -> Found:
    """Create a sandbox with the memory of ``found`` and return it.

    ``notebook`` is a path on this machine, or relative to the root folder of a server given with ``--server``.
    """
    server = reached.any_server(found)
    if server:
        path = _below_root(server, notebook) if notebook else None
        forked = server.client.fork(found.sandbox.id, savepoint or None, path)
        return Found(with_local_notebook(forked, None, server), server=server)
    assert reached.storage and found.record
    return _fork_stored(reached.storage, found.record, savepoint, os.path.abspath(notebook) if notebook else "")


def _below_root(server: Server, notebook: str) -> str:
    """Return a notebook's path relative to the server's root folder. Raises ConfigurationError if it is outside."""
    if not server.root_dir:
        return notebook
    path = os.path.relpath(os.path.realpath(notebook), os.path.realpath(server.root_dir))
    if path.split(os.sep)[0] == os.pardir:
        problem = f"{os.path.abspath(notebook)} is outside {server.root_dir}, the root folder of {server.client.url}."
        raise ConfigurationError("notebook", problem, "Choose a notebook in that folder.")
    return path


def _fork_stored(storage: Persistence, record: SandboxRecord, savepoint: str, notebook: str) -> Found:
    if notebook and not os.path.isdir(os.path.dirname(notebook)):
        raise SandboxError(f"The folder of {notebook} does not exist.", "Create it first.")
    present = storage.registry.find_notebook(notebook, record.kernel_name) if notebook else ()
    if present:
        raise NotebookInUseError(notebook, f"the sandbox {present[0].id}")
    facts = Facts(kernel_name=record.kernel_name, settings=record.settings, notebook_path=notebook)
    facts["folder"] = "" if notebook else record.working_folder
    new = storage.registry.allocate(storage.stores, **facts)
    try:
        storage.fork(record, new, savepoint)
        if notebook and os.path.exists(record.notebook_path) and not os.path.exists(notebook):
            shutil.copyfile(record.notebook_path, notebook)
    except BaseException:
        with suppress(SandboxError):
            storage.registry.delete(new.id, storage.destroy)
        raise
    return Found(look(storage, [new])[0].sandbox, new)
