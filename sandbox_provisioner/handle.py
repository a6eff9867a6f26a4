"""SandboxHandle: one sandbox as the rest of the program holds it, made only by its factories."""

from __future__ import annotations

import re

from .bundle import BundleSpec
from .errors import ConfigurationError
from .gvisor import GVisorSandbox
from .runsc import Runsc

SANDBOX_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def valid_id(sandbox_id: str) -> str:
    """``sandbox_id`` itself, if it can be one: it becomes part of paths and object names."""
    if not SANDBOX_ID.fullmatch(sandbox_id):
        raise ConfigurationError(
            "sandbox_id",
            f"{sandbox_id!r} cannot be a sandbox's id.",
            "An id has 1 to 128 letters, digits, hyphens and underscores, and begins with a letter or a digit.",
        )
    return sandbox_id


class SandboxHandle:
    """A sandbox's name and its driver. Use a factory; the constructor only sets what it is given."""

    def __init__(self, sandbox_id: str, instance: GVisorSandbox) -> None:
        self.sandbox_id = sandbox_id
        self.instance = instance

    @classmethod
    def create_ephemeral(
        cls, sandbox_id: str, spec: BundleSpec, runsc: Runsc, platform: str = "systrap"
    ) -> SandboxHandle:
        """A sandbox that leaves nothing behind; it is not started yet."""
        return cls(valid_id(sandbox_id), GVisorSandbox(sandbox_id, spec, runsc, platform))
