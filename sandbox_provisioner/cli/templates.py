"""Implement ``jupyter sandbox template``: build, list and delete the templates that kernels start from."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime

from jupyter_core.application import JupyterApp
from traitlets.config import Config

from ..errors import SandboxError
from ..setup import kernelspecs
from ..setup.progress import Progress
from ..templates.store import Template, TemplateShelf
from .options import Commands
from .output import ago, print_json, print_table, reported, say, size, warn

ABOUT = """\
A template is a kernel that was checkpointed before it serves. New sandboxed kernels start as copies of it, in a
fraction of the time. A server builds a missing or outdated template in the background; this command builds templates
now, lists them and deletes them.
"""


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    about = "build, list or delete the templates that kernels start from"
    parser = commands.add_parser("template", help=about, description=ABOUT)
    parser.add_argument(
        "action", choices=("build", "list", "delete"), help="without names, build and delete apply to all templates"
    )
    parser.add_argument("names", nargs="*", metavar="KERNEL", help="name in `jupyter kernelspec list`")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run, interrupted="the unfinished step has been undone.")


def run(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox template`` and return its exit status."""
    shelf, status = TemplateShelf(), 0
    if arguments.action == "build":
        progress = Progress(sys.stderr if arguments.json else sys.stdout)
        status = build(arguments.names or _sandboxed(), progress)
    elif arguments.action == "delete":
        status = _delete(arguments.names, shelf)
    found = [each for each in shelf.list() if not arguments.names or each.kernel_name in arguments.names]
    if arguments.json:
        print_json([_as_json(each) for each in found])
    elif arguments.action == "list":
        _print(found)
    return status


def build(names: Iterable[str], progress: Progress) -> int:
    """Build the templates of these kernels and return the exit status. A failure does not stop the others."""
    from ..templates import build as templatebuild  # imports the code of kernels, which other commands do not need
    from ..templates import match

    config, failed = configuration(), []
    for name in names:
        try:
            with reported(progress, f"Template of {name}") as step:
                recipe = match.recipe_for(name, config)
                made = asyncio.run(templatebuild.build(recipe, TemplateShelf(), wait=True, say=step.note))
                step.result = _state(made) if made else ""
        except SandboxError as error:
            failed.append(error)
    for failure in failed:
        warn(failure)
    return 1 if failed else 0


def configuration() -> Config:
    """Return the configuration from a Jupyter server's files."""
    app = JupyterApp(config_file_name="jupyter_server_config")
    app.load_config_file()
    return app.config


def _sandboxed() -> list[str]:
    names = [name for name, kernel in kernelspecs.kernels().items() if kernel.sandboxed]
    if not names:
        raise SandboxError("No sandboxed kernel is installed.", "Run `jupyter sandbox setup` to install it.")
    return names


def _delete(names: list[str], shelf: TemplateShelf) -> int:
    missing = [name for name in names if not shelf.drop(name)]
    if not names:
        for each in shelf.list():
            shelf.drop(each.kernel_name)
    for name in missing:
        warn(f"{name} has no template.")
    return 1 if missing else 0


def _state(template: Template) -> str:
    if template.unfit:
        return f"none, {template.unfit}: the kernel starts without a template"
    changed = template.changed
    parts = [f"will be rebuilt at the next start: {changed} has changed" if changed else size(template.size)]
    if template.preloaded:
        parts.append(f"with {', '.join(template.preloaded)}")
    parts += [f"without {name} ({reason})" for name, reason in template.left_out.items()]
    return ", ".join(parts)


def _print(found: list[Template]) -> None:
    if not found:
        say("No templates.")
        return
    rows = [(each.kernel_name, ago(datetime.fromisoformat(each.created)), _state(each)) for each in found]
    print_table(("KERNEL", "MADE", "STATE"), rows)


def _as_json(template: Template) -> dict[str, object]:
    fields = {name: value for name, value in asdict(template).items() if name not in ("marks", "folders", "image")}
    return {**fields, "current": not template.changed}
