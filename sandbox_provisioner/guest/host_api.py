"""Forward requests from processes in the sandbox to the host. PID 1 serves them on a unix socket in its epoll loop.

A connection carries one request, a JSON object that ends with the end of the input, and then one answer of the same
form. PID 1 itself refuses a request that is too large or malformed, and one over the limit of open connections.
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


class Ask:
    """One connection: the bytes received so far, and the part of the answer that is still to be sent."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.said = b""
        self.number = 0
        self.answer = b""
        self.watched = False


class Asks:
    """All connections. ``tell`` sends a request to the host with a number, which the host's answer repeats."""

    def __init__(self, epoll: select.epoll, tell: Callable[..., None]) -> None:
        self.epoll = epoll
        self.tell = tell
        self.listener: socket.socket | None = None
        self.open: dict[int, Ask] = {}
        self.pending: dict[int, Ask] = {}
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
        self.go_on()

    def go_on(self) -> None:
        """Start accepting requests, or accept them again after ``stop``."""
        if self.listener:
            self.epoll.register(self.listener, select.EPOLLIN)

    def stop(self) -> None:
        """Send pending requests an error, close all connections and accept none until ``go_on``. The host is gone."""
        if self.listener:
            self.epoll.unregister(self.listener)
        self.settle(GONE)
        for ask in list(self.open.values()):
            self._close(ask)

    def serve(self, fd: int) -> bool:
        """Handle an epoll event of ``fd``. Return False if the descriptor does not belong to a request."""
        if self.listener and fd == self.listener.fileno():
            self._accept()
        elif fd in self.open:
            ask = self.open[fd]
            if ask.answer:
                self._write(ask)
            elif not ask.number:
                self._read(ask)
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
        ask = self.open[peer.fileno()] = Ask(peer)
        self._watch(ask, select.EPOLLIN)
        if len(self.open) > MAX_OPEN:
            self._reply(ask, {"problem": "The sandbox is asked too much at once. Wait for an answer, and ask again."})

    def _read(self, ask: Ask) -> None:
        try:
            piece = ask.peer.recv(MAX_REQUEST + 1)
        except BlockingIOError:
            return
        except OSError:
            self._close(ask)
            return
        ask.said += piece
        if len(ask.said) > MAX_REQUEST:
            self._reply(ask, {"problem": f"What is asked of the sandbox has more than {MAX_REQUEST} bytes."})
        elif not piece:
            self._pass_on(ask)

    def _pass_on(self, ask: Ask) -> None:
        try:
            request = json.loads(ask.said)
            fits = isinstance(request, dict) and len(json.dumps(request)) <= MAX_REQUEST
        except (ValueError, RecursionError):
            fits = False
        if not fits:
            self._reply(ask, {"problem": "What is asked of the sandbox is no JSON object, or too large a one."})
            return
        self._watch(ask, 0)
        self.last += 1
        ask.number = self.last
        self.pending[ask.number] = ask
        self.tell(op="ask", number=ask.number, request=request)

    def answered(self, number: int, answer: dict[str, Any]) -> None:
        """Pass on an answer from the host, and confirm its arrival.

        The host limits the number of requests whose answers are unconfirmed.
        """
        self.tell(op="answered", number=number)
        if number in self.pending:
            self._reply(self.pending[number], answer)

    def settle(self, answer: dict[str, Any]) -> None:
        """Send this answer to every request that waits for the host, because the current host does not know it."""
        for ask in list(self.pending.values()):
            self._reply(ask, answer)

    def _reply(self, ask: Ask, answer: dict[str, Any]) -> None:
        self.pending.pop(ask.number, None)
        ask.answer = json.dumps(answer).encode()
        self._watch(ask, select.EPOLLOUT)
        self._write(ask)

    def _write(self, ask: Ask) -> None:
        try:
            ask.answer = ask.answer[ask.peer.send(ask.answer) :]
        except BlockingIOError:
            return
        except OSError:
            ask.answer = b""
        if not ask.answer:
            self._close(ask)

    def _close(self, ask: Ask) -> None:
        self.pending.pop(ask.number, None)
        self._watch(ask, 0)
        del self.open[ask.peer.fileno()]
        ask.peer.close()

    def _watch(self, ask: Ask, events: int) -> None:
        """Set the epoll events of a connection. While the host has the request there are none, not even a hang-up."""
        if ask.watched:
            self.epoll.unregister(ask.peer)
        if events:
            self.epoll.register(ask.peer, events)
        ask.watched = bool(events)
