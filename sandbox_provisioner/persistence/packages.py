"""Name the installed Python packages, and their versions, that files belong to. For messages only.

pip and other installers write a folder NAME-VERSION.dist-info beside the packages, with a list of all files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

SITES = ("site-packages", "dist-packages")
"""Names of the folders in which packages are installed."""
DIST_INFO = re.compile(r"([A-Za-z0-9._-]+?)-([A-Za-z0-9.!+_]+)\.dist-info")
MOST_DISTRIBUTIONS = 1000
MOST_RECORD = 1 << 22
"""Bytes of a list of files that are read."""


def installed(files: Iterable[str]) -> dict[str, str]:
    """Return the name and version of the package in each installed folder or module of ``files``. Blocks.

    The key is the path directly below the folder of all packages, such as ``.../site-packages/numpy``.
    """
    tops: dict[str, set[str]] = {}
    for file in files:
        if place := top(file):
            site, _, name = place.rpartition("/")
            tops.setdefault(site, set()).add(name)
    return {f"{site}/{name}": package for site, names in tops.items() for name, package in _named(site, names)}


def top(file: str) -> str:
    """Return the path of the package, or of the module, that contains ``file``; empty if it is not installed."""
    parts = file.split("/")
    sites = [number for number, part in enumerate(parts[:-1]) if part in SITES]
    return "/".join(parts[: sites[-1] + 2]) if sites else ""


def _named(site: str, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the folders in ``names`` with their packages, by the packages' names, or else by their lists of files."""
    found = _distributions(site)
    by_name = {_normal(name): (name, version) for name, version in found}
    for name in names:
        if package := by_name.get(_normal(name)):
            yield name, " ".join(package)
    missing = {name for name in names if _normal(name) not in by_name}
    for name, version in found if missing else ():
        listed = {line.split(b"/", 1)[0].decode(errors="replace") for line in _record(site, name, version)}
        yield from ((folder, f"{name} {version}") for folder in missing & listed)


def _distributions(site: str) -> list[tuple[str, str]]:
    """Return the names and versions of the packages that are installed in a folder."""
    with suppress(OSError):
        matches = filter(None, map(DIST_INFO.fullmatch, sorted(os.listdir(site))))
        return [(match[1], match[2]) for match in matches][:MOST_DISTRIBUTIONS]
    return []


def _record(site: str, name: str, version: str) -> list[bytes]:
    with suppress(OSError), Path(site, f"{name}-{version}.dist-info", "RECORD").open("rb") as record:
        return record.read(MOST_RECORD).splitlines()
    return []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def difference(before: Mapping[str, str], now: Mapping[str, str], file: str) -> str:
    """Return a remark about the package that contains ``file``, such as " (numpy 1.26.4 is now numpy 2.0.1)"."""
    old, new = (versions.get(top(file), "") for versions in (before, now))
    if old and new and old != new:
        return f" ({old} is now {new})"
    return f" (a part of {old or new})" if old or new else ""
