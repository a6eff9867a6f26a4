"""Let websockets that are opened at the same time to one sandboxed kernel share their kernel_info requests.

For each new websocket, Jupyter Server sends kernel_info_request on shell and control, and repeats that every half
second until the websocket's iopub connection has received a message. The kernel publishes four statuses for each pair
of requests, to every websocket. So the traffic across the sandbox's boundary grows with the square of the number of
websockets; once it takes longer than half a second, the repetitions add to it.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection

from ..provisioner import SandboxProvisioner


class SandboxWebsocketConnection(ZMQChannelsWebsocketConnection):
    """The value of ServerApp.kernel_websocket_connection_class on a server with sandboxed kernels. Server loop only."""

    _turns: ClassVar[WeakValueDictionary[str, asyncio.Lock]] = WeakValueDictionary()
    """Locks by kernel id, held by the websocket that sends kernel_info requests."""

    def nudge(self) -> asyncio.Future[None]:
        """Return a future that completes once iopub delivers messages. Called by Jupyter Server for a new websocket."""
        kernel = self.kernel_manager
        sandboxed = isinstance(getattr(kernel, "provisioner", None), SandboxProvisioner)
        if not sandboxed or getattr(kernel, "execution_state", None) == "busy":
            return super().nudge()
        iopub, heard = self.channels["iopub"], asyncio.Event()

        def hear(message: Any) -> None:
            heard.set()
            iopub.stop_on_recv()  # later messages are for the client

        iopub.on_recv(hear)
        return asyncio.ensure_future(self._nudge_in_turn(heard))

    async def _nudge_in_turn(self, heard: asyncio.Event) -> None:
        """Send kernel_info requests, unless iopub has delivered a message caused by another websocket's requests.

        Raises TimeoutError if the kernel does not answer the others, or this one, within ``kernel_info_timeout``.
        """
        turn = self._turns.setdefault(self.kernel_id, asyncio.Lock())
        async with asyncio.timeout(self.kernel_info_timeout):
            await turn.acquire()
        try:
            if not heard.is_set() and self.channels:
                await super().nudge()
        finally:
            turn.release()
