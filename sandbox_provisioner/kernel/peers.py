"""Find the user who opened a local connection."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
UID_FIELD = 7


def trusted_peer(connection: socket.socket) -> bool:
    """Return True if root or this process's own user opened the connection."""
    return peer_uid(connection) in (0, os.geteuid())


def peer_uid(connection: socket.socket) -> int | None:
    """Return the user id of the process that opened the connection; None if it cannot be determined."""
    if connection.family == socket.AF_UNIX:
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", packed)[1])
    try:
        theirs, ours = connection.getpeername(), connection.getsockname()
        wanted = [_entry(*theirs[:2]), _entry(*ours[:2])]
        for line in TABLES[connection.family].read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1:3] == wanted:
                return int(fields[UID_FIELD])
    except (OSError, LookupError, ValueError):
        pass
    return None


def _entry(address: str, port: int) -> str:
    """Return an address in the format of /proc/net/tcp: 32-bit words in the machine's byte order."""
    packed = ipaddress.ip_address(address).packed
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return f"{b''.join(words).hex().upper()}:{port:04X}"
