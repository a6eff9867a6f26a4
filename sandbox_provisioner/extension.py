"""The name of the server extension in users' configurations. The code is in ``server.app``."""

from __future__ import annotations

from .server.app import (
    _jupyter_server_extension_points,
    _link_jupyter_server_extension,
    _load_jupyter_server_extension,
)

__all__ = [
    "_jupyter_server_extension_points",
    "_link_jupyter_server_extension",
    "_load_jupyter_server_extension",
]
