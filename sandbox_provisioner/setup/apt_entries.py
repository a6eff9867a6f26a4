"""Rewrite the machine's own apt sources to name the backports of its release on the same mirror."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..gvisor.programs import trusted_path, trusted_program


def write_backports(parts: Path) -> None:
    """Write the rewritten source files into the folder ``parts``; it stays empty if no source names a release."""
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
