"""Copy a kernel's output to the descriptors that Jupyter gave for it, and report its exit status."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..process import Process
from .output_log import PARTIAL, Budget, LogLines

LAST_WORDS = 2000
DROPPED_PER_SECOND = 1 << 20
"""Read rate, in bytes per second, of output that is dropped instead of logged."""


@dataclass
class Ending:
    """The descriptors for a kernel's stdout and stderr (None drops them), and the callback for its exit status.

    Streams in ``logged`` go to the server's own log or terminal, as lines that ``output_log`` formats; all others get
    the bytes unchanged.
    """

    sinks: Mapping[str, int | None] = field(default_factory=dict)
    tell: Callable[[int], None] = lambda status: None
    logged: frozenset[str] = frozenset()
    last_words: bytes = b""
    """The last output of the kernel, at most LAST_WORDS bytes."""

    def close(self) -> None:
        """Close the descriptors, only once: their numbers are soon reused."""
        sinks, self.sinks = self.sinks, {}
        for sink in sinks.values():
            if sink is not None:
                os.close(sink)


def ending(kwargs: Mapping[str, Any], tell: Callable[[int], None]) -> Ending:
    """Return the ending for a kernel whose ``stdout`` and ``stderr`` are given in ``kwargs``, as Popen takes them."""
    sinks = {name: _sink(kwargs.get(name), inherited) for name, inherited in (("stdout", 1), ("stderr", 2))}
    return Ending(sinks, tell, frozenset(name for name in sinks if _shares_log(kwargs.get(name))))


def _sink(given: Any, inherited: int) -> int | None:
    """Return a duplicate of the descriptor ``given``, as Popen takes it; of ``inherited`` if that is None.

    Return None for PIPE, which has no reader here, DEVNULL and STDOUT.
    """
    number = inherited if given is None else given if isinstance(given, int) else given.fileno()
    return None if number in (subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT) else os.dup(number)


def _shares_log(given: Any) -> bool:
    """Return True if ``given``, as Popen takes it, is this process's own log or a terminal."""
    if given is None:
        return True
    number = given if isinstance(given, int) else given.fileno()
    return number >= 0 and (os.isatty(number) or any(_same_file(number, own) for own in (1, 2)))


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # this process has no such descriptor
        return False


async def copy_output(process: Process, ending: Ending, sandbox_id: str) -> None:
    """Copy the output of ``process`` to the sinks until it ends, and keep its last words."""
    loop = asyncio.get_running_loop()
    budget = Budget(loop.time())
    logs = {name: LogLines(sandbox_id, budget) for name in ending.logged}
    output = process.stream()
    following = asyncio.ensure_future(anext(output, None))
    try:
        while True:
            waits = any(stream.pending for stream in logs.values())
            done, _ = await asyncio.wait({following}, timeout=PARTIAL if waits else None)
            piece = following.result() if done else None
            if piece is None:
                for name, stream in logs.items():
                    await _write_all(ending.sinks.get(name), stream.flush(loop.time()))
                if done:
                    return
                continue
            following = asyncio.ensure_future(anext(output, None))
            ending.last_words = (ending.last_words + piece.data)[-LAST_WORDS:]
            log = logs.get(piece.stream)
            lines = log.feed(piece.data, loop.time()) if log else [piece.data]
            await _write_all(ending.sinks.get(piece.stream), lines)
            if log and log.dropping:  # read slowly: other kernels share this loop
                await asyncio.sleep(len(piece.data) / DROPPED_PER_SECOND)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _write_all(sink: int | None, pieces: Sequence[bytes]) -> None:
    """Write each piece as a whole, so that lines of different writers do not mix."""
    if sink is not None:
        for piece in pieces:
            with suppress(OSError):
                await _write(sink, piece)


async def _write(sink: int, data: bytes) -> None:
    """Write without blocking to a descriptor that others share, so it cannot be switched to non-blocking mode."""
    loop = asyncio.get_running_loop()
    view = memoryview(data)
    while view:
        writable = asyncio.Event()
        try:
            loop.add_writer(sink, writable.set)
        except PermissionError:  # a regular file: always writable, and rejected by epoll
            view = view[os.write(sink, view) :]
            continue
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sink)
        view = view[os.write(sink, view[: select.PIPE_BUF]) :]
