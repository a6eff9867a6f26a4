"""Read the sandbox settings in the environment of one start request, which override the configured ones."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .. import config
from ..sandbox.claims import Wanted
from .settings import SandboxSettings

ASKED = "SANDBOX_ASKED"
"""The variable that names the variables set by the request, even if the server has the same values."""


def heed(env: Mapping[str, str], settings: SandboxSettings) -> None:
    """Apply the request's settings to ``settings``."""
    asked = _asked(env)
    settings.enable_handoff = config.flag("SANDBOX_ENABLE_HANDOFF", asked, settings.enable_handoff)
    settings.enable_checkpoint_at_idle = config.flag(
        "SANDBOX_ENABLE_CHECKPOINT_AT_IDLE", asked, settings.enable_checkpoint_at_idle
    )
    settings.idle_timeout = config.seconds("SANDBOX_IDLE_TIMEOUT", settings.idle_timeout, asked)


def wanted(env: Mapping[str, str], settings: SandboxSettings, kernel_name: str) -> Wanted | None:
    """Return the persistent sandbox that the start requests; None for an ephemeral kernel."""
    asked = _asked(env)
    gcs = asked.get("GCS_SANDBOX_ID") or ("" if asked.get("SANDBOX_ID") else settings.gcs_sandbox_id)
    explicit = gcs or asked.get("SANDBOX_ID") or settings.sandbox_id
    notebook = env.get("JPY_SESSION_NAME", "")
    if not explicit and not (settings.persistent and notebook.endswith(".ipynb")):
        return None
    shared_with = tuple(settings.shared_with)
    return Wanted(kernel_name, notebook, explicit, bool(gcs), config.user_name(), shared_with)


def _asked(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the request itself set: named in ASKED, or different from the server's."""
    own = env.get(ASKED, "").split(",")
    return {name: value for name, value in env.items() if name in own or value != os.environ.get(name, "")}
