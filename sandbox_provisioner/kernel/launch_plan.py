"""Plan the start of a sandboxed kernel from the command and the environment that Jupyter would run on the host."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_config_path, jupyter_path, jupyter_runtime_dir

from ..gvisor.bundle import BundleSpec, Mount, all_mounts, parse_mount
from ..gvisor.interpreter import (
    NeededPath,
    environment_parts,
    needed_paths,
    pip_target,
    resolve,
    trusted_mounts,
    with_entrypoint,
)
from ..gvisor.mounts import homes, masks, shields, unlinked, within
from ..gvisor.reserved_dirs import hide, require_unreserved, reserved_folders
from ..gvisor.runsc import Runsc
from ..gvisor.runtime_dir import runtime_roots
from .folders import Workplace
from .relay import CHANNELS
from .scope import protected
from .settings import SandboxSettings
from .starting import Start

GUEST_RUNTIME = "/run/jupyter"
CONNECTION = ("key", "signature_scheme", "curve_publickey", "curve_secretkey")
"""Fields of a connection file that a kernel and its clients must share, besides the endpoints."""
NETWORK = "SANDBOX_NETWORK"
"""Variable that tells the kernel its setting ``network``, for the notes on errors (see ``guest.notes``)."""
PIP_OFFLINE = {"PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "3", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""Variables that make pip fail at once without network, unless the user set them."""
PACKAGES = "pip installs packages here in this sandbox, because the virtual environment is read-only.\n"


@dataclass(frozen=True)
class Launch:
    """A plan: the sandbox's spec, the kernel's process, and the addresses of its channels inside."""

    spec: BundleSpec
    start: Start
    targets: dict[str, str]
    bare: BundleSpec
    """The sandbox's spec without the kernel's folder, for a template."""
    env: Mapping[str, str]
    """The kernel's variables, without those that this module adds."""
    platform: str
    guarded: tuple[Mount, ...] = ()
    """Read-only mounts in the kernel's folder that a sandbox which was saved without them does not need."""


def plan(
    cmd: list[str],
    env: dict[str, str],
    workplace: Workplace | None,
    connection_file: str,
    settings: SandboxSettings,
    runsc: Runsc,
    root: str = "",
) -> Launch:
    """Return the plan to start ``cmd`` in a sandbox with ``workplace``, if given, and the mounts of ``settings``.

    ``root`` is the server's root folder; kernels may have written to anything below it. Raises CommandNotFoundError,
    and ConfigurationError for an invalid mount.
    """
    connection = os.path.realpath(connection_file)
    inside = f"{GUEST_RUNTIME}/{os.path.basename(connection)}"
    argv = [part.replace(connection, inside) for part in cmd]
    argv[0] = resolve(argv[0], env)
    folder, cwd = workplace or (None, env["HOME"])
    guarded = protected(folder, cwd, settings.protected_paths) if folder else []
    info = json.loads(Path(connection).read_text()) | _guest_endpoints(settings.guest_transport)
    packages, variables = pip_target(argv[0], env)
    configured, watched = _configured(folder, settings, root)
    needed = needed_paths(argv, env) + (needed_paths([sys.executable], env) if argv[0] != sys.executable else [])
    spec, bare = (_bundle(needed, env, shown, configured, settings, runsc) for shown in (folder, None))
    guarded = [mount for mount in guarded if mount.destination not in {given.destination for given in spec.mounts}]
    spec = replace(spec, mounts=(*guarded, *spec.mounts))
    start = Start(
        argv=with_entrypoint(argv),
        env=_pip_variables(settings.network) | env | variables | {NETWORK: settings.network},
        cwd=cwd,
        connection_file=inside,
        folder=folder,
        files={inside: json.dumps(info), **({f"{packages}/README": PACKAGES} if packages else {})},
        watched=(*watched, *_inside(folder, spec)),
        remember={"connection": {name: info[name] for name in CONNECTION if name in info}, "cwd": cwd},
    )
    return Launch(spec, start, targets(info), bare, env, settings.platform, tuple(guarded))


def _inside(folder: Mount | None, spec: BundleSpec) -> list[Mount]:
    """Return the mounts of host files in ``folder``, which a kernel that runs there could replace by links."""
    if folder is None:
        return []
    mounts = [mount for mount in all_mounts(spec) if mount.source and mount != folder]
    inner = [mount for mount in mounts if within(mount.source, folder.source)]
    return [mount for mount in inner if os.path.realpath(mount.source) == mount.source]


def _configured(
    folder: Mount | None, settings: SandboxSettings, root: str
) -> tuple[tuple[Mount, ...], tuple[Mount, ...]]:
    """Return all mounts of the settings, and separately those that other kernels could replace during the start.

    Raises ConfigurationError for a link that a kernel may have made, or a writable mount of a reserved folder.
    """
    mounts = [parse_mount(text) for text in settings.mounts]
    writable = [root] if root else []
    writable += [mount.source for mount in ([folder] if folder else []) + mounts if mount.writable]
    found = [unlinked(mount, writable, "mounts") for mount in mounts]
    reserved = reserved_folders(settings.storage_dir)
    for mount in found:
        if mount.writable:
            require_unreserved(mount, reserved, "mounts")
    above = [os.path.realpath(place) for place in writable]
    watched = [mount for mount in found if any(within(os.path.dirname(mount.source), place) for place in above)]
    return tuple(found), tuple(watched)


def _bundle(
    needed: list[NeededPath],
    env: dict[str, str],
    folder: Mount | None,
    configured: tuple[Mount, ...],
    settings: SandboxSettings,
    runsc: Runsc,
) -> BundleSpec:
    """Return the sandbox's spec: mounts of the ``needed`` paths, of ``folder``, if given, and of the settings."""
    given = [*([folder] if folder else []), *configured]
    reserved = reserved_folders(settings.storage_dir)
    hide(given, reserved, env["HOME"])  # creates missing reserved folders, before the lookups below
    seen = trusted_mounts(needed, [mount.source for mount in given if mount.writable])
    trusted = [*jupyter_path(), *jupyter_config_path(), str(runsc.path.parent)]
    trusted += [part for mount in seen for part in (mount.source, *environment_parts(mount.source))]
    mounts = [*seen, *given, *shields(given, trusted)]
    secret = {*homes(), jupyter_runtime_dir(), *map(str, runtime_roots())}
    hidden = dict.fromkeys([*masks(mounts, secret, env["HOME"]), *hide(mounts, reserved, env["HOME"])])
    return BundleSpec(
        python=os.path.realpath(sys.executable),
        home=env["HOME"],
        user=env["USER"],
        mounts=(*mounts, *hidden),
        network=settings.network,
        environment={"PATH": env.get("PATH", os.defpath), "HOME": env["HOME"]},
        read_only=True,
    )


def _pip_variables(network: str) -> dict[str, str]:
    """Return the variables for pip in a sandbox with this ``network``."""
    return PIP_OFFLINE if network == "none" else {}


def _guest_endpoints(transport: str) -> dict[str, Any]:
    """Return the kernel's endpoints for the connection file inside the sandbox."""
    first, ip = (1, f"{GUEST_RUNTIME}/kernel") if transport == "ipc" else (5001, "127.0.0.1")
    ports = {f"{channel}_port": first + number for number, channel in enumerate(CHANNELS)}
    return {"transport": transport, "ip": ip, **ports}


def targets(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the stream target of each channel, from the connection file inside the sandbox."""
    mark = "unix:{ip}-{port}" if info["transport"] == "ipc" else "tcp:{ip}:{port}"
    return {channel: mark.format(ip=info["ip"], port=info[f"{channel}_port"]) for channel in CHANNELS}
