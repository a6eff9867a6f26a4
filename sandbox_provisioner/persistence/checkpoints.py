"""Store images of checkpoints, fetch and verify them, and find obstacles to restoring them on this server."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from ..errors import CorruptObjectError, MetadataError, ObjectNotFoundError
from ..gvisor.bundle import BundleSpec
from ..gvisor.carried import visible_mounts
from ..gvisor.runsc import Runsc
from ..storage.base import Advance, ObjectStore
from . import compatibility
from .digest_cache import DigestCache
from .metadata import Checkpoint, GCSArtifact

NAME = re.compile(r"[A-Za-z0-9_-]+/")
PACKAGES = "packages"
"""Key in the contents of a checkpoint: the packages that its files belong to. Older checkpoints do not have it."""
MOST_NAME = 200
"""Characters of a package's name and version that are shown."""
IMAGE_FILES = ("checkpoint.img", "pages.img", "pages_meta.img")


def now() -> str:
    """Return the current time in the format of documents."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_name() -> str:
    """Return a unique name for a checkpoint; names sort by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid4().hex[:8]}"


def save(store: ObjectStore, prefix: str, image: Path, advance: Advance) -> GCSArtifact:
    """Upload an image's files below ``prefix`` and return the artifact. Blocks."""
    files = {path.name: store.upload(path, prefix + path.name, advance) for path in sorted(image.iterdir())}
    return GCSArtifact(prefix, now(), files)


def fetch(store: ObjectStore, artifact: GCSArtifact, folder: Path, advance: Advance) -> Path:
    """Return the folder of the verified image: the stored one itself, or a copy in ``folder``. Blocks.

    Raises CorruptObjectError if a file is missing or damaged.
    """
    try:
        in_place = [store.in_place(artifact.name + name, record) for name, record in artifact.files.items()]
        if in_place and all(in_place) and (first := in_place[0]):
            return first.parent
        for name, record in artifact.files.items():
            store.download(artifact.name + name, record, folder / name, advance)
    except ObjectNotFoundError as error:
        raise CorruptObjectError(store.where, error.name, "it is not there") from error
    return folder


def copy(store: ObjectStore, artifact: GCSArtifact, folder: Path, prefix: str, advance: Advance) -> GCSArtifact:
    """Copy a stored image to ``prefix``, through the new local ``folder``, and return the copy. Blocks."""
    folder.mkdir()
    for name, record in artifact.files.items():
        store.download(artifact.name + name, record, folder / name)
    return save(store, prefix, folder, advance)


def check_names(artifact: GCSArtifact, prefix: str) -> None:
    """Raise MetadataError unless ``artifact`` names only an image's files below ``prefix``."""
    is_valid_name = artifact.name.startswith(prefix) and NAME.fullmatch(artifact.name.removeprefix(prefix))
    if not is_valid_name or not set(artifact.files) <= set(IMAGE_FILES):
        names = ", ".join(sorted(artifact.files))
        raise MetadataError(f"A checkpoint has an invalid name or files: {artifact.name!r:.200}, {names!r:.200}.")


def obstacles(checkpoint: Checkpoint, runsc: Runsc) -> list[str]:
    """Return why this server's runsc and CPU cannot restore ``checkpoint``, as clauses. Blocks."""
    found = []
    if checkpoint.runsc_version != runsc.version:
        found.append(f"it was saved by runsc {checkpoint.runsc_version}, and this server has runsc {runsc.version}")
    elif checkpoint.runsc_sha256 != runsc.sha256:
        found.append(f"it was saved by another build of runsc {runsc.version} than {runsc.path}")
    return found + compatibility.missing_cpu_features(checkpoint.architecture, checkpoint.cpu_features)


def file_obstacles(checkpoint: Checkpoint, spec: BundleSpec, digests: DigestCache) -> list[str]:
    """Return a clause for each file of ``checkpoint`` that is missing or differs in a sandbox of ``spec``. Blocks."""
    sources = (mount.source for mount in visible_mounts(spec) if mount.source)
    missing = [f"{path}, which is mounted in it, is not there" for path in sources if not os.path.exists(path)]
    recorded, before = compatibility.from_json(checkpoint.files), checkpoint.contents.get(PACKAGES)
    items = before.items() if isinstance(before, Mapping) else ()
    known = {str(place): str(package)[:MOST_NAME] for place, package in items}
    return missing + compatibility.differences(recorded, spec, digests, known)
