"""The environment of a sandboxed kernel: of the server's variables only what is harmless or was permitted."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterable
from pathlib import Path

from .config import SIGNING_KEY

PASSED = (
    "PATH", "LANG", "LANGUAGE", "TZ", "TERM", "COLUMNS", "LINES", "VIRTUAL_ENV", "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV", "PYTHONPATH", "IPYKERNEL_CELL_NAME", "JPY_SESSION_NAME", "OMP_NUM_THREADS",
)  # fmt: skip
"""What a kernel sees of the server's environment, besides LC_*, unless told otherwise."""

FALLBACK_HOME = "/home/sandbox"


def filtered(env: dict[str, str], permitted: Iterable[str]) -> dict[str, str]:
    """Of all variables: those that are ``permitted``, those that this start was given, and the harmless ones."""
    _server_environment.update(_initial_environment().items(), os.environ.items())
    named = {*permitted, *PASSED} - {SIGNING_KEY}  # a guest that has the key could sign for its user
    passed = {
        name: value
        for name, value in env.items()
        if name in named or name.startswith("LC_") or (name, value) not in _server_environment
    }
    home = os.path.expanduser("~")
    passed["HOME"] = home if os.path.isabs(home) and home != "/" else FALLBACK_HOME
    passed["USER"] = passed["LOGNAME"] = getpass.getuser()
    passed["TMPDIR"] = "/tmp"
    passed["JPY_PARENT_PID"] = "1"  # the sandbox's init, which ipykernel knows not to watch
    return passed


_server_environment: set[tuple[str, str]] = set()
"""Every variable the server was ever seen to have: what a restart brings back of them was not given to the kernel."""


def _initial_environment() -> dict[str, str]:
    """The environment that this process was started with, whatever it has become since."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
