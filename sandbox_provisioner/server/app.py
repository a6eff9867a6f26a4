"""Load the Jupyter Server extension: the hibernating kernel manager, guarded contents, the REST API and telemetry.

The wheel enables the extension. A package's configuration file cannot set the kernel manager's class; an extension
can, because it is linked before the server creates the manager. A class that the user configured is kept, and a
server that uses a gateway keeps the gateway's class. ``contents.managers`` guards the server's access to files.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_core.utils import ensure_async
from jupyter_server.serverapp import ServerApp

from .._text import printable_lines
from ..config import own_folder
from ..contents.managers import CLASSES, GuardedContents
from ..gvisor.mounts import within
from ..setup.kernelspecs import Kernel, without_twin
from . import drives, jupyter_handlers, telemetry
from .exporters import guard_exporters
from .handlers import handlers
from .kernel_manager import SandboxKernelManager, is_sandboxed
from .kernel_websocket import SandboxWebsocketConnection
from .plain_kernels import PlainKernelGuard

if TYPE_CHECKING:
    from .kernels import ServerKernels
    from .service import Sandboxes
    from .settings import ServerSettings

FORMATTER = logging.Formatter()
FILES = 1 << 16
"""Limit of open files to request for the server, up to the hard limit. A notebook uses about 30, even hibernated."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Return the module to link and load. Called by Jupyter Server."""
    return [{"module": "sandbox_provisioner.extension"}]


def _link_jupyter_server_extension(serverapp: ServerApp) -> None:
    """Choose the server's classes. Called by Jupyter Server before it creates its kernel and contents managers."""
    _guard_contents(serverapp)
    _run_no_code_of_shared_cwd(serverapp)
    _keep_virtual_documents_private(serverapp)
    guard_exporters()
    if "kernel_websocket_connection_class" not in serverapp.config.ServerApp:
        _choose_class(serverapp, "kernel_websocket_connection_class", SandboxWebsocketConnection)
    if "kernel_manager_class" in serverapp.config.ServerApp:
        serverapp.log.info("Sandboxed kernels are not hibernated: ServerApp.kernel_manager_class is configured.")
        return
    if "min_open_files_limit" not in serverapp.config.ServerApp:
        serverapp.min_open_files_limit = min(FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    _choose_class(serverapp, "kernel_manager_class", SandboxKernelManager)


def _choose_class(serverapp: ServerApp, trait: str, our_class: type) -> None:
    """Make ``our_class`` the default of one of the server's traits, unless the server uses a gateway."""
    default = getattr(serverapp, f"_default_{trait}")

    def choose(server: ServerApp) -> Any:
        """Return the class. Called when the server first needs it: only then is the gateway configured."""
        return default() if server.gateway_config.gateway_enabled else our_class

    # traitlets looks for an instance's own default under this name.
    setattr(serverapp, f"_{trait}_default", choose)


def _guard_contents(serverapp: ServerApp) -> None:
    """Replace the contents manager by its guarded subclass if it is one of Jupyter Server's own, even if configured."""
    guarded: Any = CLASSES.get(serverapp.contents_manager_class)
    if guarded:
        # The server reads its configuration again when a later extension updates it.
        if "contents_manager_class" in serverapp.config.ServerApp:
            serverapp.config.ServerApp.contents_manager_class = guarded
        serverapp.contents_manager_class = guarded


def _run_no_code_of_shared_cwd(serverapp: ServerApp) -> None:
    """Keep the server from running code from its working directory if kernels can write there.

    ``python -m jupyter_server`` puts that folder on ``sys.path``, and nbconvert looks for templates in it.
    """
    here, root = os.path.realpath(os.getcwd()), os.path.realpath(serverapp.root_dir)
    if not within(here, root) and not within(root, here):
        return
    if removed := [entry for entry in sys.path if os.path.realpath(entry) == here]:
        sys.path[:] = [entry for entry in sys.path if entry not in removed]
        serverapp.log.info("Python modules in %s are not imported by the server: kernels can write there.", here)
    if "extra_template_basedirs" not in serverapp.config.TemplateExporter:
        serverapp.config.TemplateExporter.extra_template_basedirs = []
    if "autodetect" not in serverapp.config.LanguageServerManager:
        serverapp.config.LanguageServerManager.autodetect = False
        serverapp.log.info(
            "Language servers are not detected: they would run code in %s, where kernels can write. Start the server "
            "in another folder, or set LanguageServerManager.autodetect.",
            here,
        )


def _keep_virtual_documents_private(serverapp: ServerApp) -> None:
    """Keep jupyter_lsp's copies of documents out of the folders that kernels can write: it would follow links there."""
    if "virtual_documents_dir" not in serverapp.config.LanguageServerManager and "JP_LSP_VIRTUAL_DIR" not in os.environ:
        serverapp.config.LanguageServerManager.virtual_documents_dir = str(own_folder() / "virtual-documents")


def _keep_log_printable(serverapp: ServerApp) -> None:
    """Keep control characters out of the server's log: it contains names and contents of files that kernels choose."""
    for handler in serverapp.log.handlers:
        if _make_printable not in handler.filters:
            handler.addFilter(_make_printable)


def _warn_of_unknown_settings(serverapp: ServerApp) -> None:
    if configured := serverapp.config.SandboxProvisioner:
        from ..kernel.settings import unknown_settings

        for warning in unknown_settings(configured, "The server's configuration or command line"):
            serverapp.log.warning(warning)


async def _report_new_kernels(serverapp: ServerApp) -> None:
    """Log the names of kernels that were installed after the last `jupyter sandbox setup`."""
    assert serverapp.kernel_spec_manager is not None
    found = (await ensure_async(serverapp.kernel_spec_manager.get_all_specs())).items()
    every_kernel = is_sandboxed({}, serverapp)
    missing = without_twin(Kernel(name, Path(one["resource_dir"]), one["spec"]) for name, one in found)
    if missing and not every_kernel:
        names = ", ".join(missing)
        serverapp.log.info("Kernels without a sandboxed twin: %s. `jupyter sandbox setup` tries to make them.", names)


def _make_printable(record: logging.LogRecord) -> bool:
    """Replace unprintable characters in a record's text; the formatter indents its further lines. Return True."""
    with suppress(Exception):  # a record that cannot be formatted is reported by the handler
        record.msg, record.args = printable_lines(record.getMessage()), ()
    if record.exc_info and not record.exc_text:
        record.exc_text = printable_lines(FORMATTER.formatException(record.exc_info))
    return True


def _load_jupyter_server_extension(serverapp: ServerApp) -> None:
    """Add the REST API and telemetry. Called by Jupyter Server once its managers exist."""
    _keep_log_printable(serverapp)
    _warn_of_unknown_settings(serverapp)
    manager = serverapp.contents_manager
    if not isinstance(manager, GuardedContents):
        serverapp.log.warning(
            "The server's access to files is not guarded against links that a notebook's code creates: %s is not one "
            "of Jupyter Server's own contents managers.",
            type(manager).__name__,
        )
    guard = PlainKernelGuard(parent=serverapp)
    if not serverapp.gateway_config.gateway_enabled:  # a gateway's kernels do not run on this machine
        drives.attach(serverapp)
        guard.attach()
        replaced = jupyter_handlers.handlers(serverapp.base_url, guard)
        serverapp.web_app.add_handlers(".*$", replaced)  # type: ignore[no-untyped-call]
        serverapp.io_loop.add_callback(_report_new_kernels, serverapp)
    kernels = cache(lambda: _kernels(serverapp))
    service, settings = (
        cache(lambda: _service(serverapp, kernels())),
        cache(lambda: _settings(serverapp, kernels(), guard)),
    )
    serverapp.web_app.add_handlers(".*$", handlers(serverapp.base_url, service, guard, settings))  # type: ignore[no-untyped-call]
    telemetry.attach(serverapp, serverapp.kernel_manager)


def _kernels(serverapp: ServerApp) -> ServerKernels:
    """Return the server's kernels. Called at the first request, because it imports most of this package."""
    from .kernels import ServerKernels

    return ServerKernels(
        serverapp.kernel_manager, serverapp.session_manager, serverapp.contents_manager, serverapp.root_dir
    )


def _service(serverapp: ServerApp, kernels: ServerKernels) -> Sandboxes:
    """Return the operations of the REST API. Called at the first request."""
    from ..provisioner import SandboxProvisioner
    from .service import Sandboxes

    settings = SandboxProvisioner(config=serverapp.config)
    return Sandboxes(kernels, settings.storage_dir, settings.runsc)


def _settings(serverapp: ServerApp, kernels: ServerKernels, guard: PlainKernelGuard) -> ServerSettings:
    """Return the report of the server's settings. Called at the first request."""
    from .settings import ServerSettings

    return ServerSettings(serverapp, kernels, guard)
