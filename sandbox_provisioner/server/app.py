"""The Jupyter Server extension that the wheel enables: a kernel manager that hibernates, the REST API and telemetry.

It also guards the server's access to files, see ``guarded_contents``.

A configuration file of a package's can enable an extension and nothing else; an extension is linked before the server
makes its kernel manager, and so can choose it. A class that the user configured stays, and a gateway has its own.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

from jupyter_server.serverapp import ServerApp

from . import telemetry
from .folders import within
from .guarded_contents import CLASSES, GuardedContents
from .handlers import handlers
from .kernelmanager import SandboxKernelManager
from .sandboxes import Sandboxes
from .serverkernels import ServerKernels

FILES = 1 << 16
"""Open files that the server may have, where the system allows it: a notebook has about thirty, awake or asleep."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Called by Jupyter Server to find what to link and load."""
    return [{"module": "sandbox_provisioner.extension"}]


def _link_jupyter_server_extension(serverapp: ServerApp) -> None:
    """Called by Jupyter Server before it makes its managers of kernels and of contents."""
    _guard_contents(serverapp)
    _trust_no_shared_folder(serverapp)
    if "kernel_manager_class" in serverapp.config.ServerApp:
        serverapp.log.info("Sandboxed kernels are not hibernated: ServerApp.kernel_manager_class is configured.")
        return
    if "min_open_files_limit" not in serverapp.config.ServerApp:
        serverapp.min_open_files_limit = min(FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    usual = serverapp._default_kernel_manager_class

    def choose(server: ServerApp) -> Any:
        """Asked for when the server makes its kernel manager, because only then it knows of its gateway."""
        return usual() if server.gateway_config.gateway_enabled else SandboxKernelManager

    # Where traitlets looks for an object's own default.
    serverapp._kernel_manager_class_default = choose  # type: ignore[attr-defined]


def _guard_contents(serverapp: ServerApp) -> None:
    """Replace one of Jupyter Server's own contents managers, also a configured one, by its guarded subclass."""
    guarded: Any = CLASSES.get(serverapp.contents_manager_class)
    if guarded:
        # A later extension that updates the server's configuration makes the server read this again.
        if "contents_manager_class" in serverapp.config.ServerApp:
            serverapp.config.ServerApp.contents_manager_class = guarded
        serverapp.contents_manager_class = guarded


def _trust_no_shared_folder(serverapp: ServerApp) -> None:
    """Keep the server from running code in the folder that it was started in, where kernels can write.

    ``python -m jupyter_server`` puts that folder on the module search path, and nbconvert looks for templates in it.
    """
    here, root = os.path.realpath(os.getcwd()), os.path.realpath(serverapp.root_dir)
    if not within(here, root) and not within(root, here):
        return
    if removed := [entry for entry in sys.path if os.path.realpath(entry) == here]:
        sys.path[:] = [entry for entry in sys.path if entry not in removed]
        serverapp.log.info("Python modules in %s are not imported by the server: kernels can write there.", here)
    if "extra_template_basedirs" not in serverapp.config.TemplateExporter:
        serverapp.config.TemplateExporter.extra_template_basedirs = []


def _load_jupyter_server_extension(serverapp: ServerApp) -> None:
    """Called by Jupyter Server when it is up."""
    manager = serverapp.contents_manager
    if not isinstance(manager, GuardedContents):
        serverapp.log.warning(
            "The server's access to files is not guarded against links that a notebook's code makes: %s is not one of "
            "Jupyter Server's own contents managers.",
            type(manager).__name__,
        )
    kernels = ServerKernels(
        serverapp.kernel_manager, serverapp.session_manager, serverapp.contents_manager, serverapp.root_dir
    )
    configured = serverapp.config.SandboxProvisioner
    sandboxes = Sandboxes(kernels, str(configured.get("storage_dir", "")), str(configured.get("runsc", "")))
    serverapp.web_app.add_handlers(".*$", handlers(serverapp.base_url, sandboxes))  # type: ignore[no-untyped-call]
    telemetry.attach(serverapp, serverapp.kernel_manager)
