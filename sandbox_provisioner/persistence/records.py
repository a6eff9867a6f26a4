"""Encode and decode SandboxRecord, a user's local record of a persistent sandbox: versioned and validated."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from .._text import refuse_constant
from ..errors import ConfigurationError, UnreadableRecordError
from . import decoding

VERSION = 1
LARGEST = 1_000_000
"""Maximum bytes of a record."""
ADDED = frozenset({"folder"})
"""Members that records of earlier versions do not have."""


@dataclass(frozen=True)
class SandboxRecord:
    """The identity, storage, kernel and notebook of a persistent sandbox."""

    id: UUID
    storage: str
    """The kind of storage: ``local``, ``mounted`` or ``gcs``."""
    where: str
    """Location of the storage: a path or ``gs://bucket/prefix``."""
    sandbox_id: str
    """The sandbox's id in that storage."""
    kernel_name: str
    settings: Mapping[str, Any]
    """Settings of the kernel's start; JSON values only."""
    notebook_path: str
    created: datetime
    last_used: datetime
    signed: bool = True
    """False for a sandbox that an earlier version created, until its document and snapshots are signed."""
    folder: str = ""
    """The kernel's folder, for a fork without a notebook: that of the original's notebook."""

    @property
    def working_folder(self) -> str:
        """The folder that the kernel works in; empty if it is not recorded."""
        return os.path.dirname(self.notebook_path) or self.folder


def encode(record: SandboxRecord) -> bytes:
    """Return the record as bytes. Raises ConfigurationError if the settings are not valid JSON values."""
    times = {name: getattr(record, name).astimezone(UTC).isoformat() for name in ("created", "last_used")}
    document = {"version": VERSION, **asdict(record), **times, "id": str(record.id)}
    try:
        return json.dumps(document, indent=1, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"The settings of sandbox {record.id} cannot be recorded: {error}."
        raise ConfigurationError("settings", problem, "Use only JSON values.") from error


def decode(data: bytes, identity: UUID, path: str) -> SandboxRecord:
    """Return the record in ``data``. Raises UnreadableRecordError, with ``path``, if it is not that of ``identity``."""
    try:
        if len(data) > LARGEST:
            raise ValueError(f"it has {len(data):,} bytes; at most {LARGEST:,} are allowed")
        document = json.loads(data, parse_constant=refuse_constant)
        version = document.get("version") if isinstance(document, dict) else None
        if type(version) is not int:
            raise ValueError("it is not a sandbox record")
        if version > VERSION:
            remedy = "Upgrade sandbox-provisioner."
            raise UnreadableRecordError(path, f"it has version {version}, and this program reads {VERSION}", remedy)
        record = decoding.decode(SandboxRecord, {**document, "signed": document.get("signed") is True}, ADDED)
        if record.id != identity:
            raise ValueError(f"it is the record of sandbox {record.id}")
        return record
    except decoding.FAILURES as error:
        raise UnreadableRecordError(path, str(error)[:200], "Restore the file from a backup, or remove it.") from error
