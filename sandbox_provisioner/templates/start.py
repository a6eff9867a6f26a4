"""Start a kernel as a copy of its template, or without one if no template is usable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import GuestError, LinkClosedError, ProtocolError, RunscError, SandboxError
from ..gvisor.bundle import BundleSpec
from ..gvisor.runsc import Runsc
from ..gvisor.sandbox import GVisorSandbox
from ..kernel.kernel import SandboxedKernel
from ..kernel.launch_plan import Launch
from ..kernel.output import Ending
from ..kernel.settings import SandboxSettings
from ..sandbox.handle import SandboxHandle
from ..workers import control
from .build import in_background
from .match import TemplateMatch, grant_of
from .store import Template
from .warm_pool import WARM_POOL

log = logging.getLogger(__name__)

TEMPLATE_ERRORS = (RunscError, GuestError, LinkClosedError, ProtocolError, FileNotFoundError)
"""Errors that a bad template can cause. Any other error would also occur without a template."""


@dataclass(frozen=True)
class KernelStart:
    """One start of ``kernel`` by the plan ``launch``, in the open sandbox ``handle`` or, if None, an ephemeral one.

    ``ending`` returns the kernel's outputs and exit callback, new for each attempt. ``require_wanted`` raises
    StateError if the kernel was shut down meanwhile: no other attempt follows. I/O thread only.
    """

    kernel: SandboxedKernel
    handle: SandboxHandle | None
    launch: Launch
    runsc: Runsc
    kernel_id: str
    ending: Callable[[], Ending]
    require_wanted: Callable[[], None]

    async def run(self, found: TemplateMatch | None, settings: SandboxSettings) -> None:
        """Start a copy of the template or, without a usable template, a new kernel."""
        if found and found.template:
            if await self._start_copy(found, found.template):
                WARM_POOL.keep_ready(found, settings.standby)
                return
            found.drop()
        await self._launch_in(self.launch.spec)
        if found and settings.template == "build":
            with suppress(OSError):  # the next start retries
                await control(in_background, found.recipe)

    async def _start_copy(self, found: TemplateMatch, template: Template) -> bool:
        """Start a copy from the warm pool or the image. Return False if the template failed."""
        if copy := WARM_POOL.take(found):
            try:
                await self._launch_in(found.spec, copy=copy)
                return True
            except SandboxError as error:
                await copy.delete()
                self.require_wanted()
                log.warning("Kernel %s: warm sandbox unusable; starting from the template: %s", self.kernel_id, error)
            except BaseException:
                await asyncio.shield(copy.delete())
                raise
        try:
            with found.shelf.using(template) as image:
                await self._launch_in(found.spec, image)
            return True
        except TEMPLATE_ERRORS as error:
            self.require_wanted()
            log.warning("Kernel %s: template unusable; starting without it: %s", self.kernel_id, error)
            return False

    async def _launch_in(
        self, spec: BundleSpec, template: Path | None = None, copy: GVisorSandbox | None = None
    ) -> None:
        """Start the kernel in a sandbox of ``spec``; as a copy of ``template``, or in ``copy``, which runs already."""
        platform = self.launch.platform
        if self.handle is None:
            handle = SandboxHandle.create_ephemeral(self.kernel_id, spec, self.runsc, platform)
        else:
            handle = self.handle
            await self.kernel.kill()
            handle.memory.replace_instance(spec, platform, grant_of(self.launch))
        if copy:
            handle.memory.adopt(copy)
        await self.kernel.launch(handle, self.launch.start, self.launch.targets, self.ending(), template)
