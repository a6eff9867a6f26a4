"""Forward requests from processes in the sandbox to the host. Runs in PID 1, in its event loop.

The processes connect to a unix socket. A connection carries one request, a JSON object that ends with the end of the
input, and then one answer of the same form. PID 1 itself refuses a request that is too large or malformed, or that
exceeds the limit of open connections.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable
from typing import Any

PATH = "/run/jupyter/sandbox"
MAX_OPEN = 8
MAX_REQUEST = 4096
"""Largest request in bytes, both as received and as encoded for the host."""

RESTORED = {"outcome": "restored"}
GONE = {"problem": "The server ended before it answered."}


class Client:
    """A connection of a process: the request received so far, and the part of the answer that is still to be sent.

    ``number`` identifies the request to the host, and is 0 until the request is complete.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.received = b""
        self.number = 0
        self.answer = b""
        self.watched = False


class HostApi:
    """All connections. ``tell`` sends the host a control message.

    A request is sent with a number, which the host's answer repeats. ``pending`` maps numbers to waiting connections.
    """

    def __init__(self, epoll: select.epoll, tell: Callable[..., None]) -> None:
        self.epoll = epoll
        self.tell = tell
        self.listener: socket.socket | None = None
        self.open: dict[int, Client] = {}
        self.pending: dict[int, Client] = {}
        self.last = 0

    def listen(self, path: str) -> None:
        """Start accepting requests at ``path``. If the socket cannot be created, the sandbox runs without requests."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            listener.bind(path)
            listener.listen(MAX_OPEN)
        except OSError:
            listener.close()
            return
        listener.setblocking(False)
        self.listener = listener
        self.accept()

    def accept(self) -> None:
        """Accept requests, from the start or again after ``stop``."""
        if self.listener:
            self.epoll.register(self.listener, select.EPOLLIN)

    def stop(self) -> None:
        """Send pending requests an error, close all connections and accept none until ``accept``: the host is gone."""
        if self.listener:
            self.epoll.unregister(self.listener)
        self.answer_all(GONE)
        for client in list(self.open.values()):
            self._close(client)

    def serve(self, fd: int) -> bool:
        """Handle an epoll event of ``fd``. Return False if the descriptor does not belong to a request."""
        if self.listener and fd == self.listener.fileno():
            self._accept()
        elif fd in self.open:
            client = self.open[fd]
            if client.answer:
                self._write(client)
            elif not client.number:
                self._read(client)
        else:
            return False
        return True

    def _accept(self) -> None:
        assert self.listener is not None
        try:
            peer = self.listener.accept()[0]
        except OSError:
            return
        peer.setblocking(False)
        client = self.open[peer.fileno()] = Client(peer)
        self._watch(client, select.EPOLLIN)
        if len(self.open) > MAX_OPEN:
            self._reply(client, {"problem": "Too many requests at once. Wait for an answer, then try again."})

    def _read(self, client: Client) -> None:
        try:
            piece = client.socket.recv(MAX_REQUEST + 1)
        except BlockingIOError:
            return
        except OSError:
            self._close(client)
            return
        client.received += piece
        if len(client.received) > MAX_REQUEST:
            self._reply(client, {"problem": f"The request is longer than {MAX_REQUEST} bytes."})
        elif not piece:
            self._forward(client)

    def _forward(self, client: Client) -> None:
        try:
            request = json.loads(client.received)
            valid = isinstance(request, dict) and len(json.dumps(request)) <= MAX_REQUEST
        except (ValueError, RecursionError):
            valid = False
        if not valid:
            self._reply(client, {"problem": "The request is not a JSON object, or is too large."})
            return
        self._watch(client, 0)
        self.last += 1
        client.number = self.last
        self.pending[client.number] = client
        self.tell(op="ask", number=client.number, request=request)

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Forward an answer from the host. Confirm its arrival, because the host limits unconfirmed requests."""
        self.tell(op="answered", number=number)
        if number in self.pending:
            self._reply(self.pending[number], answer)

    def answer_all(self, answer: dict[str, Any]) -> None:
        """Send ``answer`` to all requests that wait for the host, because the current host never received them."""
        for client in list(self.pending.values()):
            self._reply(client, answer)

    def _reply(self, client: Client, answer: dict[str, Any]) -> None:
        self.pending.pop(client.number, None)
        client.answer = json.dumps(answer).encode()
        self._watch(client, select.EPOLLOUT)
        self._write(client)

    def _write(self, client: Client) -> None:
        try:
            client.answer = client.answer[client.socket.send(client.answer) :]
        except BlockingIOError:
            return
        except OSError:
            client.answer = b""
        if not client.answer:
            self._close(client)

    def _close(self, client: Client) -> None:
        self.pending.pop(client.number, None)
        self._watch(client, 0)
        del self.open[client.socket.fileno()]
        client.socket.close()

    def _watch(self, client: Client, events: int) -> None:
        """Watch a connection for ``events``; with 0, not even for a hang-up, because the host has the request."""
        if client.watched:
            self.epoll.unregister(client.socket)
        if events:
            self.epoll.register(client.socket, events)
        client.watched = bool(events)
