"""Use a kernel under a plain KernelManager, without a server: run cells, hibernate, wake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

LONG = 60


def run(kc: BlockingKernelClient, code: str, timeout: float = 60) -> str:
    """Execute ``code``. Return its printed output and result as text. Fails on an error."""
    pieces: list[str] = []

    def collect(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            pieces.append(content["text"])
        elif message["msg_type"] == "execute_result":
            pieces.append(content["data"]["text/plain"])

    reply = kc.execute_interactive(code, timeout=timeout, output_hook=collect)
    if reply["content"]["status"] != "ok":
        raise AssertionError("\n".join(reply["content"]["traceback"]))
    return "".join(pieces)


class Notebook:
    """A notebook's kernel under a plain KernelManager, and a client of it."""

    def __init__(self, km: KernelManager, kc: BlockingKernelClient) -> None:
        self.km, self.kc = km, kc

    def run(self, code: str) -> str:
        return run(self.kc, code)

    @property
    def asleep(self) -> bool:
        return bool(self.km.provisioner.asleep)

    def hibernate(self) -> None:
        asyncio.run(self.km.provisioner.hibernate())
        assert self.asleep
        assert self.km.is_alive()

    def nap(self) -> None:
        """Hibernate. Unlike ``hibernate``, this allows that a client's request wakes the kernel at once."""
        asyncio.run(self.km.provisioner.hibernate())

    def wake(self) -> None:
        asyncio.run(self.km.provisioner.wake())
        assert not self.asleep

    def iopub(self, request: str) -> dict[str, Any]:
        """Wait for the next iopub message of a request."""
        while True:
            message: dict[str, Any] = self.kc.get_iopub_msg(timeout=LONG)
            if message["parent_header"].get("msg_id") == request:
                return message

    def outputs(self, request: str) -> Iterator[str]:
        """Yield the printed text and the names of errors of a request, until its idle status."""
        while True:
            message = self.iopub(request)
            if message["msg_type"] == "stream":
                yield message["content"]["text"]
            elif message["msg_type"] == "error":
                yield message["content"]["ename"]
            elif message["content"].get("execution_state") == "idle":
                return

    def reply(self, request: str) -> dict[str, Any]:
        """Wait for the reply of a request on the shell channel, and return its content."""
        while True:
            message: dict[str, Any] = self.kc.get_shell_msg(timeout=LONG)
            if message["parent_header"].get("msg_id") == request:
                return message["content"]

    def drain(self) -> None:
        """Run a cell, and discard all messages that arrived until its end."""
        self.run("pass")
        for channel in (self.kc.shell_channel, self.kc.iopub_channel, self.kc.control_channel):
            while channel.msg_ready():
                channel.get_msg(timeout=0)

    def end(self, keep: bool = False) -> None:
        """Shut the kernel down. With ``keep``, keep its saved state, as a stopping server does."""
        if keep:
            self.km.provisioner.keep_state()
        self.kc.stop_channels()
        self.km.shutdown_kernel()


Open = Callable[..., Notebook]
