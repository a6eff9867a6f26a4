"""A runsc whose checkpoints fail as on a full disk."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from sandbox_provisioner.gvisor.runsc import find


def use_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make later servers use a runsc whose checkpoints fail while a file exists. Return the path of that file."""
    mark, script = folder / "full", folder / "runsc"
    script.write_text(
        "#!/bin/sh\n"
        f'for word; do [ "$word" = checkpoint ] && [ -e {mark} ] && {{ echo no space left on device >&2; exit 128; }}; '
        f'done\nexec {find().path} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("SANDBOX_RUNSC", str(script))
    return mark
