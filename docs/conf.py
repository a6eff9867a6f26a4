"""Sphinx configuration, used by `make docs`. Generates the pages' tables from the code first."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import generate_commands  # noqa: E402
import generate_events  # noqa: E402
import generate_lifecycle  # noqa: E402
import generate_rest  # noqa: E402
import generate_settings  # noqa: E402

from sandbox_provisioner import __version__  # noqa: E402

project = "sandbox-provisioner"
version = release = __version__
copyright = "its authors"
language = "en"
extensions = ["myst_parser"]
exclude_patterns = ["_build", "generated"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "sandbox-provisioner"
html_static_path: list[str] = []
nitpicky = True

GENERATED = {
    "commands": generate_commands.markdown,
    "exits": generate_commands.exits,
    "events": generate_events.markdown,
    "lifecycle": generate_lifecycle.markdown,
    "rest": generate_rest.markdown,
    "settings": generate_settings.settings,
    "storage": generate_settings.storage,
}

(HERE / "generated").mkdir(exist_ok=True)
for name, markdown in GENERATED.items():
    (HERE / "generated" / f"{name}.md").write_text(markdown())
