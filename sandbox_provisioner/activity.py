"""ActivityWatch: hears what a kernel publishes, as any client could, and so knows whether a cell runs or waits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from jupyter_client.session import Session

STATUS = b'"status"'
LARGEST = 256 << 20
"""Bytes of a message that are worth hearing; who publishes a larger one is not heard until it connects again."""


class ActivityWatch:
    """Listens on a kernel's iopub channel, in the I/O thread, until it is closed.

    ``busy`` is what the kernel said last; ``on_news`` is told of everything that it publishes.
    """

    def __init__(self, busy: bool, on_news: Callable[[], None]) -> None:
        self.busy = busy
        self._on_news = on_news
        self._socket = _enter(self).socket(zmq.SUB)
        self._task: asyncio.Task[None] | None = None

    def listen(self, url: str, session: Session, curve: tuple[bytes, bytes] | None) -> None:
        """Begin; ``curve`` is the public and the secret key of an encrypted connection."""
        self._socket.linger = 0
        self._socket.maxmsgsize = LARGEST
        if curve:
            self._socket.curve_publickey, self._socket.curve_secretkey = curve
            self._socket.curve_serverkey = curve[0]
        self._socket.subscribe(b"")
        self._socket.connect(url)
        self._task = asyncio.create_task(self._hear(session))

    def close(self) -> None:
        """End; nothing is left of it."""
        if self._task:
            self._task.cancel()
        if not self._socket.closed:
            self._socket.close(linger=0)
            _leave(self)

    async def _hear(self, session: Session) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._on_news()
            if any(STATUS in frame for frame in frames[:4]):
                self._heed(session, frames)

    def _heed(self, session: Session, frames: list[bytes]) -> None:
        """A status is believed if it is signed; whatever else a kernel may publish is not our business."""
        try:
            message: dict[str, Any] = session.deserialize(session.feed_identities(frames)[1])
            self.busy = message["content"]["execution_state"] == "busy"
        except (ValueError, TypeError, LookupError, RecursionError):
            return


_watching: dict[int, tuple[zmq.asyncio.Context, set[ActivityWatch]]] = {}
"""By process, because a forked one has nothing of it: the context and who uses it."""


def _enter(watch: ActivityWatch) -> zmq.asyncio.Context:
    """The one context of all who watch: each context has two threads of its own."""
    if os.getpid() not in _watching:
        _watching[os.getpid()] = zmq.asyncio.Context(), set()
    context, users = _watching[os.getpid()]
    users.add(watch)
    return context


def _leave(watch: ActivityWatch) -> None:
    context, users = _watching[os.getpid()]
    users.discard(watch)
    if not users:
        del _watching[os.getpid()]
        context.term()
