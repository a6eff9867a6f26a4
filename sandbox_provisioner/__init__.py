"""Jupyter kernels inside gVisor sandboxes.

This module, ``sandbox_provisioner.client`` and ``sandbox_provisioner.errors`` are the public API. All other modules can
change with any release. Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import AsyncSandboxClient, ProblemError, Sandbox, SandboxClient, running_servers
    from .config import GCSConfig
    from .errors import SandboxError
    from .gvisor.bundle import BundleSpec, Mount
    from .gvisor.interpreter import visible as interpreter_mounts
    from .gvisor.runsc import Runsc
    from .gvisor.runsc import find as find_runsc
    from .gvisor.runtime_dir import left_behind
    from .gvisor.sandbox import GVisorSandbox
    from .persistence.metadata import GCSArtifact, GCSSandboxMetadata
    from .persistence.records import SandboxRecord
    from .process import Process
    from .provisioner import SandboxProvisioner
    from .sandbox.handle import SandboxHandle
    from .sandbox.manager import SandboxManager
    from .sandbox.registry import PersistentSandboxRegistry
    from .sandbox.user_sandboxes import Persistence
    from .sandbox.user_sandboxes import settings as storage_settings
    from .server.kernel_manager import SandboxKernelManager

__version__ = "0.1.0"

__all__ = [
    "AsyncSandboxClient",
    "BundleSpec",
    "GCSArtifact",
    "GCSConfig",
    "GCSSandboxMetadata",
    "GVisorSandbox",
    "Mount",
    "Persistence",
    "PersistentSandboxRegistry",
    "ProblemError",
    "Process",
    "Runsc",
    "Sandbox",
    "SandboxClient",
    "SandboxError",
    "SandboxHandle",
    "SandboxKernelManager",
    "SandboxManager",
    "SandboxProvisioner",
    "SandboxRecord",
    "__version__",
    "find_runsc",
    "interpreter_mounts",
    "left_behind",
    "running_servers",
    "storage_settings",
]

_ORIGINS = {
    "AsyncSandboxClient": "client:AsyncSandboxClient",
    "BundleSpec": "gvisor.bundle:BundleSpec",
    "GCSArtifact": "persistence.metadata:GCSArtifact",
    "GCSConfig": "config:GCSConfig",
    "GCSSandboxMetadata": "persistence.metadata:GCSSandboxMetadata",
    "GVisorSandbox": "gvisor.sandbox:GVisorSandbox",
    "Mount": "gvisor.bundle:Mount",
    "PersistentSandboxRegistry": "sandbox.registry:PersistentSandboxRegistry",
    "Persistence": "sandbox.user_sandboxes:Persistence",
    "ProblemError": "client:ProblemError",
    "Process": "process:Process",
    "Runsc": "gvisor.runsc:Runsc",
    "Sandbox": "client:Sandbox",
    "SandboxClient": "client:SandboxClient",
    "SandboxError": "errors:SandboxError",
    "SandboxHandle": "sandbox.handle:SandboxHandle",
    "SandboxKernelManager": "server.kernel_manager:SandboxKernelManager",
    "SandboxManager": "sandbox.manager:SandboxManager",
    "SandboxProvisioner": "provisioner:SandboxProvisioner",
    "SandboxRecord": "persistence.records:SandboxRecord",
    "find_runsc": "gvisor.runsc:find",
    "interpreter_mounts": "gvisor.interpreter:visible",
    "left_behind": "gvisor.runtime_dir:left_behind",
    "running_servers": "client:running_servers",
    "storage_settings": "sandbox.user_sandboxes:settings",
}
"""Module and name of each public object; the same as the imports above, which only type checkers read."""


def __getattr__(name: str) -> Any:
    """Import a public object. Called by Python when the module does not have the attribute ``name`` yet."""
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _ORIGINS[name].partition(":")
    found = globals()[name] = getattr(import_module(f".{module}", __name__), attribute)
    return found


def __dir__() -> list[str]:
    """Return the public names. Called by ``dir``."""
    return sorted({*globals(), *__all__})
