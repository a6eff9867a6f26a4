"""Generate tables of the settings and their variables, from the traits and from GCSConfig."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from traitlets import Enum, HasTraits

from sandbox_provisioner.config import GCSConfig, Place
from sandbox_provisioner.contents.managers import GuardedContents
from sandbox_provisioner.kernel.settings import SandboxSettings
from sandbox_provisioner.server.kernel_manager import SandboxKernelManager
from sandbox_provisioner.server.plain_kernels import PlainKernelGuard

ENVIRONMENT = re.compile(r"\s*Environment(?P<list>, comma-separated)?: (?P<name>[A-Z_]+)\.?$")
KEPT = {
    "metadata": "documents: each sandbox's kernel, lease token and checkpoints",
    "locks": "leases",
    "checkpoints": "checkpoints and savepoints",
    "snapshots": "file snapshots",
}


def settings() -> str:
    """Return the tables for SandboxProvisioner, SandboxKernelManager, GuardedContents and PlainKernelGuard."""
    with _nothing_set():
        kernel = _rows("SandboxProvisioner", SandboxSettings())
        server = _rows("SandboxKernelManager", SandboxKernelManager())
        contents = _rows("GuardedContents", GuardedContents())
        guard = _rows("PlainKernelGuard", PlainKernelGuard())
    head = ("setting and variable", "default", "meaning")
    return "\n".join(
        [
            "## A kernel: `c.SandboxProvisioner`",
            "",
            *table(head, kernel),
            "",
            "## The server: `c.SandboxKernelManager`",
            "",
            *table(head, server),
            "",
            "## The server's files: `c.GuardedContents`",
            "",
            *table(head, contents),
            "",
            "## Kernels without a sandbox: `c.PlainKernelGuard`",
            "",
            *table(head, guard),
            "",
        ]
    )


def storage() -> str:
    """Return the table of GCSConfig's variables."""
    rows = []
    for field in fields(GCSConfig):
        place = getattr(GCSConfig, field.name, None)
        if isinstance(place, Place):
            rows.append((f"`{place.bucket_variable}`", f"`{place.mount_variable}`", KEPT[field.name]))
    return "\n".join([*table(("a bucket", "a mounted folder", "content"), rows), ""])


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    columns = tuple(head)
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(cell.replace("|", r"\|") for cell in row) for row in rows]
    return [f"| {line} |" for line in lines]


def _rows(name: str, owner: HasTraits) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each trait that the class itself defines, in the order of the code."""
    own = type(owner).class_own_traits(config=True)
    for trait_name, trait in sorted(own.items(), key=lambda item: [*vars(type(owner))].index(item[0])):
        variable = ENVIRONMENT.search(trait.help)
        assert variable, f"the help of {name}.{trait_name} does not end with its environment variable"
        meaning = _code(trait.help[: variable.start()].rstrip("."))
        if isinstance(trait, Enum):
            meaning += "; one of " + ", ".join(f"`{value}`" for value in trait.values or ())
        if variable["list"]:
            meaning += "; comma-separated in the variable"
        yield f"`{trait_name}`<br>`{variable['name']}`", _shown(getattr(owner, trait_name)), meaning


def _code(text: str) -> str:
    """Return a help text as Markdown; text in single quotes becomes code."""
    return re.sub(r"(?<![\w`])'([^']+)'", r"`\1`", text)


def _shown(value: Any) -> str:
    if value in ("", []):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


@contextmanager
def _nothing_set() -> Iterator[None]:
    """Remove settings from the environment in this block, so that the tables show the defaults."""
    names = [name for name in os.environ if name.startswith(("SANDBOX_", "GCS_SANDBOX"))]
    saved = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(saved)
