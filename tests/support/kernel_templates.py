"""Templates of kernels for tests that start copies of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from traitlets.config import Config

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.templates.build import build
from sandbox_provisioner.templates.match import recipe_for
from sandbox_provisioner.templates.store import Template, TemplateShelf


def have_template(name: str, shelf: TemplateShelf) -> Template | None:
    """Make the template of a kernelspec, unless there is a current one."""
    recipe, found = recipe_for(name, Config()), shelf.get(name)
    if found and found.key == recipe.key and not found.changed:
        return found
    try:
        return asyncio.run(build(recipe, shelf, wait=True))
    except SandboxError:  # a cache of modules, which the first test of a new environment writes, was changed just now
        time.sleep(2)
        return asyncio.run(build(recipe, shelf, wait=True))


def is_copy(km: Any) -> bool:
    """Whether a kernel came of a template."""
    return km.provisioner.sandbox.spec.carried is not None
