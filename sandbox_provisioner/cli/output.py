"""Print the results of ``jupyter sandbox``: text and tables, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from .._text import indented, one_line
from ..errors import SandboxError
from ..sandbox.model import NamedState, encode
from ..setup.progress import Progress, Step
from .targets import Found

SPANS = (
    (365 * 86400, "year"), (30 * 86400, "month"), (86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"),
)  # fmt: skip
SHORT_ID = 8
"""Characters of a shortened id; tables use more if ids would not be unique."""


def print_sandboxes(found: Sequence[Found]) -> None:
    """Print one line for each sandbox."""
    ids = [each.sandbox.id for each in found]
    longest = max(map(len, ids))
    length = next(n for n in range(SHORT_ID, longest + SHORT_ID) if len({identity[:n] for identity in ids}) == len(ids))
    rows = []
    for each in found:
        sandbox = each.sandbox
        state = f"{sandbox.state}, busy" if sandbox.busy else sandbox.state
        used, notebook = ago(sandbox.last_used), sandbox.notebook_path or ""
        rows.append((sandbox.id[:length], state, size(sandbox.size), used, sandbox.kernel_name, notebook))
    print_table(("ID", "STATE", "SIZE", "USED", "KERNEL", "NOTEBOOK"), rows)


def print_named(states: Sequence[NamedState]) -> None:
    """Print one line for each savepoint or snapshot."""
    print_table(("NAME", "SIZE", "CREATED"), [(each.name, size(each.size), moment(each.created)) for each in states])


def print_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table with aligned columns."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        say("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def details(found: Found) -> dict[str, str]:
    """Return the details of a sandbox, by label."""
    sandbox, record = found.sandbox, found.record
    lines = {"id": sandbox.id, "state": sandbox.state if sandbox.persistent else f"{sandbox.state}, ephemeral"}
    if sandbox.busy_reasons:
        lines["not idle"] = ". ".join(sandbox.busy_reasons)
    if found.server:
        lines["server"] = found.server.client.url
    if record:
        lines["storage"] = f"{record.storage}, {record.where}"
    lines |= {
        "id in storage": sandbox.sandbox_id,
        "kernel": sandbox.kernel_name + (f", {sandbox.kernel_id}" if sandbox.kernel_id else ""),
        "notebook": sandbox.notebook_path or "",
        "created": moment(sandbox.created),
        "used": moment(sandbox.last_used),
    }
    if sandbox.files:
        lines |= {
            "writable": ", ".join(sandbox.files.writable),
            "read-only": ", ".join(sandbox.files.read_only),
            "in memory": ", ".join(sandbox.files.in_memory),
        }
    if record:
        lines["settings"] = json.dumps(record.settings)
    for name, stored in (("checkpoint", sandbox.checkpoint), ("previous checkpoint", sandbox.previous)):
        if stored:
            lines[name] = f"{size(stored.size)}, {moment(stored.created)}"
    lines |= {f"savepoint {each.name}": f"{size(each.size)}, {moment(each.created)}" for each in sandbox.savepoints}
    lines |= {f"snapshot {each.name}": f"{size(each.size)}, {moment(each.created)}" for each in sandbox.snapshots}
    if sandbox.lost_since:
        lines["lost"] = f"all changes after {moment(sandbox.lost_since)}: it ended without being saved"
    return lines | ({"problem": sandbox.problem} if sandbox.problem else {})


def as_json(found: Found) -> dict[str, Any]:
    """Return a sandbox as JSON: the fields of the REST API, and storage, place and settings from its record."""
    record = found.record
    return {
        **encode(found.sandbox),
        "storage": record.storage if record else None,
        "where": record.where if record else None,
        "settings": dict(record.settings) if record else None,
    }


def moment(time: datetime) -> str:
    """Return a time, with how long ago it was."""
    return f"{time.isoformat(timespec='seconds')}, {ago(time)}"


def ago(time: datetime) -> str:
    """Return roughly how long ago a time was."""
    seconds = (datetime.now(UTC) - time).total_seconds()
    for length, name in SPANS:
        if seconds >= length:
            return f"{count(int(seconds // length), name)} ago"
    return "just now" if seconds >= 0 else "in the future"


def count(number: int, thing: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    plural = f"{thing}es" if thing.endswith("x") else f"{thing}s"
    return f"{number} {thing if number == 1 else plural}"


def size(amount: int | None) -> str:
    """Return a number of bytes with a unit and at most three digits; ``?`` for None."""
    if amount is None:
        return "?"
    value, units = float(amount), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 9.95 or units[0] == "B" else f"{value:.1f} {units[0]}"


def print_json(value: Any) -> None:
    """Print ``value`` as JSON."""
    print(json.dumps(value, indent=1))


def say(line: str) -> None:
    """Print a line of text, with escapes for characters that the terminal's encoding does not have."""
    print(one_line(line).encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))


def warn(problem: object) -> None:
    """Print a problem to stderr. Indent all lines after the first, so that they cannot imitate another message."""
    print("jupyter sandbox:", indented(str(problem)), file=sys.stderr)


@contextmanager
def reported(progress: Progress, title: str) -> Iterator[Step]:
    """Run the block as a step of ``progress``. After an error, print only "failed" there, and raise the error again."""
    reason: Exception | None = None
    with suppress(SandboxError), progress.step(title) as step:
        try:
            yield step
        except (SandboxError, OSError) as error:
            reason = error
            raise SandboxError("failed") from error
    if reason:
        raise reason
