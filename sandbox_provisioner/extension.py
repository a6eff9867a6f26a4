"""The Jupyter Server extension that the wheel enables: it gives the server a kernel manager that hibernates.

A configuration file of a package's can enable an extension and nothing else; an extension is linked before the server
makes its kernel manager, and so can choose it. A class that the user configured stays, and a gateway has its own.
"""

from __future__ import annotations

import resource
from typing import Any

from jupyter_server.serverapp import ServerApp

from .kernelmanager import SandboxKernelManager

FILES = 1 << 16
"""Open files that the server may have, where the system allows it: a notebook has about thirty, awake or asleep."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Called by Jupyter Server to find what to link and load."""
    return [{"module": "sandbox_provisioner.extension"}]


def _link_jupyter_server_extension(serverapp: ServerApp) -> None:
    """Called by Jupyter Server before it makes its kernel manager."""
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


def _load_jupyter_server_extension(serverapp: ServerApp) -> None:
    """Called by Jupyter Server when it is up; there is nothing left to do."""
