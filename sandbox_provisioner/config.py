"""Settings from environment variables, parsed and checked in one place, and never read at import."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .errors import ConfigurationError

YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off", "")


def text(variable: str, default: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """The variable's value as it stands."""
    return environ.get(variable, default)


def words(variable: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The variable's comma-separated items, without those that are empty."""
    return [item.strip() for item in environ.get(variable, "").split(",") if item.strip()]


def flag(variable: str, environ: Mapping[str, str] = os.environ) -> bool:
    """A yes or no; ConfigurationError names a value that is neither."""
    value = environ.get(variable, "").strip().lower()
    if value not in YES + NO:
        raise ConfigurationError(
            variable, f"{variable} is {value!r}, which is neither yes nor no.", "Set it to 1 or 0."
        )
    return value in YES


def choice(variable: str, choices: Sequence[str], default: str, environ: Mapping[str, str] = os.environ) -> str:
    """One of ``choices``; ConfigurationError names a value that is not."""
    value = environ.get(variable) or default
    if value not in choices:
        raise ConfigurationError(variable, f"{variable} is {value!r}.", f"It can be {' or '.join(choices)}.")
    return value
