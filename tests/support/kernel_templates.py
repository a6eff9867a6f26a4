"""Templates for tests that start kernels as copies of them."""

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
    """Return the template of a kernelspec. Build it first if there is none, or only an outdated one."""
    recipe, found = recipe_for(name, Config()), shelf.get(name)
    if found and found.key == recipe.key and not found.changed:
        return found
    try:
        return asyncio.run(build(recipe, shelf, wait=True))
    except SandboxError:
        # The first test in a new environment writes bytecode caches, so files change during the build.
        time.sleep(2)
        return asyncio.run(build(recipe, shelf, wait=True))


def is_copy(km: Any) -> bool:
    """Return True if a kernel is a copy of a template."""
    return km.provisioner.sandbox.spec.carried is not None
