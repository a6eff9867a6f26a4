"""Implement ``jupyter sandbox config``: show the effective settings and the places that set them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from traitlets.config import Config

from ..client import ProblemError, SandboxClient, running_servers
from ..config import Source
from ..errors import BadRequestError
from ..sandbox.model import EffectiveSetting, EffectiveSettings, encode
from .options import Commands, add_reach
from .output import print_json, print_table, say, warn
from .targets import SERVER_TIMEOUT
from .templates import configuration

ABOUT = "show every setting, its value, and the place that sets it"
EPILOG = """\
The later place takes precedence: built-in, configuration (a file or the command line of the server), environment
variable of the server, `config` in the kernelspec, request that started the kernel. Without NOTEBOOK and --kernel, no
kernelspec's own settings are included. One of your running servers on this machine reports its settings: with NOTEBOOK,
one with this notebook in its folder. Without such a server, they are read from the configuration files and this
command's environment, as for a server that you would start here.
"""


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = add_reach(commands, "config", run, ABOUT)
    parser.epilog = EPILOG
    parser.add_argument("notebook", nargs="?", default="", metavar="NOTEBOOK", help="path of a notebook")
    parser.add_argument("--kernel", default="", metavar="NAME", help="settings of this kernel")
    parser.add_argument("--changed", action="store_true", help="leave out the settings with built-in values")


def run(arguments: argparse.Namespace) -> int:
    """Run ``jupyter sandbox config`` and return its exit status."""
    for found, place in _from_servers(arguments):
        _print(found, place, arguments)
        return 0
    place = "no running server; read from the configuration files and this command's environment"
    _print(_from_files(arguments), place, arguments)
    return 0


def _from_servers(arguments: argparse.Namespace) -> Iterator[tuple[EffectiveSettings, str]]:
    """Yield the settings that servers report, with the servers' addresses."""
    if arguments.server:
        with SandboxClient(arguments.server, arguments.token) as client:
            yield client.settings(arguments.kernel or None, arguments.notebook or None), client.url
        return
    notebook = os.path.abspath(arguments.notebook) if arguments.notebook else ""
    for server in () if arguments.no_server else running_servers():
        path = os.path.relpath(notebook, server.root_dir) if notebook else ""
        if path.startswith(".."):
            continue
        with SandboxClient(server.url, server.token or arguments.token, SERVER_TIMEOUT) as client:
            try:
                yield client.settings(arguments.kernel or None, path or None), client.url
            except ProblemError as error:
                if error.status != 404:  # a server without this package, or with an older version
                    raise


def _from_files(arguments: argparse.Namespace) -> EffectiveSettings:
    """Return the settings that a new server would have. Raises BadRequestError for an unknown kernel or notebook."""
    from ..server import settings  # Jupyter Server takes seconds to import

    config, notebook = configuration(), os.path.abspath(arguments.notebook) if arguments.notebook else ""
    name = arguments.kernel or (settings.recorded_kernel(notebook) if notebook else "")
    if notebook and not name:
        if not os.path.exists(notebook):
            raise BadRequestError(f"There is no notebook {notebook!r:.200}.", "Check the path.")
        raise BadRequestError(
            f"There is no sandbox of the notebook {notebook!r:.200} yet, so its kernel is not known.",
            "Name the kernel with --kernel NAME.",
        )
    spec = None
    if name:
        KernelProvisionerFactory.instance(config=config)
        try:
            spec = KernelSpecManager(config=config).get_kernel_spec(name)
        except NoSuchKernel:
            raise BadRequestError(f"There is no kernel named {name!r:.200}.") from None
        settings.require_sandboxed(name, spec, None)
    owners = [settings.kernel_settings(config, spec), *(kind(config=config) for kind in settings.OWNERS[1:])]
    return settings.report(owners, name, notebook, Config(), {})


def _print(found: EffectiveSettings, place: str, arguments: argparse.Namespace) -> None:
    items = [each for each in found.items if not arguments.changed or each.source != Source.BUILT_IN]
    if arguments.json:
        shown = {**encode(found), "items": [encode(each) for each in items]}
        print_json({"server": place if place.startswith("http") else None, **shown})
        return
    say(f"Server: {place}")
    say(f"Kernel: {found.kernel_name or 'any whose kernelspec has no own settings'}")
    say("")
    print_table(("SETTING", "VALUE", "FROM"), [(each.name, _text(each.value), _origin(each)) for each in items])
    for warning in found.warnings:
        warn(warning)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _origin(setting: EffectiveSetting) -> str:
    match setting.source:
        case Source.BUILT_IN:
            return "built-in"
        case Source.CONFIGURATION:
            return setting.where
        case Source.REQUEST:
            return "the request that started the kernel"
        case source:
            return f"{source} {setting.where}"
