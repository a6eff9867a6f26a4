"""What is recorded of a sandbox's memory besides its image: the host files it depends on, and what runs it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

from . import environment
from .errors import UnsaveableError
from .fingerprints import Fingerprints
from .gvisor import GVisorSandbox
from .link import AFTER_RESTORE, BEFORE_CHECKPOINT
from .metadata import Checkpoint, GCSArtifact

INVENTORY = 60.0
"""Seconds that a guest has to say which files it depends on."""
MOST_RECORDED = 6 << 20
"""Bytes that the list of these files may have in a document: as many files as are examined, with long names."""


async def prepare(sandbox: GVisorSandbox, fingerprints: Fingerprints) -> dict[str, Any]:
    """Tell it what is coming, and find the host files that it depends on; UnsaveableError if it cannot be saved."""
    if not sandbox.reachable:
        return {}
    await sandbox.link.call(BEFORE_CHECKPOINT)
    try:
        async with asyncio.timeout(INVENTORY):
            files = await environment.inventory(sandbox, fingerprints)
        if reasons := environment.unsaveable(files):
            raise UnsaveableError(sandbox.sandbox_id, reasons)
        return await asyncio.to_thread(_bounded, sandbox.sandbox_id, environment.to_json(files))
    except BaseException as error:
        await asyncio.shield(sandbox.link.call(AFTER_RESTORE))
        if isinstance(error, TimeoutError):
            raise UnsaveableError(sandbox.sandbox_id, ["it does not say which files it depends on"]) from error
        raise


def _bounded(sandbox_id: str, files: dict[str, Any]) -> dict[str, Any]:
    """Return the list of files itself; UnsaveableError if a guest has made it too long to be recorded. Blocks."""
    size = len(json.dumps(files, indent=1))
    if size > MOST_RECORDED:
        problem = f"the list of the {len(files):,} files that it uses has {size:,} bytes, {MOST_RECORDED:,} at most"
        raise UnsaveableError(sandbox_id, [f"{problem} can be recorded"])
    return files


def recorded(
    sandbox: GVisorSandbox,
    artifact: GCSArtifact,
    files: Mapping[str, Any],
    contents: Mapping[str, Any],
    seconds: float,
) -> Checkpoint:
    """An image that was stored, with all that a server must have to bring it back."""
    return Checkpoint(
        artifact=artifact,
        runsc_version=sandbox.runsc.version,
        runsc_sha256=sandbox.runsc.sha256,
        platform=sandbox.platform,
        architecture=os.uname().machine,
        cpu_features=environment.cpu_features(),
        spec=sandbox.spec,
        files=files,
        contents=contents,
        seconds=round(seconds, 3),
    )
