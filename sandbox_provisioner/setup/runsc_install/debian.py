"""Get runsc from Debian's package."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import ProgramNotFoundError, SandboxError
from ...gvisor.programs import trusted_program
from ...gvisor.runsc import OLDEST, Runsc
from .. import apt_entries
from ..progress import Note
from .source import Source, run


class DebianSource(Source):
    """The package ``runsc`` of Debian or Ubuntu, from the machine's configured mirror.

    The backports of the release come first: they are small, and the build in bookworm itself is too old. The machine's
    own lists, cache and hooks of apt are not used and stay unchanged.
    """

    name = "debian"
    title = "Debian's package"

    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Download and unpack the newest usable package. Raises SandboxError with the reason of each set of suites."""
        try:
            programs = Apt(*map(trusted_program, ("apt-get", "apt-cache", "dpkg-deb")))
        except ProgramNotFoundError as error:
            raise SandboxError(
                f"this machine has no {error.name} that can be used{''.join(f'; {one}' for one in error.refused)}"
            ) from error
        reasons = []
        for suites, settings in _suites(workspace):
            folder = Path(tempfile.mkdtemp(dir=workspace))
            (folder / "apt.conf").write_text(APT_CONFIGURATION.format(folder=folder) + settings)
            try:
                return _from_suites(programs, target, folder, note)
            except SandboxError as error:
                reasons.append(f"{suites}: {error.problem}")
        raise SandboxError("; ".join(dict.fromkeys(reasons)))


class Apt(NamedTuple):
    """Paths of the programs that download and unpack a Debian package."""

    get: str
    cache: str
    unpack: str


APT_CONFIGURATION = """\
Dir::State::lists "{folder}/lists";
Dir::Cache "{folder}/cache";
Acquire::Languages "none";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""


def _suites(workspace: Path) -> Iterator[tuple[str, str]]:
    """Yield sets of suites to search: a name, and the lines for apt's configuration that select them."""
    parts = workspace / "backports"
    parts.mkdir()
    apt_entries.write_backports(parts)
    if any(parts.iterdir()):
        yield "backports", f'Dir::Etc::sourcelist "/dev/null";\nDir::Etc::sourceparts "{parts}";\n'
    yield "this machine's suites", ""


def _from_suites(apt: Apt, target: Path, folder: Path, note: Note) -> None:
    configuration = ["-c", str(folder / "apt.conf")]
    for needed in ("lists/partial", "cache/archives/partial"):
        (folder / needed).mkdir(parents=True)
    said = run([apt.get, *configuration, "update"], note, cwd=folder, limit=300, check=False)
    offered = run([apt.cache, *configuration, "madison", "runsc"], note, cwd=folder, limit=60, check=False)
    versions = re.findall(r"^\s*runsc \| (\S+) \|", offered, re.MULTILINE)
    good = [version for version in versions if (Runsc(target, version).built or OLDEST) >= OLDEST]
    if not good:
        missed = re.search(r"^[EW]: (Failed to fetch .*)", said, re.MULTILINE)
        too_old = f"only runsc {versions[0]}, which is too old" if versions else "no package runsc"
        raise SandboxError(missed[1].strip() if missed and not versions else too_old)
    run([apt.get, *configuration, "download", f"runsc={good[0]}"], note, cwd=folder, limit=600)
    (package,) = folder.glob("runsc_*.deb")
    run([apt.unpack, "-x", str(package), "unpacked"], note, cwd=folder, limit=120)
    shutil.copyfile(folder / "unpacked" / "usr" / "bin" / "runsc", target)
