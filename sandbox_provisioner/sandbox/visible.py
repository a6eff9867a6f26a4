"""List which files of the host a sandbox sees, and which places in it exist only in memory."""

from __future__ import annotations

from ..guest.capabilities import CARRIED
from ..gvisor.bundle import BundleSpec, requested_mounts
from ..gvisor.mounts import within
from .model import VisibleFiles


def visible_files(spec: BundleSpec) -> VisibleFiles:
    """Return the paths that a sandbox with this spec sees; protected paths in a writable folder are listed first."""
    mounts = [mount for mount in requested_mounts(spec) if mount.destination != CARRIED]
    mounts += [spec.carried] if spec.carried else []
    writable = [mount.destination for mount in mounts if mount.source and mount.writable]
    shown = [mount.destination for mount in mounts if mount.source and not mount.writable]
    protected = [path for path in shown if any(within(path, folder) for folder in writable)]
    return VisibleFiles(
        writable=tuple(writable),
        read_only=tuple(dict.fromkeys([*protected, *shown])),
        in_memory=tuple(mount.destination for mount in mounts if not mount.source and mount.writable),
    )
