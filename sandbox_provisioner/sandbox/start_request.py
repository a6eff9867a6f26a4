"""Describe the start of a kernel: which sandbox it is for and how that sandbox behaves."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Features:
    """Automatic behaviour of a persistent sandbox. ``idle_timeout`` and ``hook_timeout`` are in seconds."""

    enable_handoff: bool = False
    enable_checkpoint_at_idle: bool = False
    idle_timeout: float = 1800.0
    hook_timeout: float = 0.0
    reseed: bool = False


@dataclass(frozen=True)
class StartRequest:
    """A request for a persistent sandbox, by an id that the user chose or by notebook and kernel, and its features.

    The REST API and ``kernel.start_request`` set the fields that the request itself contains;
    ``kernel.start_request.complete`` fills in the kernel's settings, also for features that are None. Add no field
    with a secret: jupyter_client stores the request for a restart, and logs it.
    """

    kernel_name: str = ""
    notebook_path: str = ""
    sandbox_id: str = ""
    gcs: bool = False
    """True if the sandbox must be in Google Cloud Storage."""
    enable_handoff: bool | None = None
    enable_checkpoint_at_idle: bool | None = None
    idle_timeout: float | None = None
    hook_timeout: float | None = None
    reseed: bool | None = None
    user: str = ""
    shared_with: tuple[str, ...] = ()
    patience: float = 0.0
    """Seconds to wait until another server releases the sandbox."""

    def features(self, can_checkpoint: bool) -> Features:
        """Return the features to use: each field as requested, or its default if the request left it out.

        By default, the sandbox is saved when it is idle if ``can_checkpoint``: if the storage makes it possible.
        """
        values = {field.name: getattr(self, field.name) for field in fields(Features)}
        if self.enable_checkpoint_at_idle is None:
            values["enable_checkpoint_at_idle"] = can_checkpoint
        return Features(**{name: value for name, value in values.items() if value is not None})
