"""Define the options that commands of ``jupyter sandbox`` share: where to look for sandboxes, and their ids."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from datetime import timedelta

from ..errors import ConfigurationError
from ..persistence.names import valid_id
from . import completion

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
Run = Callable[[argparse.Namespace], int]


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
        help=f"token of the server, if not found automatically; setting {TOKEN_VARIABLE} instead keeps it secret",
    )
    parser.set_defaults(run=run, json=False)
    if json:
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def add_ids(parser: argparse.ArgumentParser) -> None:
    """Add the argument for one or more sandboxes."""
    action = parser.add_argument("ids", nargs="+", metavar="ID", help=ID_HELP)
    completion.offer(action, completion.ids)


def add_id(parser: argparse.ArgumentParser) -> None:
    """Add the argument for one sandbox."""
    action = parser.add_argument("ids", nargs=1, metavar="ID", help=ID_HELP)
    completion.offer(action, completion.ids)


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
