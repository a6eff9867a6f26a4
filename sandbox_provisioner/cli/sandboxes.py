"""Implement ``jupyter sandbox list|show|revert|reset|delete|prune``.

All of them work without a server. A sandbox that a server has open is changed through that server.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import get_args

from ..errors import SandboxError
from ..sandbox.model import State
from .exit_codes import exit_status
from .options import Commands, add_ids, add_reach, span
from .output import as_json, count, details, print_json, print_sandboxes, say, size, warn
from .targets import UNREAD, Found, Reach, reach

UNVERIFIED_HELP = (
    "also delete your sandboxes that are not signed with your current key, for example after the loss of a key"
)
AGE_HELP = "a number with the unit s, m, h, d or w, such as 30d"


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the commands to the parser."""
    list_ = add_reach(commands, "list", run_list, "list sandboxes")
    list_.add_argument("--state", choices=get_args(State), help="only sandboxes in this state")
    list_.add_argument("--notebook", metavar="PATH", help="only sandboxes of this notebook")
    list_.add_argument(
        "--older-than", type=span, metavar="AGE", help=f"only sandboxes that have been unused for this time: {AGE_HELP}"
    )
    add_ids(add_reach(commands, "show", run_show, "show all details of sandboxes"))
    about = "return to the previous checkpoint; keep the latest as a savepoint"
    add_ids(add_reach(commands, "revert", run_revert, about))
    about = "give notebooks a new kernel at their next start; keep their latest states as savepoints"
    add_ids(add_reach(commands, "reset", run_reset, about))
    about = "delete sandboxes with their checkpoints, savepoints and snapshots, and end their kernels"
    delete = add_reach(commands, "delete", run_delete, about)
    add_ids(delete)
    prune = add_reach(commands, "prune", run_prune, "delete all sandboxes that have been unused for some time")
    prune.add_argument(
        "--older-than",
        type=span,
        required=True,
        metavar="AGE",
        help=f"minimum time without use: {AGE_HELP}",
    )
    prune.add_argument("--dry-run", action="store_true", help="only show what would be deleted")
    for command in (delete, prune):
        command.add_argument("--unverified", action="store_true", help=UNVERIFIED_HELP)


def run_list(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox list`` and return its exit status."""
    with reach(arguments) as reached:
        found = [each for each in reached.all() if _wanted(each, arguments)]
        if arguments.json:
            unreadable = [str(error) for error in reached.unreadable]
            print_json({"sandboxes": [as_json(each) for each in found], "unreadable": unreadable})
        elif found:
            print_sandboxes(found)
        else:
            filtered = arguments.state or arguments.notebook or arguments.older_than
            say("No matching sandboxes." if filtered else "No sandboxes.")
        if not arguments.json:
            for each in found:
                if each.sandbox.state in UNREAD:
                    warn(each.sandbox.problem)
            for error in reached.unreadable:
                warn(error)
        for server_error in reached.server_errors:
            warn(server_error)
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
    """Run ``jupyter sandbox show`` and return its exit status."""
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
    """Run ``jupyter sandbox revert`` and return its exit status."""
    with reach(arguments) as reached:
        reverted = {}
        for found in reached.find(arguments.ids):
            reverted[found.sandbox.id] = _revert(reached, found)
            if not arguments.json:
                say(f"Reverted {found.title} to its checkpoint of {reverted[found.sandbox.id]}.")
    if arguments.json:
        print_json({"reverted": reverted})
    return 0


def _revert(reached: Reach, found: Found) -> str:
    """Revert a sandbox and return the time of the checkpoint that is now current."""
    if server := reached.any_server(found):  # which knows its runsc, for a sandbox that was left running
        checkpoint = server.client.revert(found.sandbox.id).checkpoint
        return checkpoint.created.isoformat() if checkpoint else ""
    assert reached.storage
    record = reached.storage.registry.reattach(found.sandbox.id, reached.storage.stores)
    return reached.storage.revert(record).created


def run_reset(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox reset`` and return its exit status."""
    with reach(arguments) as reached:
        found = reached.find(arguments.ids)
        for each in found:
            kept = _reset(reached, each)
            if not arguments.json:
                say(f"Reset {each.title}: its next kernel is new." + (f" The saved state is {kept}." if kept else ""))
    if arguments.json:
        print_json({"reset": [each.sandbox.id for each in found]})
    return 0


def _reset(reached: Reach, found: Found) -> str:
    """Reset a sandbox and return where its saved state is; empty if it had none."""
    if server := reached.any_server(found):
        before = {savepoint.name for savepoint in found.sandbox.savepoints}
        after = server.client.reset(found.sandbox.id).savepoints
        kept = next((savepoint.name for savepoint in after if savepoint.name not in before), "")
    else:
        assert reached.storage
        record = reached.storage.registry.reattach(found.sandbox.id, reached.storage.stores)
        kept = reached.storage.reset(record)
    return f"savepoint {kept}" if kept else ""


@dataclass(frozen=True)
class Deletion:
    """The outcome of deleting a sandbox: the ``freed`` bytes, or the ``error`` if it was not deleted."""

    id: str
    title: str
    freed: int = 0
    error: SandboxError | None = None


def run_delete(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox delete`` and return its exit status."""
    with reach(arguments) as reached:
        found = reached.find(arguments.ids)
        return _report([_delete(reached, each, arguments.unverified) for each in found], arguments.json)


def _delete(reached: Reach, found: Found, unverified: bool) -> Deletion:
    try:
        if found.server:
            freed = found.server.client.delete(found.sandbox.id, unverified).freed
        else:
            assert reached.storage and found.record
            destroy = partial(reached.storage.destroy, unverified=unverified)
            freed = reached.storage.registry.delete(found.record.id, destroy)
    except SandboxError as error:
        return Deletion(found.sandbox.id, found.title, error=error)
    return Deletion(found.sandbox.id, found.title, freed)


def run_prune(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox prune`` and return its exit status. Sandboxes with a kernel on a server are kept."""
    with reach(arguments) as reached:
        for error in reached.unreadable:
            warn(error)
        stale = [each for each in reached.all() if _prunable(each, arguments.older_than)]
        if arguments.dry_run:
            return _preview(reached, stale, arguments)
        return _report(_prune(reached, stale, arguments), arguments.json)


def _prune(reached: Reach, stale: Sequence[Found], arguments: argparse.Namespace) -> Sequence[Deletion]:
    """Delete each sandbox that has a server through that server, and the others through the registry."""
    deletions = [_delete(reached, each, arguments.unverified) for each in stale if each.server]
    if reached.storage:
        titles = {each.record.id: each.title for each in stale if each.record and not each.server}
        destroy = partial(reached.storage.destroy, unverified=arguments.unverified)
        pruned = reached.storage.registry.prune(arguments.older_than, destroy, titles)
        deletions += [Deletion(str(each.record.id), titles[each.record.id], each.freed, each.error) for each in pruned]
    return deletions


def _prunable(found: Found, older_than: timedelta) -> bool:
    return found.sandbox.kernel_id is None and _unused(found, older_than)


def _preview(reached: Reach, stale: Sequence[Found], arguments: argparse.Namespace) -> int:
    """Print what would be deleted and what would be refused, and return the exit status that prune would have."""
    refused = {each.sandbox.id: error for each in stale if (error := _refusal(reached, each, arguments.unverified))}
    found = [each for each in stale if each.sandbox.id not in refused]
    if arguments.json:
        kept = [{"id": identity, "problem": str(error)} for identity, error in refused.items()]
        print_json({"would_delete": [as_json(each) for each in found], "would_keep": kept})
    else:
        for each in found:
            condition = f", unless the server refuses: {each.sandbox.problem}" if _server_decides(each) else ""
            say(f"Would delete {each.title}, {each.sandbox.state}, {size(each.sandbox.size)}{condition}")
        for each in stale:
            if each.sandbox.id in refused:
                say(f"Would not delete {each.title}, {each.sandbox.state}; the reason is below")
        total = sum(each.sandbox.size or 0 for each in found)
        say(f"{count(len(found), 'sandbox')}, {size(total)} in total. Nothing was deleted.")
    for error in refused.values():
        warn(error)
    return max(map(exit_status, refused.values()), default=0)


def _refusal(reached: Reach, found: Found, unverified: bool) -> SandboxError | None:
    """Return the error, if any, with which this process refuses the deletion; None if a server deletes the sandbox."""
    if found.server:
        return None
    assert reached.storage and found.record
    try:
        reached.storage.require_deletable(found.record, unverified)
    except SandboxError as error:
        return error
    return None


def _server_decides(found: Found) -> bool:
    """Return True if the server could not read the document: only its answer shows whether it deletes the sandbox."""
    return found.server is not None and found.sandbox.state in UNREAD


def _report(outcomes: Sequence[Deletion], json: bool) -> int:
    """Print the deleted sandboxes and the failures, and return the exit status."""
    removed = [each for each in outcomes if each.error is None]
    errors = {each.id: each.error for each in outcomes if each.error}
    freed = sum(each.freed for each in removed)
    if json:
        deleted = [{"id": each.id, "freed": each.freed} for each in removed]
        kept = [{"id": identity, "problem": str(error)} for identity, error in errors.items()]
        print_json({"deleted": deleted, "kept": kept, "freed": freed})
    else:
        for each in removed:
            say(f"Deleted {each.title}: {size(each.freed)}")
        say(f"{count(len(removed), 'sandbox')} deleted, {size(freed)} freed.")
    for error in errors.values():
        warn(error)
    return max(map(exit_status, errors.values()), default=0)
