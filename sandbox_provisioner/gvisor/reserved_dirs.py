"""Keep kernels from writing to the folders in which Jupyter and this package store their own files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from jupyter_core.paths import jupyter_config_dir, jupyter_runtime_dir

from ..config import STORAGE_FOLDERS, own_folder
from ..errors import ConfigurationError
from .bundle import Mount, innermost
from .mounts import masks, planted_link, within
from .runtime_dir import runtime_roots


def reserved_folders(storage_dir: str = "", environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the reserved folders, as configured, each with the setting that defines it."""
    found = {
        jupyter_runtime_dir(): "JUPYTER_RUNTIME_DIR",
        **{str(root): "SANDBOX_RUNTIME_DIR" for root in runtime_roots()},
        str(own_folder()): "JUPYTER_DATA_DIR",
        jupyter_config_dir(): "JUPYTER_CONFIG_DIR",
        **({storage_dir: "storage_dir"} if storage_dir else {}),
        **{environ[variable]: variable for variable in STORAGE_FOLDERS if environ.get(variable)},
    }
    return {path: setting for path, setting in found.items() if os.path.isabs(path)}


def require_unreserved(mount: Mount, reserved: Mapping[str, str], setting: str) -> None:
    """Raise ConfigurationError if the source of a writable mount is, or lies in, a reserved folder."""
    for own, own_setting in reserved.items():
        if within(os.path.realpath(mount.source), os.path.realpath(own)):
            raise ConfigurationError(
                setting,
                f"{mount.source} cannot be mounted writable: it lies in {own}, where Jupyter and its sandboxes keep "
                f"their own files ({own_setting}).",
                f"Name another folder in {setting}, or set {own_setting} to one that no kernel can write to.",
            )


def hide(mounts: Iterable[Mount], reserved: Mapping[str, str], home: str) -> list[Mount]:
    """Return masks (see ``mounts.masks``) of the reserved folders that a kernel could otherwise write to.

    Creates a reserved folder that does not exist yet, so that a kernel cannot create it first. Raises
    ConfigurationError if the path of a reserved folder contains a link in a writable folder.
    """
    mounts = list(mounts)
    writable = [mount for mount in mounts if mount.source and mount.writable]
    for mount in writable:
        for own, setting in reserved.items():
            _require_plain(own, setting, mount)
    covered = {mount.destination for mount in mounts}
    return [
        mask
        for mask in masks(writable, reserved, home)
        if mask.destination not in covered
        if (above := innermost(mask.destination, mounts)) and above.writable
    ]


def _require_plain(own: str, setting: str, mount: Mount) -> None:
    """Require that no link in ``mount`` leads to the reserved folder ``own``; create it if it lies in ``mount``."""
    source = os.path.realpath(mount.source)
    if link := planted_link(own, [source]):
        raise ConfigurationError(
            setting,
            f"{own} ({setting}) cannot be used: {link[0]} is a link to {link[1]}, and a kernel that can write to "
            f"{source} may have created it.",
            f"Set {setting} to a folder that no kernel can write to, or remove the link.",
        )
    real = os.path.realpath(own)
    if within(real, source) and not os.path.exists(real):
        try:
            os.makedirs(real, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                setting,
                f"{own} ({setting}) cannot be created: {error.strerror}. A kernel that can write to {source} could "
                "create it first.",
                f"Set {setting} to a folder that no kernel can write to.",
            ) from error
