"""Implement ``jupyter sandbox allow-plain``: allow a kernel without a sandbox for a notebook that ran in a sandbox."""

from __future__ import annotations

import argparse
import os

from ..errors import SandboxError
from ..errors.kinds import Kind
from ..sandbox.model import PlainNotebook, PlainNotebooks, encode
from ..sandbox.sandboxed_notebooks import SandboxedNotebook, SandboxedNotebooks
from .options import Commands
from .output import print_json, print_table, say

ABOUT = """\
A server refuses to start a kernel without a sandbox for a notebook that ran in a sandbox: code in the sandbox may have
changed the kernel in the notebook's file. This command allows it, until the notebook runs in a sandbox again. The
notebook's cells then run with all your rights. Without NOTEBOOK, the command lists the permissions.
"""


class UnknownNotebookError(SandboxError, kind=Kind.NOT_FOUND):
    """No notebook that ran in a sandbox has this path, or several have it."""


class UnknownKernelError(SandboxError, kind=Kind.BAD_REQUEST):
    """No kernel was named, and none was refused for the notebook."""


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    about = "let a notebook that ran in a sandbox use a kernel without one"
    parser = commands.add_parser("allow-plain", help=about, description=ABOUT)
    parser.add_argument("notebook", nargs="?", metavar="NOTEBOOK", help="path of the notebook, or the end of its path")
    parser.add_argument("--kernel", metavar="NAME", help="the kernel to allow; default: the one that was refused last")
    parser.add_argument("--revoke", action="store_true", help="revoke the permission")
    parser.add_argument("--json", action="store_true", help="print the permissions as JSON")
    parser.set_defaults(run=run, interrupted="no permission was given.")


def run(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox allow-plain`` and return its exit status."""
    notebooks = SandboxedNotebooks()
    if arguments.notebook:
        entry = _find(notebooks, arguments.notebook)
        kernel = "" if arguments.revoke else arguments.kernel or entry.refused
        if not kernel and not arguments.revoke:
            problem = f"No kernel without a sandbox was refused for {entry.notebook}."
            raise UnknownKernelError(problem, "Name one with --kernel.")
        notebooks.allow(entry.notebook, kernel)
        _report(entry.notebook, kernel, arguments.json)
        return 0
    allowed = [PlainNotebook(entry.notebook, entry.allowed) for entry in notebooks.entries() if entry.allowed]
    if arguments.json:
        print_json(encode(PlainNotebooks(tuple(allowed))))
    elif allowed:
        print_table(("NOTEBOOK", "KERNEL"), [(one.notebook_path, one.kernel_name) for one in allowed])
    else:
        say("No notebook has the permission to use a kernel without a sandbox.")
    return 0


def _find(notebooks: SandboxedNotebooks, wanted: str) -> SandboxedNotebook:
    """Return the entry of a notebook, by its path, or by the end of its path. Raises UnknownNotebookError."""
    if entry := notebooks.find(os.path.abspath(wanted)):
        return entry
    end = f"/{os.path.normpath(wanted).lstrip('/')}"
    found = [entry for entry in notebooks.entries() if entry.notebook.endswith(end)]
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(entry.notebook for entry in found)
        raise UnknownNotebookError(f"{wanted!r:.200} is the end of several paths: {paths}.", "Use one of these.")
    raise UnknownNotebookError(f"Notebook {wanted!r:.200} never ran in a sandbox.", "It needs no permission.")


def _report(notebook: str, kernel_name: str, as_json: bool) -> None:
    if as_json:
        print_json(encode(PlainNotebook(notebook, kernel_name)))
    elif kernel_name:
        say(f"Notebook {notebook} may now use kernel {kernel_name}, until it runs in a sandbox again.")
    else:
        say(f"Notebook {notebook} may now use sandboxed kernels only.")
