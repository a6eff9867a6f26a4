"""Report the effective settings of a server and of one of its kernels, and the place that sets each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from jupyter_client.kernelspec import KernelSpec, NoSuchKernel
from jupyter_core.utils import ensure_async
from traitlets.config import Config

from ..config import Settings, Source, storage_variables
from ..contents.managers import GuardedContents
from ..errors import BadRequestError
from ..kernel.settings import unknown_settings
from ..provisioner import SandboxProvisioner
from ..sandbox import user_sandboxes
from ..sandbox.model import EffectiveSetting, EffectiveSettings
from .kernel_manager import SandboxKernelManager, is_sandboxed
from .kernels import Live, ServerKernels
from .plain_kernels import PlainKernelGuard

OWNERS = (SandboxProvisioner, SandboxKernelManager, GuardedContents, PlainKernelGuard)
"""The classes with settings. Users configure them by these names."""
COMMAND_LINE = "the command line"
FILES = "Jupyter's configuration files"


class ServerSettings:
    """The settings of one server. Server loop only."""

    def __init__(self, server: Any, kernels: ServerKernels, guard: PlainKernelGuard) -> None:
        self._server = server
        self._kernels = kernels
        self._guard = guard

    async def show_settings(self, kernel_name: str = "", notebook_path: str = "") -> EffectiveSettings:
        """Return the server's settings, and those of a kernel: of a notebook's kernel, or of a kernelspec.

        Without both arguments, the settings are those of a kernel whose kernelspec sets none. Raises BadRequestError
        for a kernel that does not exist or does not run in a sandbox.
        """
        live = None
        if notebook_path:
            live, kernel_name = await self._kernel_of(notebook_path, kernel_name)
        spec = await self._kernelspec(kernel_name) if kernel_name else None
        provisioner = live.provisioner if live else kernel_settings(self._server.config, spec)
        others = (self._server.kernel_manager, self._server.contents_manager, self._guard)
        return await asyncio.to_thread(
            report,
            [provisioner, *(each for each in others if isinstance(each, Settings))],
            kernel_name,
            notebook_path,
            self._server.cli_config,
            requested(live.provisioner) if live else {},
        )

    async def _kernel_of(self, notebook_path: str, kernel_name: str) -> tuple[Live | None, str]:
        """Return a notebook's open kernel, if any, and the name of the kernelspec that the notebook would use."""
        notebook = self._kernels.notebook(notebook_path)
        kernel_id = await self._kernels.kernel_of(notebook)
        for live in self._kernels.live():
            if live.kernel_id == kernel_id and kernel_name in ("", live.kernel_name):
                return live, live.kernel_name
        recorded = kernel_name or await asyncio.to_thread(recorded_kernel, notebook.absolute)
        return None, recorded or next(iter(await self._kernels.names()), "")

    async def _kernelspec(self, name: str) -> KernelSpec:
        try:
            spec: KernelSpec = await ensure_async(self._server.kernel_spec_manager.get_kernel_spec(name))
        except NoSuchKernel:
            raise BadRequestError(f"There is no kernel named {name!r:.200}.", "", "kernel_name") from None
        require_sandboxed(name, spec, self._server)
        return spec


def require_sandboxed(name: str, spec: KernelSpec, server: Any) -> None:
    """Raise BadRequestError if the kernel does not run in a sandbox on this server."""
    if not is_sandboxed(spec.metadata, server):
        remedy = "`jupyter sandbox setup` adds a kernel that does."
        raise BadRequestError(f"Kernel {name!r:.200} does not run in a sandbox.", remedy, "kernel_name")


def recorded_kernel(notebook: str) -> str:
    """Return the kernel of a notebook's last used sandbox; empty without one. Blocks."""
    found = [record for record in user_sandboxes.registry().list().records if record.notebook_path == notebook]
    return max(found, key=lambda record: record.last_used).kernel_name if found else ""


def kernel_settings(configuration: Config, spec: KernelSpec | None) -> SandboxProvisioner:
    """Return the settings of a kernel that is started from a kernelspec, or from one without own settings."""
    stanza = spec.metadata.get("kernel_provisioner", {}).get("config", {}) if spec else {}
    return SandboxProvisioner(kernel_spec=spec, config=configuration, **stanza)


def requested(provisioner: SandboxProvisioner) -> dict[str, Any]:
    """Return the settings of an open sandbox that the request which started its kernel overrides."""
    handle = provisioner.handle
    if handle is None:
        return {}
    found: dict[str, Any] = {"enable_handoff": handle.hands_over}
    if handle.idle_timeout is not None:
        found |= {"enable_checkpoint_at_idle": True, "idle_timeout": handle.idle_timeout}
    elif handle.can_save and provisioner.idle_timeout:
        found["enable_checkpoint_at_idle"] = False
    return {name: value for name, value in found.items() if value != getattr(provisioner, name)}


def report(
    owners: Iterable[Settings],
    kernel_name: str,
    notebook_path: str,
    command_line: Config,
    overrides: Mapping[str, Any],
) -> EffectiveSettings:
    """Return the settings of ``owners``; ``overrides`` are those of the kernel's request. Blocks.

    Raises ConfigurationError if a variable has an invalid value.
    """
    can_checkpoint, items, warnings = False, [], []
    for owner in owners:
        title = next(kind.__name__ for kind in OWNERS if isinstance(owner, kind))
        kernel = isinstance(owner, SandboxProvisioner)
        if isinstance(owner, SandboxProvisioner):
            can_checkpoint = user_sandboxes.settings(owner.storage_dir).can_checkpoint()
            warnings = unknown_settings(owner.config.SandboxProvisioner, "The configuration or command line")
            warnings += unknown_settings(owner.unknown, f"The kernelspec {kernel_name!r}")
        for name, variable in owner.variables().items():
            source, value = owner.source(name), getattr(owner, name)
            where = {
                Source.CONFIGURATION: COMMAND_LINE if name in command_line[title] else FILES,
                Source.ENVIRONMENT: variable,
                Source.OWN: kernel_name,
            }.get(source, "")
            if kernel and name in overrides:
                source, value, where = Source.REQUEST, overrides[name], ""
            if name == "enable_checkpoint_at_idle" and source is Source.BUILT_IN:
                value = value and can_checkpoint
            items.append(EffectiveSetting(f"{title}.{name}", value, str(source), where))
    for variable, text in storage_variables().items():
        items.append(EffectiveSetting(variable, text, str(Source.ENVIRONMENT), variable))
    return EffectiveSettings(kernel_name or None, notebook_path or None, tuple(items), tuple(warnings))
