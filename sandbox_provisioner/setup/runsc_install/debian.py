"""Get runsc from Debian's package, first from the backports on the machine's own mirror."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import ProgramNotFoundError, SandboxError
from ...gvisor.programs import trusted_path, trusted_program
from ...gvisor.runsc import OLDEST, Runsc
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
    write_backports(parts)
    if any(parts.iterdir()):
        yield "backports", f'Dir::Etc::sourcelist "/dev/null";\nDir::Etc::sourceparts "{parts}";\n'
    yield "this machine's suites", ""


def _from_suites(apt: Apt, target: Path, folder: Path, note: Note) -> None:
    configuration = ["-c", str(folder / "apt.conf")]
    for needed in ("lists/partial", "cache/archives/partial"):
        (folder / needed).mkdir(parents=True)
    update_output = run([apt.get, *configuration, "update"], note, cwd=folder, limit=300, check=False)
    versions_output = run([apt.cache, *configuration, "madison", "runsc"], note, cwd=folder, limit=60, check=False)
    versions = re.findall(r"^\s*runsc \| (\S+) \|", versions_output, re.MULTILINE)
    usable = [version for version in versions if (Runsc(target, version).built or OLDEST) >= OLDEST]
    if not usable:
        failure = re.search(r"^[EW]: (Failed to fetch .*)", update_output, re.MULTILINE)
        too_old = f"only runsc {versions[0]}, which is too old" if versions else "no package runsc"
        raise SandboxError(failure[1].strip() if failure and not versions else too_old)
    run([apt.get, *configuration, "download", f"runsc={usable[0]}"], note, cwd=folder, limit=600)
    (package,) = folder.glob("runsc_*.deb")
    run([apt.unpack, "-x", str(package), "unpacked"], note, cwd=folder, limit=120)
    shutil.copyfile(folder / "unpacked" / "usr" / "bin" / "runsc", target)


def write_backports(parts: Path) -> None:
    """Write the machine's apt sources, changed to name the backports of its release, into the folder ``parts``.

    The folder stays empty if no source names a release.
    """
    for number, file in enumerate(source_files()):
        text = file.read_text(errors="replace")
        rewritten = backports_deb822(text) if file.suffix == ".sources" else backports_one_line(text)
        if rewritten:
            (parts / f"{number}{file.suffix}").write_text(rewritten)


def source_files() -> list[Path]:
    """Return the machine's readable source files, from the places that ``apt-config`` reports."""
    names = ["LIST", "Dir::Etc::sourcelist/f", "PARTS", "Dir::Etc::sourceparts/d"]
    argv = [trusted_program("apt-config"), "shell", *names]
    environment = {**os.environ, "PATH": trusted_path()}
    answer = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment)
    found = dict(part.split("=", 1) for part in shlex.split(answer.stdout))
    parts = sorted(path for path in Path(found["PARTS"]).glob("*") if path.suffix in (".list", ".sources"))
    return [path for path in (Path(found["LIST"]), *parts) if os.access(path, os.R_OK) and path.is_file()]


def _backports(suites: Sequence[str]) -> list[str]:
    """Return the backports of each suite that is a release: this machine's codename, "stable" or "oldstable"."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    return [f"{suite}-backports" for suite in suites if suite in (release, "stable", "oldstable")]


def backports_deb822(text: str) -> str:
    """Return the enabled stanzas of a .sources file that name a release, with its backports as their suites."""
    stanzas = []
    for stanza in re.split(r"\n\s*\n", re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)):
        suites = re.search(r"^Suites:((?:.*\n?)(?:[ \t]+.*\n?)*)", stanza, re.MULTILINE | re.IGNORECASE)
        wanted = _backports(suites[1].split()) if suites else []
        disabled = re.search(r"^Enabled:\s*(no|false|0|off)\b", stanza, re.MULTILINE | re.IGNORECASE)
        if suites and wanted and not disabled:
            line = f"Suites: {' '.join(wanted)}\n"
            stanzas.append((stanza[: suites.start()] + line + stanza[suites.end() :]).strip() + "\n")
    return "\n".join(stanzas)


def backports_one_line(text: str) -> str:
    """Return the ``deb`` lines of a .list file that name a release, with its backports as their suite."""
    lines = []
    for line in text.splitlines():
        entry = re.match(r"\s*(deb\s+(?:\[[^]]*\]\s+)?\S+)\s+(\S+)\s+(.*)", line)
        wanted = _backports([entry[2]]) if entry else []
        if entry and wanted:
            lines.append(f"{entry[1]} {wanted[0]} {entry[3]}\n")
    return "".join(lines)
