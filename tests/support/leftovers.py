"""Find processes, mounts and folders that sandboxes left on the machine, and the ports of this process."""

from __future__ import annotations

from pathlib import Path

import psutil


def leftovers(runtime: Path) -> list[str]:
    """Return descriptions of the processes, mounts and folders of sandboxes in this runtime folder."""
    found = [f"folder {path.name}" for path in runtime.iterdir()]
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"--root={runtime}/" in command:
                found.append(f"process {entry.name}: {command[:120]}")
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    return found + [f"mount {line.split()[4]}" for line in mounts if str(runtime) in line]


def listening() -> set[tuple[str, int]]:
    """Return the addresses on which this process listens."""
    connections = psutil.Process().net_connections("tcp")
    return {tuple(item.laddr) for item in connections if item.status == psutil.CONN_LISTEN}
