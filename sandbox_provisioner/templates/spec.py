"""Recipe: all that a template is made from, and depends on, so that a start can tell whether a template is its own.

A template belongs to a kernelspec, and is made without anything of a user's or of a notebook's. Of the environment it
gets what an interpreter or a library reads when it starts, by name; the rest, and so every secret, is given to each
copy. A start that differs in what was frozen uses no template.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import __version__
from .bundle import GUEST, BundleSpec, Mount, all_mounts
from .environment import cpu_features
from .errors import MetadataError
from .folders import within
from .guest.powers import CARRIED
from .interpreter import frozen
from .kernel import Start
from .metadata import spec_from_json
from .relay import CHANNELS
from .runsc import Runsc
from .templates import mark

FORMAT = 1
FROZEN = {
    "LANG", "LANGUAGE", "TZ", "HOME", "USER", "LOGNAME", "TMPDIR", "JPY_PARENT_PID", "IPYTHONDIR", "MPLBACKEND",
    "MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME",
}  # fmt: skip
"""The variables that a template is made with, besides those whose names begin so:"""
FROZEN_PREFIXES = ("LC_", "PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_")
PROFILE = re.compile("profile|ipython[-_]dir|config", re.IGNORECASE)
"""In an option: a folder or a file of the user's that IPython is to read."""
CONNECTION_FILE = "/run/jupyter/kernel-template.json"
_PUBLIC = {"transport", "ip", "signature_scheme", "kernel_name", *(f"{channel}_port" for channel in CHANNELS)}


@dataclass(frozen=True)
class Recipe:
    """What a template of the kernelspec ``kernel_name`` is made from; its spec's ``carried`` folder is an empty one."""

    kernel_name: str
    argv: tuple[str, ...]
    """As Jupyter would start it, with CONNECTION_FILE."""
    env: Mapping[str, str]
    connection: Mapping[str, Any]
    """What is in the connection file; there is no key yet."""
    spec: BundleSpec
    platform: str
    runsc: Runsc
    preload: tuple[str, ...]
    settings: str
    """A digest of the kernelspec's whole environment."""

    @property
    def key(self) -> str:
        """What the template is known by: a digest of all this and of what it implies."""
        program = self.argv[0]  # Jupyter names an interpreter as it was itself called, by one of several links
        facts = {
            **self.to_json(),
            "argv": [os.path.dirname(program), os.path.realpath(program), *self.argv[1:]],
            "format": FORMAT,
            "version": __version__,
            "runsc": [self.runsc.version, mark(str(self.runsc.path))],
            "guest": _guest_code(),
            "mounts": all_mounts(self.spec),
            "cpu": cpu_features(),
            "machine": [os.uname().machine, os.uname().release],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """For the process that makes the template."""
        return asdict(self) | {"runsc": [str(self.runsc.path), self.runsc.version]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Recipe:
        """What ``to_json`` made; MetadataError if it did not."""
        try:
            path, version = value["runsc"]
            fields = value | {
                "argv": tuple(value["argv"]),
                "preload": tuple(value["preload"]),
                "spec": spec_from_json(value["spec"]),
                "runsc": Runsc(Path(path), version),
            }
            return cls(**fields)
        except (TypeError, ValueError, LookupError) as error:
            raise MetadataError(f"This is no recipe of a template: {error}.") from error


def frozen_part(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a template is made with, of those that its copies have."""
    return {name: value for name, value in env.items() if name in FROZEN or name.startswith(FROZEN_PREFIXES)}


def suits(bare: BundleSpec, spec: BundleSpec, folder: Mount) -> bool:
    """Whether a sandbox that shows ``folder`` differs from the ``bare`` one by that alone.

    If something of the host's lies in the folder, or has to be kept from a kernel that can write there, a folder that
    is bound to its place later would cover that.
    """
    mounts, without = {*all_mounts(spec)} - {folder}, {*all_mounts(bare)}
    inside = any(within(mount.destination, folder.destination) for mount in without)
    return mounts == without and not inside


def carrying(bare: BundleSpec, folder: Mount) -> BundleSpec:
    """The spec of a copy that has ``folder``."""
    return replace(bare, carried=folder)


def recipe(
    kernel_name: str,
    start: Start,
    bare: BundleSpec,
    platform: str,
    runsc: Runsc,
    preload: tuple[str, ...],
    kernelspec_env: Mapping[str, str],
) -> Recipe | None:
    """The recipe of the template that ``start`` could come of; None if no such kernel can be frozen."""
    connection = json.loads(start.files[start.connection_file])
    if not frozen(start.argv) or "curve_secretkey" in connection or _profiled(start, bare):
        return None
    settings = hashlib.sha256(json.dumps(dict(kernelspec_env), sort_keys=True).encode()).hexdigest()
    return Recipe(
        kernel_name=kernel_name,
        argv=tuple(part.replace(start.connection_file, CONNECTION_FILE) for part in start.argv),
        env=frozen_part(start.env) | {"PATH": os.defpath},
        connection={name: value for name, value in connection.items() if name in _PUBLIC} | {"key": ""},
        spec=replace(bare, carried=Mount("", CARRIED, True), environment={"PATH": os.defpath, "HOME": bare.home}),
        platform=platform,
        runsc=runsc,
        preload=preload,
        settings=settings,
    )


def _profiled(start: Start, spec: BundleSpec) -> bool:
    """Whether IPython's folder may be a user's own: history and all would be opened in the template."""
    place = start.env.get("IPYTHONDIR", f"{start.env['HOME']}/.ipython")
    named = any(part.startswith("-") and PROFILE.search(part) for part in start.argv)
    return named or any(mount.source and within(place, mount.destination) for mount in all_mounts(spec))


def _guest_code() -> str:
    digest = hashlib.sha256()
    for path in sorted(GUEST.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
