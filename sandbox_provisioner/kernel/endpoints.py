"""Reserve the addresses at which clients reach a kernel: unix sockets, or loopback ports."""

from __future__ import annotations

import ipaddress
import logging
import os
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_runtime_dir

from ..errors import ConfigurationError
from ..io_thread import IO
from ..workers import control
from .relay import CHANNELS, ChannelRelay

LOOPBACK = ("", "localhost", "127.0.0.1", "::1")
MAX_SOCKET_PATH = 107
"""Longest path of a unix socket, in bytes."""


class Endpoints:
    """The addresses of one kernel in its KernelManager ``km``, and the relay that listens on them. Jupyter's loop."""

    def __init__(self, km: Any, relay: ChannelRelay, log: logging.Logger) -> None:
        self._km = km
        self._relay = relay
        self._log = log
        self._tcp_address: str | None = None

    async def reserve(self, transport: str) -> None:
        """Open the relay's listeners and set the manager's addresses. ``transport`` is used if none is configured."""
        km = self._km
        if transport == "ipc":
            await self._prefer_ipc()
        if km.transport == "ipc":
            await IO.run(self._relay.reserve_ipc(_socket_paths(km.ip)))
            ports = {channel: number for number, channel in enumerate(CHANNELS, 1)}
        else:
            ip = "127.0.0.1" if km.ip == "localhost" else km.ip
            if not ipaddress.ip_address(ip).is_loopback:
                raise ConfigurationError(
                    "KernelManager.ip",
                    f"A sandboxed kernel can only be reached over loopback, and {km.ip} is not.",
                    "Leave KernelManager.ip at 127.0.0.1.",
                )
            wanted = {channel: getattr(km, f"{channel}_port") for channel in CHANNELS}
            ports = await IO.run(self._relay.reserve_tcp(ip, wanted))
        if not km.cache_ports:
            km._record_random_port_names()  # a restart with new ports then clears these
        for channel, port in ports.items():
            setattr(km, f"{channel}_port", port)

    def restore_address(self) -> None:
        """Give the manager its TCP address back after the sockets are closed."""
        if self._tcp_address is not None:
            self._km.transport, self._km.ip = "tcp", self._tcp_address
            self._tcp_address = None

    async def _prefer_ipc(self) -> None:
        """Use unix sockets, which only this user can open, unless the configuration names another transport."""
        km = self._km
        configured = any(
            "transport" in km.config[kind.__name__] for kind in type(km).__mro__ if kind.__name__ in km.config
        )
        if km.transport != "tcp" or km.ip not in LOOPBACK or configured:
            return
        if prefix := await control(self._ipc_prefix, Path(jupyter_runtime_dir())):
            self._tcp_address = km.ip
            km.transport, km.ip = "ipc", prefix

    def _ipc_prefix(self, folder: Path) -> str:
        """Return the prefix of the socket paths in ``folder``; empty if they would be too long. Blocks."""
        kernel_id = self._km.kernel_id
        names = (folder / f"kernel-{kernel_id[:length]}" for length in (8, 13, 36))
        prefix = next(name for name in names if not os.path.lexists(f"{name}-1"))
        if len(os.fsencode(prefix)) > MAX_SOCKET_PATH - len("-1"):
            self._log.warning("Kernel %s is reached over TCP: %s is too long for unix sockets", kernel_id, folder)
            return ""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(prefix)


def _socket_paths(prefix: str) -> dict[str, str]:
    """Return the path of each channel's unix socket: the prefix and a number, as in jupyter_client."""
    return {channel: os.path.abspath(f"{prefix}-{number}") for number, channel in enumerate(CHANNELS, 1)}
