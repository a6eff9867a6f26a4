"""Define the options that commands of ``jupyter sandbox`` share, and complete their ids and names in a shell.

Completion reads only this user's records and storage: it must not wait for a server.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from ..errors import ConfigurationError, SandboxError
from ..persistence.metadata import ListedCheckpoint, Stored
from ..persistence.names import valid_id
from ..persistence.records import SandboxRecord
from ..sandbox.user_sandboxes import Persistence, registry

AGE = re.compile(r"([0-9]{1,6})([smhdw])")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
TOKEN_VARIABLE = "JUPYTER_TOKEN"
ID_HELP = "an id shown by `list`, the beginning of an id, or the path or unique file name of a notebook"
SERVERS = """\
Your servers on this machine report the sandboxes whose kernels they have; all others are read from storage. A sandbox
that a server has open is changed through that server.
"""

Commands = argparse._SubParsersAction
"""The type of argparse's collection of subcommands."""
Arguments = argparse._ActionsContainer
"""The type of a parser or a group of arguments."""
Run = Callable[[argparse.Namespace], int]
Completer = Callable[..., dict[str, str]]
Read = Callable[[Persistence, SandboxRecord], Mapping[str, Stored | ListedCheckpoint]]


def add_reach(
    commands: Commands[argparse.ArgumentParser], name: str, run: Run, about: str, json: bool = True
) -> argparse.ArgumentParser:
    """Add a command on sandboxes, with the options for servers and JSON, and return its parser."""
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=SERVERS)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--server", metavar="URL", default="", help="use only this Jupyter Server")
    where.add_argument("--no-server", action="store_true", help="use only storage, no server")
    parser.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE, ""),
        help=f"token of the server, if it is not found automatically; the variable {TOKEN_VARIABLE} keeps it secret",
    )
    parser.set_defaults(run=run, json=False)
    if json:
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def add_ids(parser: argparse.ArgumentParser, number: str | int = "+") -> None:
    """Add the argument for one or more sandboxes, or for the given number of sandboxes."""
    ids = parser.add_argument("ids", nargs=number, metavar="ID", help=ID_HELP)
    ids.completer = complete_ids  # type: ignore[attr-defined]  # for argcomplete


def add_name(parser: Arguments, flag: str, completer: Completer, help: str | None = None) -> None:
    """Add the argument for the name of an existing savepoint or snapshot."""
    stored_name = parser.add_argument(flag, metavar="NAME", type=name, help=help)
    stored_name.completer = completer  # type: ignore[attr-defined]


def name(text: str) -> str:
    """Return a valid name of a savepoint or snapshot. Raises ArgumentTypeError. Called by argparse."""
    try:
        return valid_id(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(
            str(error).replace("sandbox's id", "name").replace("An id", "A name")
        ) from None


def span(text: str) -> timedelta:
    """Return the duration of a text such as 30d. Raises ArgumentTypeError. Called by argparse."""
    if not (match := AGE.fullmatch(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 45m, 12h, 30d or 2w")
    return timedelta(**{UNITS[match[2]]: int(match[1])})


# -- completion in a shell -------------------------------------------------------------------------------------------


def complete_ids(prefix: str, **_: Any) -> dict[str, str]:
    """Return the ids with this prefix, each with its kernel and notebook. Called by argcomplete."""
    return {
        str(record.id): f"{record.kernel_name} {record.notebook_path}".strip()
        for record in registry().list().records
        if str(record.id).startswith(prefix)
    }


def complete_savepoints(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    """Return the savepoints of the sandbox on the command line that begin with ``prefix``. Called by argcomplete."""
    return _names(prefix, parsed_args, lambda storage, record: storage.summarise(record).savepoints)


def complete_snapshots(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    """Return the sandbox's file snapshots that begin with ``prefix``. Called by argcomplete."""
    return _names(prefix, parsed_args, Persistence.snapshots)


def _names(prefix: str, parsed_args: argparse.Namespace, read: Read) -> dict[str, str]:
    try:
        storage: Persistence = parsed_args.open()
        stored = read(storage, storage.registry.find(parsed_args.ids[0]))
    except (SandboxError, OSError):
        return {}
    return {name: each.created for name, each in stored.items() if name.startswith(prefix)}
