"""Keep a notebook from choosing code for the server to import when it is exported as a script.

nbconvert's exporter for scripts imports the object that ``metadata.language_info.nbconvert_exporter`` names, and calls
it. A notebook's code can write that: the module ``unittest.__main__``, for example, runs tests that it finds in the
folder that the server was started in, or ends the server.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any

from jupyter_server.nbconvert import handlers


def guard_exporters() -> None:
    """Let notebooks name only installed exporters, such as ``python``. Does nothing if called again."""
    original = handlers.get_exporter
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def get_exporter(format: str, **options: Any) -> Any:
        exporter = original(format, **options)  # type: ignore[no-untyped-call]  # imports nbconvert, which takes long
        import_module("nbconvert.exporters.script").get_exporter = _installed_exporter  # type: ignore[attr-defined]
        return exporter

    handlers.get_exporter = get_exporter


def _installed_exporter(name: Any, config: Any = None) -> Any:
    """Return the class of an installed exporter. Raises ValueError for the path of a module."""
    if not isinstance(name, str) or "." in name:
        raise ValueError(
            f"the notebook's metadata has {name!r:.200} as nbconvert_exporter, which is not the name of an installed "
            "exporter. A notebook's code may have written it. Remove it from the metadata"
        )
    return import_module("nbconvert.exporters.base").get_exporter(name, config)
