"""Connect a KernelManager with its sandboxed kernel: the addresses and keys of the kernel's clients."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_client.session import Session
from jupyter_core.paths import jupyter_runtime_dir

from ..errors import ConfigurationError, SandboxError
from ..io_thread import IO
from ..sandbox.handle import SandboxHandle
from ..workers import control
from .activity import ActivityWatch
from .kernel import SandboxedKernel
from .relay import CHANNELS
from .synthetic_replies import error_replies, notice

LOOPBACK = ("", "localhost", "127.0.0.1", "::1")
MAX_SOCKET_PATH = 107
"""Longest path of a unix socket, in bytes."""


class ClientSide:
    """The addresses and keys that ``km``, the KernelManager, has for the clients of ``kernel``.

    Also uses the keys to watch the kernel's activity as a client, and to answer clients in the kernel's place. Owned
    by the provisioner. The methods about addresses, and ``adopt_keys``, run on Jupyter's loop, all others in the I/O
    thread.
    """

    def __init__(self, km: Any, kernel: SandboxedKernel, log: logging.Logger) -> None:
        self._km = km
        self._kernel = kernel
        self._log = log
        self._tcp_address: str | None = None
        self._watch: ActivityWatch | None = None
        self._recording: asyncio.Task[None] | None = None

    # -- addresses -----------------------------------------------------------------------------------------------------

    async def reserve_addresses(self, transport: str) -> None:
        """Open the relay's listeners and set the manager's addresses. ``transport`` is used if none is configured."""
        km, relay = self._km, self._kernel.relay
        if transport == "ipc":
            await self._prefer_ipc()
        if km.transport == "ipc":
            await IO.run(relay.reserve_ipc(_socket_paths(km.ip)))
            ports = {channel: number for number, channel in enumerate(CHANNELS, 1)}
        else:
            ip = "127.0.0.1" if km.ip == "localhost" else km.ip
            if not ipaddress.ip_address(ip).is_loopback:
                raise ConfigurationError(
                    "KernelManager.ip",
                    f"{km.ip} is not a loopback address: clients reach a sandboxed kernel only over loopback.",
                    "Leave KernelManager.ip at 127.0.0.1.",
                )
            wanted = {channel: getattr(km, f"{channel}_port") for channel in CHANNELS}
            ports = await IO.run(relay.reserve_tcp(ip, wanted))
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
            self._log.warning("Kernel %s is reached over TCP: path %s is too long for unix sockets", kernel_id, folder)
            return ""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(prefix)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def session(self) -> Session:
        """Return a session to sign messages on behalf of the kernel."""
        return Session(key=self._km.session.key, signature_scheme=self._km.session.signature_scheme)

    def adopt_keys(self, sandbox_id: str, contents: Mapping[str, Any]) -> dict[str, str]:
        """Give the manager the keys of a saved kernel, which accepts no others. Return arguments for ``pre_launch``.

        ``contents`` is the saved description of the sandbox. Raises SandboxError if it has no kernel.
        """
        km, saved = self._km, contents.get("connection")
        if saved is None:
            raise SandboxError(
                f"Sandbox {sandbox_id} was not saved by Jupyter: there is no kernel in it.",
                "Name another sandbox, or delete this one.",
            )
        km.session.key = saved["key"].encode()
        km.session.signature_scheme = saved["signature_scheme"]
        if "curve_publickey" not in saved:
            return {"transport_encryption": "disabled"}
        km.curve_publickey, km.curve_secretkey = saved["curve_publickey"].encode(), saved["curve_secretkey"].encode()
        return {}

    def watch(self, handle: SandboxHandle) -> None:
        """Listen to the kernel's iopub channel, to record when it is used and when its requests end.

        Also report if the kernel's state is older than the one that was lost, or files were lost.
        """
        self.stop_watching()
        km = self._km
        self._watch = ActivityWatch(self._kernel.activity, handle.touch, self._kernel.relay.max_message_size)
        curve = (km.curve_publickey, km.curve_secretkey) if getattr(km, "curve_publickey", None) else None
        self._watch.listen(km._make_url("iopub"), self.session(), curve)
        if self._kernel.restored:
            self._watch.probe(km._make_url("shell"), self.session(), curve)
        self._report_losses(handle)
        self._kernel.home.settled = False

    def stop_watching(self) -> None:
        """Close the connection to the iopub channel."""
        if self._watch:
            self._watch.close()
            self._watch = None

    def _report_losses(self, handle: SandboxHandle) -> None:
        """Log that the state is older than the lost one, or that files were lost. The first cell tells it, too."""
        since = handle.metadata.lost_since
        texts = [text for text in (_loss(since) if since else "", self._kernel.home.notice()) if text]
        for text in texts:
            self._log.warning("Kernel %s: %s", self._km.kernel_id, text)
        self._kernel.relay.on_cell = partial(self._tell, handle, "\n".join(texts)) if texts else None

    def _tell(self, handle: SandboxHandle, text: str, cell: Mapping[str, Any]) -> None:
        self._kernel.relay.publish(notice(text, self.session(), cell))
        self._kernel.home.problem = ""
        if handle.metadata.lost_since:
            self._recording = asyncio.create_task(handle.memory.stored.record_told())

    def refuse_held(self, error: SandboxError) -> None:
        """Answer the held requests with the reason why the kernel was not woken; the next cell retries."""
        reason = f"The kernel could not be woken; its saved state is unchanged. {error}"
        self._kernel.relay.answer(lambda held: error_replies(held, self.session(), reason))


def _loss(since: str) -> str:
    """Return the notice about a state that is older than the lost one; ``since`` is its time in UTC."""
    return (
        f"This is the kernel's state of {since[:19].replace('T', ' ')} UTC. Any later changes are lost: the sandbox "
        "ended without being saved, for example because its container or machine was stopped."
    )


def _socket_paths(prefix: str) -> dict[str, str]:
    """Return the path of each channel's unix socket: the prefix and a number, as in jupyter_client."""
    return {channel: os.path.abspath(f"{prefix}-{number}") for number, channel in enumerate(CHANNELS, 1)}
