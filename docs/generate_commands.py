"""Generate the reference of `jupyter sandbox` from its argument parser."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

from generate_settings import table

from sandbox_provisioner.cli import app, exit_codes
from sandbox_provisioner.client import ProblemError
from sandbox_provisioner.errors import subclasses
from sandbox_provisioner.errors.kinds import ExitStatus

SHARED = 3
"""Options that at least this many commands have are listed once."""

NOTE = "The errors of a server have the same exit status as on this machine."

Commands = Mapping[str, argparse.ArgumentParser]


def markdown() -> str:
    """Return the help of each command, with common options listed once."""
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    commands = _commands(app._parser())
    common = _common(commands)
    lines = ["## Options of most commands", "", *_arguments(common.values()), ""]
    for words in _shared_words(commands):
        lines += [words, ""]
    lines += ["## Commands", ""]
    for name, parser in commands.items():
        lines += [f"### {name}", "", *_about(parser, set(common), _shared_words(commands))]
    return "\n".join(lines).replace(sys.prefix, "PREFIX")


def exits() -> str:
    """Return a table of the exit statuses with the exceptions that cause them."""
    rows = []
    for status in ExitStatus:
        errors = [error for error in subclasses() if error.kind.exit_status == status and error is not ProblemError]
        names = sorted(error.__name__ for error in errors)
        rows.append((f"{status.value}", status.meaning, ", ".join(f"`{name}`" for name in names)))
    return "\n".join([*table(("exit status", "", "errors"), rows), "", exit_codes.HELP.splitlines()[-1], NOTE, ""])


def _commands(parser: argparse.ArgumentParser) -> Commands:
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def _title(action: argparse.Action) -> str:
    """Return an option with its value, or the name of an argument."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    if not action.option_strings:
        return f"`{name}`"
    value = name if action.metavar else "|".join(map(str, action.choices or ()))
    return f"`{' '.join([action.option_strings[-1], *([value] if action.nargs != 0 and value else [])])}`"


def _common(commands: Commands) -> dict[str, argparse.Action]:
    actions = [action for parser in commands.values() for action in parser._actions if action.option_strings]
    counted = Counter((_title(action), action.help) for action in actions)
    shared = {title for (title, _), count in counted.items() if count >= SHARED}
    return {_title(action): action for action in actions if _title(action) in shared}


def _shared_words(commands: Commands) -> list[str]:
    counted = Counter(parser.epilog for parser in commands.values() if parser.epilog)
    return [words for words, count in counted.items() if count >= SHARED]


def _about(parser: argparse.ArgumentParser, common: set[str], told: Iterable[str]) -> list[str]:
    lines = ["```text", parser.format_usage().strip(), "```", "", (parser.description or "").strip(), ""]
    own = [action for action in parser._actions if _title(action) not in common]
    if own:
        lines += [*_arguments(own), ""]
    if parser.epilog and parser.epilog not in told:
        lines += ["```text", parser.epilog.strip(), "```", ""]
    return lines


def _arguments(actions: Iterable[argparse.Action]) -> list[str]:
    rows = [(_title(action), (action.help or "").replace("%%", "%")) for action in actions]
    return table(("argument", ""), rows)
