"""OpenAsks: what a guest has asked for and not been answered, so that what a hostile one can have us keep is bounded.

An ask is open until the guest says that the answer has arrived: one that asks on and reads nothing soon has too many.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ProtocolError
from .guest.asks import MAX_OPEN, MAX_REQUEST

UNATTENDED = 10.0
"""Seconds for which an ask waits for somebody to attend to it: a kernel that was brought back may be quicker."""
NOBODY = {"problem": "Nobody here answers what is asked of this sandbox."}

Listener = Callable[[int, dict[str, Any]], None]


class OpenAsks:
    """The asks of one link, by their numbers; ProtocolError for what an honest PID 1 does not say.

    ``send`` takes the messages that carry the answers.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._listener: Listener | None = None
        self._early: list[tuple[int, dict[str, Any]]] = []
        self._answered: dict[int, bool] = {}

    def attend(self, listener: Listener) -> None:
        """Have ``listener`` told of every ask from now on, and of those that wait already."""
        self._listener = listener
        early, self._early = self._early, []
        for number, request in early:
            listener(number, request)

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        """Answer an ask, now or when the guest wakes; one that is gone or answered needs none."""
        if self._answered.get(number) is False:
            self._answered[number] = True
            self._send({"op": "answer", "number": number, "answer": answer})

    def asked(self, number: Any, request: Any) -> None:
        """The guest asks."""
        if type(number) is not int or not 0 < number < 1 << 31 or number in self._answered:
            raise ProtocolError("The guest asks under a number that it cannot ask under.")
        if not isinstance(request, dict) or len(json.dumps(request)) > MAX_REQUEST:
            raise ProtocolError("The guest asks for what cannot be asked for.")
        if len(self._answered) >= MAX_OPEN:
            raise ProtocolError(f"The guest asks for more than {MAX_OPEN} things at once.")
        self._answered[number] = False
        if self._listener:
            self._listener(number, request)
        else:
            self._early.append((number, request))
            asyncio.get_running_loop().call_later(UNATTENDED, self._give_up)

    def arrived(self, number: Any) -> None:
        """The guest has an answer."""
        if type(number) is not int or not self._answered.get(number):
            raise ProtocolError("The guest has got an answer that nobody gave.")
        del self._answered[number]

    def forget(self) -> None:
        """The guest is gone."""
        self._early.clear()
        self._answered.clear()

    def _give_up(self) -> None:
        early, self._early = self._early, []
        for number, _ in early:
            self.answer(number, NOBODY)
