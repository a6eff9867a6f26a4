"""Let websockets that are opened at the same time to one sandboxed kernel share their kernel_info requests.

For each new websocket, Jupyter Server sends kernel_info_request on shell and control, and repeats that every half
second until the websocket's iopub connection has received a message. The kernel publishes four statuses for each pair
of requests, to every websocket. So the traffic across the sandbox's boundary grows with the square of the number of
websockets; once it takes longer than half a second, the repetitions add to it.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection

from .._text import excerpt
from .kernel_manager import provisioner_of
from .kernel_messages import MOST_KEPT

VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){0,3}")


class SandboxWebsocketConnection(ZMQChannelsWebsocketConnection):
    """The value of ServerApp.kernel_websocket_connection_class on a server with sandboxed kernels. Server loop only."""

    _turns: ClassVar[WeakValueDictionary[str, asyncio.Lock]] = WeakValueDictionary()
    """Locks by kernel id, held by the websocket that sends kernel_info requests."""

    _unsent = 0
    """Bytes that the client has not read yet."""
    _slow = False
    """True after messages were dropped because the client reads too slowly."""

    @property
    def write_message(self) -> Any:
        """The function that sends a message to the client. Used by Jupyter Server."""
        return self._write

    def _write(self, message: bytes | str, binary: bool = False) -> None:
        """Send a message, unless the client reads so slowly that MOST_KEPT bytes wait already: then drop it."""
        size = len(message)
        if self._unsent and self._unsent + size > MOST_KEPT:
            if not self._slow:
                self.log.warning("Kernel %s: messages for a client that reads too slowly are dropped", self.kernel_id)
            self._slow = True
            return

        def sent(done: asyncio.Future[None]) -> None:
            self._unsent -= size
            if not done.cancelled():
                done.exception()  # the client has disconnected

        self._unsent += size
        try:
            self.websocket_handler.write_message(message, binary).add_done_callback(sent)
        except Exception:
            self._unsent -= size
            raise

    _malformed = False
    """True after the kernel has sent a malformed message."""

    def handle_outgoing_message(self, stream: Any, outgoing_msg: list[Any]) -> None:
        """Pass a kernel's message to the client, or drop a malformed one. Called by Jupyter Server.

        After an exception, Jupyter would stop reading the stream, and later messages would fill the server's memory.
        """
        try:
            super().handle_outgoing_message(stream, outgoing_msg)
        except Exception as error:
            if not self._malformed:
                self.log.warning("Kernel %s: malformed messages are dropped: %s", self.kernel_id, excerpt(error))
            self._malformed = True

    def _handle_kernel_info_reply(self, msg: list[Any]) -> None:
        """Use the kernel's protocol version, or Jupyter's own if the reply is malformed. Called by Jupyter Server.

        The version is checked here because Jupyter Server writes it to the log as it is.
        """
        info: dict[str, Any] = {}
        try:
            reply = self.session.deserialize(self.session.feed_identities(msg)[1])
            if reply["msg_type"] != "kernel_info_reply" or not VERSION.fullmatch(reply["content"]["protocol_version"]):
                raise ValueError("it has no valid protocol_version")
            info = reply["content"]
        except Exception as error:
            self.log.warning("Kernel %s sent a malformed kernel_info_reply: %s", self.kernel_id, excerpt(error))
        self._finish_kernel_info(info)  # type: ignore[no-untyped-call]
        if self.kernel_info_channel:
            self.kernel_info_channel.close()
        self.kernel_info_channel = None

    def nudge(self) -> asyncio.Future[None]:
        """Return a future that completes once iopub delivers messages. Called by Jupyter Server for a new websocket."""
        kernel = self.kernel_manager
        if not provisioner_of(kernel) or getattr(kernel, "execution_state", None) == "busy":
            return super().nudge()
        iopub, received = self.channels["iopub"], asyncio.Event()

        def receive(message: Any) -> None:
            received.set()
            iopub.stop_on_recv()  # later messages are for the client

        iopub.on_recv(receive)
        return asyncio.ensure_future(self._nudge_in_turn(received))

    async def _nudge_in_turn(self, received: asyncio.Event) -> None:
        """Send kernel_info requests, unless iopub has delivered a message caused by another websocket's requests.

        Raises TimeoutError if the kernel does not answer the others, or this one, within ``kernel_info_timeout``.
        """
        turn = self._turns.setdefault(self.kernel_id, asyncio.Lock())
        async with asyncio.timeout(self.kernel_info_timeout):
            await turn.acquire()
        try:
            if not received.is_set() and self.channels:
                await super().nudge()
        finally:
            turn.release()
