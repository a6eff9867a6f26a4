"""Describe everything that a template is built from and depends on, so that a start can recognise its template.

A template belongs to a kernelspec and contains no data of a notebook. It is built with only those environment variables
that an interpreter or a library reads when it starts (FROZEN). All others, and so every secret, are given to each copy.
A start with other values for the FROZEN variables uses no template.
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

from .. import __version__
from ..errors import MetadataError
from ..guest.capabilities import CARRIED
from ..gvisor.bundle import GUEST, BundleSpec, Mount, all_mounts
from ..gvisor.interpreter import as_zygote
from ..gvisor.mounts import within
from ..gvisor.runsc import Runsc
from ..kernel.relay import CHANNELS
from ..kernel.starting import Start
from ..persistence import decoding, metadata
from ..persistence.compatibility import cpu_features
from .store import mark

FORMAT = 2
FROZEN = {
    "LANG", "LANGUAGE", "TZ", "HOME", "USER", "LOGNAME", "TMPDIR", "JPY_PARENT_PID", "IPYTHONDIR", "MPLBACKEND",
    "MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME",
}  # fmt: skip
"""Environment variables that a template is built with, in addition to those with FROZEN_PREFIXES."""
FROZEN_PREFIXES = ("LC_", "PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_")
PROFILE = re.compile("profile|ipython[-_]dir|config", re.IGNORECASE)
"""Matches command-line options that give IPython a folder or a file of the user."""
CONNECTION_FILE = "/run/jupyter/kernel-template.json"
_PUBLIC = {"transport", "ip", "signature_scheme", "kernel_name", *(f"{channel}_port" for channel in CHANNELS)}


@dataclass(frozen=True)
class Recipe:
    """Everything that a kernelspec's template is built from. The ``carried`` folder has no source: copies get one."""

    kernel_name: str
    argv: tuple[str, ...]
    """The command as Jupyter would start it, but with CONNECTION_FILE."""
    env: Mapping[str, str]
    connection: Mapping[str, Any]
    """Content of the connection file; the key is empty."""
    spec: BundleSpec
    platform: str
    runsc: Runsc
    preload: tuple[str, ...]
    settings: str
    """Digest of the kernelspec's whole environment."""

    @property
    def key(self) -> str:
        """Digest of the recipe, the code, the runsc and the machine, which identifies the template."""
        program = self.argv[0]  # the same interpreter may be named by different links
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
        """Return the recipe as JSON data for the build process."""
        return asdict(self) | {"runsc": [str(self.runsc.path), self.runsc.version]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Recipe:
        """Return the recipe from the result of ``to_json``. Raises MetadataError if it is invalid."""
        try:
            path, version = value["runsc"]
            fields = value | {
                "argv": tuple(value["argv"]),
                "preload": tuple(value["preload"]),
                "spec": decoding.decode(BundleSpec, value["spec"], metadata.ADDED),
                "runsc": Runsc(Path(path), version),
            }
            return cls(**fields)
        except (TypeError, ValueError, LookupError) as error:
            raise MetadataError(f"Invalid recipe of a template: {error}.") from error


def frozen_part(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in ``env`` that a template is built with."""
    return {name: value for name, value in env.items() if name in FROZEN or name.startswith(FROZEN_PREFIXES)}


def recipe(
    kernel_name: str,
    start: Start,
    bare: BundleSpec,
    platform: str,
    runsc: Runsc,
    preload: tuple[str, ...],
    kernelspec_env: Mapping[str, str],
) -> Recipe | None:
    """Return the recipe of the template for ``start``; None if such a kernel cannot have one."""
    connection = json.loads(start.files[start.connection_file])
    if not as_zygote(start.argv) or "curve_secretkey" in connection or _profiled(start, bare):
        return None
    settings = hashlib.sha256(json.dumps(dict(kernelspec_env), sort_keys=True).encode()).hexdigest()
    return Recipe(
        kernel_name=kernel_name,
        argv=tuple(part.replace(start.connection_file, CONNECTION_FILE) for part in start.argv),
        env=frozen_part(start.env) | {"PATH": os.defpath},
        connection={name: value for name, value in connection.items() if name in _PUBLIC} | {"key": ""},
        spec=replace(
            bare, carried=Mount("", CARRIED, True), inner=(), environment={"PATH": os.defpath, "HOME": bare.home}
        ),
        platform=platform,
        runsc=runsc,
        preload=preload,
        settings=settings,
    )


def _profiled(start: Start, spec: BundleSpec) -> bool:
    """Return True if IPython's folder may be the user's own: the template would open its history and other files."""
    folder = start.env.get("IPYTHONDIR", f"{start.env['HOME']}/.ipython")
    named = any(part.startswith("-") and PROFILE.search(part) for part in start.argv)
    return named or any(mount.source and within(folder, mount.destination) for mount in all_mounts(spec))


def _guest_code() -> str:
    digest = hashlib.sha256()
    for path in sorted(GUEST.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
