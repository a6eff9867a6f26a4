"""Prospect: the template that a start could come of, if there is one and nothing that it depends on has changed."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from jupyter_client.kernelspec import NoSuchKernel
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets.config import Config

from . import recipes, templatebuild
from .bundle import BundleSpec
from .errors import SandboxError
from .launch import Launch, plan
from .recipes import Recipe
from .restore_plan import Grant
from .runsc import Runsc
from .runsc import find as find_runsc
from .settings import SandboxSettings
from .templates import Template, TemplateShelf
from .variables import filtered

log = logging.getLogger(__name__)

UNFIT_FOR = timedelta(days=1)
FAILED_FOR = timedelta(minutes=5)
"""For how long it is believed that a kernelspec can have no template, or that making one fails."""


@dataclass(frozen=True)
class Prospect:
    """How a kernel could be started as a copy of ``template``, in a sandbox of ``spec``; if there is none, build it."""

    recipe: Recipe
    spec: BundleSpec
    template: Template | None
    shelf: TemplateShelf

    @contextmanager
    def image(self) -> Iterator[Path]:
        """The template's image, which stays for as long as the block lasts. OSError if it is gone."""
        assert self.template is not None
        with self.shelf.using(self.template) as image:
            yield image

    def outdated(self) -> bool:
        """Whether the template does not fit any more. Blocks."""
        return self.template is None or bool(self.template.changed)

    def drop(self) -> None:
        """Forget the template, if that can be done; else it is passed over again."""
        if self.template:
            with suppress(OSError):
                self.shelf.drop(self.recipe.kernel_name, self.template.image)

    def build(self) -> None:
        """Have a template made in the background. Blocks for milliseconds."""
        templatebuild.in_background(self.recipe)


def find(launch: Launch, runsc: Runsc, settings: SandboxSettings) -> Prospect | None:
    """What ``launch`` could come of; None if it has to start from nothing, and no new template would help. Blocks."""
    recipe = recipe_of(launch, runsc, settings)
    folder = launch.start.folder
    if recipe is None or folder is None or not recipes.suits(launch.bare, launch.spec, folder):
        return None
    shelf = TemplateShelf()
    template = shelf.get(recipe.kernel_name)
    spec = recipes.carrying(launch.bare, folder)
    if template is None or template.key != recipe.key:
        return Prospect(recipe, spec, None, shelf)
    if template.unfit:
        patience = FAILED_FOR if template.failed else UNFIT_FOR
        return None if template.age < patience else Prospect(recipe, spec, None, shelf)
    if changed := template.changed:
        log.info("The template of %s is made anew: %s has changed", recipe.kernel_name, changed)
        Prospect(recipe, spec, template, shelf).drop()
        return Prospect(recipe, spec, None, shelf)
    return Prospect(recipe, spec, template, shelf)


def grant_of(launch: Launch, platform: str) -> Grant:
    """Return the mounts that a restore may use instead of a start: those that ``launch`` would start with."""
    folder = launch.start.folder
    bindable = folder is not None and recipes.suits(launch.bare, launch.spec, folder)
    carrying = recipes.carrying(launch.bare, folder) if folder and bindable else None
    return Grant(launch.spec, platform, folder, carrying, tuple(launch.start.watched))


def recipe_of(launch: Launch, runsc: Runsc, settings: SandboxSettings) -> Recipe | None:
    """The recipe for a kernel like this one; None if there can be no template of it, or it is an unusual one."""
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
    """The recipe for a kernelspec, as a server with this configuration has it; SandboxError if it can have none."""
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
                f"Kernel {kernel_name} does not run in a sandbox.", "`jupyter sandbox setup` adds a twin."
            )
        settings.template = "use"  # somebody wants it: whether servers use it is another matter
        given = asyncio.run(KernelProvisionerBase.pre_launch(settings, env=dict(os.environ)))
        env = filtered(given["env"], [*settings.kernel_spec.env, *settings.pass_environment])
        manager.write_connection_file()
        runsc = find_runsc(settings.runsc)
        launch = plan(manager.format_kernel_cmd(), env, None, manager.connection_file, settings, runsc)
        recipe = recipe_of(launch, runsc, settings)
    if recipe is None:
        raise SandboxError(
            f"Kernel {kernel_name} can have no template: it is no Python module, or sees an IPython profile of yours.",
            "It starts from nothing.",
        )
    return recipe
