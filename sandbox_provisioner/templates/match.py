"""Find the template that a start can use, if it exists and nothing that it depends on has changed."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from jupyter_client.kernelspec import NoSuchKernel
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets.config import Config

from ..errors import SandboxError
from ..gvisor.bundle import BundleSpec
from ..gvisor.carried import carry, carrying_spec, covered
from ..gvisor.mounts import within
from ..gvisor.restore_plan import Grant
from ..gvisor.runsc import Runsc
from ..gvisor.runsc import find as find_runsc
from ..kernel.env_filter import filtered
from ..kernel.launch_plan import Launch, plan
from ..kernel.settings import SandboxSettings
from . import spec as recipes
from .spec import Recipe
from .store import Template, TemplateShelf

log = logging.getLogger(__name__)

UNFIT_FOR = timedelta(days=1)
"""Time until the next build for a kernelspec that could not have a template."""
FAILED_FOR = timedelta(minutes=5)
"""Time until the next build after a failed one."""


@dataclass(frozen=True)
class TemplateMatch:
    """A start that can be a copy of ``template``, None if not built yet, in a sandbox with ``spec``."""

    recipe: Recipe
    spec: BundleSpec
    template: Template | None
    shelf: TemplateShelf

    def outdated(self) -> bool:
        """Return True if there is no template or one of its files has changed. Blocks."""
        return self.template is None or bool(self.template.changed)

    def drop(self) -> None:
        """Delete the template. An OSError is ignored: the next start tries to delete it again."""
        if self.template:
            with suppress(OSError):
                self.shelf.drop(self.recipe.kernel_name, self.template.image)


def find(launch: Launch, runsc: Runsc, settings: SandboxSettings) -> TemplateMatch | None:
    """Return the match for ``launch``; None if this start cannot use a template, even a new one. Blocks."""
    recipe = recipe_of(launch, runsc, settings)
    folder = launch.start.folder
    spec = carry(launch.bare, launch.spec, folder) if folder else None
    if recipe is None or spec is None:
        return None
    shelf = TemplateShelf()
    template = shelf.get(recipe.kernel_name)
    without = TemplateMatch(recipe, spec, None, shelf)
    if template is None or template.key != recipe.key:
        return without
    if template.unfit:
        return None if template.age < (FAILED_FOR if template.failed else UNFIT_FOR) else without
    if any(within(path, mount.source) for mount in covered(spec) for path in template.marks):
        return None  # the template uses files that the folder would cover
    found = replace(without, template=template)
    if changed := template.changed:
        log.info("The template of %s is built again: %s has changed", recipe.kernel_name, changed)
        found.drop()
        return without
    return found


def grant_of(launch: Launch) -> Grant:
    """Return the mounts that a restore may use: the same that a start by ``launch`` would have."""
    start, folder = launch.start, launch.start.folder
    trusted = tuple(mount for mount in launch.bare.mounts if mount in launch.spec.mounts)
    carrying = carrying_spec(replace(launch.bare, mounts=trusted), launch.spec, folder) if folder else None
    optional = frozenset(mount.source for mount in launch.guarded)
    return Grant(launch.spec, launch.platform, folder, carrying, start.cwd, optional, tuple(start.watched))


def recipe_of(launch: Launch, runsc: Runsc, settings: SandboxSettings) -> Recipe | None:
    """Return the recipe for this kernel; None if it cannot have a template, or if this start's environment differs."""
    kernelspec, manager = settings.kernel_spec, settings.parent
    if settings.template == "none" or kernelspec is None or manager is None:
        return None
    given = {name: launch.env[name] for name in kernelspec.env if name in launch.env}
    usual = filtered({**os.environ, **given}, [*kernelspec.env, *settings.pass_environment])
    if recipes.frozen_part(usual) != recipes.frozen_part(launch.env):
        return None
    return recipes.recipe(
        manager.kernel_name,
        launch.start,
        launch.bare,
        settings.platform,
        runsc,
        tuple(settings.preload),
        kernelspec.env,
    )


def recipe_for(kernel_name: str, config: Config) -> Recipe:
    """Return a kernelspec's recipe under a server's configuration. Raises SandboxError if it cannot have one."""
    with tempfile.TemporaryDirectory(prefix="jupyter-sandbox-template-") as folder:
        manager = KernelManager(kernel_name=kernel_name, config=config, connection_file=f"{folder}/kernel.json")
        try:
            kernelspec = manager.kernel_spec
        except NoSuchKernel:
            raise SandboxError(f"There is no kernel named {kernel_name}.") from None
        settings = KernelProvisionerFactory.instance(config=config).create_provisioner_instance(
            kernel_name, kernelspec, parent=manager
        )
        if not isinstance(settings, SandboxSettings):
            raise SandboxError(
                f"Kernel {kernel_name} does not run in a sandbox.",
                "`jupyter sandbox setup` adds a kernelspec that does.",
            )
        settings.template = "use"  # the user asked for this template, even if the setting is "none"
        given = asyncio.run(KernelProvisionerBase.pre_launch(settings, env=dict(os.environ)))
        env = filtered(given["env"], [*settings.kernel_spec.env, *settings.pass_environment])
        manager.write_connection_file()
        runsc = find_runsc(settings.runsc)
        launch = plan(manager.format_kernel_cmd(), env, None, manager.connection_file, settings, runsc)
        recipe = recipe_of(launch, runsc, settings)
    if recipe is None:
        raise SandboxError(
            f"Kernel {kernel_name} cannot have a template: it is not a Python module, or uses your IPython profile.",
            "It starts without a template.",
        )
    return recipe
