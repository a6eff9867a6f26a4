"""Find this user's running Jupyter Servers by their files in Jupyter's runtime folder.

``jupyter_server.serverapp`` can do the same, but takes seconds to import and may not be installed beside a client.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from jupyter_core.paths import jupyter_runtime_dir

from .._text import json_object
from ..errors import ConfigurationError

PAGES = ("/lab", "/tree")
"""Suffixes of the address that a server prints; removed to get its base URL."""


@dataclass(frozen=True)
class RunningServer:
    """A running server of this user: its base URL, token and root folder."""

    url: str
    token: str
    root_dir: str


def running_servers() -> list[RunningServer]:
    """Return the servers whose process exists, the newest first, without those that listen on a unix socket."""
    files = Path(jupyter_runtime_dir()).glob("jpserver-*.json")
    servers = [info for _, info in sorted(map(_read, files), key=lambda pair: pair[0], reverse=True)]
    return [
        RunningServer(str(info["url"]), str(info.get("token") or ""), str(info.get("root_dir") or ""))
        for info in servers
        if str(info.get("url")).startswith(("http://", "https://")) and _process_exists(info.get("pid"))
    ]


def address(url: str, token: str = "") -> tuple[str, str]:
    """Return the base URL and the token of an address such as ``http://localhost:8888/lab?token=abc``.

    Raises ConfigurationError if ``url`` is not an HTTP address.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        problem = f"{url!r:.200} is not the address of a Jupyter Server."
        raise ConfigurationError(
            "url", problem, "Use an address such as http://localhost:8888/; `jupyter server list` shows yours."
        )
    given = parse_qs(parts.query).get("token", [""])[0]
    path = parts.path.rstrip("/")
    for page in PAGES:
        path = path.removesuffix(page)
    return urlunsplit((parts.scheme, parts.netloc, f"{path}/", "", "")), token or given


def _read(file: Path) -> tuple[float, dict[str, Any]]:
    """Return the modification time and the content of a server's file; empty if it is gone or invalid."""
    try:
        content = json_object(file.read_bytes())
        return file.stat().st_mtime, content
    except OSError:
        return 0.0, {}


def _process_exists(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, TypeError, OverflowError):
        return False
    return True
