"""Implement ``jupyter sandbox allow-plain``: let a notebook that ran in a sandbox use a kernel without a sandbox."""

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
Code in a sandbox can change the kernel that its notebook's file names. A server therefore refuses plain kernels
(kernels without a sandbox) for a notebook that ran in a sandbox. This command allows one plain kernel for a notebook,
until the notebook runs in a sandbox again. In that kernel, cells have all your rights. Without NOTEBOOK, the command
lists the permissions.
"""


class UnknownNotebookError(SandboxError, kind=Kind.NOT_FOUND):
    """The given path matches none of the notebooks that ran in a sandbox, or several of them."""


class UnknownKernelError(SandboxError, kind=Kind.BAD_REQUEST):
    """``--kernel`` is missing. Its default, the kernel that was last refused for the notebook, does not exist."""


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    about = "let a notebook that ran in a sandbox use a plain kernel (a kernel without a sandbox)"
    parser = commands.add_parser("allow-plain", help=about, description=ABOUT)
    parser.add_argument("notebook", nargs="?", metavar="NOTEBOOK", help="path of the notebook, or the end of its path")
    parser.add_argument("--kernel", metavar="NAME", help="kernel to allow; default: the last refused kernel")
    parser.add_argument("--revoke", action="store_true", help="revoke the permission")
    parser.add_argument("--json", action="store_true", help="print the permissions as JSON")
    parser.set_defaults(run=run, interrupted="no permission was changed.")


def run(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox allow-plain`` and return its exit status."""
    notebooks = SandboxedNotebooks()
    if arguments.notebook:
        path, entry = _find(notebooks, arguments.notebook)
        kernel = "" if arguments.revoke else arguments.kernel or entry.refused
        if not kernel and not arguments.revoke:
            problem = f"No kernel was refused for {entry.notebook}, so --kernel has no default."
            raise UnknownKernelError(problem, "Name the kernel to allow with --kernel NAME.")
        if arguments.revoke:
            notebooks.revoke(path)
        else:
            notebooks.allow(path, kernel)
        _report(path, kernel, arguments.json)
        return 0
    allowed = [PlainNotebook(entry.notebook, entry.allowed) for entry in notebooks.entries() if entry.allowed]
    if arguments.json:
        print_json(encode(PlainNotebooks(tuple(allowed))))
    elif allowed:
        print_table(("NOTEBOOK", "KERNEL"), [(one.notebook_path, one.kernel_name) for one in allowed])
    else:
        say("No permissions.")
    return 0


def _find(notebooks: SandboxedNotebooks, wanted: str) -> tuple[str, SandboxedNotebook]:
    """Return the path and the entry of a notebook, by its path or the end of its path. Raises UnknownNotebookError."""
    path = os.path.abspath(wanted)
    if entry := notebooks.find(path):
        return path, entry
    end = f"/{os.path.normpath(wanted).lstrip('/')}"
    found = [entry for entry in notebooks.entries() if entry.notebook.endswith(end)]
    if len(found) == 1:
        return found[0].notebook, found[0]
    if found:
        paths = ", ".join(entry.notebook for entry in found)
        raise UnknownNotebookError(f"{wanted!r:.200} matches several notebooks: {paths}.", "Give one of these paths.")
    problem = f"There is no record that notebook {wanted!r:.200} ran in a sandbox."
    raise UnknownNotebookError(problem, "Check the path. Without such a record, a notebook needs no permission.")


def _report(notebook: str, kernel_name: str, as_json: bool) -> None:
    if as_json:
        print_json(encode(PlainNotebook(notebook, kernel_name)))
    elif kernel_name:
        say(f"Allowed kernel {kernel_name} for notebook {notebook}, until the notebook runs in a sandbox again.")
    else:
        say(f"Revoked: notebook {notebook} can use only sandboxed kernels.")
