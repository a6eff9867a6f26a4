"""Limit the time of calls that have no timeout of their own, such as name resolution."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float | None, function: Callable[[], T]) -> T:
    """Call a function in a daemon thread and return its result.

    Raises TimeoutError after so many seconds; the thread then continues until the function returns.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)
