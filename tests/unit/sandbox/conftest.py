"""Fixtures for tests of managers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from value_program import close_all

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.sandbox.manager import SandboxManager

Serve = Callable[..., SandboxManager]


@pytest.fixture
async def serve(runsc: Runsc, tmp_path: Path) -> AsyncIterator[Serve]:
    """Return a function that creates managers with the same storage, each for another server."""
    made: list[SandboxManager] = []

    def serve(name: str = "first") -> SandboxManager:
        made.append(SandboxManager(GCSConfig(folder=tmp_path / "storage"), runsc, name))
        return made[-1]

    yield serve
    for manager in made:
        await close_all(manager)
