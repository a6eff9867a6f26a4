"""Install twin kernelspecs: NAME-sandbox runs the same kernel as NAME, but in a sandbox.

A key in the metadata marks a kernelspec as a twin. Kernelspecs without the mark are never overwritten or removed. A
user's changes to a twin's ``config`` stanza survive a refresh.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_core.paths import jupyter_data_dir

from .._text import json_object
from ..errors import SandboxError
from ..kernel.settings import TWIN_MARK, TWIN_VERSION, own_config
from .logo import sandbox_logo

if TYPE_CHECKING:
    from jupyter_client.kernelspec import KernelSpecManager

PROVISIONER = "sandbox-provisioner"
LOCAL = ("", "local-provisioner")
SUFFIX = "-sandbox"
FORMAT = 2
"""The version of a twin's format. In the first version, each twin had the built-in defaults in its ``config``."""
PYTHONS_KERNEL = " (ipykernel)"
"""Part of the name of Python's usual kernel that is left out of its twin's name."""
OWN_SETTINGS = {"enable_checkpoint_at_idle", "idle_timeout", "guest_transport"}
"""The settings that setup itself writes; the user has written all others."""


@dataclass(frozen=True)
class Kernel:
    """An installed kernelspec: its name, its folder and the content of its kernel.json."""

    name: str
    folder: Path
    spec: Mapping[str, Any]

    @property
    def display_name(self) -> str:
        """The name in menus; the kernelspec's own name if it has none."""
        return str(self.spec.get("display_name") or self.name)

    @property
    def provisioner(self) -> str:
        """The name of the provisioner in the kernelspec; empty for Jupyter's default."""
        return str(_stanza(self.spec).get("provisioner_name", ""))

    @property
    def config(self) -> Mapping[str, Any]:
        """The kernelspec's own settings for the provisioner; empty if they are not a mapping."""
        config = _stanza(self.spec).get("config")
        return own_config(_metadata(self.spec), config) if isinstance(config, dict) else {}

    @property
    def sandboxed(self) -> bool:
        """True if this package's provisioner runs the kernel."""
        return self.provisioner == PROVISIONER

    @property
    def of_ipykernel(self) -> bool:
        """True if the kernel's command runs ipykernel; such a kernel can have a template."""
        argv = self.spec.get("argv")
        return isinstance(argv, list) and bool({"ipykernel_launcher", "ipykernel"} & {str(part) for part in argv})

    @property
    def is_twin(self) -> bool:
        """True if this module made the kernelspec."""
        return TWIN_MARK in _metadata(self.spec)


def _metadata(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = spec.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _stanza(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    stanza = _metadata(spec).get("kernel_provisioner")
    return stanza if isinstance(stanza, dict) else {}


def kernels() -> dict[str, Kernel]:
    """Return every readable kernelspec that Jupyter finds, by name."""
    from jupyter_client.kernelspec import KernelSpecManager  # imports ZeroMQ, which other commands do not need

    manager = KernelSpecManager()
    found = {}
    for name, folder in sorted(manager.find_kernel_specs().items()):
        spec = _read(Path(folder))
        if not spec and not (Path(folder) / "kernel.json").exists():
            spec = _built_in(manager, name) or {}
        if spec:
            found[name] = Kernel(name, Path(folder), spec)
    return found


def _read(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's kernel.json; empty if it cannot be read."""
    try:
        return json_object((folder / "kernel.json").read_bytes())
    except OSError:
        return {}


def _built_in(manager: KernelSpecManager, name: str) -> dict[str, Any] | None:
    """Return the kernelspec that jupyter_client makes for ipykernel where no kernel.json is installed, or None."""
    try:
        return dict(manager.get_kernel_spec(name).to_dict())
    except KeyError:  # NoSuchKernel
        return None


def kernels_folder(sys_prefix: bool) -> Path:
    """Return the kernels folder for twins: of this environment with ``sys_prefix``, else of this user."""
    data = Path(sys.prefix) / "share" / "jupyter" if sys_prefix else Path(jupyter_data_dir())
    return data / "kernels"


def origins(names: Iterable[str] = ()) -> list[Kernel]:
    """Return the kernels to make twins of: the named ones, or all that Jupyter's local provisioner runs.

    Raises SandboxError for an unknown name, for a kernel with another provisioner, because it may run elsewhere, and if
    no kernel is installed.
    """
    found = kernels()
    local = {name: kernel for name, kernel in found.items() if kernel.provisioner in LOCAL}
    for name in names:
        if name not in found:
            raise SandboxError(
                f"There is no kernel named {name}.", f"These can be sandboxed: {', '.join(local) or 'none'}."
            )
        if name not in local:
            raise SandboxError(
                f"Kernel {name} cannot be sandboxed: the provisioner {found[name].provisioner} starts it, and only "
                "kernels of Jupyter's local provisioner can be sandboxed.",
                f"These can be sandboxed: {', '.join(local) or 'none'}.",
            )
    wanted = [local[name] for name in dict.fromkeys(names)] or list(local.values())
    if not wanted:
        raise SandboxError("No kernel is installed here.", "Install one, such as Python's: `pip install ipykernel`.")
    return wanted


def twin_name(origin: Kernel, taken: Collection[str]) -> str:
    """Return the name in menus of the twin of ``origin``, different from the names in ``taken``."""
    full = origin.display_name
    wanted = (f"{full.removesuffix(PYTHONS_KERNEL)} (sandbox)", f"{full} (sandbox)")
    return next((name for name in wanted if name not in taken), f"{full} ({origin.name}{SUFFIX})")


def twin_spec(origin: Kernel, config: Mapping[str, Any], taken: Collection[str] = ()) -> dict[str, Any]:
    """Return the twin's kernel.json: the original's with this provisioner, its ``config`` and the mark.

    ``taken`` has the names in menus of the other kernels.
    """
    stanza = {"provisioner_name": PROVISIONER, "config": dict(config)}
    metadata = {
        **_metadata(origin.spec),
        "kernel_provisioner": stanza,
        TWIN_MARK: origin.name,
        TWIN_VERSION: FORMAT,
    }
    return {**origin.spec, "display_name": twin_name(origin, taken), "metadata": metadata}


def without_twin(found: Iterable[Kernel]) -> list[str]:
    """Return the names of the kernels that could have a twin and have none; empty if there is no twin at all."""
    found = list(found)
    twins = {str(_metadata(kernel.spec)[TWIN_MARK]) for kernel in found if kernel.is_twin}
    return sorted({kernel.name for kernel in found if kernel.provisioner in LOCAL} - twins) if twins else []


def present_config(origin: Kernel, folder: Path) -> dict[str, Any]:
    """Return the settings of the twin of ``origin`` in the kernels folder ``folder``; empty if it has no twin there."""
    place = folder / f"{origin.name}{SUFFIX}"
    present = Kernel(place.name, place, _read(place))
    return dict(present.config) if present.is_twin else {}


def transport_settings(transport: str, present: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting for the transport of a kernel's channels; none for ipc, unless the twin has the setting."""
    return {"guest_transport": transport} if transport != "ipc" or "guest_transport" in present else {}


def idle_settings(seconds: float | None) -> dict[str, Any]:
    """Return the settings to save a kernel after so many idle seconds: 0 for never, None for no settings."""
    if seconds is None:
        return {}
    return {"enable_checkpoint_at_idle": seconds > 0, **({"idle_timeout": seconds} if seconds > 0 else {})}


def install_twin(origin: Kernel, folder: Path, config: Mapping[str, Any] | None = None) -> Kernel:
    """Create or refresh the twin of ``origin`` in the kernels folder ``folder``, and return it.

    ``config`` overrides the twin's present settings. Raises SandboxError if the twin's name is taken by a kernelspec
    that is no twin, or if writing fails.
    """
    place = folder / f"{origin.name}{SUFFIX}"
    present = Kernel(place.name, place, _read(place))
    if place.exists() and not present.is_twin:
        raise SandboxError(
            f"{place} exists and was not made by `jupyter sandbox setup`.",
            "It was left unchanged. Move it away, so that the sandboxed kernel can be installed there.",
        )
    taken = {kernel.display_name for name, kernel in kernels().items() if name != place.name}
    twin = Kernel(place.name, place, twin_spec(origin, {**present.config, **(config or {})}, taken))
    try:
        _replace(place, origin.folder, twin.spec)
    except (OSError, shutil.Error) as error:
        raise SandboxError(f"The kernelspec {place} could not be written: {error}.") from error
    return twin


def _replace(place: Path, resources: Path, spec: Mapping[str, Any]) -> None:
    """Build the kernelspec beside the kernels folder, then rename it into place. A failure leaves the old one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sandbox-twin-", dir=place.parent.parent) as staging:
        new, old = Path(staging) / "new", Path(staging) / "old"
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(resources, new, ignore=unwanted, ignore_dangling_symlinks=True)
        for path in (new, *new.rglob("*")):
            path.chmod(path.stat().st_mode | 0o644 | (0o111 if path.is_dir() else 0))
        (new / "logo-svg.svg").write_text(sandbox_logo(resources), encoding="utf-8")
        (new / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
        if place.exists():
            place.rename(old)
        try:
            new.rename(place)
        except BaseException:
            if old.exists():
                old.rename(place)
            raise


def remove_twins(folder: Path, names: Iterable[str] = ()) -> list[Path]:
    """Remove the twins in the kernels folder ``folder``, all or only the named ones, and return their paths.

    ``names`` may have the twins' own names or the originals'.
    """
    wanted = {name.removesuffix(SUFFIX) + SUFFIX for name in names}
    removed = []
    for place in sorted(folder.glob(f"*{SUFFIX}")):
        if (not wanted or place.name in wanted) and TWIN_MARK in _metadata(_read(place)):
            with tempfile.TemporaryDirectory(prefix=".sandbox-twin-", dir=folder.parent) as trash:
                place.rename(Path(trash) / place.name)
            removed.append(place)
    return removed
