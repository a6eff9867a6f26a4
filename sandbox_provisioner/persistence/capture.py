"""Collect the facts that are recorded with an image: the host files it depends on, runsc and the CPU."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

from ..errors import UnsaveableError
from ..errors.saving import ReplacedFilesError
from ..gvisor.sandbox import GVisorSandbox
from ..mux.connection import AFTER_RESTORE, BEFORE_CHECKPOINT
from . import compatibility
from .checkpoints import PACKAGES
from .digest_cache import DigestCache
from .metadata import Checkpoint, GCSArtifact

INVENTORY = 60.0
"""Maximum seconds to list and hash the files that a guest depends on."""
MOST_RECORDED = 6 << 20
"""Maximum bytes of the list of files in a document: enough for ``compatibility.MOST_FILES`` files with long names."""


async def prepare(sandbox: GVisorSandbox, digests: DigestCache) -> dict[str, Any]:
    """Run the guest's hook before a checkpoint, and return the host files that the sandbox depends on.

    Returns {} for a sandbox that is not reachable. Raises UnsaveableError if the sandbox cannot be saved. After any
    failure, runs the guest's hook after a restore, because the sandbox continues.
    """
    if not sandbox.reachable:
        return {}
    await sandbox.connection.call_hook(BEFORE_CHECKPOINT)
    try:
        async with asyncio.timeout(INVENTORY):
            files = await compatibility.inventory(sandbox, digests)
        if reasons := compatibility.unsaveable(files):
            raise ReplacedFilesError(sandbox.sandbox_id, reasons)
        return await asyncio.to_thread(_require_bounded, sandbox.sandbox_id, compatibility.to_json(files))
    except BaseException as error:
        await asyncio.shield(sandbox.connection.call_hook(AFTER_RESTORE))
        if isinstance(error, TimeoutError):
            raise UnsaveableError(sandbox.sandbox_id, ["it did not report in time which files it uses"]) from error
        raise


def _require_bounded(sandbox_id: str, files: dict[str, Any]) -> dict[str, Any]:
    """Return ``files``. Raises UnsaveableError if they are too long for a document. Blocks."""
    size = len(json.dumps(files, indent=1))
    if size > MOST_RECORDED:
        problem = f"the list of the {len(files):,} files that it uses has {size:,} bytes, and at most {MOST_RECORDED:,}"
        raise UnsaveableError(sandbox_id, [f"{problem} can be recorded"])
    return files


def describe_image(
    sandbox: GVisorSandbox,
    artifact: GCSArtifact,
    files: Mapping[str, Any],
    contents: Mapping[str, Any],
    seconds: float,
) -> Checkpoint:
    """Return the checkpoint of a stored image, with everything that a server needs to restore it. Blocks."""
    packages = compatibility.installed_packages((path for path in files if files[path]["digest"]), sandbox.spec)
    known = {PACKAGES: packages} if packages else {}
    return Checkpoint(
        artifact=artifact,
        runsc_version=sandbox.runsc.version,
        runsc_sha256=sandbox.runsc.sha256,
        platform=sandbox.platform,
        architecture=os.uname().machine,
        cpu_features=compatibility.cpu_features(),
        spec=sandbox.spec,
        files=files,
        contents={name: value for name, value in contents.items() if name != PACKAGES} | known,
        seconds=round(seconds, 3),
    )
