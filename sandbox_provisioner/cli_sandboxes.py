"""``jupyter sandbox list|show|delete|prune``: which persistent sandboxes there are, and how they go."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from .errors import SandboxError, SandboxNotFoundError, StorageNotHereError
from .metadata import Checkpoint, GCSSandboxMetadata
from .persistence import Persistence, Snapshot
from .records import SandboxRecord
from .registry import Removal

AGE = re.compile(r"([0-9]{1,6})([smhdw])")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
SPANS = ((365 * 86400, "year"), (30 * 86400, "month"), (86400, "day"), (3600, "hour"), (60, "minute"))
SHORT_ID = 8
AT_ONCE = 8

Open = Callable[[], Persistence]


@dataclass(frozen=True)
class Sight:
    """A record, with what its storage has of the sandbox or with the reason why that is not known."""

    record: SandboxRecord
    metadata: GCSSandboxMetadata | None = None
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)
    problem: SandboxError | None = None

    @property
    def state(self) -> str:
        """How it is, in a word."""
        if isinstance(self.problem, SandboxNotFoundError):
            return "gone"
        if isinstance(self.problem, StorageNotHereError):
            return "elsewhere"
        if self.metadata is None:
            return "unknown"
        return "running" if self.metadata.running else "saved" if self.metadata.checkpoint else "empty"

    @property
    def size(self) -> int | None:
        """The bytes of its checkpoints and snapshots; None if they are not known."""
        return None if self.metadata is None else sum(item.size for item in self.stored.values())

    @property
    def stored(self) -> dict[str, Checkpoint | Snapshot]:
        """What is kept of it, by what a person calls it."""
        found: dict[str, Checkpoint | Snapshot] = {}
        if self.metadata and self.metadata.checkpoint:
            found["checkpoint"] = self.metadata.checkpoint
        if self.metadata and self.metadata.previous:
            found["previous checkpoint"] = self.metadata.previous
        return found | {f"snapshot {name}": snapshot for name, snapshot in self.snapshots.items()}


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser], open_: Open) -> None:
    """Add the commands to a parser; the one that runs gets its sandboxes from ``open_``."""
    parsers = {}
    for name, run, about in (
        ("list", run_list, "list your persistent sandboxes"),
        ("show", run_show, "show all that is known of a sandbox"),
        ("revert", run_revert, "give up a sandbox's last checkpoint, which cannot be restored, for the one before"),
        ("delete", run_delete, "delete sandboxes with their checkpoints and snapshots"),
        ("prune", run_prune, "delete every sandbox that has not been used for a time"),
    ):
        parsers[name] = commands.add_parser(name, help=about, description=f"{about.capitalize()}.")
        parsers[name].add_argument("--json", action="store_true", help="print the result as JSON")
        parsers[name].set_defaults(run=run, open=open_)
    for name in ("show", "revert", "delete"):
        parsers[name].add_argument("ids", nargs="+", metavar="ID", help="an id that `list` shows, or its beginning")
    parsers["prune"].add_argument(
        "--older-than",
        type=span,
        required=True,
        metavar="AGE",
        help="for how long they have not been used: a number and one of s, m, h, d and w, such as 30d",
    )
    parsers["prune"].add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def run_list(arguments: argparse.Namespace) -> int:
    """``jupyter sandbox list``."""
    sandboxes = arguments.open()
    records, unreadable = sandboxes.registry.list()
    sights = look(sandboxes, sorted(records, key=lambda record: record.last_used, reverse=True))
    if arguments.json:
        print_json({"sandboxes": [as_json(sight) for sight in sights], "unreadable": [str(e) for e in unreadable]})
        return 0
    if sights:
        print_table(sights)
    else:
        say("There are no persistent sandboxes.")
    for sight in sights:
        if sight.state in ("elsewhere", "unknown"):
            warn(sight.problem)
    for error in unreadable:
        warn(error)
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """``jupyter sandbox show``."""
    sandboxes = arguments.open()
    sights = look(sandboxes, [sandboxes.registry.find(wanted) for wanted in arguments.ids])
    if arguments.json:
        print_json({"sandboxes": [as_json(sight) for sight in sights]})
        return 0
    for number, sight in enumerate(sights):
        if number:
            say("")
        for name, value in details(sight).items():
            say(f"{name:<20} {value}")
    return 0


def run_revert(arguments: argparse.Namespace) -> int:
    """``jupyter sandbox revert``."""
    sandboxes = arguments.open()
    reverted = {}
    for record in map(sandboxes.registry.find, arguments.ids):
        reverted[str(record.id)] = sandboxes.revert(record).created
        if not arguments.json:
            say(f"{title(record)} will be as it was at {reverted[str(record.id)]}.")
    if arguments.json:
        print_json({"reverted": reverted})
    return 0


def run_delete(arguments: argparse.Namespace) -> int:
    """``jupyter sandbox delete``."""
    sandboxes = arguments.open()
    found = {record.id: record for record in map(sandboxes.registry.find, arguments.ids)}
    removals = []
    for record in found.values():
        try:
            removals.append(Removal(record, sandboxes.registry.delete(record.id, sandboxes.destroy)))
        except SandboxError as error:
            removals.append(Removal(record, error=error))
    return report(removals, arguments.json)


def run_prune(arguments: argparse.Namespace) -> int:
    """``jupyter sandbox prune``."""
    sandboxes = arguments.open()
    for error in sandboxes.registry.list().unreadable:
        warn(error)
    if not arguments.dry_run:
        return report(sandboxes.registry.prune(arguments.older_than, sandboxes.destroy), arguments.json)
    sights = look(sandboxes, sandboxes.registry.unused(arguments.older_than))
    if arguments.json:
        print_json({"would_delete": [as_json(sight) for sight in sights]})
        return 0
    for sight in sights:
        say(f"Would delete {title(sight.record)}, {sight.state}, {size(sight.size)}")
    total = sum(sight.size or 0 for sight in sights)
    say(f"{count(len(sights), 'sandbox')}, {size(total)} in all. Nothing was deleted.")
    return 0


def look(sandboxes: Persistence, records: Iterable[SandboxRecord]) -> list[Sight]:
    """What storage has of each; several are asked for at once, as one may be far away."""

    def sight(record: SandboxRecord) -> Sight:
        try:
            return Sight(record, sandboxes.describe(record), sandboxes.snapshots(record))
        except SandboxError as error:
            return Sight(record, problem=error)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(sight, records))


def report(removals: Sequence[Removal], as_json: bool) -> int:
    """Say what went and what stayed; returns the exit status."""
    gone = [removal for removal in removals if removal.error is None]
    kept = [removal for removal in removals if removal.error is not None]
    freed = sum(removal.freed for removal in gone)
    if as_json:
        deleted = [{"id": str(removal.record.id), "freed": removal.freed} for removal in gone]
        refused = [{"id": str(removal.record.id), "problem": str(removal.error)} for removal in kept]
        print_json({"deleted": deleted, "kept": refused, "freed": freed})
    else:
        for removal in gone:
            say(f"Deleted {title(removal.record)}: {size(removal.freed)}")
        say(f"{count(len(gone), 'sandbox')} deleted, {size(freed)} freed.")
    for removal in kept:
        warn(removal.error)
    return 1 if kept else 0


def print_table(sights: Sequence[Sight]) -> None:
    """Print one line for each sandbox."""
    ids = [str(sight.record.id) for sight in sights]
    length = next(n for n in range(SHORT_ID, 37) if len({identity[:n] for identity in ids}) == len(ids))
    rows = [("ID", "STATE", "SIZE", "USED", "KERNEL", "NOTEBOOK")]
    for sight in sights:
        record = sight.record
        used = ago(record.last_used)
        rows.append(
            (str(record.id)[:length], sight.state, size(sight.size), used, record.kernel_name, record.notebook_path)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def details(sight: Sight) -> dict[str, str]:
    """Everything about a sandbox, line by line."""
    record = sight.record
    lines = {
        "id": str(record.id),
        "state": sight.state,
        "storage": f"{record.storage}, {record.where}",
        "id in storage": record.sandbox_id,
        "kernel": record.kernel_name,
        "settings": json.dumps(record.settings),
        "notebook": record.notebook_path,
        "created": f"{record.created.isoformat(timespec='seconds')}, {ago(record.created)}",
        "used": f"{record.last_used.isoformat(timespec='seconds')}, {ago(record.last_used)}",
    }
    lines |= {name: f"{size(item.size)}, {item.created}" for name, item in sight.stored.items()}
    if sight.problem is not None:
        lines["problem"] = str(sight.problem)
    return lines


def as_json(sight: Sight) -> dict[str, Any]:
    """The same for a program."""
    record = sight.record
    return {
        "id": str(record.id),
        "state": sight.state,
        "storage": record.storage,
        "where": record.where,
        "sandbox_id": record.sandbox_id,
        "kernel_name": record.kernel_name,
        "settings": record.settings,
        "notebook_path": record.notebook_path,
        "created": record.created.isoformat(),
        "last_used": record.last_used.isoformat(),
        "size": sight.size,
        "stored": {name: {"created": item.created, "size": item.size} for name, item in sight.stored.items()},
        "problem": str(sight.problem) if sight.problem else None,
    }


def title(record: SandboxRecord) -> str:
    """A sandbox as a person knows it."""
    known = ", ".join(words for words in (record.kernel_name, record.notebook_path) if words)
    return f"{record.id} ({known})" if known else str(record.id)


def span(text: str) -> timedelta:
    """A length of time such as 30d."""
    if not (match := AGE.fullmatch(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time such as 30d, 12h or 2w")
    return timedelta(**{UNITS[match[2]]: int(match[1])})


def ago(time: datetime) -> str:
    """How long ago that was, roughly."""
    seconds = (datetime.now(UTC) - time).total_seconds()
    for length, name in SPANS:
        if seconds >= length:
            return f"{count(int(seconds // length), name)} ago"
    return "just now" if seconds >= 0 else "in the future"


def count(number: int, thing: str) -> str:
    """A number of things."""
    plural = f"{thing}es" if thing.endswith("x") else f"{thing}s"
    return f"{number} {thing if number == 1 else plural}"


def size(amount: int | None) -> str:
    """A number of bytes in three digits or so."""
    if amount is None:
        return "?"
    value, units = float(amount), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 9.95 or units[0] == "B" else f"{value:.1f} {units[0]}"


def print_json(value: Any) -> None:
    """Print for a program."""
    print(json.dumps(value, indent=1))


def say(line: str) -> None:
    """Print a line for a person, also on a terminal that cannot show all of it."""
    print(plain(line).encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))


def warn(problem: SandboxError | None) -> None:
    """Tell what is wrong beside the result."""
    print(f"jupyter sandbox: {plain(str(problem))}", file=sys.stderr)


def plain(line: str) -> str:
    """One line, with nothing in it that a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in line)
