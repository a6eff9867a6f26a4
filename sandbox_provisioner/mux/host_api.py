"""Track the guest's requests to the host, so that a hostile guest can occupy only bounded memory.

A request ("ask" in the protocol) is open until the guest confirms that the answer arrived: a guest that sends requests
without reading the answers soon reaches the limit. ``kernel.host_api`` executes the requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ProtocolError
from ..guest.host_api import MAX_OPEN, MAX_REQUEST

LISTENER_WAIT = 10.0
"""Seconds that a request waits for ``listen``: a restored kernel may send one before the server listens."""
NO_LISTENER = {"problem": "This sandbox's server does not accept requests."}

Listener = Callable[[int, dict[str, Any]], None]


class HostApi:
    """The open requests of one guest, by number. Runs on the host's I/O loop. ``send`` sends PID 1 an answer."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._listener: Listener | None = None
        self._early: list[tuple[int, dict[str, Any]]] = []
        """Requests that arrived before ``listen`` was called."""
        self._answered: dict[int, bool] = {}
        """The open requests: True if the answer was sent and the guest has not confirmed it."""

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` for every request from now on, and for those that already wait."""
        self._listener = listener
        early, self._early = self._early, []
        for number, request in early:
            listener(number, request)

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        """Answer a request, now or when the guest wakes. Does nothing if it is closed or already answered."""
        if self._answered.get(number) is False:
            self._answered[number] = True
            self._send({"op": "answer", "number": number, "answer": answer})

    def receive(self, number: Any, request: Any) -> None:
        """Register a request from the guest. Called by the connection. Raises ProtocolError if it is not allowed."""
        if type(number) is not int or not 0 < number < 1 << 31 or number in self._answered:
            raise ProtocolError("Invalid request number from guest.")
        if not isinstance(request, dict) or len(json.dumps(request)) > MAX_REQUEST:
            raise ProtocolError("Invalid request from guest.")
        if len(self._answered) >= MAX_OPEN:
            raise ProtocolError(f"The guest has more than {MAX_OPEN} open requests.")
        self._answered[number] = False
        if self._listener:
            self._listener(number, request)
        else:
            self._early.append((number, request))
            asyncio.get_running_loop().call_later(LISTENER_WAIT, self._refuse_early)

    def confirm(self, number: Any) -> None:
        """Close a request whose answer the guest has received. Raises ProtocolError if none was sent."""
        if type(number) is not int or not self._answered.get(number):
            raise ProtocolError("The guest confirmed an answer that was not sent.")
        del self._answered[number]

    def clear(self) -> None:
        """Drop all requests. Called by the connection when the guest is gone."""
        self._early.clear()
        self._answered.clear()

    def _refuse_early(self) -> None:
        early, self._early = self._early, []
        for number, _ in early:
            self.answer(number, NO_LISTENER)
