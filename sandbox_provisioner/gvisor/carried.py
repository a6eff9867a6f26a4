"""The carried folder of a template's copy, and the parts of it that are protected from the kernel.

In other sandboxes, runsc mounts these parts. A template is made before the folder is known, and a restore cannot add a
mount. So PID 1 mounts them when a copy is activated (``guest.capabilities``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from ..guest.capabilities import EMPTY, MOUNTED, READ_ONLY, WRITABLE
from .bundle import BundleSpec, Mount, all_mounts, arrange, carried_mounts, cover, requested_mounts
from .mounts import change_time, within

Part = tuple[str, str, int]
"""A path in the folder, its kind (see ``guest.capabilities``), and the st_ctime_ns of the file or folder."""


def carry(bare: BundleSpec, spec: BundleSpec, folder: Mount) -> BundleSpec | None:
    """Return the spec of a copy whose processes see the same as with ``spec``; None if no copy can show that.

    ``spec`` is ``bare``, the template's spec, plus ``folder``. Outside of the folder, both must have the same mounts.
    In the folder, ``spec`` may hide its parts or make them read-only, but not show other folders there.
    """
    without = all_mounts(bare)
    if _outside(all_mounts(spec), folder) != _outside(without, folder) | {
        folder,
        *filter(None, [cover(folder, without)]),
    }:
        return None
    copy = carrying_spec(bare, spec, folder)
    own = [mount for mount in all_mounts(bare) if _inside(mount, folder)]
    kept = [mount for mount in own if mount not in covered(copy)]
    suitable = all(mount.source for mount in own) and all(
        _shows_itself(mount, folder) for mount in [*kept, *carried_mounts(copy)[1:]] if mount.source
    )
    return copy if suitable else None


def carrying_spec(bare: BundleSpec, spec: BundleSpec, folder: Mount) -> BundleSpec:
    """Return ``bare`` with the carried ``folder`` and with the mounts that ``spec`` has in it."""
    inner = tuple(mount for mount in requested_mounts(spec) if _inside(mount, folder))
    return replace(bare, carried=folder, inner=inner)


def covered(spec: BundleSpec) -> list[Mount]:
    """Return the mounts of the template that the carried folder covers, and that the kernel then does not see.

    An example is the source of a package, in the folder, that is installed editable in the environment.
    """
    folder, shown = spec.carried, {mount.destination for mount in carried_mounts(spec)}
    return [mount for mount in all_mounts(spec) if folder and _inside(mount, folder) and mount.destination not in shown]


def visible_mounts(spec: BundleSpec) -> list[Mount]:
    """Return every mount as processes in the sandbox see it: the carried folder and its parts at their own paths."""
    hidden = covered(spec)
    return [*(mount for mount in all_mounts(spec) if mount not in hidden), *carried_mounts(spec)]


def parts(spec: BundleSpec) -> list[Part]:
    """Return the parts of the carried folder that PID 1 must mount, outer before inner. Blocks.

    Raises ConfigurationError if one of them was replaced by a link.
    """
    folder = spec.carried
    if folder is None:
        return []
    mounted = {mount.destination for mount in all_mounts(spec) if not mount.writable}
    return [
        (
            os.path.relpath(mount.destination, folder.destination),
            _kind(mount, mounted),
            change_time(mount._replace(source=_source(mount, folder))),
        )
        for mount in arrange(carried_mounts(spec))
        if mount != folder
    ]


def _kind(mount: Mount, mounted: Iterable[str]) -> str:
    if not mount.source:
        return EMPTY
    if mount.writable:
        return WRITABLE
    return MOUNTED if mount.destination in mounted else READ_ONLY


def _inside(mount: Mount, folder: Mount) -> bool:
    return mount.destination != folder.destination and within(mount.destination, folder.destination)


def _outside(mounts: Iterable[Mount], folder: Mount) -> set[Mount]:
    return {mount for mount in mounts if not _inside(mount, folder)}


def _source(mount: Mount, folder: Mount) -> str:
    """Return the real path on the host that the folder itself shows at the mount's destination."""
    return os.path.join(folder.source, os.path.relpath(mount.destination, folder.destination))


def _shows_itself(mount: Mount, folder: Mount) -> bool:
    return os.path.realpath(mount.source) == _source(mount, folder)
