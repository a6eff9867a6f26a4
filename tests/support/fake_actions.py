"""A replacement for ``NotebookActions`` that returns values from a test, and needs no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.kernel.synthetic_replies import Cell
from sandbox_provisioner.persistence.metadata import Checkpoint, GCSArtifact
from sandbox_provisioner.storage.base import FileRecord


def checkpoint(size: int = 123_000_000, created: str = "2026-11-16T15:50:00.000+00:00") -> Checkpoint:
    """Return the description of a checkpoint that does not exist."""
    artifact = GCSArtifact("checkpoints/1/", created, {"image": FileRecord(size, size, ())})
    spec = BundleSpec("/usr/bin/python3", "/home/me", "me")
    return Checkpoint(artifact, "1", "2", "systrap", "x86_64", (), spec, {}, {}, 0.4)


class FakeActions:
    """The actions of a notebook without a kernel. ``made`` and ``rewound`` record calls.

    ``ephemeral`` is the reason why nothing of the kernel is saved, or empty. ``savepoint`` raises ``error`` if set.
    """

    def __init__(self, ephemeral: str = "") -> None:
        self.ephemeral = ephemeral
        self.made: dict[str, Checkpoint] = {}
        self.rewound: list[tuple[str, Cell | None]] = []
        self.error: Exception | None = None

    async def status(self) -> Mapping[str, Any]:
        return {
            "sandbox_id": "nb-1",
            "state": "running",
            "notebook": "" if self.ephemeral else "/n/a.ipynb",
            "idle_timeout": 1800.0,
            "ephemeral": self.ephemeral,
        }

    async def savepoints(self) -> Mapping[str, Checkpoint]:
        return self.made

    async def savepoint(self, name: str) -> Checkpoint:
        if self.error:
            raise self.error
        return self.made.setdefault(name, checkpoint())

    async def rewind(self, name: str, cell: Cell | None) -> str:
        self.rewound.append((name, cell))
        return "before-rewind-1"

    async def reset_home(self) -> None:
        if self.error:
            raise self.error

    async def keep_awake(self, name: str, seconds: float | None) -> str:
        return f"It is kept awake for {seconds} seconds"
