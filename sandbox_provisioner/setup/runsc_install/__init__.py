"""Install runsc on a machine that has no usable one.

The first source is gVisor's pinned source code, built with Go and verified by the digests in this package (go.sum). The
second is Debian's package from the machine's own mirror, which apt verifies. A release of Google's is used only if the
user gives its version and digest. No source needs root.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...errors import RunscNotFoundError, SandboxError
from ...gvisor.runsc import OLDEST, Runsc, inspect
from ..progress import Progress
from .debian import DebianSource
from .go import GoSource
from .release import ReleaseSource
from .source import Source

__all__ = ["SOURCES", "DebianSource", "GoSource", "ReleaseSource", "Source", "choose", "install"]

SOURCES: dict[str, type[GoSource | DebianSource]] = {source.name: source for source in (GoSource, DebianSource)}
"""Sources that need no further input, by name, in the order in which they are tried."""


def choose(name: str | None, release: str = "", sha512: str = "") -> list[Source]:
    """Return the sources to try: ReleaseSource, the named one, or all in order. Raises SandboxError for bad options."""
    if name == ReleaseSource.name or (name is None and (release or sha512)):
        if not release or not sha512:
            raise SandboxError(
                "Google's release is used only with a known version and digest.",
                "Give both --release VERSION and --sha512 DIGEST, or use --source go, whose digests are pinned.",
            )
        return [ReleaseSource(release, sha512)]
    if release or sha512:
        raise SandboxError(f"--release and --sha512 cannot be used with --source {name}.", "Use --source release.")
    return [make() for known, make in SOURCES.items() if name in (None, known)]


def install(sources: Sequence[Source], folder: Path, progress: Progress) -> Runsc:
    """Install runsc in ``folder`` from the first source that succeeds, and return it.

    An existing runsc there is replaced only after the new one has reported a version that is new enough. Raises
    RunscNotFoundError with the reason of every source if all fail.
    """
    folder = folder.absolute()
    reasons = []
    for source in sources:
        try:
            title = f"Getting runsc: {source.title}"
            with progress.step(title) as step, _staged(folder) as (staged, workspace):
                source.obtain(staged, workspace, step.note)
                staged.chmod(0o755)
                runsc = inspect(staged)
                runsc.require_new_enough()
                staged.replace(folder / "runsc")
                step.result = f"runsc {runsc.version} in {step.seconds():.0f} s"
            return inspect(folder / "runsc")
        except SandboxError as error:
            reasons.append(f"  {source.name}: {error.problem}")
    raise RunscNotFoundError(
        "runsc could not be installed:\n" + "\n".join(reasons),
        f"\nGive this machine access to one of these sources, or set SANDBOX_RUNSC to a runsc built since {OLDEST}.",
    )


@contextmanager
def _staged(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Make a temporary file in ``folder`` and a temporary workspace for the block. Turns OSError into SandboxError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        with tempfile.TemporaryDirectory(prefix="jupyter-sandbox-setup-", dir=_workspace_parent()) as workspace:
            descriptor, name = tempfile.mkstemp(prefix=".runsc-", dir=folder)
            os.close(descriptor)
            try:
                yield Path(name), Path(workspace)
            finally:
                Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise SandboxError(f"{error.strerror or error} ({error.filename or folder})") from error


def _remove_abandoned(folder: Path, age: float = 86400.0) -> None:
    """Delete the temporary files of installations that were killed more than ``age`` seconds ago."""
    for path in folder.glob(".runsc-*"):
        if time.time() - path.stat().st_mtime > age:
            path.unlink(missing_ok=True)


def _workspace_parent() -> str | None:
    """Return the folder for a gigabyte of temporary files: /var/tmp, as /tmp is often in memory, or None."""
    return None if os.environ.get("TMPDIR") or not os.access("/var/tmp", os.W_OK) else "/var/tmp"
