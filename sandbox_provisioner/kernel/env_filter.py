"""Filter a sandboxed kernel's environment: pass only variables that are harmless, permitted or set for this start."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..config import SIGNING_KEY, user_name

PASSED = (
    "PATH", "LANG", "LANGUAGE", "TZ", "TERM", "COLUMNS", "LINES", "VIRTUAL_ENV", "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV", "PYTHONPATH", "IPYKERNEL_CELL_NAME", "JPY_SESSION_NAME", "OMP_NUM_THREADS",
)  # fmt: skip
"""Variables of the server's environment that every kernel gets, besides LC_*."""

FALLBACK_HOME = "/home/sandbox"


def filtered(env: dict[str, str], permitted: Iterable[str]) -> dict[str, str]:
    """Return the kernel's environment: the allowed variables of ``env``, and those that every sandbox sets.

    The kernel gets variables that are ``permitted``, in PASSED or set for this start. A variable was set for this start
    if the server never had it with that value.
    """
    _server_environment.update(_initial_environment().items(), os.environ.items())
    named = {*permitted, *PASSED} - {SIGNING_KEY}  # a guest with the key could sign documents as its user
    passed = {
        name: value
        for name, value in env.items()
        if name in named or name.startswith("LC_") or (name, value) not in _server_environment
    }
    home = os.path.expanduser("~")
    passed["HOME"] = home if os.path.isabs(home) and home != "/" else FALLBACK_HOME
    passed["USER"] = passed["LOGNAME"] = user_name().replace(" ", "")
    passed["TMPDIR"] = "/tmp"
    passed["JPY_PARENT_PID"] = "1"  # the guest's init; ipykernel does not watch a parent with PID 1
    return passed


_server_environment: set[tuple[str, str]] = set()
"""Each (name, value) that the server ever had: a restart passes the values that it had at the first start."""


def _initial_environment() -> dict[str, str]:
    """Return the environment that this process was started with; empty if /proc cannot be read."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
