"""Make a kernel's StartRequest from the keyword or environment of the start, completed from the settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import config
from ..sandbox.start_request import StartRequest

if TYPE_CHECKING:
    from .settings import SandboxSettings

KEYWORD = "start_request"
"""Keyword of jupyter_client's ``start_kernel`` that passes a StartRequest; jupyter_client repeats it at a restart."""


def requested(arguments: Mapping[str, Any], settings: SandboxSettings, kernel_name: str) -> StartRequest | None:
    """Return the request of a start with these keyword arguments; None if it is for an ephemeral kernel.

    Raises ConfigurationError if a variable in the environment has an invalid value.
    """
    env = arguments.get("env") or {}
    request = arguments.get(KEYWORD) or from_environment(env)
    return complete(replace(request, kernel_name=kernel_name), env.get("JPY_SESSION_NAME", ""), settings)


def from_environment(env: Mapping[str, str]) -> StartRequest:
    """Return the request that the variables in ``env`` describe.

    Variables with the same value as in the server's environment are ignored: they were not set for this start.
    """
    given = {name: value for name, value in env.items() if value and value != os.environ.get(name, "")}

    def flag(variable: str) -> bool | None:
        return config.flag(variable, given) if variable in given else None

    gcs = given.get("GCS_SANDBOX_ID", "")
    return StartRequest(
        sandbox_id=gcs or given.get("SANDBOX_ID", ""),
        gcs=bool(gcs),
        enable_handoff=flag("SANDBOX_ENABLE_HANDOFF"),
        enable_checkpoint_at_idle=flag("SANDBOX_ENABLE_CHECKPOINT_AT_IDLE"),
        idle_timeout=config.seconds("SANDBOX_IDLE_TIMEOUT", 0, given) if "SANDBOX_IDLE_TIMEOUT" in given else None,
    )


def complete(request: StartRequest, notebook_path: str, settings: SandboxSettings) -> StartRequest | None:
    """Return the request, completed from the kernel's settings; None if the kernel is ephemeral.

    ``enable_checkpoint_at_idle`` stays None if only its built-in default applies: the storage may not support it.
    """
    notebook = request.notebook_path or notebook_path
    sandbox_id, gcs = request.sandbox_id, request.gcs
    if not sandbox_id:
        sandbox_id, gcs = settings.gcs_sandbox_id or settings.sandbox_id, bool(settings.gcs_sandbox_id)
    if not sandbox_id and not (settings.persistent and notebook.endswith(".ipynb")):
        return None
    names = ("enable_handoff", "enable_checkpoint_at_idle", "idle_timeout")
    policy = {name: getattr(settings, name) for name in names if getattr(request, name) is None}
    if settings.source("enable_checkpoint_at_idle") is config.Source.BUILT_IN:
        policy.pop("enable_checkpoint_at_idle", None)
    completed = replace(
        request,
        notebook_path=notebook,
        sandbox_id=sandbox_id,
        gcs=gcs,
        hook_timeout=settings.hook_timeout,
        reseed=settings.reseed,
        user=config.user_name(),
        shared_with=tuple(settings.shared_with),
        **policy,
    )
    return replace(completed, patience=settings.handoff_timeout if completed.enable_handoff else 0.0)
