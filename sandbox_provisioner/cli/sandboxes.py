"""``jupyter sandbox list|show|revert|delete|prune``: which sandboxes there are, and how they go.

All of these do without a server. What a server has open is changed through that server.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import get_args

from .cli_exits import exit_status
from .cli_options import Commands, add_ids, add_reach, span
from .cli_output import as_json, count, details, print_json, print_sandboxes, say, size, warn
from .cli_reach import Found, Reach, reach
from .client import State
from .errors import SandboxError, UnknownSandboxError

AGE_HELP = "a number and one of s, m, h, d and w, such as 30d"


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the commands to a parser."""
    list_ = add_reach(commands, "list", run_list, "list sandboxes")
    list_.add_argument("--state", choices=get_args(State), help="only those in this state")
    list_.add_argument("--notebook", metavar="PATH", help="only those of this notebook")
    list_.add_argument("--older-than", type=span, metavar="AGE", help=f"only those not used for so long: {AGE_HELP}")
    add_ids(add_reach(commands, "show", run_show, "show all that is known of a sandbox"))
    about = "give up a sandbox's last checkpoint, which cannot be restored, for the one before"
    add_ids(add_reach(commands, "revert", run_revert, about))
    about = "delete sandboxes with their checkpoints, savepoints and snapshots, and end their kernels"
    add_ids(add_reach(commands, "delete", run_delete, about))
    prune = add_reach(commands, "prune", run_prune, "delete every sandbox that has not been used for a time")
    prune.add_argument(
        "--older-than",
        type=span,
        required=True,
        metavar="AGE",
        help=f"for how long they have not been used: {AGE_HELP}",
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def run_list(arguments: argparse.Namespace) -> int:
    """``jupyter sandbox list``."""
    with reach(arguments) as reached:
        found = [each for each in reached.all() if _wanted(each, arguments)]
        if arguments.json:
            unreadable = [str(error) for error in reached.unreadable]
            print_json({"sandboxes": [as_json(each) for each in found], "unreadable": unreadable})
        elif found:
            print_sandboxes(found)
        else:
            filtered = arguments.state or arguments.notebook or arguments.older_than
            say("No sandbox is like that." if filtered else "There are no sandboxes.")
        if not arguments.json:
            for each in found:
                if each.sandbox.state in ("elsewhere", "unknown"):
                    warn(each.sandbox.problem)
            for error in reached.unreadable:
                warn(error)
        for complaint in reached.complaints:
            warn(complaint)
    return 0


def _wanted(found: Found, arguments: argparse.Namespace) -> bool:
    sandbox, notebook = found.sandbox, arguments.notebook
    return (
        arguments.state in (None, sandbox.state)
        and (notebook is None or sandbox.notebook_path in (notebook, os.path.abspath(notebook)))
        and (arguments.older_than is None or _unused(found, arguments.older_than))
    )


def _unused(found: Found, older_than: timedelta) -> bool:
    return datetime.now(UTC) - found.sandbox.last_used > older_than


def run_show(arguments: argparse.Namespace) -> int:
    """``jupyter sandbox show``."""
    with reach(arguments) as reached:
        found = reached.find(arguments.ids)
        if arguments.json:
            print_json({"sandboxes": [as_json(each) for each in found]})
            return 0
        for number, each in enumerate(found):
            if number:
                say("")
            for name, value in details(each).items():
                say(f"{name:<20} {value}")
    return 0


def run_revert(arguments: argparse.Namespace) -> int:
    """``jupyter sandbox revert``."""
    with reach(arguments) as reached:
        reverted = {}
        for found in reached.find(arguments.ids):
            reverted[found.sandbox.id] = _revert(reached, found)
            if not arguments.json:
                say(f"{found.title} will be as it was at {reverted[found.sandbox.id]}.")
    if arguments.json:
        print_json({"reverted": reverted})
    return 0


def _revert(reached: Reach, found: Found) -> str:
    """Returns when the checkpoint was made that counts now."""
    if found.server:
        checkpoint = found.server.client.revert(found.sandbox.id).checkpoint
        return checkpoint.created.isoformat() if checkpoint else ""
    assert reached.storage and found.record
    return reached.storage.revert(found.record).created


@dataclass(frozen=True)
class Gone:
    """A sandbox that was to go: ``freed`` bytes, or the ``error`` for which it is still there."""

    id: str
    title: str
    freed: int = 0
    error: SandboxError | None = None


def run_delete(arguments: argparse.Namespace) -> int:
    """``jupyter sandbox delete``."""
    with reach(arguments) as reached:
        return _report([_delete(reached, found) for found in reached.find(arguments.ids)], arguments.json)


def _delete(reached: Reach, found: Found) -> Gone:
    try:
        if found.server:
            freed = found.server.client.delete(found.sandbox.id).freed
        else:
            assert reached.storage and found.record
            freed = reached.storage.registry.delete(found.record.id, reached.storage.destroy)
    except SandboxError as error:
        return Gone(found.sandbox.id, found.title, error=error)
    return Gone(found.sandbox.id, found.title, freed)


def run_prune(arguments: argparse.Namespace) -> int:
    """``jupyter sandbox prune``: on a server that was named, or in storage; nobody's kernel is ended for its age."""
    with reach(arguments) as reached:
        for error in reached.unreadable:
            warn(error)
        stale = [each for each in reached.all() if _prunable(each, arguments.older_than)]
        if arguments.dry_run:
            return _foretell(stale, arguments.json)
        return _report([_delete(reached, each) for each in stale if _untouched(reached, each)], arguments.json)


def _prunable(found: Found, older_than: timedelta) -> bool:
    return found.sandbox.kernel_id is None and _unused(found, older_than)


def _untouched(reached: Reach, found: Found) -> bool:
    """Whether nobody used or deleted it while others were deleted."""
    if not (reached.storage and found.record):
        return True
    try:
        return reached.storage.registry.load(found.record.id).last_used == found.record.last_used
    except UnknownSandboxError:
        return False


def _foretell(found: Sequence[Found], json: bool) -> int:
    if json:
        print_json({"would_delete": [as_json(each) for each in found]})
        return 0
    for each in found:
        say(f"Would delete {each.title}, {each.sandbox.state}, {size(each.sandbox.size)}")
    total = sum(each.sandbox.size or 0 for each in found)
    say(f"{count(len(found), 'sandbox')}, {size(total)} in all. Nothing was deleted.")
    return 0


def _report(outcomes: Sequence[Gone], json: bool) -> int:
    """Say what went and what stayed; returns the exit status."""
    gone = [each for each in outcomes if each.error is None]
    errors = {each.id: each.error for each in outcomes if each.error}
    freed = sum(each.freed for each in gone)
    if json:
        deleted = [{"id": each.id, "freed": each.freed} for each in gone]
        kept = [{"id": identity, "problem": str(error)} for identity, error in errors.items()]
        print_json({"deleted": deleted, "kept": kept, "freed": freed})
    else:
        for each in gone:
            say(f"Deleted {each.title}: {size(each.freed)}")
        say(f"{count(len(gone), 'sandbox')} deleted, {size(freed)} freed.")
    for error in errors.values():
        warn(error)
    return max(map(exit_status, errors.values()), default=0)
