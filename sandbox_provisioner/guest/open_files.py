"""List the files that processes have mapped or open, and their working folders: a restore needs all of them.

Runs in the sandbox as a process of its own, before a checkpoint. Prints a JSON list of [path, use, state], explained
by FilePrint in ``persistence.compatibility``. With the argument ``processes``, a fourth item is the process, which is
empty for a file whose state is empty; servers of older versions expect three items.

If such a file is missing, the restore fails without naming it; if it was replaced, the old mapping shows the new bytes.
A file that was replaced while the sandbox ran is found by its inode: the inode of a private mapping is compared with
the one that its path has now. Open files are not compared: replacing one may be intended, and a lookup of its path
would make gVisor notice the replacement, after which gVisor does not save the file.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress

REGION = re.compile(
    r"^[0-9a-f]+-[0-9a-f]+ [r-][w-][x-]([ps]) [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) ([0-9]+)[ \n]+", re.MULTILINE
)
DELETED = " (deleted)"
INIT_MAPS = "/run/jupyter/maps"
"""The file in which PID 1 records its mappings. Other processes can read /proc/1/maps only of an older PID 1."""

Identity = tuple[int, int]
FileUse = tuple[str, str, Identity]
"""A path, its use and the file's device and inode."""


def mappings(text: str) -> Iterator[FileUse]:
    """Yield the mapped files in the text of a process's ``maps``, in which a path may contain line ends."""
    parts = REGION.split(text)
    for start in range(1, len(parts), 5):
        kind, major, minor, inode, path = parts[start : start + 5]
        if path.startswith("/"):
            identity = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            yield path[:-1], "shared" if kind == "s" else "mapped", identity


def descriptors(folder: str) -> Iterator[FileUse]:
    """Yield the open files and folders and the working folder of the process with this ``/proc`` folder."""
    links = ["cwd"]
    with suppress(OSError):
        links += [f"fd/{name}" for name in os.listdir(f"{folder}/fd")]
    for link in links:
        try:
            path, found = os.readlink(f"{folder}/{link}"), os.stat(f"{folder}/{link}")
        except OSError:
            continue
        if path.startswith("/") and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            yield path, "folder" if stat.S_ISDIR(found.st_mode) else "open", (found.st_dev, found.st_ino)


def state(path: str, use: str, identity: Identity) -> tuple[str, str]:
    """Return the path without the suffix that the system adds, and the file's state: empty, "lost" or "deleted"."""
    if use == "mapped":
        with suppress(OSError):
            found = os.lstat(path)
            if (found.st_dev, found.st_ino) == identity:
                return path, ""
    if path.endswith(DELETED):
        return path.removesuffix(DELETED), "deleted"
    return path, "lost" if use == "mapped" else ""


def files_in_use() -> list[tuple[str, str, str, str]]:
    """Return all files in use by processes other than this one, once for each use; if lost, once for each process."""
    found = set()
    for entry, uses in _uses_by_process().items():
        for path, use, identity in uses:
            name, file_state = state(path, use, identity)
            found.add((name, use, file_state, _title(entry) if file_state else ""))
    return sorted(found)


def _uses_by_process() -> dict[str, set[FileUse]]:
    """Return the uses of files by the name of the process's folder in ``/proc``; an older PID 1 may be missing."""
    found: dict[str, set[FileUse]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        uses = found.setdefault(entry, set())
        try:
            uses.update(mappings(_read(f"/proc/{entry}/maps")))
        except PermissionError:
            if entry == "1":
                with suppress(OSError):
                    uses.update(mappings(_read(INIT_MAPS)))
            continue
        except OSError:
            continue
        uses.update(descriptors(f"/proc/{entry}"))
    return found


def _title(entry: str) -> str:
    """Return the name of the program that a process runs, and its id."""
    with suppress(OSError):
        return f"{_read(f'/proc/{entry}/comm').strip()} (process {entry})"
    return f"process {entry}"


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return file.read()


if __name__ == "__main__":
    items = 4 if "processes" in sys.argv else 3
    json.dump([row[:items] for row in files_in_use()], sys.stdout)
